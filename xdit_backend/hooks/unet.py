"""Hooks on a diffusers U-Net: each rank computes its rows of every image inside it, and gets the others' through an
exchange.

As transformer.py for transformers. Installed once on a loaded model, as its UNetPlan says. diffusers' own, unmodified
forward runs; its convolutions, norms and self-attentions work on rows (rows.py). docs/algorithms.md section 9.
"""

import functools
import inspect
import re
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor2_0

from ..distributed.kernels import attend
from ..distributed.norm_rows import group_norm_rows
from ..distributed.operators import attention, running
from ..distributed.rows import Convolution, input_rows
from ..parallel.displaced import StaleSplit, keys_and_values
from ..parallel.nag import apply_nag
from ..partition import attended, halved, level_of, unet_blocks
from ..protocol.errors import UnsupportedError
from .compiled import CompiledBlocks
from .free_u import free_u
from .networks import with_networks
from .own_code import OwnCode, functional, torch_with
from .tiles import attend_in_tiles
from .turns import take_turns


@dataclass(frozen=True)
class RunningSelfAttention:
    """The self-attention that a forward is in."""

    split: StaleSplit | None               # of its image, over the ranks; None: all here
    operation: str | None                  # what it does instead, see specs.Branch


class UNetHooks:
    """The hooks of one U-Net on this rank, and the forward they serve now."""

    num_blocks = 0

    def __init__(self, model, plan, offloaded=None, on_compile=lambda done, total: None):
        """offloaded: the blocks whose weights come from host memory (checkpoints/offloading.py), if there are such.
        on_compile: of CompiledBlocks."""
        self.plan, self._model, self._context, self._offloaded = plan, model, None, offloaded
        assert not hasattr(model, "_has_hooks"), "this model has its hooks; placed twice, they would ask each other"
        model._has_hooks = True
        self.num_levels = plan.num_levels(model.config)
        self.counts = {"convolution": 0, "group norm": 0, "self-attention": 0, "of text": 0}
        own_code = OwnCode(F=functional(scaled_dot_product_attention=self._scaled_dot_product_attention))
        attentions = attended(model)
        for name, module in model.named_modules():
            level = level_of(name, self.num_levels)
            if hasattr(module, "processor"):
                own_code.place(module)
            if isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1):
                self._place_convolution(name, module, level)
            elif isinstance(module, torch.nn.GroupNorm):
                self.counts["group norm"] += 1
                module.forward = self._hook_norm(module, module.forward, name, level)
            elif name in attentions:
                self._place_attention(name, module, level, attentions[name])
        self._install_control(model, plan.skips(model.config))
        self._blocks = list(map(model.get_submodule, unet_blocks(model)))
        self._install_compiled(model, on_compile)
        if offloaded is not None:                              # around what is compiled
            for number, block in enumerate(self._blocks):
                block.forward = self._hook_block(block.forward, number)

    def run(self, context):
        """Run the model's forward as the context says. Every rank of the displaced axis does.

        Returns (output of the forward, None), as Hooks does: where the context has bands, this rank's rows of it.
        """
        self._begin_blocks(1)
        with self._serving(context):
            return self._forward(context), None

    def _forward(self, context):
        with running(self):
            return self._model(**context.inputs, return_dict=False)[0]

    def run_in_turn(self, contexts):
        """As `run` for each of several forwards, of which all run a block before one runs the next: its weights come
        from host memory."""
        self._begin_blocks(len(contexts))
        forwards = [functools.partial(self._forward, context) for context in contexts]
        return [(output, None) for output in take_turns(forwards, contexts, self._serving, True)]

    @contextmanager
    def _serving(self, context):
        """The model's forward runs as the context says while under this."""
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def _begin_blocks(self, num_forwards):
        if self._offloaded is not None:
            self._offloaded.begin(range(len(self._blocks)), num_forwards)

    def _hook_block(self, forward, number):
        """Its weights are on the device while it runs."""
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            self._offloaded.enter(number)
            output = forward(*args, **kwargs)
            self._offloaded.leave(number)
            if self._context is not None:
                self._context.end_block(number)
            return output
        return hooked

    def _place_convolution(self, name, module, level):
        assert module.dilation == (1, 1) and module.padding_mode == "zeros", f"{name}: no U-Net of a family has such"
        self.counts["convolution"] += 1
        convolve, run = module._conv_forward, self._first_convolution if name == self.plan.first else self._convolution

        def of_rows(input, weight, bias):
            if torch.compiler.is_compiling() or not self._is_split:
                return convolve(input, weight, bias)
            convolution = Convolution(weight, bias, module.stride, module.padding, module.dilation, module.groups)
            return run(self._split(name, level), input, convolution)
        module._conv_forward = of_rows

    def _place_attention(self, name, module, level, what):
        """what: of partition.attended."""
        where = name.rpartition(".")[2]
        if what == "rows":
            self.counts["self-attention"] += 1
            self._check_attention(name, module)
        for which, linear in enumerate((module.to_k, module.to_v)):            # within what reads the text once
            linear.forward = self._hook_networks(linear.forward, where, str(which))
            if what == "text":
                self.counts["of text"] += 1
                linear.forward = self._hook_of_text(linear.forward, f"{name}.{which}")
        if where == "attn1":
            module.forward = self._hook_self_attention(module.forward, name, level, what == "rows")

    def _install_compiled(self, model, on_compile):
        """What may run as torch.compile makes it, where each rank has whole images."""
        self._compiled = CompiledBlocks(model, len(self._blocks), on_compile)
        for index, block in enumerate(self._blocks):
            block.forward = self._hook_compiled(block.forward, index)

    def _hook_compiled(self, forward, index):
        names = list(inspect.signature(forward).parameters)

        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            context = self._context
            if (context is None or not context.compile_backend or self._is_split or context.operations
                    or context.guided or context.networks or context.free_u or context.tiles):
                return forward(*args, **kwargs)
            return self._compiled.run(index, forward, context, {**dict(zip(names, args)), **kwargs})
        return hooked

    @property
    def _is_split(self):
        return self._context is not None and self._context.bands is not None

    def _split(self, name, level):
        """The rows of a layer's image on each rank, for the run."""
        context, layers = self._context, self._context.exchange.layers
        if name not in layers:
            layers[name] = StaleSplit(halved(context.bands, level), context.exchange.group, context.traffic,
                                      exchange=context.exchange, key=name)
        return layers[name]

    def _install_control(self, model, skips):
        """Where ComfyUI's model adds what a ControlNet gives: to the output of each block on the way down and of the
        middle one, and to each skip where it is taken up. skips: of UNetPlan.
        """
        makers = [model.conv_in]
        for block in model.down_blocks:
            makers += [*(getattr(block, "attentions", None) or block.resnets), *(block.downsamplers or ())]
        assert len(makers) == len(skips)
        levels = [level for _, level in skips]
        self._control_levels = {f"{side}.{number}": level for side in ("input", "output")
                                for number, level in enumerate(levels)} | {"middle.0": levels[-1]}
        for number, module in enumerate(makers):
            module.forward = self._hook_control(module.forward, f"input.{number}")
        joins = OwnCode(torch=torch_with(cat=self._join))
        for block in model.up_blocks:
            joins.place(block)
        model.mid_block.forward = self._hook_control(model.mid_block.forward, "middle.0")
        end = len(skips)
        for block in model.up_blocks:
            start = end - len(block.resnets)
            block.forward = self._hook_skips(block.forward, [f"output.{number}" for number in range(start, end)])
            end = start

    def own_control(self, control, context):
        """Of what a ControlNet gives, {place: (B or 1, C, H, W)}, this rank's rows."""
        if context.bands is None:
            return control
        bands = {place: halved(context.bands, self._control_levels[place])[context.exchange.rank:][:2]
                 for place in control}
        return {place: added[:, :, slice(*bands[place])] for place, added in control.items()}

    def _hook_norm(self, module, forward, name, level):
        @functools.wraps(forward)
        def hooked(input):
            if torch.compiler.is_compiling() or not self._is_split:
                return forward(input)
            weight, bias = (each if each is None else each.to(input.dtype) for each in (module.weight, module.bias))
            return group_norm_rows(input, module.num_groups, weight, bias, module.eps, self._split(name, level))
        return hooked

    def _hook_self_attention(self, forward, name, level, of_rows):
        """Those of the middle may have to give their values, or to tell their scores. of_rows: does it attend to the
        rows of its image?"""
        number = re.search(r"transformer_blocks\.(\d+)\.", name)
        # that of one block counts before that of all
        places = (f"middle.0.{number[1]}", "middle.0") if name.startswith("mid_block.") else ()

        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            context = None if torch.compiler.is_compiling() else self._context
            if context is None:
                return forward(*args, **kwargs)
            operation = next((context.operations[place] for place in places if place in context.operations), None)
            split = self._split(name, level) if self._is_split and of_rows else None
            if split is not None or operation is not None or context.tiles and of_rows:
                context.attention = RunningSelfAttention(split, operation)
            output = forward(*args, **kwargs)
            context.attention = None
            for nag in context.guided:
                apply_nag(output, nag, -1)
            return output
        return hooked

    def _hook_networks(self, forward, where, which):
        @functools.wraps(forward)
        def hooked(given):
            if torch.compiler.is_compiling() or self._context is None:
                return forward(given)
            return forward(with_networks(self._context, where, which, given))
        return hooked

    def _scaled_dot_product_attention(self, query, key, value, attn_mask=None, **options):
        """As torch's, (B, N, T, H). Within a hooked attention: of this rank's queries to the keys of all rows."""
        is_causal, scale = options.get("is_causal", False), options.get("scale")
        if torch.compiler.is_compiling():
            return attention(query, key, value, attn_mask, "", is_causal, scale)
        if self._context is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
        now = self._context.attention
        if now is None:
            return attend(query, key, value, self._context.kernel, attn_mask, is_causal, scale)
        if now.operation == "values":
            return value
        if now.split is not None:
            if attn_mask is not None or is_causal:
                raise UnsupportedError("Use cfg_degree: this model masks its self-attention, which displaced_degree "
                                       "does not support.")
            split, width = now.split, key.shape[2] // now.split.size
            key, value = keys_and_values(key, value, [size * width for size in split.sizes], split.exchange, split.key)
        if now.operation == "scores":
            self._write_scores(query, key)
        if str(query.shape[2]) in self._context.tiles:
            return attend_in_tiles(self._context.tiles[str(query.shape[2])], query, key, value, lambda *each: attend(
                *each, self._context.kernel, attn_mask, is_causal, scale))
        return attend(query, key, value, self._context.kernel, attn_mask, is_causal, scale)

    def attention_of_graph(self, query, key, value, mask, name, is_causal, scale):
        """As _scaled_dot_product_attention, for the operator: no other rank takes part."""
        return attend(query, key, value, self._context.kernel, mask, is_causal, scale)

    def _write_scores(self, query, key):
        """What share of it each key gets from this rank's queries."""
        shares = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1, dtype=torch.float32)
        rank = 0 if self._context.bands is None else self._context.exchange.rank
        self._context.scores[rank].copy_(shares.mean(1).sum(1))

    def _hook_of_text(self, forward, name):
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            if torch.compiler.is_compiling() or not self._is_split:
                return forward(*args, **kwargs)
            return self._once(name, forward, *args, **kwargs)
        return hooked

    def _once(self, name, forward, *args, **kwargs):
        """What reads the text alone is the same in all calls with one conditioning, for the same images."""
        once, images = self._context.exchange.once, (self._context.first_image, args[0].shape[0])
        if name not in once or once[name][0] != images:
            once[name] = images, forward(*args, **kwargs)
        return once[name][1]

    def _join(self, tensors, dim=0):
        """As torch.cat, which joins what a block on the way up has with a skip."""
        context = None if torch.compiler.is_compiling() else self._context
        for given in () if context is None else context.free_u:
            tensors = free_u(*tensors, given)
        return torch.cat(tensors, dim)

    def _hook_control(self, forward, place):
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            output = forward(*args, **kwargs)
            if isinstance(output, tuple):
                return self._with_control(output[0], place), *output[1:]
            return self._with_control(output, place)
        return hooked

    def _hook_skips(self, forward, places):
        @functools.wraps(forward)
        def hooked(*args, res_hidden_states_tuple, **kwargs):
            skips = tuple(self._with_control(skip, place) for skip, place in zip(res_hidden_states_tuple, places))
            return forward(*args, res_hidden_states_tuple=skips, **kwargs)
        return hooked

    def _with_control(self, tensor_BCHW, place):
        """The tensor with what is to be added at this place."""
        context = self._context
        if context is None or place not in context.control:
            return tensor_BCHW
        return (tensor_BCHW + context.control.take(place)).to(tensor_BCHW.dtype)

    def _first_convolution(self, split, input, convolution):
        """Of the latent, which every rank has whole."""
        kernel, _, padding = convolution.reach(-2)
        above, low, high, below = input_rows(split.start, split.start + split.size, split.num_rows, kernel, 1, padding)
        return convolution.run(F.pad(input[:, :, low:high], (0, 0, above, below)), {-2: 0})

    def _convolution(self, split, input, convolution):
        return convolution.run(split.around(input, *convolution.reach(-2)), {-2: 0})

    def _check_attention(self, name, module):
        if not isinstance(module.processor, AttnProcessor2_0):
            raise UnsupportedError(f"Use cfg_degree or data_degree: {name} is run by "
                                   f"{type(module.processor).__name__}, which does not use torch's attention and "
                                   "would see this rank's rows only.")
