"""Loading of a diffusers transformer from a file of any format that its family supports, or from a diffusers folder.

All ranks map the same file, so that the machine has it in memory once; a rank reads only the tensors it needs.
"""

from dataclasses import dataclass, field

import torch

from ..memory.copy_thread import CopyThread
from ..memory.staging import StagingBuffers
from ..protocol.errors import CheckpointError
from .build_transformer import build_empty
from .checkpoint import Checkpoint, open_spec
from .offload.block_offload import OffloadedBlocks
from .offload.host_weights import HostCopies
from .offload.offload_plan import plan_weights
from .quantisation import kitchen_layers
from .quantisation.layerwise_casting import Casts, cast_at_use, unpack_at_use
from .quantisation.quantise_on_load import quantised
from .quantisation.quantised_weights import packed_weights, set_packed_parameters
from .tensor_reader import read_auxiliary, read_file, read_plain
from .tensor_sharding import narrow
from .weight_table import WeightTable, weight_table


@dataclass
class Transformer:
    """A diffusers model with this rank's weights, and their sources."""

    model: torch.nn.Module
    checkpoint: Checkpoint
    table: WeightTable
    device: torch.device
    tensor_rank: int = 0                   # of spec.tensor_degree
    blocks: range | None = None            # loaded here, over all lists of the plan; None: all
    # {id: region of the mapped file} of weights whose stored form equals the file's
    files: dict = field(default_factory=dict)
    # of weights stored in another type than they are computed with
    casts: Casts = field(default_factory=Casts)
    # blocks whose weights are offloaded to system RAM; None: all weights are resident
    offloaded: OffloadedBlocks | None = None
    # host copies of offloaded weights that differ from the file, while the model is loaded
    host_copies: HostCopies = field(default_factory=HostCopies)
    chunk_bytes: int | None = None         # of StagingBuffers

    @property
    def spec(self):
        """The ModelSpec."""
        return self.table.spec

    @property
    def splits(self):
        """{name: Split} of the sharded weights."""
        return self.table.splits

    @property
    def family(self):
        return self.checkpoint.family

    @property
    def config(self):
        """Arguments of the model's class."""
        return self.checkpoint.config

    def needs(self, name):
        """Whether this rank needs this tensor of the file, or a shard of it."""
        return self.blocks is None or (block := self._block_of(name)) is None or block in self.blocks

    def share(self, name, tensor, addresses):
        """This rank's shard of a tensor; None if it has none. Its memory contains nothing else, unless it is a region
        of a mapped file. addresses: of these maps."""
        own = (self.splits[name].own(tensor, self.spec.tensor_degree, self.tensor_rank) if name in self.splits
               else tensor)
        is_part = own is not None and own is not tensor and own.untyped_storage().nbytes() > own.nbytes
        return own.clone() if is_part and own.untyped_storage().data_ptr() not in addresses else own

    def hold(self, weight, tensor, dtype, staging, addresses):
        """Set a weight to these values, moved to the device and cast there, and record whether they are a region of the
        mapped file. An offloaded weight is set in system RAM."""
        if self.offloaded is not None and id(weight) in self.offloaded.weights:
            self.offloaded.replace(weight, in_host_memory(tensor, dtype, staging))
            return
        weight.data = moved(tensor, self.device, dtype, staging)
        self.files.pop(id(weight), None)
        if tensor.dtype == dtype and tensor.untyped_storage().data_ptr() in addresses:
            self.files[id(weight)] = tensor

    def _block_of(self, name):
        """Index of the block of a tensor of the file, over all lists; None for tensors outside the blocks."""
        first = 0
        if self.family.plan.is_outside(name):
            return None
        for list_ in self.family.blocks:
            first_prefix = f"{list_.name}." if self.checkpoint.folder_config is not None else list_.file_prefix
            for prefix in (first_prefix, *(f"{each}." for each in list_.names[1:])):
                if name.startswith(prefix):
                    return first + int(name[len(prefix):].partition(".")[0])
            first += len(self.model.get_submodule(list_.name))
        return None


def load_transformer(spec, device, on_progress=lambda done, total: None, choose_blocks=None, tensor_rank=0,
                     host_copies=None, chunk_bytes=None):
    """Load a Transformer from a file or folder, in spec's dtypes, on `device`.

    choose_blocks(WeightTable) -> a range: load only these blocks. Others are not read and stay on the meta
    device. Blocks are numbered over all of the plan's lists. tensor_rank: rank within spec.tensor_degree. With
    spec.weights_memory, the weights of some blocks are offloaded to system RAM (block_offload.py). host_copies: memory
    for offloaded weights that differ from the file; None: of this process. chunk_bytes: of StagingBuffers.

    On CPU devices, weights stored in the dtype of the file stay regions of its map. on_progress(done, total) counts
    bytes of the file, after each tensor, and may raise to cancel. Raises CheckpointError if the tensors of the file and
    of the model do not match, or the file has changed.
    """
    checkpoint = open_spec(spec)
    family = checkpoint.family
    model = build_empty(family, checkpoint.config)
    packed = packed_weights(checkpoint, model, spec.quantisation)
    set_packed_parameters(model, packed)
    table = weight_table(model, family, spec, checkpoint, packed)
    loaded = Transformer(model, checkpoint, table, device, tensor_rank, choose_blocks(table) if choose_blocks else None,
                         chunk_bytes=chunk_bytes)
    offloaded = plan_weights(table, spec.weights_memory, loaded.blocks)[1] if spec.weights_memory else {}
    tensors = read_file(checkpoint, lambda name: loaded.needs(name))
    # referenced until the end, so that no other tensor gets their addresses
    maps = list(tensors.values())
    tensors = _converted(tensors, checkpoint, packed)
    to_quantise = {name: (tensors.pop(name), how.type) for name, how in packed.items() if not how.is_in_file}
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    missing = [name for name in missing if name not in to_quantise and name.removesuffix("_scale") not in to_quantise]
    if missing or unexpected:
        raise CheckpointError(f"Use another file of this model, or Load Diffusion Model: {spec.path} does not fit "
                              f"{family.transformer}: {len(missing)} tensors are missing ({', '.join(missing[:3])} "
                              f"...), {len(unexpected)} are unknown ({', '.join(unexpected[:3])} ...).")
    model.eval().requires_grad_(False)
    loaded.host_copies = host_copies or HostCopies()
    in_blocks = {f"{name}_scale": how.layer for name, how in packed.items()
                 if how.layer is not None and how.layer.how.block}
    _move(loaded, addresses_of(maps), to_quantise, on_progress, offloaded, in_blocks)
    narrow(model, loaded.splits, spec.tensor_degree, tensor_rank)
    if spec.storage_dtype != spec.compute_dtype:
        cast_at_use(model, getattr(torch, spec.compute_dtype), loaded.casts, spec.fast)
    unpack_at_use(model, packed, loaded.casts)
    if offloaded:
        loaded.offloaded = _offloaded(loaded, offloaded)
    return loaded


def _offloaded(loaded, names):
    """The OffloadedBlocks of a model. names: {name of a weight: its block}, in the order of blocks."""
    staging = StagingBuffers(loaded.device, loaded.chunk_bytes)
    blocks = OffloadedBlocks(loaded.device, CopyThread(loaded.device, staging), files=loaded.checkpoint.files)
    weights: dict[int, list] = {}
    tensors = dict((*loaded.model.named_parameters(), *loaded.model.named_buffers()))
    for name, block in names.items():
        if name in tensors:                                    # some ranks do not have a bias
            weights.setdefault(block, []).append(tensors[name])
    for block, own in weights.items():
        blocks.add(block, own)
    return blocks


def _converted(tensors, checkpoint, packed):
    """{name in the model: tensor}. tensors: of the file. Packed weights stay packed, with their scales; all others
    become plain numbers."""
    if checkpoint.folder_config is not None:
        return checkpoint.under_diffusers_names(tensors)
    packed = {name: how for name, how in packed.items() if how.is_in_file}
    converted = checkpoint.under_diffusers_names(
        read_plain(checkpoint, tensors, {how.source for how in packed.values()}))
    auxiliary = read_auxiliary(checkpoint, tensors)
    for name, how in packed.items():
        converted[name] = how.take(tensors[how.source])
        converted |= {f"{name.removesuffix('weight')}{what}": tensor
                      for what, tensor in how.take_auxiliary(auxiliary.get(how.source)).items()}
    return converted


def _move(loaded, addresses, to_quantise, on_progress, offloaded, in_blocks):
    """Take this rank's shard of one tensor after the other, and move and cast it, so that there are never two copies of
    the model. addresses: of the file's tensors. offloaded: names of offloaded weights. in_blocks: {name of scales that
    are stored in tiles: the Layer}.

    to_quantise: {name: (tensor, type)} of weights to quantise on the device; emptied. Rows are quantised independently,
    so a rank quantises only its own; a shard of columns is taken after quantising full rows.
    """
    model, spec, splits = loaded.model, loaded.spec, loaded.splits
    weights = dict((*model.named_parameters(), *model.named_buffers()))
    tensors = [(each.name, weights[each.name], to_quantise[each.name][0] if each.name in to_quantise
                else weights[each.name], each.dtype) for each in loaded.table.weights]
    tensors = [each for each in tensors if not each[2].is_meta]                               # not of another stage
    staging = StagingBuffers(loaded.device, loaded.chunk_bytes)
    read_bytes = [source.nbytes * (splits[name].share(spec.tensor_degree, loaded.tensor_rank) if name in splits
                                   and not (
                                       name in to_quantise and splits[name].dim) else 1)
                  for name, _, source, _ in tensors]
    done_bytes, total_bytes = 0.0, round(sum(read_bytes))

    def in_tiles(name, own):                                   # before other ranks see it in shared memory
        if name not in in_blocks:
            return own
        return kitchen_layers.in_tiles(in_blocks[name], {"weight_scale": own})["weight_scale"]
    for (name, weight, source, dtype), own_bytes in zip(tensors, read_bytes):
        done_bytes += own_bytes
        if name in to_quantise:
            linear, by_rows = model.get_submodule(name.removesuffix(".weight")), name in splits and splits[
                name].dim == 0
            own = loaded.share(name, source, addresses) if by_rows else source
            numbers, linear.weight_scale = quantised(moved(own, loaded.device, torch.float32, staging),
                                                     to_quantise.pop(name)[1])
            numbers = numbers if by_rows else loaded.share(name, numbers, addresses)
            linear.weight = torch.nn.Parameter(loaded.host_copies.keep(numbers, numbers.dtype) if name in offloaded
                                               else numbers, requires_grad=False)
        elif (own := loaded.share(name, weight.data, addresses)) is None:
            weight.data = weight.data[:0]
        elif name in offloaded:
            own = in_tiles(name, own)
            is_map = own.dtype == dtype and own.untyped_storage().data_ptr() in addresses
            weight.data = own if is_map else loaded.host_copies.keep(own, dtype)
        else:
            loaded.hold(weight, in_tiles(name, own), dtype, staging, addresses)
        on_progress(round(done_bytes), total_bytes)
    on_progress(total_bytes, total_bytes)


def addresses_of(maps):
    """Addresses of these memory maps of a file."""
    return {tensor.untyped_storage().data_ptr() for tensor in maps if not tensor.is_meta}


def moved(tensor, device, dtype, staging):
    """A tensor on the device, cast there."""
    is_apart = not staging.is_direct and tensor.device.type == "cpu"
    return (staging.to_device(tensor) if is_apart else tensor).to(device, dtype)


def in_host_memory(tensor, dtype, staging):
    """A tensor in system RAM, cast on the device where it was."""
    if tensor.device.type == "cpu":
        return tensor.to(dtype)
    copy = torch.empty(tensor.shape, dtype=dtype)
    staging.to_host(tensor, copy)
    return copy
