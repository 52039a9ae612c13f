"""Tensors of a loaded model's file as a LoRA or another weight patch changes them. Called by the engine on each rank.

The order of casts and sums is that of ComfyUI's ModelPatcher, so that its bits are those of ComfyUI's own.
"""

import torch
import torch.nn.functional as F

from ..memory.staging import StagingBuffers
from ..protocol.shared_memory import DTYPES, map_segment
from .loader import addresses_of, moved
from .quantisation.layerwise_casting import add_at_use
from .quantisation.quantise_on_load import quantised
from .quantisation.quantised_weights import packed_weights
from .tensor_reader import read_file, read_plain
from .tensor_sharding import held

SUMMED = 2 ** 22               # numbers of a tensor whose sums are in memory at a time, in 16 bytes each


def change_weights(loaded, changes, leave=lambda weights: None):
    """Give a Transformer other values of some tensors of its file. Nothing is read of the others.

    changes: {name in the file, without its prefix: specs.Change}. leave(weights) is called before these get other
    values; with None where what changes is not values of weights alone. Of what is changed to how the file has it,
    every bit is as when it was loaded.
    """
    model, checkpoint, spec, splits = loaded.model, loaded.checkpoint, loaded.spec, loaded.splits
    checkpoint.check_is(spec)
    staging = StagingBuffers(loaded.device, loaded.piece_bytes)
    here = {name: change for name, change in changes.items() if loaded.needs(name)}
    packed = {name: how for name, how in packed_weights(checkpoint, model, spec.quantisation).items()
              if how.source in here}
    tensors = read_file(checkpoint, lambda name: name in here and here[name].whole is None)
    addresses = addresses_of(tensors.values())
    maps = list(tensors.values())
    plain = read_plain(checkpoint, tensors, {how.source for how in packed.values()})
    for name, change in here.items():
        if change.whole is not None or not plain[name].is_meta:
            plain[name] = changed(plain[name], change, staging)
    converted = checkpoint.under_diffusers_names(plain)
    weights = {name: (weight, dtype) for name, weight, dtype in held(model, loaded.family, spec)}
    for name, how in packed.items():
        terms = here[how.source].terms + here[how.source].hooked
        if here[how.source].whole is None and weights[name][0].dtype.itemsize == 1:
            del converted[name]                                # it is as it was loaded
        elif here[how.source].whole is None:
            rows = how.take(tensors[how.source])
            converted[name] = (rows if how.is_in_file
                               else quantised(moved(rows, loaded.device, torch.float32, staging), how.type)[0])
        if name in converted:
            plain_dtype = getattr(torch, spec.compute_dtype)
            weights[name] = weights[name][0], plain_dtype if converted[name].dtype.itemsize > 1 else converted[
                name].dtype
        product = factors(terms, how, checkpoint.shapes[how.source], staging) if terms else (None, None)
        if terms and name in splits:                           # of the matrix a rank has some rows, or some columns
            own = splits[name].own(product[splits[name].dim], spec.tensor_degree, loaded.tensor_rank)
            product = (own, product[1]) if splits[name].dim == 0 else (product[0], own)
        add_at_use(model.get_submodule(name.removesuffix(".weight")), *product)
    shares = {name: loaded.share(name, tensor, addresses) for name, tensor in converted.items()}
    shares = {name: share for name, share in shares.items() if share is not None and not share.is_meta}
    leave(None if packed else [weights[name][0] for name in shares])
    for name, tensor in shares.items():
        weight, dtype = weights[name]
        loaded.hold(weight, tensor, dtype, staging, addresses)
    # kept until now, so that no other tensor got their addresses
    del maps


def changed(tensor, change, staging):
    """The tensor as a specs.Change says; a tensor that nothing is added to stays where it is, sums are made on the
    ferry's device.

    tensor: of the file, a map of it, which is not written to.
    """
    # a folder may have in several rows what ComfyUI has in one
    if change.whole is not None:
        whole = map_segment(change.whole)
        return whole.view(tensor.shape) if whole.numel() == tensor.numel() else whole
    if not change.terms and not change.hooked:
        return tensor
    terms, hooked = ([(term, *(staging.to_device(map_segment(factor)).flatten(1).to(torch.float32)
                               for factor in (term.up, term.down))) for term in each]
                     for each in (change.terms, change.hooked))
    count, made = _rows_at_a_time(tensor, terms + hooked), None
    if count is None:
        return _summed(tensor, None, change, terms, hooked, staging)
    for first in range(0, len(tensor), count):
        rows = _summed(tensor[first:first + count], first, change, terms, hooked, staging)
        made = rows.new_empty(tensor.shape) if made is None else made
        made[first:first + count] = rows
    return made


def _rows_at_a_time(tensor, terms):
    """Of how many rows of a tensor sums are made at a time; None: of all. terms: with their factors."""
    if tensor.numel() <= SUMMED or any(len(up) != _rows_of(term, len(tensor))[1] for term, up, _ in terms):
        return None
    return max(1, SUMMED * len(tensor) // tensor.numel())


def _rows_of(term, num_rows):
    """(first, number) of a tensor's rows that a term is added to."""
    return term.offset[1:] if term.offset is not None and term.offset[0] == 0 else (0, num_rows)


def _summed(rows, first, change, terms, hooked, staging):
    """These rows of a tensor with all that is added. first: of them in the tensor; None: they are all. terms, hooked:
    with their factors."""
    weight = staging.to_device(rows).to(DTYPES[change.dtype])
    if terms:
        weight = _added(weight.to(DTYPES[change.sum_dtype]), first, terms).to(DTYPES[change.dtype])
    return _added(weight.to(torch.float32), first, hooked).to(DTYPES[change.dtype]) if hooked else weight


def _added(weight, first, terms):
    """The rows of a weight, which are written to. first: as of _summed."""
    for term, up, down in terms:
        rows = slice(0, len(weight))
        if first is not None:
            start, length = _rows_of(term, first + len(weight))
            begin, end = max(first, start), min(first + len(weight), start + length)
            if begin >= end:                                   # it is added to other rows
                continue
            rows, up = slice(begin - first, end - first), up[begin - start:end - start]
        elif term.offset is not None and term.offset[0] == 0:
            rows = slice(term.offset[1], term.offset[1] + term.offset[2])
        part = weight[rows]
        if term.offset is not None and term.offset[0]:
            part = part.narrow(*term.offset)
        part += (term.scale * (up @ down).reshape(part.shape)).to(part.dtype)
    return weight


def factors(terms, packed, shape, staging):
    """(up, down): the sum of a Change's terms, for the rows of a matrix that are `packed`, as one product. shape: of
    the whole matrix.

    What is quantised stays so: rounding the sum again would add noise. up: float32 (rows, ranks), with the scales;
    down: (ranks, columns).
    """
    ups, downs = [], []
    for term in terms:
        up, down = (map_segment(factor).flatten(1).to(torch.float32) for factor in (term.up, term.down))
        dim, start, length = term.offset or (0, 0, shape[0])
        before_after = start, shape[dim] - start - length
        up, down = (F.pad(up, (0, 0, *before_after)), down) if dim == 0 else (up, F.pad(down, before_after))
        ups.append(term.scale * up)
        downs.append(down)
    return staging.to_device(packed.take(torch.cat(ups, 1)).contiguous()), staging.to_device(torch.cat(downs))
