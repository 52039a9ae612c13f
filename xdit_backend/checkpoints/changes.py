"""One tensor of a model's file as a LoRA or another weight patch changes it. Called by the loader on each rank.

The order of casts and sums is that of ComfyUI's ModelPatcher, so that its bits are those of ComfyUI's own.
"""

import torch
import torch.nn.functional as F

from ..protocol.segments import DTYPES, map_segment


def changed(tensor, change, ferry):
    """The tensor as a messages.Change says; a tensor that nothing is added to stays where it is, sums are made on the ferry's device.

    tensor: of the file, a map of it, which is not written to.
    """
    if change.whole is not None:
        return map_segment(change.whole)
    if not change.terms and not change.hooked:
        return tensor
    weight = ferry.bring(tensor).to(DTYPES[change.dtype])
    if change.terms:
        weight = _added(weight.to(DTYPES[change.sum_dtype]), change.terms, ferry).to(DTYPES[change.dtype])
    return _added(weight.to(torch.float32), change.hooked, ferry).to(DTYPES[change.dtype]) if change.hooked else weight


def _added(weight, terms, ferry):
    """The weight, which is written to."""
    for term in terms:
        part = weight if term.offset is None else weight.narrow(*term.offset)
        up, down = (ferry.bring(map_segment(factor)).flatten(1).to(torch.float32) for factor in (term.up, term.down))
        part += (term.scale * (up @ down).reshape(part.shape)).to(part.dtype)
    return weight


def factors(terms, packed, shape, ferry):
    """(up, down): the sum of a Change's terms, for the rows of a matrix that are `packed`, as one product. shape: of the whole matrix.

    What is quantised stays so: rounding the sum again would add noise. up: float32 (rows, ranks), with the scales; down: (ranks, columns).
    """
    ups, downs = [], []
    for term in terms:
        up, down = (map_segment(factor).flatten(1).to(torch.float32) for factor in (term.up, term.down))
        dim, start, length = term.offset or (0, 0, shape[0])
        before_after = start, shape[dim] - start - length
        up, down = (F.pad(up, (0, 0, *before_after)), down) if dim == 0 else (up, F.pad(down, before_after))
        ups.append(term.scale * up)
        downs.append(down)
    return ferry.bring(packed.take(torch.cat(ups, 1)).contiguous()), ferry.bring(torch.cat(downs))
