"""Which blocks of a rank keep their weights on its device, and which have them come from host memory in every step; and
how long a step then takes. Pure arithmetic.

Used by the loader on each rank, and by the host, which so knows beforehand what each rank will hold. Forecasts count by
the mean block (offloaded_memory).
"""

import itertools
from dataclasses import dataclass, replace

NUM_BUFFERS = 2                # of a device, each for one block at a time: one runs while the next one's weights come
PHASES = 8                     # of blocks that are spread evenly, which are tried
SETTLED = 4                    # steps after which they all take as long


@dataclass(frozen=True)
class OffloadPlan:
    """What a rank's device holds, in bytes.

    blocks: those whose weights come from host memory, sorted. device_bytes: of weights on the device, with the buffers
    that the others come through, which are buffer_bytes. offloaded_bytes: of the weights that come, once a step.
    """

    blocks: tuple[int, ...]
    device_bytes: int
    offloaded_bytes: int
    buffer_bytes: int


def num_buffers(num_blocks):
    """Through how many buffers so many blocks come. Of three, one would have the second to itself, and stay there: so
    two come through one, in the same memory."""
    return 1 if num_blocks == 2 else min(NUM_BUFFERS, num_blocks)


def plan_offload(sizes, costs, extra_bytes, budget_bytes):
    """The OffloadPlan of a rank whose weights may take so many bytes of its device; where none takes so few, the one
    that takes least.

    sizes: {block: bytes of its weights that can come from host memory}. costs: {block: what computing it takes,
    relative}. extra_bytes: of weights that stay on the device in any case.

    A buffer is as large as the largest block that comes through it, so the smaller kind of block may do alone. Between
    the others they are spread evenly: only as many blocks as there are buffers can be fetched while others compute. Of
    the choices, that is taken whose step is the shortest where copying takes as long as computing, which is where it is
    hardest to hide.
    """
    blocks = sorted(sizes)
    whole = OffloadPlan((), extra_bytes + sum(sizes.values()), 0, 0)
    if whole.device_bytes <= budget_bytes or not blocks:
        return whole
    fitting, least = [], whole
    for most, phase in itertools.product(sorted(set(sizes.values())), range(PHASES)):
        kind = [block for block in blocks if sizes[block] <= most]
        for count in (2, *range(4, len(kind) + 1)) if len(kind) > NUM_BUFFERS else ():
            plan = _plan_of(_placement(kind, count, phase / PHASES), sizes, whole.device_bytes)
            least = min(least, plan, key=lambda each: each.device_bytes)
            if plan.device_bytes <= budget_bytes:
                fitting.append(plan)
                break
    if not fitting:
        return least
    copy_s = sum(costs[block] for block in blocks) / min(plan.offloaded_bytes for plan in fitting)
    times = {block: size * copy_s for block, size in sizes.items()}
    return min(fitting, key=lambda plan: (step_seconds(costs, times, plan.blocks), plan.offloaded_bytes))


def _placement(kind, count, phase):
    """So many of these blocks, as far from each other as can be. phase: from 0 to 1, how late they begin."""
    return tuple(kind[int((number + phase) * len(kind) / count)] for number in range(count))


def _plan_of(blocks, sizes, whole_bytes):
    offloaded = sum(sizes[block] for block in blocks)
    buffers = num_buffers(len(blocks)) * max(sizes[block] for block in blocks)
    return OffloadPlan(blocks, whole_bytes - offloaded + buffers, offloaded, buffers)


def step_seconds(compute_s, copy_s, offloaded, count=None):
    """Seconds of a step, when many follow each other.

    compute_s, copy_s: {block: seconds of running it, of copying its weights}. offloaded: sorted, of those blocks.
    count: of buffers; None: num_buffers. Copies are made one after the other; a buffer's next one begins when the block
    that it holds has run.
    """
    place = {block: number for number, block in enumerate(offloaded)}
    count = count or num_buffers(len(offloaded))
    users = [offloaded[number::count] for number in range(count)]                      # of each buffer, in turn
    there_at, copied_at = {}, 0.0
    for block in offloaded[:count]:
        there_at[block] = copied_at = copied_at + copy_s[block]
    now, ends = 0.0, [0.0]
    for _, block in itertools.product(range(SETTLED), sorted(compute_s)):
        now = max(now, there_at.get(block, 0.0)) + compute_s[block]
        if block in place:
            own = users[place[block] % count]
            following = own[(place[block] // count + 1) % len(own)]
            if following != block:
                there_at[following] = copied_at = max(copied_at, now) + copy_s[following]
        if block == max(compute_s):
            ends.append(now)
    return ends[-1] - ends[-2]


def offloaded_memory(dims, needed, free_bytes, weights_memory, num_stages=1):
    """The Memory of a rank of which some weights come from host memory, so that it has room; None where even two blocks
    at a time have none.

    needed: with all weights on the device. free_bytes: of the device, for all that the rank holds there.
    weights_memory: of MemorySettings. num_stages: of one of which the rank has the blocks.
    """
    beside, outside = needed.keys_values + needed.activations, dims.outside_bytes
    free_bytes = min(free_bytes - beside, weights_memory)
    over, a_block = needed.weights - free_bytes, num_stages * (needed.weights - outside) / dims.blocks
    buffers = NUM_BUFFERS * a_block
    if over <= 0:
        return needed
    # each block of a stage would have a buffer of its own, or the buffers alone are too large
    if dims.blocks <= NUM_BUFFERS * num_stages or outside + buffers > free_bytes:
        return None
    # the first two blocks that come make room for one, each further one for itself
    return replace(needed, weights=free_bytes, streamed=buffers if over <= a_block else over + buffers)
