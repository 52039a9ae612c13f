"""Which blocks come from host memory: within the budget, evenly, and as fast as the best choice there is."""

import itertools

import pytest

from xdit_backend.forecast.offloading import NUM_BUFFERS, plan_offload, step_seconds

MS_10 = dict.fromkeys(range(40), 10.0)


def held_bytes(plan, sizes, beside_bytes):
    """What the device holds, counted anew."""
    stays = sum(size for block, size in sizes.items() if block not in plan.blocks)
    return beside_bytes + stays + NUM_BUFFERS * max((sizes[block] for block in plan.blocks), default=0)


def spread(count, blocks=40):
    return tuple((2 * number + 1) * blocks // (2 * count) for number in range(count))


@pytest.mark.parametrize("sizes", [[7] * 12, [20] * 4 + [5] * 12, [3, 9, 4, 8, 5, 7, 6, 6], [1, 50, 1, 50, 1, 50]])
def test_weights_keep_to_the_budget_wherever_some_choice_does(sizes):
    """Of small models, every choice is looked at: where one fits, the plan does, and where none does, it has least."""
    sizes = dict(enumerate(sizes))
    choices = [chosen for count in range(len(sizes) + 1) for chosen in itertools.combinations(sizes, count)]
    least = min(held_bytes(plan_offload(sizes, sizes, 10, 0), sizes, 10), 10 + sum(sizes.values()))

    for budget in range(10, 12 + sum(sizes.values()), 3):
        plan = plan_offload(sizes, sizes, 10, budget)
        assert plan.device_bytes == held_bytes(plan, sizes, 10)
        assert plan.device_bytes + plan.offloaded_bytes - plan.buffer_bytes == 10 + sum(sizes.values())
        assert plan.device_bytes <= budget or (plan.device_bytes == least and budget < least)
    of_choices = [10 + sum(sizes.values()) - sum(sizes[block] for block in chosen)
                  + min(NUM_BUFFERS, len(chosen)) * max((sizes[block] for block in chosen), default=0)
                  for chosen in choices]
    assert least == min(of_choices)


def test_nothing_comes_where_all_fits_and_no_more_than_is_needed():
    sizes = dict(enumerate([7] * 12))

    assert plan_offload(sizes, sizes, 10, 94).blocks == ()
    assert len(plan_offload(sizes, sizes, 10, 93).blocks) == NUM_BUFFERS + 1
    assert len(plan_offload(sizes, sizes, 10, 60).blocks) == NUM_BUFFERS + 5
    assert plan_offload({}, {}, 10, 0).device_bytes == 10


def test_blocks_of_one_kind_are_spread_evenly():
    sizes = dict(enumerate([7] * 40))
    for budget in range(30, 290, 10):
        blocks = plan_offload(sizes, sizes, 10, budget).blocks
        gaps = [second - first for first, second in itertools.pairwise((*blocks, blocks[0] + 40))]
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("a_copy, count, took_ms, took_at_the_end_ms, bound_ms", [
    (16, 20, 414, 518, 400), (19, 20, 416, 583, 400), (30, 20, 619, 815, 600), (8, 35, 465, 429, 400),
    (20, 35, 725, 755, 700)])
def test_a_step_takes_what_threads_took(a_copy, count, took_ms, took_at_the_end_ms, bound_ms):
    """Of 40 blocks of 10 ms, so many come in a_copy ms each: spread evenly, and the last ones. Measured with a thread
    for the copies, whose blocks and copies slept."""
    copies = dict.fromkeys(range(40), float(a_copy))

    evenly, at_the_end = (step_seconds(MS_10, copies, blocks) for blocks in (spread(count),
                                                                             tuple(range(40 - count, 40))))

    assert bound_ms <= evenly <= took_ms < 1.15 * evenly
    assert bound_ms <= at_the_end <= took_at_the_end_ms < 1.1 * at_the_end
    assert step_seconds(MS_10, copies, ()) == 400
    # one buffer: each copy waits for the block before, and each block for its copy
    assert step_seconds(MS_10, copies, tuple(range(40)), 1) == pytest.approx(40 * (10 + a_copy))


@pytest.mark.parametrize("a_copy", [0.4, 0.8, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("sizes", [[4] * 10, [8] * 3 + [4] * 7], ids=["one kind", "two kinds"])
def test_no_other_choice_of_blocks_is_much_faster(sizes, a_copy):
    """Every choice that keeps to the budget is walked through, for links of all speeds."""
    sizes = dict(enumerate(map(float, sizes)))
    copies = {block: size * a_copy for block, size in sizes.items()}
    for share in (0.5, 0.8):
        budget = share * sum(sizes.values()) + 5
        plan = plan_offload(sizes, sizes, 5, budget)
        best = min(step_seconds(sizes, copies, chosen) for count in range(NUM_BUFFERS + 1, len(sizes) + 1)
                   for chosen in itertools.combinations(sizes, count)
                   if 5 + sum(sizes.values()) - sum(sizes[block] for block in chosen)
                   + NUM_BUFFERS * max(sizes[block] for block in chosen) <= budget)

        assert step_seconds(sizes, copies, plan.blocks) <= 1.15 * best
