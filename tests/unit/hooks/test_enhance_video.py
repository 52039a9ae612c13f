"""The factor of Enhance-A-Video equals that of attention between frames written out, also summed over shards."""

import pytest
import torch

from tests.support.tolerances import close
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.hooks.enhance_video import _between_frames, enhance_factor
from xdit_backend.protocol.specs import Enhance

FRAMES, POSITIONS = 4, 6


def tokens():
    return torch.randn(2, 2, 3, FRAMES * POSITIONS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def written_out(query, key):
    """Sum over images, heads, positions and pairs of different frames."""
    total = 0
    for position in range(POSITIONS):
        here = slice(position, None, POSITIONS)
        weights = (query[:, :, here] @ key[:, :, here].transpose(2, 3) / 8 ** 0.5).softmax(-1)
        total += (weights * (1 - torch.eye(FRAMES))).sum()
    return total


def test_the_factor_equals_attention_between_frames_written_out():
    query, key = 0.3 * tokens()

    found = enhance_factor(query, key, Enhance(FRAMES, 2.5), [FRAMES * POSITIONS], SINGLE, None)

    mean = written_out(query, key) / (2 * 3 * POSITIONS * FRAMES * (FRAMES - 1))
    assert mean * (FRAMES + 2.5) > 1
    close(found.double(), mean * (FRAMES + 2.5), 1e-6)


def test_the_factor_is_at_least_one():
    query, _ = 9 * tokens()

    assert enhance_factor(query, query, Enhance(FRAMES, 0.5), [FRAMES * POSITIONS], SINGLE, None) == 1


@pytest.mark.parametrize("sizes", [[12, 12], [7, 1, 16], [5, 13, 6], [24, 0]])
def test_shards_add_up_to_all_tokens(sizes):
    query, key = tokens()
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]

    shards = [_between_frames(query[:, :, start:start + size], key, start, FRAMES)
              for start, size in zip(starts, sizes) if size]

    close(sum(shards).double(), written_out(query, key), 1e-6)
    shifted = [_between_frames(query[:, :, start:start + size], key, start and start - 1, FRAMES)
               for start, size in zip(starts, sizes) if size]
    assert len(shifted) == 1 or abs(sum(shifted) / sum(shards) - 1) > 1e-3
