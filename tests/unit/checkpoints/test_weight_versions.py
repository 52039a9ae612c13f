"""Versions of weights that are kept: what a model goes back to is what it had, to the bit,
whatever was changed on the way."""

import random

import pytest
import torch

from xdit_backend.checkpoints.weight_versions import MAX_CACHED, Versions

ROOM = 2 ** 20


@pytest.mark.parametrize("seed", range(6))
def test_any_way_through_versions_leads_to_their_own_weights(seed):
    """Versions differ in some weights each, are reached in several commands,
    and some weights are as in a file in some versions."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    plain = [torch.randn(3, generator=generator) for _ in range(6)]
    wanted = {0: plain} | {number: [torch.randn(3, generator=generator) if draw.random() < 0.4 else values
                                    for values in plain]
                           for number in range(1, MAX_CACHED + 2)}
    weights = [torch.nn.Parameter(values, requires_grad=False) for values in plain]
    files = {id(weight): weight.data for weight in weights}
    versions, now, num_returns = Versions(), 0, 0
    for _ in range(40):
        following = draw.choice([number for number in wanted if number != now])
        if versions.go_back(following, now, files):
            num_returns += 1
        else:
            differing = [place for place in range(6) if wanted[now][place] is not wanted[following][place]]
            for count, place in enumerate(differing):
                versions.leave(now, count == 0, [weights[place]], files, ROOM)
                values = wanted[following][place]
                weights[place].data = values if values is plain[place] else values.clone()
                files.pop(id(weights[place]), None)
                if values is plain[place]:
                    files[id(weights[place])] = values
        now = following
        assert all(torch.equal(weight, values) for weight, values in zip(weights, wanted[now]))
        assert files.keys() == {id(weight) for weight, values, first in zip(weights, wanted[now], plain)
                                if values is first}
    assert num_returns > 10


def test_nothing_is_kept_without_room_nor_from_the_middle_of_a_change():
    weights, versions = [torch.nn.Parameter(torch.ones(256), requires_grad=False) for _ in range(2)], Versions()

    versions.leave(1, True, weights[:1], {}, 1024)
    weights[0].data = torch.zeros(256)
    assert versions.num_bytes == 1024
    versions.leave(1, False, weights[1:], {}, 1023)            # its second command has no room
    weights[1].data = torch.zeros(256)
    assert versions.num_bytes == 0 and not versions.go_back(1, 2, {})
    versions.leave(2, False, weights, {}, ROOM)                # the first one was not kept

    assert versions.num_bytes == 0 and not versions.go_back(2, 3, {})
