"""Synchronised amax of dynamically quantised layers (quantisation/layerwise_casting.py): ranks that have shards of a
layer's input agree on its largest absolute value, so that all round as a single rank would.
docs/design/quantisation.md.
"""

import functools

import torch

from ..distributed import custom_ops
from ..distributed.collectives import largest


class AmaxSync:
    """Synchronises the amax of a model's dynamically quantised layers."""

    def __init__(self, model, splits, current):
        """splits: from checkpoints.tensor_sharding.tensor_splits; (): layers are unsharded.
        current(): the ForwardContext of the running forward; None outside of one."""
        self._current, self._of_all, self._axes = current, [], ()
        self._all_multiply = {}                                # group -> whether all its ranks multiply quantised
        for path, module in model.named_modules():
            agreed, weight = getattr(module, "agreed", ""), f"{path}.weight"
            is_summed = weight in splits and splits[weight].how == "rowwise"
            if agreed == "each" and is_summed:                 # otherwise a rank has all of a token's inputs
                module.agree = functools.partial(self._largest, ("tensor",))
            elif agreed == "all":
                module.agree = functools.partial(self._largest, ("tensor", "sequence") if is_summed else ("sequence",))
                self._of_all.append(module)

    def meet(self, context):
        """Prepare for a forward of this context. Every sequence rank calls it. The first call determines whether all
        ranks' devices multiply quantised in layers with one amax for all tokens; if not, they do not synchronise.
        """
        mesh, group = context.mesh, context.mesh.sequence_group
        if self._of_all and group is not None and group not in self._all_multiply:
            unpacks = not all(getattr(module, "multiplies", True) for module in self._of_all)
            latent = next(value for value in context.inputs.values() if torch.is_tensor(value))
            unpacked = largest(latent.new_full((1,), float(unpacks), dtype=torch.float32), group, context.traffic)
            self._all_multiply[group] = bool((1 - unpacked).item())
        self._axes = tuple(axis for axis, is_used in (("tensor", mesh.tensor_group is not None),
                                                    ("sequence", self._all_multiply.get(group, False))) if is_used)

    def suits_graphs(self, tokens, streams_by_tensor):
        """True if a block's compiled graph may communicate, in a forward of these Tokens. streams_by_tensor: streams of
        each of the block's tensors.

        A graph compiled for zero tokens does not communicate, since its computation is eliminated. If a rank has no
        tokens in one of the tensors and another rank has some, the ranks run the block eagerly.
        """
        return "sequence" not in self._axes or all(min(sizes) > 0 or max(sizes) == 0
                                                   for sizes in map(tokens.sizes, streams_by_tensor))

    def _largest(self, axes, tensor):
        """Element-wise maximum over the ranks of these axes."""
        if torch.compiler.is_compiling():
            for axis in axes:
                tensor = custom_ops.largest_of_ranks(tensor, axis) if axis in self._axes else tensor
            return tensor
        context = self._current()
        for axis in axes if context is not None else ():
            if axis in self._axes:
                tensor = largest(tensor, getattr(context.mesh, f"{axis}_group"), context.traffic)
        return tensor
