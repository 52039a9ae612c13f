"""The choice of resident and offloaded weights on a rank. The loader on each rank and the host compute it from the
model on the meta device."""

import dataclasses

import torch

from ...partition import level_of, unet_blocks
from ...planner.offload_cost import plan_offload
from ...protocol.shared_memory import DTYPES
from ..quantisation.quantised_weights import packed_weights
from ..tensor_sharding import block_sizes, splits_of, storage_dtypes, tensor_bytes
from .block_offload import aligned

SMALL = 1 / 1024               # of its block: smaller weights stay resident: launching a copy takes longer than it


def offload_plan(model, family, spec, budget_bytes, blocks=None):
    """The OffloadPlan of a rank, as in plan_weights."""
    return plan_weights(model, family, spec, budget_bytes, blocks)[0]


def plan_weights(model, family, spec, budget_bytes, blocks=None):
    """(OffloadPlan of a rank, {name of an offloaded weight: its block}).

    model: on the meta device, as stored. A U-Net's blocks are those of partition.unet_blocks. budget_bytes: device
    memory for weights. blocks: of this rank; None: all.
    """
    movable, extra_bytes = _by_block(model, family, spec, blocks)
    costs = _costs(model, family)
    sizes = {block: sum(weights.values()) for block, weights in movable.items()}
    plan = plan_offload(sizes, {block: costs[block] for block in sizes}, extra_bytes, budget_bytes)
    return plan, {name: block for block in plan.blocks for name in movable[block]}


def with_host_bytes(spec, checkpoint, model):
    """The spec with ModelSpec.host_bytes set. With stages each rank has weights of its own in any case."""
    if not spec.weights_memory or spec.stages is not None:
        return spec
    names = plan_weights(model, checkpoint.family, spec, spec.weights_memory)[1]
    return dataclasses.replace(spec, host_bytes=unmapped_bytes(checkpoint, model, spec, names))


def unmapped_bytes(checkpoint, model, spec, names):
    """Bytes of these weights that are stored differently from the file and thus need system RAM of their own. model: as
    in plan_weights."""
    packed = packed_weights(checkpoint, model, spec.quantisation)
    types = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
             "F8_E5M2": "float8_e5m2"}
    of_file = {name: torch.empty(shape, dtype=DTYPES[types.get(checkpoint.dtypes[name], "float32")], device="meta")
               for name, shape in checkpoint.shapes.items()}
    converted, splits = checkpoint.under_diffusers_names(of_file), splits_of(model, checkpoint.family, spec)
    storages, total = {tensor.untyped_storage()._cdata for tensor in of_file.values()}, 0

    def is_map(name, dtype):
        if name in packed:
            return packed[name].is_in_file and len(packed[name].runs) == 1
        own = converted.get(name)
        return own is not None and own.dtype == dtype and own.untyped_storage()._cdata in storages
    for name, tensor, dtype in storage_dtypes(model, checkpoint.family, spec):
        if name in names and not is_map(name, dtype):
            share = splits[name].share(spec.tensor_degree) if name in splits else 1
            total += aligned(round(tensor.numel() * dtype.itemsize * share))
    return total


def _costs(model, family):
    """Relative compute of each block: its weights times tokens of the image, or pixels."""
    if family.blocks:
        return [size * share for size, share in block_sizes(model, family)]
    num_levels = family.plan.num_levels(model.config)
    return [sum(weight.numel() for weight in model.get_submodule(path).parameters()) / 4 ** level_of(path, num_levels)
            for path in unet_blocks(model)]


def _tensors(model, family, spec):
    """[(name, number of its block, bytes)] of all weights; None: always resident."""
    tensors = tensor_bytes(model, family, spec)
    if family.blocks:
        return [(name, None if family.plan.is_outside(name) else block, size) for name, block, size in tensors]
    numbers = {path: number for number, path in enumerate(unet_blocks(model))}

    def block_of(name):
        path = name
        while path and path not in numbers:
            path = path.rpartition(".")[0]
        return numbers.get(path)
    return [(name, block_of(name), size) for name, _, size in tensors]


def _by_block(model, family, spec, blocks):
    """({block: {name of a weight: its bytes}}, bytes of weights that are always resident)."""
    found, extra_bytes = {}, 0
    for name, block, size in _tensors(model, family, spec):
        if block is not None and blocks is not None and block not in blocks:
            continue
        if block is None:
            extra_bytes += size
        else:
            found.setdefault(block, {})[name] = size
    for weights in found.values():
        least = SMALL * sum(weights.values())
        extra_bytes += sum(weights.pop(name) for name in [name for name, size in weights.items() if size < least])
    return found, extra_bytes
