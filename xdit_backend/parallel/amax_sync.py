"""Layers whose products round their inputs by the largest of them (quantisation/layerwise_casting.py): ranks that have
some of the inputs each agree on that number, so that all round as one rank that had them all. Installed by the hooks.
docs/design/quantisation.md.
"""

import functools

import torch

from ..distributed import custom_ops
from ..distributed.collectives import largest


class AmaxSync:
    """What the layers of one model that round inputs ask of the other ranks."""

    def __init__(self, model, splits, current):
        """splits: of checkpoints.tensor_sharding.tensor_splits; (): this rank has whole layers. current(): the
        ForwardContext of the forward that runs; None: the model's own forward runs."""
        self._current, self._of_all, self._axes = current, [], ()
        self._all_multiply = {}                                # group -> do all its ranks multiply layers of _of_all?
        for path, module in model.named_modules():
            agreed, weight = getattr(module, "agreed", ""), f"{path}.weight"
            is_summed = weight in splits and splits[weight].how == "rows"
            if agreed == "each" and is_summed:                 # else a rank has all of a token's
                module.agree = functools.partial(self._largest, ("tensor",))
            elif agreed == "all":
                module.agree = functools.partial(self._largest, ("tensor", "sequence") if is_summed else ("sequence",))
                self._of_all.append(module)

    def meet(self, context):
        """Called before a forward of this context by every rank of its sequence axes. The first time, the ranks tell
        whether their devices multiply layers that take one number for all tokens: where one does not, they round apart.
        """
        mesh, group = context.mesh, context.mesh.sequence_group
        if self._of_all and group is not None and group not in self._all_multiply:
            unpacks = not all(getattr(module, "multiplies", True) for module in self._of_all)
            latent = next(value for value in context.inputs.values() if torch.is_tensor(value))
            told = largest(latent.new_full((1,), float(unpacks), dtype=torch.float32), group, context.traffic)
            self._all_multiply[group] = bool((1 - told).item())
        self._axes = tuple(axis for axis, requested in (("tensor", mesh.tensor_group is not None),
                                                    ("sequence", self._all_multiply.get(group, False))) if requested)

    def suits_graphs(self, tokens, held):
        """May a block's graph ask the others, in a forward of these Tokens? held: the streams of each of its tensors.

        A graph that was made for no tokens asks nothing, since of what is computed for them nothing is left: where a
        rank has none in one of the tensors, and another has some, the ranks run the block as it is.
        """
        return "sequence" not in self._axes or all(min(sizes) > 0 or max(sizes) == 0
                                                   for sizes in map(tokens.sizes, held))

    def _largest(self, axes, tensor):
        """The largest of the ranks' tensors along these axes, number by number."""
        if torch.compiler.is_compiling():
            for axis in axes:
                tensor = custom_ops.largest_of_ranks(tensor, axis) if axis in self._axes else tensor
            return tensor
        context = self._current()
        for axis in axes if context is not None else ():
            if axis in self._axes:
                tensor = largest(tensor, getattr(context.mesh, f"{axis}_group"), context.traffic)
        return tensor
