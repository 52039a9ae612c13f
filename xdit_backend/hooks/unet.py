"""Hooks on a diffusers U-Net: each rank computes its band of rows of every image inside the unmodified forward, and
gets other ranks' rows from an Exchange. docs/design/displaced.md.

They are installed once on a loaded model, as its UNetPlan describes: convolutions, norms and self-attentions work on
rows.
"""

import functools
import inspect
import re
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor2_0

from ..attention.backends import attend
from ..attention.entmax import sparse_attention
from ..distributed.custom_ops import attention, running
from ..distributed.group_norm import group_norm_rows
from ..distributed.spatial_ops import Convolution, input_rows
from ..parallel.displaced import StaleSplit, of_all_rows
from ..partition import attended, cut_bands, halved, in_block, level_of, unet_blocks
from ..protocol.errors import UnsupportedError
from ..protocol.specs import Blur, Shrink
from .function_overrides import FunctionOverrides, functional, torch_with
from .injected_networks import guide_images, text_attentions, with_images, with_networks
from .model_hooks import ModelHooks
from .nag import apply_nag
from .unet_compiled import GraphRows
from .unet_patches import ControlBlocks, ShrinkBlocks, as_large, attend_in_tiles, blurred, free_u


@dataclass(frozen=True)
class RunningSelfAttention:
    """The self-attention that a forward is in."""

    split: StaleSplit | None               # of its image over the ranks; None: every rank has all rows
    operation: str | Blur | None           # what it does instead, see specs.Branch


class UNetHooks(ModelHooks):
    """The hooks of one U-Net on this rank."""

    def __init__(self, model, plan, splits=(), offloaded=None, on_compile=lambda done, total: None):
        """Arguments as of ModelHooks."""
        assert not splits, "U-shaped networks are not sharded"
        paths, attentions = unet_blocks(model), attended(model)
        super().__init__(model, plan, list(map(model.get_submodule, paths)), offloaded, on_compile)
        self.num_levels = plan.num_levels(model.config)
        self.counts = {"convolution": 0, "group norm": 0, "self-attention": 0, "of text": 0}
        # of the running forward, if blocks are compiled; name of the attention being traced into a graph
        self._graph_rows, self._graph_attention = None, ""
        self._text_attentions = text_attentions(model, self.num_levels)
        function_overrides = FunctionOverrides(
            F=functional(scaled_dot_product_attention=self._scaled_dot_product_attention))
        for name, module in model.named_modules():
            index, inner = in_block(name, paths)
            level = level_of(name, self.num_levels)
            if hasattr(module, "processor"):
                function_overrides.install(module)
            if isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1):
                self._hook_convolution(name, module, level, inner)
            elif isinstance(module, torch.nn.GroupNorm):
                self.counts["group norm"] += 1
                module.forward = self._hook_norm(module, module.forward, name, level, inner)
            elif name in attentions:
                self._hook_attention(module, level, (index, inner, name), attentions[name])
        for path, (name, _) in self._text_attentions.items():
            block = model.get_submodule(path.rpartition(".")[0])
            block.forward = self._hook_shuffled(block.forward, name)
        joins = FunctionOverrides(torch=torch_with(cat=self._join))
        for block in model.up_blocks:
            joins.install(block)
        for index, (block, path) in enumerate(zip(self._blocks, paths)):
            block.forward = self._hook_compiled(block.forward, index, path)
        self._control = ControlBlocks(model, plan.skips(model.config), lambda: self._context)
        ShrinkBlocks(model, lambda: self._context)
        if offloaded is not None:                              # outside of what is compiled
            for number, block in enumerate(self._blocks):
                block.forward = self._hook_block(block.forward, number)

    def _forward(self, context):
        with running(self):
            return self._model(**context.inputs, return_dict=False)[0], None

    @contextmanager
    def serving(self, context):
        """See ModelHooks.serving."""
        self._graph_rows = GraphRows.of(context, self.num_levels) if context.options.compile_backend else None
        with super().serving(context):
            yield

    def _hook_block(self, forward, number):
        """Run a block while its streamed weights are on the device."""
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            with self._weights_resident(self._context, number):
                return forward(*args, **kwargs)
        return hooked

    def _hook_convolution(self, name, module, level, inner):
        assert module.dilation == (1, 1) and module.padding_mode == "zeros", f"{name}: dilated, or not padded by zeros"
        self.counts["convolution"] += 1
        convolve, run = module._conv_forward, self._first_convolution if name == self.plan.first else self._convolution

        def of_rows(input, weight, bias):
            if torch.compiler.is_compiling() and self._graph_rows is not None:
                return self._graph_rows.convolve(module, inner, level, input, weight, bias)
            if torch.compiler.is_compiling() or not self._is_split:
                return convolve(input, weight, bias)
            convolution = Convolution(weight, bias, module.stride, module.padding, module.dilation, module.groups)
            return run(self._split(name, level), input, convolution)
        module._conv_forward = of_rows

    def _hook_attention(self, module, level, names, keys):
        """names: (index of the block, name in it, name). keys: of partition.attended."""
        index, inner, name = names
        where = name.rpartition(".")[2]
        if keys == "rows":
            self.counts["self-attention"] += 1
            self._check_attention(name, module)
        for which, path in enumerate(("to_k", "to_v")):        # inside the hook that caches keys of the text
            linear, key = getattr(module, path), f"{inner}.{path}"
            linear.forward = self._hook_networks(linear.forward, where, str(which))
            if keys == "text":
                self.counts["of text"] += 1
                self._compiled.blocks[index].once[key] = linear, "run"
                linear.forward = self._hook_of_text(linear, linear.forward, (index, key))
        if name in self._text_attentions:
            module.forward = self._hook_text_attention(module.forward, name, inner)
        if where == "attn1":
            module.forward = self._hook_self_attention(module.forward, name, level, inner if keys == "rows" else "")

    def _hook_compiled(self, forward, index, path):
        names = list(inspect.signature(forward).parameters)

        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            context = self._context
            if context is None:
                return forward(*args, **kwargs)
            with context.traffic.at_block(path):
                patches = context.patches
                is_eager = (patches.operations or patches.guided or patches.free_u or patches.tiles or patches.shuffled
                            or any(use.where != "text" for use, _ in patches.networks))
                if not context.options.compile_backend or is_eager:
                    return forward(*args, **kwargs)
                context.state.block = path
                return self._compiled.run(index, forward, context, {**dict(zip(names, args)), **kwargs})
        return hooked

    @property
    def _is_split(self):
        return self._context is not None and self._context.bands is not None

    def _split(self, name, level):
        """The StaleSplit of a layer's image, for the run."""
        context, layers = self._context, self._context.exchange.layers
        if name not in layers:
            layers[name] = StaleSplit(halved(context.bands, level), context.exchange.group, context.traffic,
                                      exchange=context.exchange, key=name)
        return layers[name]

    def bands_of(self, exchange, num_rows, mesh):
        """See ModelHooks.bands_of."""
        return cut_bands(num_rows, exchange.num_ranks, 2 ** (self.num_levels - 1), mesh.sequence_speeds)

    def own_control(self, control, context):
        """See ControlBlocks.own."""
        return self._control.own(control, context)

    def _hook_norm(self, module, forward, name, level, inner):
        @functools.wraps(forward)
        def hooked(input):
            if torch.compiler.is_compiling() and self._graph_rows is not None:
                return self._graph_rows.norm(module, inner, level, input)
            if torch.compiler.is_compiling() or not self._is_split:
                return forward(input)
            weight, bias = (each if each is None else each.to(input.dtype) for each in (module.weight, module.bias))
            return group_norm_rows(input, module.num_groups, weight, bias, module.eps, self._split(name, level))
        return hooked

    def _hook_self_attention(self, forward, name, level, inner):
        """They may return their values, blur their queries, and those of the middle block may write their scores.
        inner: name in the block of one over the rows of its image; "" for others."""
        number = re.search(r"transformer_blocks\.(\d+)\.", name)
        # an operation on one block takes precedence over one on all
        points = (f"middle.0.{number[1]}", "middle.0") if name.startswith("mid_block.") else ()
        point, _ = self._text_attentions.get(f"{name.removesuffix('attn1')}attn2", ("", 0))
        points = points or (point, point.rpartition(".")[0])

        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            if torch.compiler.is_compiling():
                self._graph_attention = "" if self._graph_rows is None else inner
                output = forward(*args, **kwargs)
                self._graph_attention = ""
                return output
            context = self._context
            if context is None:
                return forward(*args, **kwargs)
            operations, tiles = context.patches.operations, context.patches.tiles
            operation = next((operations[point] for point in points if point in operations), None)
            split = self._split(name, level) if self._is_split and inner else None
            if split is not None or operation is not None or tiles and inner:
                context.state.attention = RunningSelfAttention(split, operation)
            output = forward(*args, **kwargs)
            context.state.attention = None
            for nag in context.patches.guided:
                apply_nag(output, nag, -1)
            return output
        return hooked

    def _hook_shuffled(self, forward, name):
        """Run a transformer block on its tokens in the order of Branch.shuffled. name: of the block, "input.4.0"."""
        @functools.wraps(forward)
        def hooked(hidden_states, *args, **kwargs):
            if not torch.compiler.is_compiling() and self._context is not None:
                order = self._context.patches.shuffled.get(name)
                hidden_states = hidden_states if order is None else hidden_states[:, order]
            return forward(hidden_states, *args, **kwargs)
        return hooked

    def _hook_text_attention(self, forward, name, inner):
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            if torch.compiler.is_compiling():
                self._graph_attention = inner
                output = forward(*args, **kwargs)
                self._graph_attention = ""
                return output
            context = self._context
            if context is None:
                return forward(*args, **kwargs)
            context.state.text_attention = name
            output = forward(*args, **kwargs)
            context.state.text_attention = ""
            return output
        return hooked

    def _hook_networks(self, forward, where, which):
        @functools.wraps(forward)
        def hooked(tensor):
            if torch.compiler.is_compiling() or self._context is None:
                return forward(tensor)
            return forward(with_networks(self._context, where, which, tensor))
        return hooked

    def _scaled_dot_product_attention(self, query, key, value, attn_mask=None, **options):
        """torch's function, (B, N, T, H). Within a hooked self-attention: this rank's queries, keys of all rows."""
        is_causal, scale = options.get("is_causal", False), options.get("scale")
        if torch.compiler.is_compiling():
            return attention(query, key, value, attn_mask, self._graph_attention, is_causal, scale)
        if self._context is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
        now = self._context.state.attention
        if now is None:
            return self._attend(self._context.state.text_attention, query, key, value, attn_mask, is_causal, scale)
        if now.operation == "values":
            return value
        if isinstance(now.operation, Blur):
            assert now.split is None, "the host rejects blurred queries where a rank has some of the rows"
            query = blurred(query, now.operation)
        if now.split is not None:
            key, value = of_all_rows(key, value, now.split, attn_mask is not None or is_causal)
        if now.operation == "scores":
            self._write_scores(query, key)
        tiles = self._context.patches.tiles.get(str(query.shape[2]))
        if tiles is not None:
            return attend_in_tiles(tiles, query, key, value, lambda *each: attend(
                *each, self._context.backend, attn_mask, is_causal, scale))
        return attend(query, key, value, self._context.backend, attn_mask, is_causal, scale)

    def _attend(self, name, *arguments):
        """attend, plus what networks add to an attention to the text. name: its path, or ""."""
        query, key, value, mask, is_causal, scale = arguments
        context, (block, level) = self._context, self._text_attentions.get(name, ("", 0))
        entmax = context.patches.operations.get(f"attn2.{block}")
        out = (attend(query, key, value, context.backend, mask, is_causal, scale) if entmax is None
               else sparse_attention(query, key, value, entmax, scale))
        if not (block and context.patches.networks):
            return out

        def attend_to(*each):
            return attend(*each, context.backend, None, False, scale)
        out = with_images(context, (block, level), query, out, attend_to)
        return guide_images(context, block, query, out, attend_to)

    def attention_of_graph(self, query, key, value, mask, name, is_causal, scale):
        """_scaled_dot_product_attention of a compiled block. name: of an attention to the text, or a self-attention of
        rows, in the running block; "" for one without communication."""
        path = f"{self._context.state.block}.{name}"
        if name and path not in self._text_attentions:
            key, value = of_all_rows(key, value, self.split_of_graph(name), mask is not None or is_causal)
        return self._attend(path, query, key, value, mask, is_causal, scale)

    def split_of_graph(self, name):
        """For custom ops: the StaleSplit of a layer, by its name in the running block."""
        path = f"{self._context.state.block}.{name}"
        return self._split(path, level_of(path, self.num_levels))

    def _write_scores(self, query, key):
        """Write the attention probability of each key, summed over this rank's queries."""
        probabilities = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1, dtype=torch.float32)
        rank = 0 if self._context.bands is None else self._context.exchange.rank
        self._context.patches.scores[rank].copy_(probabilities.mean(1).sum(1))

    def _hook_of_text(self, module, forward, key):
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            if torch.compiler.is_compiling():
                return self._compiled.once(module, forward, args, kwargs)
            if not self._is_split:
                return forward(*args, **kwargs)
            return self._once(key, forward, *args, **kwargs)
        return hooked

    def _once(self, key, forward, *args, **kwargs):
        """Cache the output of a module that reads the text alone: it is the same in all calls with one conditioning,
        for the same images. key: (index of the block, name in it)."""
        once, images = self._context.once, self._context.moment("run", args[0].shape[0])
        if key not in once or once[key][0] != images:
            once[key] = images, forward(*args, **kwargs)
        return once[key][1]

    def _join(self, tensors, dim=0):
        """torch.cat, which joins the hidden states of an up block with a skip; Deep Shrink and FreeU change both."""
        for settings in () if self._context is None else self._context.patches.free_u:
            tensors = (as_large if isinstance(settings, Shrink) else free_u)(*tensors, settings)
        return torch.cat(tensors, dim)

    def _first_convolution(self, split, input, convolution):
        """This rank's rows of a convolution of the latent, all rows of which are on every rank."""
        backend, _, padding = convolution.reach(-2)
        above, low, high, below = input_rows(split.start, split.start + split.size, split.num_rows, backend, 1, padding)
        return convolution.run(F.pad(input[:, :, low:high], (0, 0, above, below)), {-2: 0})

    def _convolution(self, split, input, convolution):
        return convolution.run(split.around(input, *convolution.reach(-2)), {-2: 0})

    def _check_attention(self, name, module):
        if not isinstance(module.processor, AttnProcessor2_0):
            raise UnsupportedError(f"Use cfg_degree or data_degree: {name} is run by "
                                   f"{type(module.processor).__name__}, which does not use torch's attention and "
                                   "would see this rank's rows only.")
