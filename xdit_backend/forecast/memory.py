"""Bytes a rank holds under a layout: weights, stale keys and values, activations. Pure arithmetic.

What the choice of stages, the refusal of a run that cannot fit, ComfyUI's accounting and the benches all use.
"""

import math
from dataclasses import dataclass

ACTIVATIONS = 8.5              # that live at once beside the feed-forward's, in hidden states
WHOLE = 0.45                   # of them, what tensor parallelism leaves whole


@dataclass(frozen=True)
class Memory:
    weights: float
    keys_values: float
    activations: float
    host: float = 0.0                      # keys and values that are in host memory, and not in `total`
    come: float = 0.0                      # of weights that come from host memory in every step, and are not in `total`

    @property
    def total(self):
        return self.weights + self.keys_values + self.activations


@dataclass(frozen=True)
class MemorySettings:
    """What a rank's memory depends on beside the layout. See planner.memory_settings for those of a ParallelConfig."""

    cached_steps: int = 1                  # of how many steps stale keys and values are kept; config.cached_steps
    offload: bool = False                  # they are in host memory, those of two blocks at a time on the device
    images_apart: bool = False             # see working_share
    exchanged_copies: int = 1              # of keys and values of other ranks, with displaced patches
    # bytes of a device that weights may take, others come from host memory; inf: what the rest leaves; 0: all are there
    weights_memory: float = 0.0


DEFAULT_SETTINGS = MemorySettings()


def rank_memory(net, job, degrees, settings=DEFAULT_SETTINGS):
    """Memory of the fullest rank.

    Stale keys and values are 2 B (S + S_t) h elements a block: of a stage's blocks and a rank's heads under PipeFusion,
    of all blocks under DistriFusion.
    """
    tokens = job.tokens + (job.text if net.joint else 0)
    a_block = 2 * net.key_share * degrees.batch(job) * tokens * net.width * net.element_bytes
    a_block /= degrees.ulysses * degrees.tensor
    keys_values = host = 0.0
    if degrees.pipefusion > 1:
        keys_values = settings.cached_steps * a_block * math.ceil(net.blocks / degrees.pipefusion)
    if degrees.pipefusion > 1 and settings.offload:
        keys_values, host = (settings.cached_steps + 1) * a_block, keys_values
    if degrees.displaced > 1:
        keys_values = settings.exchanged_copies * settings.cached_steps * a_block * net.blocks
    rows = job.branches * job.images * tokens * working_share(job, degrees, net.branches_apart, settings.images_apart)
    live = ACTIVATIONS + net.elements / 4
    return Memory(weights=weight_bytes(net, degrees), keys_values=keys_values,
                  activations=rows * net.width * net.element_bytes * live * (WHOLE + (1 - WHOLE) / degrees.tensor),
                  host=host)


def weight_bytes(net, degrees):
    """Of a rank: its stage's or its tensors' part of the blocks, and all that is outside of them."""
    stages = 1 if degrees.warmup_by_sequence else degrees.pipefusion
    return net.outside_bytes + (net.held_bytes - net.outside_bytes) / stages / degrees.tensor


def working_share(job, degrees, branches_apart=False, images_apart=False):
    """The part of a run's activations (of all its images, branches and tokens) that a rank has at a time.

    branches_apart: stages take one branch after the other. Whole steps decide, which PipeFusion warms up by;
    images_apart: one image after the other, so that patches of all images may be more.
    """
    branches = 1 if branches_apart and degrees.pipefusion > 1 else math.ceil(job.branches / degrees.cfg)
    images = math.ceil(job.images / degrees.data)
    if images_apart and degrees.pipefusion > 1:
        images = max(1.0, images / (degrees.num_patches or degrees.pipefusion))
    batch = branches * images
    sequence = degrees.sequence * (degrees.pipefusion if degrees.warmup_by_sequence else 1)
    return batch / (job.branches * job.images) / sequence / degrees.displaced


def most_that_fits(fits, most):
    """The largest number from 1 to `most` for which fits(number) holds, which holds for all below it;
    0 where there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
