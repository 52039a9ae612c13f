"""Hooks on a diffusers U-Net: each rank computes its rows of every image inside it, and gets the others' through an
exchange.

As transformer.py for transformers. Installed once on a loaded model, as its UNetPlan says. diffusers' own, unmodified
forward runs; while a convolution, a norm or an attention does, torch's function for it works on rows (rows.py).
docs/algorithms.md section 9.
"""

import functools
import re

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor2_0

# The originals, bound before they are replaced.
from torch.nn.functional import pad, scaled_dot_product_attention

from ..autoencoders.family import replaced
from ..distributed.norm_rows import group_norm_rows
from ..distributed.rows import Convolution, input_rows
from ..parallel.displaced import StaleSplit, keys_and_values
from ..parallel.nag import apply_nag
from ..partition import halved, level_of
from ..protocol.errors import UnsupportedError


class UNetHooks:
    """The hooks of one U-Net on this rank, and the forward they serve now."""

    num_blocks = 0

    def __init__(self, model, plan):
        self.plan, self._model, self._context, self._attend = plan, model, None, scaled_dot_product_attention
        assert not hasattr(model, "_has_hooks"), "this model has its hooks; placed twice, they would ask each other"
        model._has_hooks = True
        self.num_levels = plan.num_levels(model.config)
        self.counts = {"convolution": 0, "group norm": 0, "self-attention": 0, "of text": 0}
        for name, module in model.named_modules():
            level = level_of(name, self.num_levels)
            if isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1):
                assert (module.dilation == (1, 1)
                        and module.padding_mode == "zeros"), f"{name}: no U-Net of a family has such a convolution"
                function = self._first_convolution if name == plan.first else self._convolution
                self._place(module, "convolution", functools.partial(self._hooked, "conv2d", function, name, level))
            elif isinstance(module, torch.nn.GroupNorm):
                self._place(module, "group norm",
                            functools.partial(self._hooked, "group_norm", self._group_norm, name, level))
            elif name.endswith(f".{plan.self_attention}"):
                self._check_attention(name, module)
                plain = module.forward
                self._place(module, "self-attention", functools.partial(
                    self._hooked, "scaled_dot_product_attention", self._attention, name, level))
                if name.startswith("mid_block."):
                    number = re.search(r"transformer_blocks\.(\d+)\.", name)[1]
                    module.forward = self._hook_middle(plain, module.forward, f"middle.0.{number}")
                module.forward = self._hook_guided(module.forward)
            elif name.endswith(tuple(f".{path}" for path in plan.of_text)):
                self._place(module, "of text", functools.partial(self._once, name))
        self._install_control(model, plan.skips(model.config))

    def run(self, context):
        """Run the model's forward as the context says. Every rank of the displaced axis does.

        Returns (output of the forward, None), as Hooks does: where the context has bands, this rank's rows of it.
        """
        self._context = context
        try:
            return self._model(**context.inputs, return_dict=False)[0], None
        finally:
            self._context = None

    def _place(self, module, kind, hook):
        self.counts[kind] += 1
        forward = module.forward

        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            alone = self._context is None or self._context.bands is None
            return forward(*args, **kwargs) if alone else hook(forward, *args, **kwargs)
        module.forward = hooked

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

    def _hook_middle(self, plain, forward, name):
        """A self-attention of the middle, which may have to give its values, or to tell its scores.
        plain: its forward without hooks."""
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            context, operation = self._context, None
            if context is not None:                            # that of one block counts before that of all
                operation = context.operations.get(name) or context.operations.get("middle.0")
            if operation == "values":
                with replaced(F, scaled_dot_product_attention=lambda query, key, value, **options: value):
                    return plain(*args, **kwargs)
            if operation == "scores":
                with replaced(self, _attend=self._scored), replaced(F, scaled_dot_product_attention=self._scored):
                    return forward(*args, **kwargs)
            return forward(*args, **kwargs)
        return hooked

    def _scored(self, query, key, value, **options):
        """torch's attention, which also returns what share of it each key gets from this rank's queries."""
        shares = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1, dtype=torch.float32)
        rank = 0 if self._context.bands is None else self._context.exchange.rank
        self._context.scores[rank].copy_(shares.mean(1).sum(1))
        return scaled_dot_product_attention(query, key, value, **options)

    def _hook_guided(self, forward):
        @functools.wraps(forward)
        def hooked(*args, **kwargs):
            output = forward(*args, **kwargs)
            for nag in () if self._context is None else self._context.guided:
                apply_nag(output, nag, -1)
            return output
        return hooked

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

    def _hooked(self, torch_name, function, name, level, forward, *args, **kwargs):
        """Run a module while torch's function works on this rank's rows."""
        context, layers = self._context, self._context.exchange.layers
        if name not in layers:
            layers[name] = StaleSplit(halved(context.bands, level), context.exchange.group, context.traffic,
                                      exchange=context.exchange, key=name)
        with replaced(F, **{torch_name: functools.partial(function, layers[name])}):
            return forward(*args, **kwargs)

    def _first_convolution(self, split, input, *arguments):
        """Of the latent, which every rank has whole."""
        convolution = Convolution(*arguments)
        kernel, _, padding = convolution.reach(-2)
        above, low, high, below = input_rows(split.start, split.start + split.size, split.num_rows, kernel, 1, padding)
        return convolution.run(pad(input[:, :, low:high], (0, 0, above, below)), {-2: 0})

    def _convolution(self, split, input, *arguments):
        convolution = Convolution(*arguments)
        return convolution.run(split.around(input, *convolution.reach(-2)), {-2: 0})

    def _group_norm(self, split, input, num_groups, weight=None, bias=None, eps=1e-5):
        return group_norm_rows(input, num_groups, weight, bias, eps, split)

    def _attention(self, split, query, key, value, attn_mask=None, **options):
        if attn_mask is not None or options.get("is_causal"):
            raise UnsupportedError("This model masks its self-attention, which displaced_degree does not support. Use "
                                   "cfg_degree.")
        width = key.shape[2] // split.size
        every = keys_and_values(key, value, [size * width for size in split.sizes], split.exchange, split.key)
        return self._attend(query, *every, **options)

    def _once(self, name, forward, *args, **kwargs):
        """What reads the text alone is the same in all calls with one conditioning, for the same images."""
        context = self._context
        images = context.first_image, args[0].shape[0]
        known = context.exchange.once.get(name)
        if known is None or known[0] != images:
            known = context.exchange.once[name] = images, forward(*args, **kwargs)
        return known[1]

    def _check_attention(self, name, module):
        if not isinstance(module.processor, AttnProcessor2_0):
            raise UnsupportedError(f"{name} is run by {type(module.processor).__name__}, which does not use torch's "
                                   f"attention and would see this rank's rows only. Use cfg_degree or data_degree.")
