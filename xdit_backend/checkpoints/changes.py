"""One tensor of a model's file as a LoRA or another weight patch changes it. Called by the loader on each rank.

The order of casts and sums is that of ComfyUI's ModelPatcher, so that its bits are those of ComfyUI's own.
"""

import torch

from ..protocol.segments import DTYPES, map_segment


def changed(tensor, change, ferry):
    """The tensor as a messages.Change says; a tensor that nothing is added to stays where it is, sums are made on the ferry's device.

    tensor: of the file, a map of it, which is not written to.
    """
    if change.whole is not None:
        return map_segment(change.whole)
    if not change.terms:
        return tensor
    weight = ferry.bring(tensor).to(DTYPES[change.dtype]).to(DTYPES[change.sum_dtype])
    for term in change.terms:
        part = weight if term.offset is None else weight.narrow(*term.offset)
        up, down = (ferry.bring(map_segment(factor)).flatten(1).to(torch.float32) for factor in (term.up, term.down))
        part += (term.scale * (up @ down).reshape(part.shape)).to(part.dtype)
    return weight.to(DTYPES[change.dtype])
