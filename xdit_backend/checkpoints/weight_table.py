"""Table of a model's weights: of every parameter and buffer its name in the file, its type as stored on a rank, its
bytes, its block and its shard. Arithmetic only.

The host estimates memory, balances stages and plans offloading by this table, and the workers load by it.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from ..partition import block_indices, block_path, level_of, unet_blocks
from ..protocol.shared_memory import DTYPES
from ..protocol.specs import ModelSpec
from .quantisation.layer_formats import AUXILIARY
from .quantisation.quantised_weights import packed_weights
from .tensor_sharding import Split, tensor_splits

# torch's names of safetensors' types; other tensors of a file are unpacked to float32
FILE_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
              "F8_E5M2": "float8_e5m2"}


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer as ranks store it.

    shape: without sharding, in stored columns if it is packed. block: its index over all block lists of the plan, or of
    a U-Net's blocks (partition.unet_blocks); None: outside the blocks, or used outside of its block too. file_name: the
    tensor of the file that it is, or is a part of; None: computed from several, or in no file. is_mapped: stored
    exactly as a region of the file. split: None: replicated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: int | None
    file_name: str | None = None
    is_mapped: bool = False
    split: Split | None = None

    def num_bytes(self, degree=1, rank=0):
        """Bytes on a rank of the tensor degree. The first rank has the most."""
        share = self.split.share(degree, rank) if self.split is not None else 1
        return round(math.prod(self.shape) * share) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightTable:
    """The Weights of a model under a ModelSpec.

    block_sizes: [(parameters of a block, fraction of its copies that an image token passes)]; () for a U-Net.
    block_costs: relative compute of each block.
    """

    spec: ModelSpec
    weights: tuple[Weight, ...]
    block_sizes: tuple[tuple[int, float], ...]
    block_costs: tuple[float, ...]

    @cached_property
    def splits(self):
        """{name: Split} of the sharded weights."""
        return {weight.name: weight.split for weight in self.weights if weight.split is not None}

    def num_bytes(self, weight, rank=0):
        """Bytes of a weight on a tensor rank."""
        return weight.num_bytes(self.spec.tensor_degree, rank)

    def rank_bytes(self, blocks=None, rank=0):
        """Bytes on a tensor rank with these blocks; None: with all."""
        return sum(self.num_bytes(weight, rank) for weight in self.weights
                   if blocks is None or weight.block is None or weight.block in blocks)

    @cached_property
    def resident_bytes(self):
        """Bytes on the first tensor rank, which has the most, with all blocks."""
        return self.rank_bytes()

    @cached_property
    def block_bytes(self):
        """Bytes of each block on the first tensor rank."""
        sizes = [0] * len(self.block_costs)
        for weight in self.weights:
            if weight.block is not None:
                sizes[weight.block] += self.num_bytes(weight)
        return tuple(sizes)

    @property
    def outside_bytes(self):
        """Bytes outside the blocks, which every stage has."""
        return self.resident_bytes - sum(self.block_bytes)


def weight_table(model, family, spec, checkpoint=None, packed=None):
    """The WeightTable of a model, which may be on the meta device, with packed weights as stored.

    checkpoint: the Checkpoint that it is of; None: none, so that weights have no file_name. packed: its packed_weights;
    None: found here. Raises UnsupportedError for a tensor degree that cannot shard the model's layers.
    """
    regions = _regions(checkpoint) if checkpoint is not None else {}
    if packed is None:
        packed = packed_weights(checkpoint, model, spec.quantisation) if checkpoint is not None else {}
    splits = tensor_splits(model, family.plan, spec.tensor_degree) if spec.tensor_degree > 1 else {}
    block_of, dtype_of, weights = _block_finder(model, family), _dtype_finder(model, family, spec, regions), []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        file_name, file_dtype = regions.get(name, (None, None))
        dtype = dtype_of(name, tensor)
        is_mapped = file_name is not None and file_dtype == dtype
        if name in packed:
            file_name, is_mapped = packed[name].source, packed[name].is_in_file and len(packed[name].runs) == 1
        weights.append(Weight(name, tuple(tensor.shape), dtype, block_of(name), file_name, is_mapped,
                              splits.get(name)))
    sizes = tuple(block_sizes(model, family))
    if family.blocks:
        costs = [size * share for size, share in sizes]
    else:
        num_levels = family.plan.num_levels(model.config)
        costs = [sum(weight.numel() for weight in model.get_submodule(path).parameters())
                 / 4 ** level_of(path, num_levels) for path in unet_blocks(model)]
    return WeightTable(spec, tuple(weights), sizes, tuple(costs))


def block_sizes(model, family):
    """Parameters of each block, over all lists of the plan: [(number, fraction that an image token passes)]."""
    def size(block):
        packed = sum(module.out_features * module.in_features - module.weight.numel() for module in block.modules()
                     if type(module) is torch.nn.Linear)
        return sum(parameter.numel() for parameter in block.parameters()) + packed
    return [(sum(map(size, block_copies)), list_.image_fraction) for list_ in family.blocks
            for block_copies in zip(*map(model.get_submodule, list_.names))]


def _regions(checkpoint):
    """{name in the model: (name in the file, dtype there)} of tensors that are regions of one tensor of the file."""
    types = checkpoint.dtypes
    of_file = {name: torch.empty(shape, dtype=DTYPES[FILE_TYPES.get(types[name], "float32")], device="meta")
               for name, shape in checkpoint.shapes.items()}
    storages = {tensor.untyped_storage()._cdata: name for name, tensor in of_file.items()}
    return {name: (storages[storage], tensor.dtype)
            for name, tensor in checkpoint.under_diffusers_names(of_file).items()
            if (storage := tensor.untyped_storage()._cdata) in storages}


def _block_finder(model, family):
    """(name of a weight) -> Weight.block."""
    if family.blocks:
        indices = block_indices(model, family.blocks)
        return lambda name: None if family.plan.is_outside(name) else indices.get(block_path(name))
    numbers = {path: number for number, path in enumerate(unet_blocks(model))}

    def block_of(name):
        path = name
        while path and path not in numbers:
            path = path.rpartition(".")[0]
        return numbers.get(path)
    return block_of


def _dtype_finder(model, family, spec, regions):
    """(name, tensor) -> the dtype that a rank stores it in. regions: {name: (name in the file, dtype there)}."""
    storage, compute = getattr(torch, spec.storage_dtype), getattr(torch, spec.compute_dtype)
    exact = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if compute.itemsize == 2 else set()
    wide = getattr(model, "wide_modules", ())                  # of ComfyUI's classes: always float32
    own = getattr(model, "own_buffers", ())                    # of ComfyUI's classes too
    auxiliary = {name for name, _ in model.named_buffers() if name.rpartition(".")[2] in AUXILIARY}
    linears = _of_linears(model) if storage.itemsize == 1 else ()
    # made by the model itself, and in no file
    tables = {name for name, _ in model.named_buffers()} - model.state_dict().keys()

    def dtype_of(name, tensor):
        names, in_file = set(name.split(".")), regions.get(name, (None, tensor.dtype))[1]
        if name in own and tensor.is_floating_point():
            return storage if own[name] else torch.promote_types(compute, torch.float32)
        # RoPE tables keep their dtype, except frequencies from a file, which ComfyUI stores as weights
        if not tensor.is_floating_point() or (names & {"freqs_cos", "freqs_sin", "inv_freq"}
                                              and (name in tables or in_file == torch.float32)):
            return tensor.dtype
        if name in auxiliary or f"{name}_scale" in auxiliary:        # as in the file
            return tensor.dtype
        if name.rpartition(".")[0] in wide:
            return torch.promote_types(compute, torch.float32)
        if storage != compute:                                 # cast at use
            is_as_computed = name in tables or name in linears or names & set(family.keep_in_compute_dtype)
            return compute if is_as_computed else storage
        return torch.float32 if names & exact else compute
    return dtype_of


def _of_linears(model):
    """Parameters of linear layers in a model with some of ComfyUI's quantised layers: there ComfyUI's loader rounds to
    float8 only parameters outside linear layers (comfy.ops.mixed_precision_ops)."""
    linears = {path: module for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if not any(getattr(module, "format", "") for module in linears.values()):
        return set()
    return {f"{path}.{leaf}" for path in linears for leaf in ("weight", "bias")}
