"""Memory of a rank under a layout: weights, stale keys and values, activations. Arithmetic only."""

import dataclasses
import functools
import math
import statistics
from dataclasses import dataclass

from ..partition import FULL, shard_sizes, split_stages, stage_blocks, stage_of
from .quantised_matmul_memory import most_in_layers

USABLE_MEMORY = 0.95           # fraction of a device's memory that a run may use
CONTEXT_BYTES = 6e8            # of a GPU, used by CUDA and its libraries


@dataclass(frozen=True)
class Memory:
    weights: float
    keys_values: float
    activations: float
    host: float = 0.0                      # keys and values in system RAM, not included in `total`
    # offloaded weights streamed whenever the rank runs its blocks, not included in `total`
    streamed: float = 0.0

    @property
    def total(self):
        return self.weights + self.keys_values + self.activations


@dataclass(frozen=True)
class MemorySettings:
    """Settings that a rank's memory depends on, in addition to the layout. planner.memory_settings derives them from a
    ParallelConfig."""

    cached_steps: int = 1                  # steps whose stale keys and values are cached; config.cached_steps
    offload: bool = False                  # keys and values in system RAM, those of two blocks at a time in VRAM
    images_apart: bool = False             # see working_fraction
    exchanged_copies: int = 1              # copies of other ranks' keys and values, with displaced patches
    # bytes of resident weights allowed, others are offloaded; inf: all memory that remains; 0: no offloading
    weights_memory: float = 0.0
    has_lora: bool = False                 # applied to packed weights
    added_bytes: float = 0.0               # per rank: growth of patched weights, and LoRA factors


DEFAULT_SETTINGS = MemorySettings()


def rank_memory(dims, job, degrees, settings=DEFAULT_SETTINGS):
    """Memory of the fullest rank.

    Stale keys and values are 2 B (S + S_t) h elements per block: for a stage's blocks and a rank's heads under
    PipeFusion, for all blocks under DistriFusion. With one patch only those of references are cached (Job.cached).
    """
    counts = stage_counts(dims, degrees.pipefusion)
    stages = {range(sum(counts[:stage]), sum(counts[:stage + 1])) for stage in range(len(counts))}
    if not dims.skips or degrees.warmup_by_sequence:            # other activations are the same on all stages
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
    """Peak activation bytes of a stage on top of its cached keys and values, if the peak occurs before a forward's own
    keys and values are cached. In the first, synchronous step those of earlier branches are cached already."""
    if degrees.warmup_steps > 1 or degrees.warmup_by_sequence:
        return most
    late = max(dims.footprint.late / dims.footprint.alone, 1 / (degrees.num_patches or degrees.pipefusion))
    to_stream = _to_stream(dims, job, degrees, cached_bytes, dims.footprint.early * dims.blocks / num_blocks)
    return max(most * min(1.0, late), most - to_stream)


def _to_stream(dims, job, degrees, cached_bytes, share):
    """Bytes of the last branch that a stage has yet to cache after this fraction of its blocks."""
    return cached_bytes * max(0.0, 1 - share) / (degrees.batch(job) if dims.branches_apart else 1)


def _cached(dims, job, degrees, settings, num_blocks):
    """Bytes of cached keys and values of a rank with this many blocks: (on the device, in system RAM)."""
    tokens, text, degrees = job.tokens + (job.text if dims.joint else 0), 0.0, _of_attention(dims, degrees)
    a_block = ((dims.footprint or ActivationFootprint()).keys * key_fraction(dims,
                                                                    degrees) * degrees.batch(job) * tokens * dims.width
               * dims.element_bytes / degrees.ulysses / degrees.tensor)
    if degrees.displaced > 1:
        return settings.exchanged_copies * settings.cached_steps * a_block * dims.blocks, 0.0
    if degrees.pipefusion == 1 or degrees.num_patches == 1:
        return a_block * num_blocks * job.cached / tokens / degrees.ring, 0.0
    if not dims.joint:                                          # keys and values of the text, computed once per run
        text = 2 * degrees.batch(job) * job.sequences * job.text * dims.width * dims.element_bytes / degrees.tensor
    keys_values = settings.cached_steps * a_block * num_blocks
    return (((settings.cached_steps + 1) * a_block + text * num_blocks, keys_values) if settings.offload
            else (keys_values + text * num_blocks, 0.0))


def unet_memory(footprint, hidden_bytes, images, cached_bytes, degrees):
    """Memory of the fullest rank of a U-Net, without weights.

    footprint: of the family, in units of hidden_bytes, one image's hidden states at the first level: alone, per image
    that a rank computes in full; block, per image whose rows are sharded. Both are counted by the dry run. images: in a
    rank's batch, with all branches; one at a time if rows are sharded. cached_bytes: from model_dims.cached_bytes.
    """
    if degrees.displaced == 1:
        return Memory(0.0, 0.0, images * footprint.alone * hidden_bytes)
    return Memory(0.0, cached_bytes, footprint.block * hidden_bytes / degrees.displaced)


def _of_attention(dims, degrees):
    """The degrees that shard attention's heads."""
    return dataclasses.replace(degrees, tensor=1) if dims.replicated_attention else degrees


def key_fraction(dims, degrees):
    """Ratio of the size of a rank's keys (or values) to that of its queries. Key heads are repeated if Ulysses ranks
    would have to share one (parallel/sequence_parallel.py)."""
    key_heads = (dims.key_heads or dims.heads) / degrees.tensor
    repeats = math.lcm(degrees.ulysses, int(key_heads)) / key_heads if key_heads.is_integer() else 1
    return dims.key_fraction * repeats


@dataclass(frozen=True)
class ActivationFootprint:
    """Peak activation memory of a family without weights and cached tensors, in units of the hidden states of all
    tokens of one forward. Counted by the dry run of published models (dry_run/simulated_rank.py); tests allow 5 %.

    One rank has all tokens:
      alone: peak. residual: of that, what tensor parallelism does not shard. `whole`: peak while nothing is sharded by
      tensor parallelism.
    Tokens are sharded:
      outside: peak outside the blocks, where streams are unsharded. `held`: unsharded tensors that coexist with the
      blocks, such as inputs yet to be split and position embeddings. cut: of `held`, what a stage has split into its
      ranks' own tokens before its first block ends.
    Per rank's own tokens:
      block: peak in a block. exchange: peak where Ulysses packs queries, keys and values. entered: of that, what tensor
      parallelism does not shard; 0: at most ENTERED. attends: peak where displaced patches attend, without the keys and
      values of all ranks; 0: exchange less UNPACKED.
    keys: cached keys and values of one block, with as many key heads as query heads. given: inputs of a guidance branch
    that waits while another runs. own: 1 if tokens of one image are split without a copy; those of several images are
    copied, and the first block runs with the unsplit tensor still allocated. shared: of one image's, what a batch has
    only once throughout, such as position embeddings; once: additional such tensors outside the blocks. narrowing:
    fraction of the peak that is allocated while the weight of a down-projection is unpacked. late: peak in a stage
    after its first blocks; 0: as alone throughout. early: fraction of the blocks whose peak is alone.
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


# in addition to `exchange`, in hidden states: a round of Ring has the next keys and values and sums in float32; after
# Ulysses also the unpacked tensors
RING, RING_AND_ULYSSES = 2.05, 5.05
# parts of `exchange` that are not allocated where displaced patches attend, without and with Ulysses
UNPACKED, PACKED_BEFORE = 8.0, 3.0
JOINED_SKIP = 2.0              # a skip concatenated with the hidden states
STAGES_ENDS = 2.0              # input and output of a stage's last block, in addition to the message made of it
# of `exchange`: the block's input, normalised and modulated, at most, which tensor parallelism does not shard; and
# queries, keys and values as computed, packed, sent and joined, which it does
ENTERED, PACKED = 3.0, 12.0


def _activation_rows(dims, job, degrees, settings, blocks, is_cut=False):
    """Peak activations, in hidden states of all tokens of one image. blocks: of the rank's stage. is_cut: after its
    first block, when inputs have been split into the rank's tokens and freed."""
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
    """Peak where displaced patches attend to the gathered keys and values of all ranks."""
    own = (footprint.exchange - PACKED_BEFORE if degrees.ulysses > 1 else footprint.attends
           or footprint.exchange - UNPACKED)
    return (2 * key_fraction(dims, degrees) / degrees.ulysses / degrees.tensor
            + _divided(own, min(footprint.entered or ENTERED, own), degrees) / sequence / degrees.displaced)


def _with_skips(dims, blocks, inside, shards=1):
    """Peak with skip connections, where later blocks read earlier blocks' outputs. inside: peak without. blocks: of the
    rank. shards: number of shards of the tokens. A stage also has the received message, of which the outputs yet to be
    read are views, and at its end the next message.
    """
    if not dims.skips:
        return inside

    def message(block):
        """Hidden states that stages send each other before a block."""
        return 1 + min(block, dims.blocks - block, dims.skips) if 0 < block < dims.blocks else 0

    own = max(0, min(blocks.stop, dims.skips) - blocks.start)
    joined = JOINED_SKIP if blocks.stop > dims.blocks - dims.skips else 0.0
    return (message(blocks.start) + own) / shards + max(
        inside + joined / shards, (STAGES_ENDS + message(blocks.stop)) / shards)


def _of_batch(footprint, shared, batch):
    """Peak for a batch. shared: of one image's, what a batch has once."""
    return batch * (footprint - shared) + shared


def _share(dims, job, degrees, settings):
    """Tokens of a rank in a forward of all tokens of its batch, as a multiple of one image's tokens."""
    shards = degrees.sequence * (degrees.pipefusion if degrees.warmup_by_sequence else 1) * degrees.displaced
    return _batch(job, degrees, dims.branches_apart, settings.images_apart) / shards


def _divided(footprint, residual, degrees):
    """Peak under tensor parallelism, which shards all except the residual."""
    return residual + max(0.0, footprint - residual) / degrees.tensor


def weight_bytes(dims, degrees):
    """Weights of the fullest rank: its stage's blocks or its tensor shards, and everything outside the blocks."""
    stages = 1 if degrees.warmup_by_sequence else degrees.pipefusion
    return dims.outside_bytes + max(stage_bytes(dims, stages)) / degrees.tensor


@functools.lru_cache(maxsize=64)               # the layout search repeats the same arguments
def stage_counts(dims, num_stages, limits=None, speeds=None):
    """Number of blocks of each stage. limits: bytes of block weights that fit on each stage's device. speeds: relative,
    of each stage's device. Both are tuples. Costs count the work on image tokens, so that stages with equal times may
    have different amounts of weights.
    """
    if num_stages == 1 or not dims.block_costs:
        return shard_sizes(dims.blocks, num_stages)
    return split_stages(dims.block_costs, num_stages, speeds, dims.block_bytes, limits)


def stage_bytes(dims, num_stages):
    """Bytes of block weights of each stage, as stage_counts assigns them."""
    counts = stage_counts(dims, num_stages)
    if not dims.block_bytes:
        return [(dims.resident_bytes - dims.outside_bytes) * count / dims.blocks for count in counts]
    return [sum(dims.block_bytes[block] for block in stage_blocks(counts, stage)) for stage in range(num_stages)]


def rank_weights(weight_bytes, dims, stages, device_bytes):
    """Approximate bytes of a model's weights on each rank, with blocks assigned to stages as workers do.

    weight_bytes: of all blocks, as stored on a rank. dims: None for a U-Net. device_bytes: of each rank's device.
    """
    if not has_parts(dims, stages):
        return [weight_bytes] * len(device_bytes)
    blocks = rank_blocks(dims, stages, device_bytes)
    sizes = dims.block_bytes or [(dims.resident_bytes - dims.outside_bytes) / dims.blocks] * dims.blocks
    return [round((dims.outside_bytes + sum(sizes[block] for block in own)) * weight_bytes / dims.resident_bytes)
            for own in blocks]


def has_parts(dims, stages):
    """Whether a rank has only its stage's blocks. dims, stages: as in rank_weights."""
    return dims is not None and stages is not None and not stages.every_block


def rank_blocks(dims, stages, device_bytes):
    """The range of blocks of each rank, if ranks have only their stage's blocks."""
    of_stages: list[list[int]] = [[] for _ in range(stages.pipefusion_degree)]
    for rank in range(len(device_bytes)):
        of_stages[stage_of(rank, stages)].append(rank)
    limits = tuple(FULL * min(device_bytes[rank] for rank in ranks) - dims.outside_bytes for ranks in of_stages)
    speeds = (tuple(statistics.mean(stages.speeds[rank] for rank in ranks) for ranks in of_stages) if stages.speeds
              else None)
    counts = stages.num_blocks or stage_counts(dims, stages.pipefusion_degree, limits, speeds)
    return [stage_blocks(counts, stage_of(rank, stages)) for rank in range(len(device_bytes))]


def memory_budget(memory_bytes):
    """Bytes available to a rank on a device with its own memory. memory_bytes: the rank's fraction of that memory."""
    return USABLE_MEMORY * memory_bytes - CONTEXT_BYTES


def fits_stages(dims, degrees, needed, memory_bytes):
    """Whether a run fits on stages with this much memory, with blocks and their keys and values distributed by free
    memory."""
    unsplit = needed.activations + dims.outside_bytes
    if degrees.pipefusion == 1 or degrees.warmup_by_sequence:
        return needed.total <= USABLE_MEMORY * min(memory_bytes)
    free_bytes = [USABLE_MEMORY * size - unsplit for size in memory_bytes]
    return min(free_bytes) > 0 and (needed.total - unsplit) * degrees.pipefusion <= sum(free_bytes)


def working_fraction(job, degrees, branches_apart=False, images_apart=False):
    """The fraction of a run's activations (of all its images, branches and tokens) that a rank has at a time.

    branches_apart: stages, and ranks with displaced patches, process one branch after the other. The synchronous steps
    of PipeFusion's warm-up determine the peak; images_apart: they process one image after the other, so that patches of
    all images may exceed them.
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
    """The largest number from 1 to `most` for which fits(number) holds, given that it holds for all smaller ones; 0:
    none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
