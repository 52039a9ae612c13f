"""What a worker tries before it takes commands."""

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from xdit_backend.protocol.errors import LinkError, WorkerStartError
from xdit_backend.worker.preflight import check_free, prepare_device, try_links


def words_of_links(rank, world_size, fault):
    """What a transfer in which one message goes wrong on its way comes to, on this rank: "" or the error's words."""
    transfer = dist.all_to_all_single

    def faulty(receive, send, *args, **kwargs):
        if fault == "swapped" and rank == 1:                   # what was for one other went to the next
            send = send.view(world_size, -1).roll(1, 0).reshape(-1)
        return transfer(receive, send, *args, **kwargs)
    dist.all_to_all_single = faulty
    try:
        try_links(rank, ["cuda:4", "cuda:5", "cuda:6"], torch.device("cpu"))
    except LinkError as error:
        return str(error)
    finally:
        dist.all_to_all_single = transfer
    return ""


@pytest.mark.parametrize("fault", ["", "swapped"])
def test_numbers_that_arrive_as_others_are_noticed_with_who_sent_them(fault):
    told = run_ranks(words_of_links, 3, fault)

    expected = "data from cuda:5 arrived corrupted on cuda:"
    assert told == ["", "", ""] if not fault else all(expected in text for text in told)


def test_a_transfer_that_raises_is_told_with_its_devices(monkeypatch):
    def fails(*args, **kwargs):
        raise dist.DistBackendError("no route")
    monkeypatch.setattr("xdit_backend.worker.preflight.all_to_all", fails)

    with pytest.raises(LinkError, match=r"between cuda:0, cuda:1 failed on rank 1 with DistBackendError: no route"):
        try_links(1, ["cuda:0", "cuda:1"], torch.device("cpu"))


def test_a_device_that_is_full_is_refused_in_numbers():
    prepare_device(torch.device("cpu"))
    check_free("cuda:0", 2 ** 30, 24 * 2 ** 30)
    with pytest.raises(WorkerStartError, match=r"cuda:1 has 300 MB of 24.0 GB free, and a worker needs at least "
                                               r"512 MB"):
        check_free("cuda:1", 300 * 2 ** 20, 24 * 2 ** 30)


def test_a_device_that_cannot_be_used_says_what_the_driver_said():
    with pytest.raises(WorkerStartError, match=r"all of cuda:99 .* cannot be used \(.*Error: "):
        prepare_device(torch.device("cuda:99"))
