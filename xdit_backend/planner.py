"""The automatic choice: which parallel method a run uses on the devices there are. Pure arithmetic.

Called by the bridge before each prediction; the workers follow the layout that a command names.
"""

import dataclasses
import itertools
import math

from .config import validate_layout
from .protocol.errors import ConfigError
from .protocol.messages import Layout, Patch, Stages


def choose_layout(config, num_devices, num_branches, num_heads, family, stages=None):
    """Return the Layout for one prediction.

    Manual mode: the person's degrees. Auto mode: CFG parallel when there are two branches and an even number of
    devices, then Ulysses as far as the heads allow, then Ring. CFG parallel comes first because it sends only the
    prediction; Ulysses sends less than Ring (xDiT, arXiv 2411.01738, table 1). stages: how the model is spread, where it is.
    Raises ConfigError when the layout cannot work for this model.
    """
    if config.mode == "manual":
        layout = config.layout
        validate_layout(layout, num_heads, family)
        return layout
    cfg_degree = 2 if num_branches == 2 and num_devices % 2 == 0 and stages is None else 1
    rest = num_devices // cfg_degree if stages is None else stages.sequence_degree
    ulysses_degree = max(d for d in range(1, rest + 1) if rest % d == 0 and num_heads % d == 0)
    return Layout(cfg_degree=cfg_degree, ring_degree=rest // ulysses_degree, ulysses_degree=ulysses_degree,
                  pipefusion_degree=1 if stages is None else stages.pipefusion_degree)


FULL = 0.8                     # of a device's memory that weights may take; the rest is for activations, and for other nodes
WARMUP_FULL = 0.4              # where all weights take less, every rank holds them, so that warm-up runs by sequence parallelism


def choose_stages(config, num_devices, weight_bytes, device_bytes):
    """How the model is spread over stages when it is loaded: Stages, or None where every rank runs every block.

    Manual mode: the person's pipefusion_degree. Auto mode: PipeFusion where the weights do not fit on one device, with as
    few stages as they need; it is the one method that spreads weights. device_bytes: memory of the smallest device.
    """
    if config.mode == "manual":
        if config.pipefusion_degree == 1:
            return None
        every_block = config.warmup == "sequence" or (config.warmup == "auto" and weight_bytes <= WARMUP_FULL * device_bytes)
        return Stages(config.pipefusion_degree, config.ring_degree * config.ulysses_degree, config.num_stage_blocks,
                      every_block, config.offload_keys_values)
    if num_devices == 1 or weight_bytes <= FULL * device_bytes:
        return None
    fitting = [degree for degree in range(2, num_devices + 1)
               if num_devices % degree == 0 and weight_bytes <= degree * FULL * device_bytes]
    degree = min(fitting, default=num_devices)
    return Stages(degree, num_devices // degree, offload=config.offload_keys_values)


def warmup_layout(layout, stages):
    """The layout of whole steps: the same ranks as one sequence group where every rank holds all blocks."""
    if not stages.every_block:
        return layout
    return dataclasses.replace(layout, pipefusion_degree=1, ring_degree=layout.pipefusion_degree * layout.ring_degree)


def describe_layout(layout):
    """A layout in a person's words, e.g. "CFG 2 x Ulysses 2"."""
    names = {"cfg_degree": "CFG", "data_degree": "data", "pipefusion_degree": "PipeFusion", "ring_degree": "Ring", "ulysses_degree": "Ulysses"}
    parts = [f"{text} {getattr(layout, name)}" for name, text in names.items() if getattr(layout, name) > 1]
    return " x ".join(parts) or "one device"


def shard_sizes(num_tokens, num_shards):
    """Sizes of contiguous shards that differ by one at most, the larger ones first."""
    quotient, remainder = divmod(num_tokens, num_shards)
    return [quotient + (index < remainder) for index in range(num_shards)]


def shard_start(num_tokens, num_shards, index):
    """Index of the first token of a shard."""
    quotient, remainder = divmod(num_tokens, num_shards)
    return quotient * index + min(remainder, index)


def check_shards(num_tokens, num_shards):
    """Refuse more sequence shards than tokens."""
    if num_tokens < num_shards:
        raise ConfigError(f"The latent has {num_tokens} tokens, too few for ulysses_degree x ring_degree = {num_shards}. "
                          f"Use a larger latent or lower degrees.")


# --- PipeFusion: which blocks, which rows (ALGORITHMS.md sections 2.1 and 2.4) ---

def split_stages(costs, num_stages, speeds=None, sizes=None, limits=None):
    """Cut blocks into contiguous stages so that the slowest stage is as fast as can be; returns blocks a stage.

    costs: of each block. speeds: of each stage's device, relative; all alike where None. sizes and limits: bytes of
    each block, and what each stage's device can hold; where no split fits, they are ignored. Every stage gets a block.
    Raises ConfigError for more stages than blocks.
    """
    num_blocks = len(costs)
    if num_stages > num_blocks:
        raise ConfigError(f"pipefusion_degree={num_stages} is more than the model's {num_blocks} blocks. "
                          f"Use at most {num_blocks}.")
    time = _ranges(costs)
    size = _ranges(sizes or [0] * num_blocks)
    speeds, limits = speeds or [1.0] * num_stages, limits or [math.inf] * num_stages

    def best_bounds(slowest, weigh):
        """Boundaries with the least weigh-ed times, no stage slower than `slowest`; None where nothing fits."""
        reached = {0: (0.0, (0,))}                             # blocks so far -> (weight, boundaries)
        for stage in range(num_stages):
            following = {}
            for start, (weight, bounds) in reached.items():
                for stop in range(start + 1, num_blocks - (num_stages - stage - 1) + 1):
                    seconds = time(start, stop) / speeds[stage]
                    if size(start, stop) > limits[stage] or seconds > slowest:
                        break
                    candidate = weigh(weight, seconds)
                    if stop not in following or candidate < following[stop][0]:
                        following[stop] = (candidate, (*bounds, stop))
            reached = following
        return reached.get(num_blocks)

    found = best_bounds(math.inf, max)
    if found is None:
        return split_stages(costs, num_stages, speeds)
    bounds = best_bounds(found[0], lambda weight, seconds: weight + seconds ** 2)[1]      # and as even as can be
    return [stop - start for start, stop in zip(bounds, bounds[1:])]


def _ranges(values):
    """A function (start, stop) -> sum of the values in between."""
    sums = list(itertools.accumulate(values, initial=0))
    return lambda start, stop: sums[stop] - sums[start]


def patch_dim(shape, patch_size):
    """The dim of a latent that is cut into patches: rows, or frames where there are several, so that tokens stay contiguous.

    shape: (B, C, H, W) or (B, C, F, H, W). patch_size: latent pixels of a token along the dims after C.
    """
    return 2 if len(shape) == 4 or shape[2] > patch_size[0] else 3


def num_tokens(sizes, patch_size):
    """Tokens of a latent with these sizes along the dims of patch_size."""
    return math.prod(-(-size // patch) for size, patch in zip(sizes, patch_size))


def choose_num_patches(requested, num_stages, shape, patch_size, sequence_degree=1):
    """How many patches a latent is cut into; fewer than requested where it has too few rows.

    0 requested: twice the stages, since a patch more than there are stages hides the way through the host, and more than
    two a stage make kernels small (ALGORITHMS.md section 2.4). A patch has at least one token for every sequence rank.
    """
    dim = patch_dim(shape, patch_size)
    rows = -(-shape[dim] // patch_size[dim - 2])
    tokens_a_row = num_tokens(shape[dim + 1:], patch_size[dim - 1:])
    rows_needed = -(-sequence_degree // tokens_a_row)
    return max(1, min(requested or 2 * num_stages, rows // rows_needed))


def cut_patches(shape, patch_size, num_patches):
    """Cut a latent into patches of whole token rows that differ by one token row at most: [(Patch, number of latent rows)]."""
    dim = patch_dim(shape, patch_size)
    unit = patch_size[dim - 2]
    patches, start = [], 0
    for size in shard_sizes(-(-shape[dim] // unit), num_patches):
        rows = min(size * unit, shape[dim] - start)
        patches.append((Patch(dim, start, shape[dim]), rows))
        start += rows
    return patches


def opens_step(patch):
    """Does this patch (None: a whole latent) come first in a step? Text tokens come with it (ALGORITHMS.md section 2.5)."""
    return patch is None or patch.start == 0


def stage_blocks(counts, stage):
    """The blocks of a stage, where counts are the blocks of each."""
    return range(sum(counts[:stage]), sum(counts[:stage + 1]))


def stage_of(rank, stages):
    """The stage that a rank of the world runs."""
    return rank // stages.sequence_degree % stages.pipefusion_degree


def last_stage_ranks(layout, world_size):
    """The ranks that give predictions: those of the last stage."""
    sequence_degree = layout.ring_degree * layout.ulysses_degree
    return [rank for rank in range(world_size)
            if rank // sequence_degree % layout.pipefusion_degree == layout.pipefusion_degree - 1]
