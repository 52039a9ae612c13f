"""Blocks of which each rank copies a part: what is copied by whom, and what an exchange has to bring."""

from concurrent.futures import Future
from functools import partial

import pytest
import torch

from xdit_backend.checkpoints.offload.block_offload import ALIGNMENT, CooperativeLoad, OffloadedBlocks

CPU = torch.device("cpu")
NUM_BLOCKS = 4
# of one block's weights: small ones, one that spans all parts, one whose rows lie apart in host memory
SHAPES = ((3,), (300, 64), (1,), (40, 50), (9, 33))
TYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8)


class InLine:
    """In place of a CopyThread."""

    def start(self, pairs):
        for source, target in pairs:
            target.copy_(source)
        done: Future = Future()
        done.set_result(None)
        return done

    def wait(self, copied):
        pass

    def drain(self):
        pass


def blocks_of(num_blocks=NUM_BLOCKS):
    """[[weight]] of each block, the same in each call."""
    random = torch.Generator().manual_seed(0)
    made = []
    for _ in range(num_blocks):
        weights = [torch.randint(0, 100, shape, generator=random).to(dtype) for shape, dtype in zip(SHAPES, TYPES)]
        apart = torch.zeros(40, 60, dtype=TYPES[3])
        apart[:, :50] = weights[3]
        made.append([torch.nn.Parameter(weight, requires_grad=False)
                     for weight in (*weights[:3], apart[:, :50], weights[4])])
    return made


class Ranks:
    """Some ranks of one process, which run in step."""

    def __init__(self, num_ranks, brings=lambda rows, rank, own: rows[rank].copy_(own)):
        self.weights = [blocks_of() for _ in range(num_ranks)]
        self.offloaded, self._brings = [OffloadedBlocks(CPU, InLine()) for _ in range(num_ranks)], brings
        for rank, (offloaded, weights) in enumerate(zip(self.offloaded, self.weights)):
            for number, own in enumerate(weights):
                offloaded.add(number, own)
            offloaded.copy_by(False, CooperativeLoad(rank, num_ranks, partial(self._wait, rank)))

    def _wait(self, rank, rows):
        self.waiting[rank] = rows

    def step(self):
        """[[the weights that each rank's blocks found]]"""
        found = [[] for _ in self.offloaded]
        for offloaded in self.offloaded:
            offloaded.begin(range(NUM_BLOCKS))
        for number in range(NUM_BLOCKS):
            self.waiting = {}
            for offloaded in self.offloaded:
                offloaded.enter(number)
            for rows in self.waiting.values():                 # all have their own part by now
                for rank, theirs in self.waiting.items():
                    self._brings(rows, rank, theirs[rank])
            for offloaded, weights, seen in zip(self.offloaded, self.weights, found):
                seen.append([weight.data.clone() for weight in weights[number]])
                offloaded.leave(number)
        return found


def is_right(found):
    return all(torch.equal(one.view(torch.uint8), wanted.contiguous().view(torch.uint8))
               for blocks in found for block, of_file in zip(blocks, blocks_of())
               for one, wanted in zip(block, of_file, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_rank_copies_a_part_and_has_all_when_a_block_runs(num_ranks):
    """And no more, but for the end of a block and what lies apart in host memory."""
    ranks = Ranks(num_ranks)
    steps = [ranks.step() for _ in range(3)]

    assert all(map(is_right, steps))
    whole = sum(weight.nbytes for block in blocks_of() for weight in block)
    rest = NUM_BLOCKS * (num_ranks * ALIGNMENT + 40 * 50)
    for offloaded in ranks.offloaded:
        assert 0 < offloaded.copied_bytes <= (3 * NUM_BLOCKS + 2) / NUM_BLOCKS * (whole / num_ranks + rest)
        assert offloaded.copied_bytes < 0.75 * 3 * whole


def test_a_part_that_is_not_brought_is_seen():
    """The mutant of the test above."""
    assert not is_right(Ranks(2, lambda rows, rank, own: None).step())
    assert not is_right(Ranks(3, lambda rows, rank, own: rows[rank].copy_(own) if rank else None).step())


def test_a_block_of_which_only_a_part_is_here_is_copied_anew_for_a_run_that_shares_nothing():
    ranks = Ranks(2)
    assert is_right(ranks.step())
    ranks.offloaded[0].copy_by(False)                          # the first two blocks of its next step are here in part
    alone, copied = ranks.offloaded[0], ranks.offloaded[0].copied_bytes
    alone.begin(range(NUM_BLOCKS))
    found = []
    for number in range(NUM_BLOCKS):
        alone.enter(number)
        found.append([weight.data.clone() for weight in ranks.weights[0][number]])
        alone.leave(number)

    assert is_right([found])
    assert alone.copied_bytes - copied >= sum(weight.nbytes for block in blocks_of() for weight in block)
