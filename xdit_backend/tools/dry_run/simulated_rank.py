"""The dry run of one rank: its shard of a model's weights as fake tensors, and the workers' own commands run on it."""

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
from ...checkpoints.tensor_sharding import narrow
from ...checkpoints.weight_table import weight_table
from ...config import refuse_methods, validate_layout
from ...distributed.collectives import Traffic
from ...hooks.install import install_hooks
from ...memory.staging import StagingBuffers
from ...partition import split_stages, stage_blocks, stage_of
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
    """Memory and work of a rank in a step after the first: for PipeFusion all of its patches, for displaced patches a
    stale call.

    peak_bytes: without weights, of both steps; of these, cached_bytes are cached from step to step. sent_bytes: as
    passed to torch's process groups; reported_bytes: as reported by the workers. streamed_bytes: of weights that this
    rank copies from system RAM; weight_bytes includes their buffers. shared_bytes: of these, bytes sent to other ranks,
    included in sent_bytes.
    """

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
    """Synchronous replacement for a CopyThread. first: the weights before they got a buffer, which are referenced so
    that DeviceWork does not count reused memory under their storage keys."""

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
    tensor_degree. memory: bytes of each rank's device available for weights, for the split into stages; (): unlimited.
    capability: of the devices; None: fake_cuda.CAPABILITY. Raises UnsupportedError if shapes depend on values,
    ConfigError as check_layout does.
    """
    check_layout(checkpoint, layout)
    world_size = world_size_of(layout)
    with fake_group(rank, world_size):
        model, packed = outline(checkpoint, spec)
        table = weight_table(model, checkpoint.family, spec, checkpoint, packed)
        blocks = own_blocks(table, rank, memory)
        work = DeviceWork(answer=run.conditioning.get("context", (1, 1))[1],
                          num_experts=dict(model.config).get("num_routed_experts", 0)
                          or dict(model.config).get("num_experts", 0))
        with fake_cuda_device(capability=capability), work:
            loaded = load(checkpoint, table, model, packed, (blocks, rank % spec.tensor_degree))
            try:
                return _count(loaded, spec, layout, run, world_size, work)
            except DynamicOutputShapeException as error:
                raise UnsupportedError(f"Run python -m xdit_backend plan for an estimate: {checkpoint.family.name} "
                                       f"cannot be counted without a device, because shapes in its layers depend on "
                                       f"values ({error}), such as the number of distinct ones.") from error


def check_layout(checkpoint, layout):
    """Raise ConfigError, with valid alternatives, for a layout that the model's family or its heads do not support."""
    family, config = checkpoint.family, checkpoint.config
    validate_layout(layout, family.num_heads(config), family.name, family.num_key_heads(config))
    refuse_methods(layout, family.refused, family.name)


def world_size_of(layout):
    """Number of ranks of a Layout."""
    return math.prod(getattr(layout, each.name) for each in dataclasses.fields(Layout))


def stage_ranks(checkpoint, spec, layout, memory=()):
    """The first rank of a layout, the last, and the first of those with the most weights. memory: as in count."""
    last = world_size_of(layout) - 1
    ranks = {0, last}
    if spec.stages is not None and not spec.stages.every_block:
        table = table_of(checkpoint, spec)
        ranks.add(max(range(last + 1), key=lambda rank: table.rank_bytes(own_blocks(table, rank, memory))))
    return sorted(ranks)


def outline(checkpoint, spec):
    """(model on the meta device with weights in their stored types; its packed weights)."""
    model = build_empty(checkpoint.family, checkpoint.config)
    model.eval().requires_grad_(False)
    packed = packed_weights(checkpoint, model, spec.quantisation)
    set_packed_parameters(model, packed)
    return model, packed


def table_of(checkpoint, spec):
    """The WeightTable of a checkpoint under a ModelSpec."""
    model, packed = outline(checkpoint, spec)
    return weight_table(model, checkpoint.family, spec, checkpoint, packed)


def own_blocks(table, rank, memory=()):
    """The blocks of a rank's stage; all blocks if there are no stages. memory: as in count."""
    stages = table.spec.stages
    if stages is None:
        return range(len(table.block_sizes))
    counts = stages.num_blocks or split_stages(
        table.block_costs, stages.pipefusion_degree, sizes=table.block_bytes,
        limits=[min(memory[rank] for rank in range(len(memory)) if stage_of(rank, stages) == stage)
                - table.outside_bytes for stage in range(stages.pipefusion_degree)] if memory else None)
    return stage_blocks(counts, stage_of(rank, stages))


def load(checkpoint, table, model, packed, part, copies=CopiesInLine):
    """A worker's Loaded, with uninitialised weights on the device. model, packed: from outline. part: (blocks of the
    rank's stage, its tensor rank). copies(offloaded weights before they get buffers): makes the object that copies for
    OffloadedBlocks."""
    (blocks, tensor_rank), family, spec, splits = part, checkpoint.family, table.spec, table.splits
    here = None if spec.stages is None or spec.stages.every_block else blocks
    transformer = Transformer(model, checkpoint, table, CUDA, tensor_rank, here)
    offloaded = plan_weights(table, spec.weights_memory, here)[1] if spec.weights_memory else {}
    streamed: dict[int, list] = {}                                 # by block: its weights and their host copies
    first = []
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    for weight in table.weights:
        name, tensor = weight.name, tensors[weight.name]
        if here is not None and weight.block is not None and weight.block not in here:
            continue                                           # in another stage: stays on the meta device
        own = splits[name].own(tensor, spec.tensor_degree, tensor_rank) if name in splits else tensor
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        shape = tensor[:0].shape if own is None else own.shape
        made = torch.empty(shape, dtype=weight.dtype, device=CUDA)
        if name in offloaded:                                  # its only device memory is a buffer
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
    hooks = install_hooks(model, family.plan, splits=splits, offloaded=transformer.offloaded)
    return Loaded(transformer, hooks, getattr(torch, spec.compute_dtype), blocks)


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
    """Bytes of weights copied from system RAM so far, and bytes sent to ranks with the same weights."""
    return (0, 0) if offloaded is None else (offloaded.copied_bytes, offloaded.sent_bytes)
