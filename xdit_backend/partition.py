"""Partitioning arithmetic: tokens of a shard, blocks of a stage, rows of a patch, ranks of a stage.

The host and every worker compute the same partition, so that ranks know each other's shards without communication.
"""

import itertools
import math
import re

from .protocol.errors import ConfigError
from .protocol.specs import Patch

ALIGNMENT = 16                 # bytes; the offset of a layer in an all-gather bucket suits any dtype
# fraction of a device's memory that weights may take; the rest is for activations and for other nodes
FULL = 0.8
STREAMS = {"vid", "txt", "all"}            # modules that a block has per stream, or one for both


def shard_sizes(num_tokens, num_shards, speeds=(), least=0):
    """Sizes of contiguous shards that take about the same time.

    On identical ranks they differ by one at most, the larger ones first.
    speeds: relative speed of each shard's rank; (): identical. least: minimum size of a shard, if num_tokens suffices.
    """
    if not speeds:
        quotient, remainder = divmod(num_tokens, num_shards)
        return [quotient + (index < remainder) for index in range(num_shards)]
    assert len(speeds) == num_shards
    least = least if num_tokens >= least * num_shards else 0
    sizes = [max(least, num_tokens * speed // sum(speeds)) for speed in speeds]
    while sum(sizes) < num_tokens:                             # add to the rank that would finish first
        sizes[min(range(num_shards), key=lambda index: (sizes[index] + 1) / speeds[index])] += 1
    while sum(sizes) > num_tokens:                             # take from the rank that finishes last
        sizes[max((index for index in range(num_shards) if sizes[index] > least),
                  key=lambda index: sizes[index] / speeds[index])] -= 1
    return sizes


def shard_start(num_tokens, num_shards, index, speeds=(), least=0):
    """Index of the first token of a shard."""
    if not speeds:
        quotient, remainder = divmod(num_tokens, num_shards)
        return quotient * index + min(remainder, index)
    return sum(shard_sizes(num_tokens, num_shards, speeds, least)[:index])


def check_shards(num_tokens, num_shards, what="tokens"):
    """Reject more sequence shards than tokens, or than rows of tokens."""
    if num_tokens < num_shards:
        raise ConfigError(f"Use a larger latent or lower degrees: it has {num_tokens} {what}, too few for "
                          f"ulysses_degree x ring_degree = {num_shards}.")


# --- PipeFusion: blocks of stages, rows of patches (docs/design/pipefusion.md) ---

def split_stages(costs, num_stages, speeds=None, sizes=None, limits=None):
    """Cut blocks into contiguous stages that minimise the time of the slowest stage; returns the blocks per stage.

    costs: of each block. speeds: relative speed of each stage's device; None: identical. sizes, limits: bytes of each
    block, and bytes that each stage's device can hold. A split that fits takes precedence over speed; if none fits,
    the fullest device exceeds its limit by the smallest factor. Every stage gets a block. Raises ConfigError for more
    stages than blocks.
    """
    num_blocks = len(costs)
    if num_stages > num_blocks:
        raise ConfigError(f"Set pipefusion_degree to at most {num_blocks}: pipefusion_degree={num_stages} is more "
                          f"than the model's {num_blocks} blocks.")
    time = _ranges(costs)
    size = _ranges(sizes or [0] * num_blocks)
    speeds, limits = speeds or [1.0] * num_stages, limits or [math.inf] * num_stages

    def best_bounds(slowest, weigh, most_full=1.0):
        """(weight, boundaries) with the smallest total weight, no stage slower than `slowest` or fuller than
        `most_full` times its limit; None if there are none."""
        reached = {0: (0.0, (0,))}                             # blocks so far -> (weight, boundaries)
        for stage in range(num_stages):
            following = {}
            for start, (weight, bounds) in reached.items():
                for stop in range(start + 1, num_blocks - (num_stages - stage - 1) + 1):
                    seconds = time(start, stop) / speeds[stage]
                    if size(start, stop) > most_full * limits[stage] or seconds > slowest:
                        break
                    candidate = weigh(weight, seconds)
                    if stop not in following or candidate < following[stop][0]:
                        following[stop] = (candidate, (*bounds, stop))
            reached = following
        return reached.get(num_blocks)

    most_full = 1.0
    found = best_bounds(math.inf, max)
    if found is None:
        most_full = _least_full(sizes, limits) * (1 + 1e-9)
        found = best_bounds(math.inf, max, most_full)
    # among splits with this slowest stage, the most even one
    bounds = best_bounds(found[0], lambda weight, seconds: weight + seconds ** 2, most_full)[1]
    return [stop - start for start, stop in zip(bounds, bounds[1:])]


def _least_full(sizes, limits):
    """Fill of the fullest stage relative to its limit, minimised over all cuts."""
    if min(limits) <= 0:
        return math.inf
    size, num_blocks = _ranges(sizes), len(sizes)
    fullest = {0: 0.0}                                         # blocks so far -> the fullest stage
    for stage, limit in enumerate(limits):
        last_stop = num_blocks - (len(limits) - stage - 1)
        reached: dict[int, float] = {}
        for start, so_far in fullest.items():
            for stop in range(start + 1, last_stop + 1):
                full = max(so_far, size(start, stop) / limit)
                reached[stop] = min(full, reached.get(stop, math.inf))
        fullest = reached
    return fullest[num_blocks]


def _ranges(values):
    """Return a function (start, stop) -> sum(values[start:stop]), of constant time."""
    sums = list(itertools.accumulate(values, initial=0))
    return lambda start, stop: sums[stop] - sums[start]


def patch_dim(shape, patch_size):
    """Dim along which a latent is cut into patches: rows, or frames if there are several, so that the tokens of a
    patch are contiguous.

    shape: (B, C, T), (B, C, H, W) or (B, C, F, H, W). patch_size: latent pixels of a token along the dims after C.
    """
    return 2 if len(shape) < 5 or shape[2] > patch_size[0] else 3


def num_tokens(sizes, patch_size):
    """Number of tokens of a latent with these sizes along the dims of patch_size."""
    return math.prod(-(-size // patch) for size, patch in zip(sizes, patch_size))


def cut_patches(shape, patch_size, num_patches):
    """Cut a latent into patches of complete token rows, whose numbers differ by one at most:
    [(Patch, number of latent rows)]."""
    dim = patch_dim(shape, patch_size)
    unit = patch_size[dim - 2]
    patches, start = [], 0
    for size in shard_sizes(-(-shape[dim] // unit), num_patches):
        rows = min(size * unit, shape[dim] - start)
        patches.append((Patch(dim, start, shape[dim]), rows))
        start += rows
    return patches


def cut_bands(num_rows, num_ranks, multiple, speeds=()):
    """Boundaries of the ranks' bands of an image, (num_ranks + 1,): the first row of each, then num_rows.

    Bands are multiples of `multiple` rows, of equal size as far as possible or proportional to speeds; the last one
    may end in an incomplete multiple. None if there are too few rows for all ranks.
    """
    units = -(-num_rows // multiple)
    if units < num_ranks:
        return None
    return (*(shard_start(units, num_ranks, rank, speeds, least=1) * multiple for rank in range(num_ranks)), num_rows)


def halved(starts, num_halvings):
    """Band boundaries after an image was halved num_halvings times, each time rounded up."""
    for _ in range(num_halvings):
        starts = tuple(-(-start // 2) for start in starts)
    return starts


def level_of(name, num_levels):
    """Number of times that the image which a module of a diffusers U-Net reads was halved, from the module's name."""
    match = re.match(r"(down|mid|up)_block(?:s\.(\d+))?\.(\w+)", name)
    if match is None:
        return 0
    side, number, kind = match[1], int(match[2] or 0), match[3]
    if side == "down":
        return number
    return num_levels - 1 - number - (kind == "upsamplers")


def attended(model):
    """{path of an attention of a diffusers U-Net: its keys}: "rows" of the image, "text", or, in temporal blocks,
    "frames" of one pixel or their context, all of which a rank has.
    """
    found = {}
    for name, block in model.named_modules():
        if getattr(block, "attn1", None) is not None:
            # temporal blocks, whose tokens are frames, have no such attribute
            of_text = getattr(block, "only_cross_attention", None)
            found[f"{name}.attn1"] = "frames" if of_text is None else "text" if of_text else "rows"
            if block.attn2 is not None:
                found[f"{name}.attn2"] = "frames" if of_text is None else "text"
    return found


def block_path(name):
    """Path of the block that a tensor or module belongs to: the name up to its first number."""
    names = name.split(".")
    return ".".join(names[:next((index for index, each in enumerate(names) if each.isdigit()), len(names)) + 1])


def summed_modules(splits):
    """Paths of the modules whose outputs are summed over the tensor ranks.

    These are attentions and feed-forwards, or the linear that both end in; linears of an attention processor
    individually, since an unsharded one that rounds its inputs may follow; the linears of an attention that is nothing
    else, which the block calls; and a block's modules per stream.
    splits: {name of a weight: checkpoints.tensor_sharding.Split}.
    """
    summed = set()
    for name, split in splits.items():
        if split.how == "rowwise" and name.endswith(".weight"):
            # list, index, (a module that is the block, or contains a norm too,) attention or feed-forward
            names = name.split(".")[:-1]
            inside = block_path(name).count(".") + 1
            is_within = (names[inside] == "block" or names[inside].endswith("_wrapper")
                         or not STREAMS.isdisjoint(names[inside + 1:inside + 2]))
            by_itself = "processor" in names or names[inside + 1:] == ["proj"]
            summed.add(".".join(names if by_itself else names[:inside + (2 if is_within else 1)]))
    return sorted(summed)


def slot_bytes(shapes, dtype):
    """Bytes of a layer in each rank's row of an all-gather bucket: the largest rank's, aligned."""
    most = max(map(math.prod, shapes)) * dtype.itemsize
    return -(-most // ALIGNMENT) * ALIGNMENT


def opens_step(patch):
    """True for the first patch of a step, which carries the text tokens, and for a full latent (patch None).
    docs/design/pipefusion.md."""
    return patch is None or patch.start == 0


def stage_blocks(counts, stage):
    """Indices of a stage's blocks. counts: blocks per stage."""
    return range(sum(counts[:stage]), sum(counts[:stage + 1]))


def stage_of(rank, stages):
    """Stage of a rank of the world."""
    return rank // stages.sequence_degree % stages.pipefusion_degree


def ranks_by_part(num_ranks, spec):
    """Groups of ranks with the same weights of a ModelSpec: a list of ranks per shard of the model."""
    ranks_by_shard = {}
    for rank in range(num_ranks):
        stage = 0 if spec.stages is None or spec.stages.every_block else stage_of(rank, spec.stages)
        ranks_by_shard.setdefault((stage, rank % spec.tensor_degree), []).append(rank)
    return [ranks_by_shard[shard] for shard in sorted(ranks_by_shard)]


def last_stage_ranks(layout, world_size):
    """Ranks of the last stage, which return predictions."""
    stage_ranks = layout.stage_ranks
    return [rank for rank in range(world_size)
            if rank // stage_ranks % layout.pipefusion_degree == layout.pipefusion_degree - 1]


def block_indices(model, lists):
    """{path of a block: its index over all of these BlockLists}. Paired blocks have the same index."""
    blocks = [[f"{name}.{number}" for name in list_.names] for list_ in lists
              for number in range(len(model.get_submodule(list_.name)))]
    return {path: index for index, paths in enumerate(blocks) for path in paths}


def unet_blocks(model):
    """Paths of a U-Net's blocks, which hold nearly all of its weights, in execution order: the residual and transformer
    blocks of diffusers' classes, the blocks of a ReplicatedPlan's lists."""
    if not hasattr(model.down_blocks[0], "resnets"):
        return [f"{side}.{level}.{number}" for side in ("down_blocks", "up_blocks")
                for level, blocks in enumerate(model.get_submodule(side)) for number in range(len(blocks))]
    paths = []
    sides = [*(f"down_blocks.{number}" for number in range(len(model.down_blocks))), "mid_block",
             *(f"up_blocks.{number}" for number in range(len(model.up_blocks)))]
    for side in sides:
        block = model.get_submodule(side)
        for number, (_, attention) in enumerate(itertools.zip_longest(block.resnets,
                                                                      getattr(block, "attentions", None) or ())):
            paths.append(f"{side}.resnets.{number}")
            if attention is not None:
                lists = [kind for kind in ("transformer_blocks", "temporal_transformer_blocks")
                         if hasattr(attention, kind)]          # interleaved
                paths += [f"{side}.attentions.{number}.{kind}.{inner}"
                          for inner in range(len(attention.transformer_blocks)) for kind in lists]
    return paths


def in_block(name, paths):
    """(index of the block that contains a module, the module's name in it); (None, "") if none does. paths: of all
    blocks."""
    for index, path in enumerate(paths):
        if name.startswith(f"{path}."):
            return index, name[len(path) + 1:]
    return None, ""
