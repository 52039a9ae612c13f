"""Who has which part: tokens of a shard, blocks of a stage, rows of a patch, ranks of a stage. Pure arithmetic.

The host and every worker import it, so that each knows the others' parts without asking. What is chosen is
planner/planner.py's.
"""

import itertools
import math
import re

from .protocol.errors import ConfigError
from .protocol.specs import Patch

ALIGNMENT = 16                 # bytes; a layer's place in a bucket of an exchange fits any dtype
# of a device's memory that weights may take; the rest is for activations, and for other nodes
FULL = 0.8
STREAMS = {"vid", "txt", "all"}            # of what some blocks have for each stream, or for both, by itself


def shard_sizes(num_tokens, num_shards, speeds=(), least=0):
    """Sizes of contiguous shards, so that all take about as long; alike, they differ by one at most, the larger ones
    first.

    speeds: of each shard's rank, relative; (): alike. least: what each shard has, where there is enough for all.
    """
    if not speeds:
        quotient, remainder = divmod(num_tokens, num_shards)
        return [quotient + (index < remainder) for index in range(num_shards)]
    assert len(speeds) == num_shards
    least = least if num_tokens >= least * num_shards else 0
    sizes = [max(least, num_tokens * speed // sum(speeds)) for speed in speeds]
    while sum(sizes) < num_tokens:                             # to who would be done first
        sizes[min(range(num_shards), key=lambda index: (sizes[index] + 1) / speeds[index])] += 1
    while sum(sizes) > num_tokens:                             # from who is done last
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
    """Refuse more sequence shards than tokens, or than rows of tokens."""
    if num_tokens < num_shards:
        raise ConfigError(f"Use a larger latent or lower degrees: it has {num_tokens} {what}, too few for "
                          f"ulysses_degree x ring_degree = {num_shards}.")


# --- PipeFusion: which blocks, which rows (docs/design/pipefusion.md) ---

def split_stages(costs, num_stages, speeds=None, sizes=None, limits=None):
    """Cut blocks into contiguous stages so that the slowest stage is as fast as can be; returns blocks a stage.

    costs: of each block. speeds: of each stage's device, relative; all alike where None. sizes and limits: bytes of
    each block, and what each stage's device can hold: what fits comes first, then what is fast; where no split fits,
    the one that lacks least, in parts of what its devices hold. Every stage gets a block. Raises ConfigError for more
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
        """Boundaries with the least weigh-ed times, no stage slower than `slowest` nor fuller than that; None where
        there are none."""
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
    # and as even as can be
    bounds = best_bounds(found[0], lambda weight, seconds: weight + seconds ** 2, most_full)[1]
    return [stop - start for start, stop in zip(bounds, bounds[1:])]


def _least_full(sizes, limits):
    """How full the fullest stage is, in parts of its limit, where blocks are cut so that this is least."""
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
    """A function (start, stop) -> sum of the values in between."""
    sums = list(itertools.accumulate(values, initial=0))
    return lambda start, stop: sums[stop] - sums[start]


def patch_dim(shape, patch_size):
    """The dim of a latent that is cut into patches: rows, or frames where there are several, so that tokens stay
    contiguous.

    shape: (B, C, T), (B, C, H, W) or (B, C, F, H, W). patch_size: latent pixels of a token along the dims after C.
    """
    return 2 if len(shape) < 5 or shape[2] > patch_size[0] else 3


def num_tokens(sizes, patch_size):
    """Tokens of a latent with these sizes along the dims of patch_size."""
    return math.prod(-(-size // patch) for size, patch in zip(sizes, patch_size))


def cut_patches(shape, patch_size, num_patches):
    """Cut a latent into patches of whole token rows that differ by one token row at most:
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
    """First row of each rank's band of an image, and the number of rows: bands of whole multiples, as even as can be,
    or by speed.

    The last one takes what is left of a multiple. None where there are too few rows for all ranks.
    """
    units = -(-num_rows // multiple)
    if units < num_ranks:
        return None
    return (*(shard_start(units, num_ranks, rank, speeds, least=1) * multiple for rank in range(num_ranks)), num_rows)


def halved(starts, times):
    """The same of an image that was halved so many times, each time rounded up."""
    for _ in range(times):
        starts = tuple(-(-start // 2) for start in starts)
    return starts


def level_of(name, num_levels):
    """How often the image that a module reads was halved, by the module's name in diffusers' U-Nets."""
    match = re.match(r"(down|mid|up)_block(?:s\.(\d+))?\.(\w+)", name)
    if match is None:
        return 0
    side, number, kind = match[1], int(match[2] or 0), match[3]
    if side == "down":
        return number
    return num_levels - 1 - number - (kind == "upsamplers")


def attended(model):
    """{path of an attention of diffusers' U-Net: what it attends to}: the "rows" of its image, the "text", or
    "frames" of a place, which a rank has whole, and what is read beside them.
    """
    found = {}
    for name, block in model.named_modules():
        if getattr(block, "attn1", None) is not None:
            # blocks whose tokens are frames have no such choice
            of_text = getattr(block, "only_cross_attention", None)
            found[f"{name}.attn1"] = "frames" if of_text is None else "text" if of_text else "rows"
            if block.attn2 is not None:
                found[f"{name}.attn2"] = "frames" if of_text is None else "text"
    return found


def block_path(name):
    """Of a tensor's or a module's path, what ends with the first number: the block, where it is in one."""
    names = name.split(".")
    return ".".join(names[:next((index for index, each in enumerate(names) if each.isdigit()), len(names)) + 1])


def summed_modules(splits):
    """Paths of the modules whose outputs tensor ranks add up: attentions and feed-forwards, or the matrix that both end
    in; of a processor with matrices of its own these, since a whole one may follow, which rounds its inputs; and of an
    attention that is no more than its matrices, which the block calls; and what a block has of each stream.

    splits: {name of a weight: checkpoints.tensor_sharding.Split}.
    """
    summed = set()
    for name, split in splits.items():
        if split.how == "rows" and name.endswith(".weight"):
            # list, index, (one module that is the block, or has a norm beside,) attention or feed-forward
            names = name.split(".")[:-1]
            inside = block_path(name).count(".") + 1
            is_within = (names[inside] == "block" or names[inside].endswith("_wrapper")
                         or not STREAMS.isdisjoint(names[inside + 1:inside + 2]))
            by_itself = "processor" in names or names[inside + 1:] == ["proj"]
            summed.add(".".join(names if by_itself else names[:inside + (2 if is_within else 1)]))
    return sorted(summed)


def slot_bytes(shapes, dtype):
    """Bytes that a layer takes of every rank's row of an exchange: the largest rank's, aligned."""
    most = max(map(math.prod, shapes)) * dtype.itemsize
    return -(-most // ALIGNMENT) * ALIGNMENT


def opens_step(patch):
    """Is this patch (None: the full latent) the first of a step? Text tokens travel with it
    (docs/design/pipefusion.md)."""
    return patch is None or patch.start == 0


def stage_blocks(counts, stage):
    """The blocks of a stage, where counts are the blocks of each."""
    return range(sum(counts[:stage]), sum(counts[:stage + 1]))


def stage_of(rank, stages):
    """The stage that a rank of the world runs."""
    return rank // stages.sequence_degree % stages.pipefusion_degree


def ranks_by_part(num_ranks, spec):
    """The ranks that hold the same weights of a ModelSpec: a list of ranks for each part of the model."""
    parts = {}
    for rank in range(num_ranks):
        stage = 0 if spec.stages is None or spec.stages.every_block else stage_of(rank, spec.stages)
        parts.setdefault((stage, rank % spec.tensor_degree), []).append(rank)
    return [parts[part] for part in sorted(parts)]


def last_stage_ranks(layout, world_size):
    """The ranks that give predictions: those of the last stage."""
    stage_ranks = layout.ring_degree * layout.ulysses_degree * layout.tensor_degree
    return [rank for rank in range(world_size)
            if rank // stage_ranks % layout.pipefusion_degree == layout.pipefusion_degree - 1]


def block_indices(model, lists):
    """{path of a block: its number over all of these BlockLists}. A paired block has that of the one it is paired
    with."""
    blocks = [[f"{name}.{number}" for name in list_.names] for list_ in lists
              for number in range(len(model.get_submodule(list_.name)))]
    return {path: index for index, paths in enumerate(blocks) for path in paths}


def unet_blocks(model):
    """Paths of the blocks of a U-Net, which hold nearly all of its weights, in the order in which they run: of
    diffusers' the residual and the transformer blocks, of a WholePlan's those of its lists."""
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
                         if hasattr(attention, kind)]          # which take turns
                paths += [f"{side}.attentions.{number}.{kind}.{inner}"
                          for inner in range(len(attention.transformer_blocks)) for kind in lists]
    return paths


def in_block(name, paths):
    """(index of the block that a module is in, its name there). paths: of all blocks. (None, "") for none of them."""
    for index, path in enumerate(paths):
        if name.startswith(f"{path}."):
            return index, name[len(path) + 1:]
    return None, ""
