"""Bytes a rank holds under a layout: weights, stale keys and values, activations. Pure arithmetic.

What the choice of stages, the refusal of a run that cannot fit, ComfyUI's accounting and the benches all use.
"""

import dataclasses
import functools
import math
import statistics
from dataclasses import dataclass

from ..partition import FULL, shard_sizes, split_stages, stage_blocks, stage_of
from .quantised_matmul_memory import most_in_layers

USABLE_MEMORY = 0.95           # of a device's memory that a run may take
CONTEXT_BYTES = 6e8            # of a GPU, that CUDA and its libraries take for themselves


@dataclass(frozen=True)
class Memory:
    weights: float
    keys_values: float
    activations: float
    host: float = 0.0                      # keys and values that are in host memory, and not in `total`
    # of weights that come from host memory whenever the rank runs its blocks, and are not in `total`
    streamed: float = 0.0

    @property
    def total(self):
        return self.weights + self.keys_values + self.activations


@dataclass(frozen=True)
class MemorySettings:
    """What a rank's memory depends on beside the layout. See planner.memory_settings for those of a ParallelConfig."""

    cached_steps: int = 1                  # of how many steps stale keys and values are kept; config.cached_steps
    offload: bool = False                  # they are in host memory, those of two blocks at a time on the device
    images_apart: bool = False             # see working_fraction
    exchanged_copies: int = 1              # of keys and values of other ranks, with displaced patches
    # bytes of a device that weights may take, others come from host memory; inf: what the rest leaves; 0: all are there
    weights_memory: float = 0.0
    has_lora: bool = False                 # beside weights that are packed
    added_bytes: float = 0.0               # of a rank, that changed weights take more, and a LoRA's factors


DEFAULT_SETTINGS = MemorySettings()


def rank_memory(dims, job, degrees, settings=DEFAULT_SETTINGS):
    """Memory of the fullest rank.

    Stale keys and values are 2 B (S + S_t) h elements a block: of a stage's blocks and a rank's heads under PipeFusion,
    of all blocks under DistriFusion; of one patch none are kept, but for those of references (Job.kept).
    """
    counts = stage_counts(dims, degrees.pipefusion)
    stages = {range(sum(counts[:stage]), sum(counts[:stage + 1])) for stage in range(len(counts))}
    if not dims.skips or degrees.warmup_by_sequence:            # what else lives at once is alike on all
        stages = {max(stages, key=len)}
    cached = [_cached(dims, job, degrees, settings, len(stage)) for stage in stages]
    unit = (job.tokens + (job.text if dims.joint else 0)) * dims.width * dims.element_bytes
    footprint = [_activation_rows(dims, job, degrees, settings, stage) * unit for stage in stages]
    if degrees.pipefusion > 1 and degrees.sequence > 1 and not degrees.warmup_by_sequence:
        footprint = [max(_activation_rows(dims, job, degrees, settings, stage, is_cut=True) * unit,
                    most - _to_stream(dims, job, degrees, of[0], 1 / len(stage)))
                for most, of, stage in zip(footprint, cached, stages)]
    if dims.footprint is not None and dims.footprint.late and degrees.pipefusion > 1 and degrees.sequence == 1:
        footprint = [_besides_cached(dims, job, degrees, most, of[0], len(stage)) for most, of,
                     stage in zip(footprint, cached, stages)]
    (keys_values, host), activations = max(zip(cached, footprint), key=lambda both: both[0][0] + both[1])
    share = _share(dims, job, degrees, settings)
    weights = weight_bytes(dims, degrees) + settings.added_bytes
    return Memory(weights=weights, keys_values=keys_values, host=host, activations=most_in_layers(
        dims, dims.footprint or ActivationFootprint(), share * job.tokens, share * job.text if dims.joint else 0.0,
        activations,
        degrees.tensor, settings.has_lora))


def _besides_cached(dims, job, degrees, most, cached_bytes, num_blocks):
    """Bytes of a stage of so many blocks beside all that it keeps, where most lives before a forward's own keys and
    values are kept: in the first step, which runs whole, those of the branches before are."""
    if degrees.warmup_steps > 1 or degrees.warmup_by_sequence:
        return most
    late = max(dims.footprint.late / dims.footprint.alone, 1 / (degrees.num_patches or degrees.pipefusion))
    to_stream = _to_stream(dims, job, degrees, cached_bytes, dims.footprint.early * dims.blocks / num_blocks)
    return max(most * min(1.0, late), most - to_stream)


def _to_stream(dims, job, degrees, cached_bytes, share):
    """Bytes that a stage has yet to keep of the last branch, where this share of its blocks has run."""
    return cached_bytes * max(0.0, 1 - share) / (degrees.batch(job) if dims.branches_apart else 1)


def _cached(dims, job, degrees, settings, num_blocks):
    """Bytes of keys and values of a rank with so many blocks: (on the device, in host memory)."""
    tokens, text, degrees = job.tokens + (job.text if dims.joint else 0), 0.0, _of_attention(dims, degrees)
    a_block = ((dims.footprint or ActivationFootprint()).keys * key_fraction(dims,
                                                                    degrees) * degrees.batch(job) * tokens * dims.width
               * dims.element_bytes / degrees.ulysses / degrees.tensor)
    if degrees.displaced > 1:
        return settings.exchanged_copies * settings.cached_steps * a_block * dims.blocks, 0.0
    if degrees.pipefusion == 1 or degrees.num_patches == 1:
        return a_block * num_blocks * job.cached / tokens / degrees.ring, 0.0
    if not dims.joint:                                          # those of the text, which are made once a run
        text = 2 * degrees.batch(job) * job.sequences * job.text * dims.width * dims.element_bytes / degrees.tensor
    keys_values = settings.cached_steps * a_block * num_blocks
    return (((settings.cached_steps + 1) * a_block + text * num_blocks, keys_values) if settings.offload
            else (keys_values + text * num_blocks, 0.0))


def unet_memory(footprint, hidden_bytes, images, cached_bytes, degrees):
    """Memory of the fullest rank of a U-Net beside weights.

    live: of its family, in hidden states of the first level of one image, hidden_bytes: alone, of an image that a rank
    has whole, and block, of one whose rows are shared out; both as a count of the workers' own work says. images: that
    a rank has in a batch, of all branches; one at a time where rows are shared out. cached_bytes: of
    model_dims.cached_bytes.
    """
    if degrees.displaced == 1:
        return Memory(0.0, 0.0, images * footprint.alone * hidden_bytes)
    return Memory(0.0, cached_bytes, footprint.block * hidden_bytes / degrees.displaced)


def _of_attention(dims, degrees):
    """By what a rank's heads are a part of all."""
    return dataclasses.replace(degrees, tensor=1) if dims.whole_attention else degrees


def key_fraction(dims, degrees):
    """Size of the keys, or values, of a rank's heads to that of its queries. Key heads are repeated where Ulysses ranks
    would have to share one (parallel/sequence_parallel.py)."""
    key_heads = (dims.key_heads or dims.heads) / degrees.tensor
    repeats = math.lcm(degrees.ulysses, int(key_heads)) / key_heads if key_heads.is_integer() else 1
    return dims.key_fraction * repeats


@dataclass(frozen=True)
class ActivationFootprint:
    """What lives at once beside weights and what is kept, in hidden states of all tokens of a forward, as a count of
    the workers' own work says of a published model (dry_run/simulated_rank.py; tests hold it to 5 %).

    alone: most where a rank has all tokens; residual: of that, what tensor parallelism does not divide; whole: most at
    a moment at which it divides nothing. Where tokens are shared out, outside: most outside of the blocks, where
    streams are whole; held: whole, beside the blocks, such as what is to be cut and tables of positions; and of a
    rank's own tokens, block: most in a block by itself; exchange: where Ulysses packs queries, keys and values;
    entered: of that, what tensor parallelism does not divide; 0: ENTERED at most; attends: where displaced patches
    attend, beside keys and values of all ranks; 0: exchange, less UNPACKED. keys: those and values of one block, which
    are kept, where queries have as many heads. given: what a branch of guidance is given, where others run while it
    waits. own: 1 where tokens of one image are cut without a copy; those of several images
    are copied, while the first block runs beside the whole. shared: of one image's, what a batch has once all the time,
    such as tables of positions; once: that too, outside of the blocks. narrowing: of the most, the share that lives
    where a weight that narrows tokens is unpacked. late: most in a stage after the first blocks, of which early is the
    share that live as alone; 0: as alone in all. cut: of held, what a stage has cut into its ranks' own tokens before
    its first block ends.
    """

    alone: float = 15.0
    residual: float = 5.0
    whole: float = 9.0
    outside: float = 5.0
    held: float = 2.0
    block: float = 13.0
    exchange: float = 18.0
    entered: float = 0.0
    attends: float = 0.0
    keys: float = 2.0
    given: float = 0.0
    own: float = 1.0
    once: float = 0.0
    shared: float = 0.0
    narrowing: float = 0.77
    late: float = 0.0
    early: float = 0.0
    cut: float = 1.0


# beside `exchange`, in hidden states: a round of Ring has the next keys and values, and sums in more bits; where
# Ulysses comes before it, what that has unpacked
RING, RING_AND_ULYSSES = 2.05, 5.05
# of `exchange`, what is not there where displaced patches attend, without Ulysses and with it
UNPACKED, PACKED_BEFORE = 8.0, 3.0
JOINED_SKIP = 2.0              # a skip beside the hidden states that it is read with, in one tensor
STAGES_ENDS = 2.0              # what the last block of a stage has taken and given, beside the message made of it
# of `exchange`: what came into the block, was normalised and modulated, at most, which tensor parallelism does not
# divide; and queries, keys and values, as they are made, packed, sent and put together, which it does
ENTERED, PACKED = 3.0, 12.0


def _activation_rows(dims, job, degrees, settings, blocks, is_cut=False):
    """The most that lives at once, in hidden states of all tokens of one image. blocks: of the rank's stage. is_cut:
    after its first block, where what was cut into this rank's tokens is gone."""
    footprint = dims.footprint or ActivationFootprint()
    batch = _batch(job, degrees, dims.branches_apart, settings.images_apart)
    sequence = degrees.sequence * (degrees.pipefusion if degrees.warmup_by_sequence else 1)
    if sequence * degrees.displaced == 1:
        most = max(footprint.whole if degrees.tensor > 1 else 0.0,
                   _divided(footprint.alone, footprint.residual, degrees))
        return _of_batch(_with_skips(dims, blocks, most), footprint.shared, batch)
    is_small = footprint.residual < footprint.alone
    residual = max(0.0, footprint.residual - footprint.held) if is_small else footprint.block
    block = _divided(footprint.block, residual, degrees)
    of_heads = _of_attention(dims, degrees)
    exchange = _divided(footprint.exchange,
                        footprint.entered or min(residual, ENTERED, max(0.0, footprint.exchange - PACKED)),
                        of_heads)
    if degrees.tensor > 1:
        block = max(block, footprint.whole - footprint.held)
    if degrees.ring > 1 or sequence > degrees.sequence:
        exchange += (RING_AND_ULYSSES if degrees.ulysses > 1 else RING) / of_heads.tensor
    block, exchange = (each / sequence / degrees.displaced for each in (block, exchange))
    inside = max(block, exchange) if sequence > 1 else block
    if degrees.displaced > 1:
        inside = max(inside, _with_all_keys(dims, footprint, of_heads, sequence))
    inside = _with_skips(dims, blocks, inside, sequence * degrees.displaced)
    own = footprint.own / sequence / degrees.displaced if batch > 1 else 0.0
    waiting = footprint.given * (math.ceil(job.branches / degrees.cfg) - 1) if degrees.displaced > 1 else 0.0
    return waiting + max(_of_batch(footprint.outside, footprint.shared + footprint.once, batch),
                         _of_batch(footprint.held - footprint.cut * is_cut + own + inside, footprint.shared, batch))


def _with_all_keys(dims, footprint, degrees, sequence):
    """What lives where displaced patches attend to keys and values of all ranks, which are one piece each."""
    own = (footprint.exchange - PACKED_BEFORE if degrees.ulysses > 1 else footprint.attends
           or footprint.exchange - UNPACKED)
    return (2 * key_fraction(dims, degrees) / degrees.ulysses / degrees.tensor
            + _divided(own, min(footprint.entered or ENTERED, own), degrees) / sequence / degrees.displaced)


def _with_skips(dims, blocks, inside, parts=1):
    """What lives at once, where later blocks read what earlier ones have given. inside: without. blocks: of a rank.
    parts: that the tokens are shared out in. A stage also has the message that came, of which what is still to be read
    is views, and at its end the next one.
    """
    if not dims.skips:
        return inside

    def message(block):
        """Hidden states that stages send each other before a block."""
        return 1 + min(block, dims.blocks - block, dims.skips) if 0 < block < dims.blocks else 0

    own = max(0, min(blocks.stop, dims.skips) - blocks.start)
    joined = JOINED_SKIP if blocks.stop > dims.blocks - dims.skips else 0.0
    return (message(blocks.start) + own) / parts + max(
        inside + joined / parts, (STAGES_ENDS + message(blocks.stop)) / parts)


def _of_batch(footprint, shared, batch):
    """What lives at once of a batch. shared: of one image's, what is there once."""
    return batch * (footprint - shared) + shared


def _share(dims, job, degrees, settings):
    """How many times the tokens of one image a rank has of its batch, in a forward of all tokens."""
    parts = degrees.sequence * (degrees.pipefusion if degrees.warmup_by_sequence else 1) * degrees.displaced
    return _batch(job, degrees, dims.branches_apart, settings.images_apart) / parts


def _divided(footprint, residual, degrees):
    """Of what lives at once, what does under tensor parallelism."""
    return residual + max(0.0, footprint - residual) / degrees.tensor


def weight_bytes(dims, degrees):
    """Of the fullest rank: its stage's or its tensors' part of the blocks, and all that is outside of them."""
    stages = 1 if degrees.warmup_by_sequence else degrees.pipefusion
    return dims.outside_bytes + max(stage_bytes(dims, stages)) / degrees.tensor


@functools.lru_cache(maxsize=64)               # the choice of a layout asks for the same ones again and again
def stage_counts(dims, num_stages, limits=None, speeds=None):
    """Blocks of each stage. limits: bytes that its device can hold of their weights. speeds: of its device, relative.
    Both as tuples. A cost is of a block's work on image tokens, so stages that take as long hold unlike weights.
    """
    if num_stages == 1 or not dims.block_costs:
        return shard_sizes(dims.blocks, num_stages)
    return split_stages(dims.block_costs, num_stages, speeds, dims.block_bytes, limits)


def stage_bytes(dims, num_stages):
    """Bytes of the weights in the blocks of each stage, as stage_counts has them."""
    counts = stage_counts(dims, num_stages)
    if not dims.block_bytes:
        return [(dims.resident_bytes - dims.outside_bytes) * count / dims.blocks for count in counts]
    return [sum(dims.block_bytes[block] for block in stage_blocks(counts, stage)) for stage in range(num_stages)]


def rank_weights(weight_bytes, dims, stages, device_bytes):
    """About how many bytes of a model's weights each rank holds, where blocks are given to stages as workers do it.

    weight_bytes: of all blocks, as a rank holds them. net: None of a U-Net. device_bytes: of each rank's device.
    """
    if not has_parts(dims, stages):
        return [weight_bytes] * len(device_bytes)
    blocks = rank_blocks(dims, stages, device_bytes)
    sizes = dims.block_bytes or [(dims.resident_bytes - dims.outside_bytes) / dims.blocks] * dims.blocks
    return [round((dims.outside_bytes + sum(sizes[block] for block in own)) * weight_bytes / dims.resident_bytes)
            for own in blocks]


def has_parts(dims, stages):
    """Has a rank the blocks of its stage alone? net, stages: as in rank_weights."""
    return dims is not None and stages is not None and not stages.every_block


def rank_blocks(dims, stages, device_bytes):
    """The range of blocks of each rank, where it has those of its stage alone."""
    of_stages: list[list[int]] = [[] for _ in range(stages.pipefusion_degree)]
    for rank in range(len(device_bytes)):
        of_stages[stage_of(rank, stages)].append(rank)
    limits = tuple(FULL * min(device_bytes[rank] for rank in ranks) - dims.outside_bytes for ranks in of_stages)
    speeds = (tuple(statistics.mean(stages.speeds[rank] for rank in ranks) for ranks in of_stages) if stages.speeds
              else None)
    counts = stages.num_blocks or stage_counts(dims, stages.pipefusion_degree, limits, speeds)
    return [stage_blocks(counts, stage_of(rank, stages)) for rank in range(len(device_bytes))]


def memory_budget(memory_bytes):
    """Bytes that a rank has for all that it holds on a device with memory of its own. memory_bytes: the rank's part."""
    return USABLE_MEMORY * memory_bytes - CONTEXT_BYTES


def fits_stages(dims, degrees, needed, memory_bytes):
    """Does a run fit on stages with so much memory? Blocks, and their keys and values, go where there is room."""
    beside = needed.activations + dims.outside_bytes
    if degrees.pipefusion == 1 or degrees.warmup_by_sequence:
        return needed.total <= USABLE_MEMORY * min(memory_bytes)
    free_bytes = [USABLE_MEMORY * size - beside for size in memory_bytes]
    return min(free_bytes) > 0 and (needed.total - beside) * degrees.pipefusion <= sum(free_bytes)


def working_fraction(job, degrees, branches_apart=False, images_apart=False):
    """The part of a run's activations (of all its images, branches and tokens) that a rank has at a time.

    branches_apart: stages, and ranks with displaced patches, take one branch after the other. Whole steps decide, which
    PipeFusion warms up by; images_apart: one image after the other, so that patches of all images may be more.
    """
    sequence = degrees.sequence * (degrees.pipefusion if degrees.warmup_by_sequence else 1)
    batch = _batch(job, degrees, branches_apart, images_apart)
    return batch / (job.branches * job.images) / sequence / degrees.displaced


def _batch(job, degrees, branches_apart, images_apart):
    """Rows of the batch that a rank computes at a time."""
    is_apart = branches_apart and (degrees.pipefusion > 1 or degrees.displaced > 1)
    branches, images = 1 if is_apart else math.ceil(job.branches / degrees.cfg), math.ceil(job.images / degrees.data)
    if images_apart and degrees.pipefusion > 1:
        images = max(1.0, images / (degrees.num_patches or degrees.pipefusion))
    return branches * images


def most_that_fits(fits, most):
    """The largest number from 1 to `most` for which fits(number) holds, which holds for all below it;
    0 where there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
