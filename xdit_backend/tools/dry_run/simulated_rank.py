"""One rank of a layout, counted: its share of a model's weights, pretended, and the workers' own commands run on it.
Used by bench size and by tests.
"""

import dataclasses
import math
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from ...checkpoints.build_transformer import build_empty
from ...checkpoints.loader import Transformer
from ...checkpoints.offload.block_offload import OffloadedBlocks
from ...checkpoints.offload.offload_plan import plan_weights
from ...checkpoints.quantisation.layerwise_casting import cast_at_use, unpack_at_use
from ...checkpoints.quantisation.quantised_weights import packed_weights, set_packed_parameters
from ...checkpoints.tensor_sharding import block_bytes, block_sizes, held, narrow, resident_bytes, splits_of
from ...config import refuse_methods, validate_layout
from ...distributed.collectives import Traffic
from ...hooks.replicated_unet import ReplicatedHooks
from ...hooks.transformer import Hooks
from ...hooks.unet import UNetHooks
from ...memory.staging import StagingBuffers
from ...partition import block_indices, split_stages, stage_blocks, stage_of
from ...protocol.errors import UnsupportedError
from ...protocol.specs import Layout
from ...worker.models import Loaded
from ...worker.predictions import Predictions
from ...worker.timeline import Timeline
from .commands import Calls, HostMemory
from .fake_cuda import CUDA, fake_cuda_device, fake_group
from .op_counter import DeviceWork


@dataclass(frozen=True)
class Counted:
    """What a rank holds and does in a step after the first: of PipeFusion all of its patches, of displaced patches a
    stale call. peak_bytes: beside weights, of both steps; cached_bytes of it are kept from step to step. sent_bytes: as
    torch's process groups are told; reported_bytes: as the workers report them. streamed_bytes: of weights that this
    rank copies from host memory; weight_bytes has the buffers that they come through. shared_bytes: of them, that it
    sends to others; sent_bytes has them too."""

    weight_bytes: int
    cached_bytes: int
    peak_bytes: int
    streamed_bytes: int
    shared_bytes: int
    flops: int
    attention_flops: int
    sent_bytes: int
    reported_bytes: int
    num_exchanges: int
    kernels: int
    moved_bytes: int
    waits: dict[str, int]
    mixed: dict[str, int]
    names: dict[str, int]


class CopiesInLine:
    """In place of a CopyThread, where nothing takes time. first: what weights were before they got a buffer: as long
    as it lives, DeviceWork takes no other memory for it."""

    def __init__(self, first):
        self._staging, self._first = StagingBuffers(CUDA), first

    def start(self, pairs):
        for source, target in pairs:
            self._staging.copy(source, target)
        done: Future = Future()
        done.set_result(None)
        return done

    def wait(self, copied):
        copied.result()

    def drain(self):
        pass


def count(checkpoint, spec, layout, rank, run, memory=(), capability=None):
    """The Counted of a rank under a Layout.

    checkpoint: a Checkpoint, or published_models.Unwritten. spec: its ModelSpec, with the layout's stages and
    tensor_degree. memory: bytes of each rank's device that its weights may take, for the split into stages; (): as many
    as wanted. capability: of the devices; None: fake_cuda.CAPABILITY.
    Raises UnsupportedError where shapes depend on numbers, ConfigError as check_layout does.
    """
    check_layout(checkpoint, layout)
    world_size = world_size_of(layout)
    with fake_group(rank, world_size):
        model, packed = outline(checkpoint, spec)
        blocks = own_blocks(model, checkpoint.family, spec, rank, memory)
        work = DeviceWork(answer=run.conditioning.get("context", (1, 1))[1],
                          num_experts=dict(model.config).get("num_routed_experts", 0)
                          or dict(model.config).get("num_experts", 0))
        with fake_cuda_device(capability=capability), work:
            loaded = load(checkpoint, spec, model, packed, (blocks, rank % spec.tensor_degree))
            try:
                return _count(loaded, spec, layout, run, world_size, work)
            except DynamicOutputShapeException as error:
                raise UnsupportedError(f"{checkpoint.family.name} cannot be counted without a device: what its layers "
                                       f"compute depends on numbers ({error}), such as how many of them are unlike. "
                                       f"Ask python -m xdit_backend plan for a forecast.") from error


def check_layout(checkpoint, layout):
    """Raise ConfigError, with what would work, for a layout that the model's family or its heads refuse."""
    family, config = checkpoint.family, checkpoint.config
    validate_layout(layout, family.num_heads(config), family.name, family.num_key_heads(config))
    refuse_methods(layout, family.refused, family.name)


def world_size_of(layout):
    """Ranks that work under a Layout."""
    return math.prod(getattr(layout, each.name) for each in dataclasses.fields(Layout))


def stage_ranks(checkpoint, spec, layout, memory=()):
    """The first rank of a layout, the last, and the first of those that hold most weights. memory: as count's."""
    last = world_size_of(layout) - 1
    ranks = {0, last}
    if spec.stages is not None and not spec.stages.every_block:
        model, _ = outline(checkpoint, spec)
        sizes = block_bytes(model, checkpoint.family, spec)
        ranks.add(max(range(last + 1), key=lambda rank: sum(
            sizes[block] for block in own_blocks(model, checkpoint.family, spec, rank, memory))))
    return sorted(ranks)


def outline(checkpoint, spec):
    """(the model on the meta device, as its weights are held; its packed weights)."""
    model = build_empty(checkpoint.family, checkpoint.config)
    model.eval().requires_grad_(False)
    packed = packed_weights(checkpoint, model, spec.quantisation)
    set_packed_parameters(model, packed)
    return model, packed


def own_blocks(model, family, spec, rank, memory=()):
    """The blocks of a rank's stage; all, where there are none."""
    sizes = block_sizes(model, family)
    if spec.stages is None:
        return range(len(sizes))
    of_blocks = block_bytes(model, family, spec)
    outside = resident_bytes(model, family, spec) - sum(of_blocks)
    counts = spec.stages.num_blocks or split_stages(
        [size * share for size, share in sizes], spec.stages.pipefusion_degree,
        sizes=of_blocks,
        limits=[min(memory[rank] for rank in range(len(memory)) if stage_of(rank, spec.stages) == stage) - outside
                for stage in range(spec.stages.pipefusion_degree)] if memory else None)
    return stage_blocks(counts, stage_of(rank, spec.stages))


def load(checkpoint, spec, model, packed, part, copies=CopiesInLine):
    """A worker's Loaded, whose weights are on the device, without a value. model, packed: of outline. part: (the blocks
    of the rank's stage, its tensor rank). copies(weights that come from host memory, as they are before) -> what makes
    the copies of OffloadedBlocks."""
    (blocks, tensor_rank), family = part, checkpoint.family
    splits = splits_of(model, family, spec)
    here = None if spec.stages is None or spec.stages.every_block else blocks
    transformer = Transformer(model, checkpoint, spec, CUDA, tensor_rank, here, splits)
    offloaded = plan_weights(model, family, spec, spec.weights_memory, here)[1] if spec.weights_memory else {}
    streamed: dict[int, list] = {}                                 # of a block: its weights and their host copies
    first = []
    indices = block_indices(model, family.blocks)
    for name, tensor, dtype in held(model, family, spec):
        is_outside = family.is_unet or name.startswith(family.plan.shared_parameters)
        index = None if is_outside else indices.get(block_path(name))
        if here is not None and index is not None and index not in here:
            continue                                           # of another stage: it stays on the meta device
        own = splits[name].own(tensor, spec.tensor_degree, tensor_rank) if name in splits else tensor
        owner, _, leaf = name.rpartition(".")
        module, dtype = model.get_submodule(owner), tensor.dtype if name in packed else dtype
        shape = tensor[:0].shape if own is None else own.shape
        made = torch.empty(shape, dtype=dtype, device=CUDA)
        if name in offloaded:                                  # it has no memory but a buffer's
            host_copy, made = torch.empty_like(made, device="cpu"), made.new_empty(0)
            first.append(made)
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(made, requires_grad=False)
        else:
            module._buffers[leaf] = made
        if name in offloaded:
            streamed.setdefault(offloaded[name], []).append((getattr(module, leaf), host_copy))
    if streamed:
        transformer.offloaded = OffloadedBlocks(CUDA, copies(first))
        for block in sorted(streamed):
            transformer.offloaded.add(block, *map(list, zip(*streamed[block])))
        transformer.offloaded.restore()
    narrow(model, splits, spec.tensor_degree, tensor_rank)
    if spec.storage_dtype != spec.compute_dtype:
        cast_at_use(model, getattr(torch, spec.compute_dtype), transformer.casts)
    unpack_at_use(model, packed, transformer.casts)
    kind = ReplicatedHooks if family.is_replicated else UNetHooks
    hooks = (kind(model, family.plan, transformer.offloaded) if family.is_unet
             else Hooks(model, family.plan, splits, transformer.offloaded))
    return Loaded(transformer, hooks, getattr(torch, spec.compute_dtype), blocks)


def block_path(name):
    """Path of the block that a weight would be in."""
    return ".".join(name.split(".")[:2])


def _count(loaded, spec, layout, run, world_size, work):
    weight_bytes, memory = work.resident_bytes, HostMemory()
    work.start_over()
    predictions = Predictions({spec.name: loaded}, world_size, CUDA, StagingBuffers(CUDA), Timeline(CUDA),
                              map_segment=memory.map)
    calls = Calls(loaded, spec, layout, run, memory)
    for command in calls.conditionings():
        predictions.keep_conditioning(command, Traffic())
    for command in calls.first_step():
        predictions.predict(command, Traffic())
    peak_bytes = work.peak_bytes
    work.start_over()
    traffic, offloaded = Traffic(), loaded.transformer.offloaded
    before = _copied_and_sent(offloaded)
    for command in calls.next_step():
        predictions.predict(command, traffic)
    streamed_bytes, shared_bytes = (now - then for now, then in zip(_copied_and_sent(offloaded), before))
    return Counted(weight_bytes, work.resident_bytes - weight_bytes, max(peak_bytes, work.peak_bytes) - weight_bytes,
                   streamed_bytes, shared_bytes, work.flops, work.attention_flops, work.sent_bytes, traffic.sent_bytes,
                   traffic.num_exchanges, work.kernels, work.moved_bytes, dict(work.waits), dict(work.mixed),
                   dict(work.names))


def _copied_and_sent(offloaded):
    """Bytes of weights that have come from host memory, and that have been sent to ranks that share them."""
    return (0, 0) if offloaded is None else (offloaded.copied_bytes, offloaded.sent_bytes)
