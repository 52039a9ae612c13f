"""The choice of blocks to offload on a rank, and the time of a step that streams them. Arithmetic only.

Each rank's loader and the host compute the same plan, so that the host knows in advance what each rank will load.
Estimates of runs use the mean block instead (offloaded_memory).
"""

import itertools
from dataclasses import dataclass, replace

NUM_BUFFERS = 2                # on a device, each for one block: one block runs while the next one's weights arrive
PHASES = 8                     # candidate offsets of evenly spaced blocks
SETTLED = 4                    # steps after which step times are constant


@dataclass(frozen=True)
class OffloadPlan:
    """Offloading plan of a rank, in bytes.

    blocks: offloaded blocks, sorted. device_bytes: of resident weights, including buffer_bytes of the buffers for
    streamed blocks. offloaded_bytes: of the offloaded weights, streamed once per step.
    """

    blocks: tuple[int, ...]
    device_bytes: int
    offloaded_bytes: int
    buffer_bytes: int


def num_buffers(num_blocks):
    """The number of buffers for this many offloaded blocks. Of three blocks, one would have the second buffer to itself
    and stay there; so two blocks use one buffer, in the same memory."""
    return 1 if num_blocks == 2 else min(NUM_BUFFERS, num_blocks)


def plan_offload(sizes, costs, extra_bytes, budget_bytes):
    """The OffloadPlan of a rank whose weights may take budget_bytes of its device; if that is impossible, the plan with
    the least memory.

    sizes: {block: bytes of its weights that can be offloaded}. costs: {block: relative compute}. extra_bytes: of
    weights that are always resident.

    A buffer has the size of the largest block that uses it, so offloading only the smaller kind of block may be better.
    Offloaded blocks are spaced evenly among the others, since only as many as there are buffers can be fetched ahead.
    The plan with the shortest step is chosen for the case that copies take as long as compute, where they are hardest
    to hide.
    """
    blocks = sorted(sizes)
    full_plan = OffloadPlan((), extra_bytes + sum(sizes.values()), 0, 0)
    if full_plan.device_bytes <= budget_bytes or not blocks:
        return full_plan
    fitting, least = [], full_plan
    for most, phase in itertools.product(sorted(set(sizes.values())), range(PHASES)):
        kind = [block for block in blocks if sizes[block] <= most]
        for count in (2, *range(4, len(kind) + 1)) if len(kind) > NUM_BUFFERS else ():
            plan = _plan_of(_placement(kind, count, phase / PHASES), sizes, full_plan.device_bytes)
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
    """This many of the blocks, evenly spaced. phase: offset from 0 to 1."""
    return tuple(kind[int((number + phase) * len(kind) / count)] for number in range(count))


def _plan_of(blocks, sizes, full_bytes):
    offloaded = sum(sizes[block] for block in blocks)
    buffers = num_buffers(len(blocks)) * max(sizes[block] for block in blocks)
    return OffloadPlan(blocks, full_bytes - offloaded + buffers, offloaded, buffers)


def step_seconds(compute_s, copy_s, offloaded, count=None):
    """Seconds of a step in steady state.

    compute_s, copy_s: {block: seconds of running it, of copying its weights}. offloaded: those blocks, sorted. count:
    of buffers; None: num_buffers. Copies run one after the other; the next copy into a buffer starts when the block in
    it has run.
    """
    position = {block: number for number, block in enumerate(offloaded)}
    count = count or num_buffers(len(offloaded))
    users = [offloaded[number::count] for number in range(count)]                      # of each buffer, in order
    there_at, copied_at = {}, 0.0
    for block in offloaded[:count]:
        there_at[block] = copied_at = copied_at + copy_s[block]
    now, ends = 0.0, [0.0]
    for _, block in itertools.product(range(SETTLED), sorted(compute_s)):
        now = max(now, there_at.get(block, 0.0)) + compute_s[block]
        if block in position:
            own = users[position[block] % count]
            following = own[(position[block] // count + 1) % len(own)]
            if following != block:
                there_at[following] = copied_at = max(copied_at, now) + copy_s[following]
        if block == max(compute_s):
            ends.append(now)
    return ends[-1] - ends[-2]


def offloaded_memory(dims, needed, free_bytes, weights_memory, num_stages=1):
    """The Memory of a rank that offloads as many weights as needed to fit; None if not even two blocks at a time fit.

    needed: with all weights resident. free_bytes: of the device, for everything on the rank. weights_memory: of
    MemorySettings. num_stages: number of stages, of which the rank has one.
    """
    run_bytes, outside = needed.keys_values + needed.activations, dims.outside_bytes
    free_bytes = min(free_bytes - run_bytes, weights_memory)
    over, a_block = needed.weights - free_bytes, num_stages * (needed.weights - outside) / dims.blocks
    buffers = NUM_BUFFERS * a_block
    if over <= 0:
        return needed
    # each block of a stage would have its own buffer, or the buffers alone are too large
    if dims.blocks <= NUM_BUFFERS * num_stages or outside + buffers > free_bytes:
        return None
    # the first two streamed blocks free the memory of one, each further one of itself
    return replace(needed, weights=free_bytes, streamed=buffers if over <= a_block else over + buffers)
