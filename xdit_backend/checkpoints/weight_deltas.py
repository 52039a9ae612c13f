"""Updates of a loaded model's weights by a LoRA or another weight patch.

Casts and sums are in the order of ComfyUI's ModelPatcher, so that results are bitwise identical.
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

SUMMED = 2 ** 22               # elements of a tensor that are summed at a time, with 16 bytes each


def change_weights(loaded, changes, leave=lambda weights: None):
    """Give some tensors of a Transformer other values. Other tensors are not read.

    changes: {name in the file, without its prefix: specs.Change}. leave(weights) is called before these get other
    values; with None if something other than values of weights changes. A tensor that is changed back to the file's
    values is bitwise as it was loaded.
    """
    model, checkpoint, spec, splits = loaded.model, loaded.checkpoint, loaded.spec, loaded.splits
    checkpoint.check_is(spec)
    staging = StagingBuffers(loaded.device, loaded.chunk_bytes)
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
    tensors_by_name = dict((*model.named_parameters(), *model.named_buffers()))
    weights = {each.name: (tensors_by_name[each.name], each.dtype) for each in loaded.table.weights
               if each.name in tensors_by_name}
    for name, how in packed.items():
        terms = here[how.source].terms + here[how.source].hooked
        if here[how.source].whole is None and weights[name][0].dtype.itemsize == 1:
            del converted[name]                                # unchanged since it was loaded
        elif here[how.source].whole is None:
            rows = how.take(tensors[how.source])
            converted[name] = (rows if how.is_in_file
                               else quantised(moved(rows, loaded.device, torch.float32, staging), how.type)[0])
        if name in converted:
            plain_dtype = getattr(torch, spec.compute_dtype)
            weights[name] = weights[name][0], plain_dtype if converted[name].dtype.itemsize > 1 else converted[
                name].dtype
        product = factors(terms, how, checkpoint.shapes[how.source], staging) if terms else (None, None)
        if terms and name in splits:                           # a rank has some rows of the matrix, or some columns
            own = splits[name].own(product[splits[name].dim], spec.tensor_degree, loaded.tensor_rank)
            product = (own, product[1]) if splits[name].dim == 0 else (product[0], own)
        add_at_use(model.get_submodule(name.removesuffix(".weight")), *product)
    shards = {name: loaded.share(name, tensor, addresses) for name, tensor in converted.items()}
    shards = {name: shard for name, shard in shards.items() if shard is not None and not shard.is_meta}
    leave(None if packed else [weights[name][0] for name in shards])
    for name, tensor in shards.items():
        weight, dtype = weights[name]
        loaded.hold(weight, tensor, dtype, staging, addresses)
    # referenced until now, so that no other tensor got their addresses
    del maps


def changed(tensor, change, staging):
    """The tensor with a specs.Change applied. A tensor without additions stays where it is; sums are computed on the
    device of staging.

    tensor: of the file, a memory map that is not written to.
    """
    # a folder may store in several rows what ComfyUI has in one
    if change.whole is not None:
        full = map_segment(change.whole)
        return full.view(tensor.shape) if full.numel() == tensor.numel() else full
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
    """Number of rows of a tensor that are summed at a time; None: all. terms: with their factors."""
    if tensor.numel() <= SUMMED or any(len(up) != _rows_of(term, len(tensor))[1] for term, up, _ in terms):
        return None
    return max(1, SUMMED * len(tensor) // tensor.numel())


def _rows_of(term, num_rows):
    """(first, number) of a tensor's rows to which a term is added."""
    return term.offset[1:] if term.offset is not None and term.offset[0] == 0 else (0, num_rows)


def _summed(rows, first, change, terms, hooked, staging):
    """These rows of a tensor with all terms added. first: index of the first row; None: all rows are given. terms,
    hooked: with their factors."""
    weight = staging.to_device(rows).to(DTYPES[change.dtype])
    if terms:
        weight = _added(weight.to(DTYPES[change.sum_dtype]), first, terms).to(DTYPES[change.dtype])
    return _added(weight.to(torch.float32), first, hooked).to(DTYPES[change.dtype]) if hooked else weight


def _added(weight, first, terms):
    """The rows of a weight, modified in place. first: as in _summed."""
    for term, up, down in terms:
        rows = slice(0, len(weight))
        if first is not None:
            start, length = _rows_of(term, first + len(weight))
            begin, end = max(first, start), min(first + len(weight), start + length)
            if begin >= end:                                   # the term is added to other rows
                continue
            rows, up = slice(begin - first, end - first), up[begin - start:end - start]
        elif term.offset is not None and term.offset[0] == 0:
            rows = slice(term.offset[1], term.offset[1] + term.offset[2])
        section = weight[rows]
        if term.offset is not None and term.offset[0]:
            section = section.narrow(*term.offset)
        section += (term.scale * (up @ down).reshape(section.shape)).to(section.dtype)
    return weight


def factors(terms, packed, shape, staging):
    """(up, down): the sum of a Change's terms as one product, for the rows of a matrix in `packed`. shape: of the full
    matrix.

    Quantised weights stay quantised, since rounding the sum again would add noise. up: float32 (rows, ranks), with the
    scales; down: (ranks, columns).
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
