"""Hidden states from stage to stage: in order, counted, overlapping, and with an error that names a silent stage."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import build_mesh
from xdit_backend.parallel.pipefusion import MAX_SENT, Link
from xdit_backend.protocol.errors import XDiTError
from xdit_backend.protocol.specs import Layout


def pass_on(rank, world_size, sizes):
    """Every message gets one added at each stage. Receives are posted two ahead."""
    link, traffic = Link(build_mesh(Layout(pipefusion_degree=world_size), world_size), torch.device("cpu")), Traffic()
    handles, arrived = [], []
    for index, size in enumerate(sizes):
        while rank > 0 and len(handles) + len(arrived) < min(index + 3, len(sizes)):
            handles.append(link.post_receive(sizes[len(handles) + len(arrived)], torch.float32))
        message = link.receive(handles.pop(0)) if rank > 0 else torch.full((size,), float(index * 10))
        arrived.append(message)
        if rank + 1 < world_size:
            link.send(message + 1, traffic)
    link.drain()
    return [message[0].item() for message in arrived], (link.num_posted, link.num_received,
                                                        link.num_sent), traffic.sent_bytes


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages_arrive_in_order_and_none_is_left(world_size):
    sizes = [5, 1, 400_000, 7, 3]

    results = run_ranks(pass_on, world_size, sizes)

    for rank, (values, (posted, received, sent), sent_bytes) in enumerate(results):
        assert values == [index * 10 + rank for index in range(len(sizes))]
        assert posted == received == (len(sizes) if rank else 0)
        assert sent == (len(sizes) if rank + 1 < world_size else 0)
        assert sent_bytes == 4 * sum(sizes) * (rank + 1 < world_size)


def send_many(rank, world_size):
    """How many sent messages are kept after so many."""
    link = Link(build_mesh(Layout(pipefusion_degree=world_size), world_size), torch.device("cpu"))
    for _ in range(100):
        if rank == 0:
            link.send(torch.ones(1000), Traffic())
        else:
            link.receive(link.post_receive(1000, torch.float32))
    cached = len(link._sent)
    link.drain()
    return cached


def test_messages_that_have_arrived_are_let_go():
    assert run_ranks(send_many, 2) == [MAX_SENT, 0]


def send_to_nobody(rank, world_size):
    os.environ["XDIT_STAGE_TIMEOUT_S"] = "1"
    link = Link(build_mesh(Layout(pipefusion_degree=world_size), world_size), torch.device("cpu"))
    if rank == 0:
        for _ in range(MAX_SENT + 1):
            link.send(torch.ones(4), Traffic())
    else:
        time.sleep(3)


def test_a_stage_that_takes_nothing_is_named():
    with pytest.raises(XDiTError, match=r"Stage 1 \(rank 1\) took nothing from stage 0 for 1 s"):
        run_ranks(send_to_nobody, 2)


def wait_in_vain(rank, world_size):
    os.environ["XDIT_STAGE_TIMEOUT_S"] = "1"
    link = Link(build_mesh(Layout(pipefusion_degree=world_size), world_size), torch.device("cpu"))
    if rank == 0:
        time.sleep(3)
    else:
        link.receive(link.post_receive(4, torch.float32))


def test_a_silent_stage_is_named():
    with pytest.raises(XDiTError, match=r"Stage 0 \(rank 0\) sent nothing to stage 1 for 1 s"):
        run_ranks(wait_in_vain, 2)


def send_long_before(rank, world_size):
    """The sum of a message that the receiver asks for when the sender has gone on. NCCL connects a pair at its first
    message, for which both wait."""
    link, gone_on = Link(build_mesh(Layout(pipefusion_degree=world_size), world_size),
                         torch.device("cpu")), torch.zeros(1)
    if rank == 0:
        link.send(torch.ones(1), Traffic())
        link.send(torch.ones(1_000_000), Traffic())
        dist.send(gone_on, 1)
        return link.drain()
    link.receive(link.post_receive(1, torch.float32))
    dist.recv(gone_on, 0)
    return link.receive(link.post_receive(1_000_000, torch.float32)).sum().item()


def test_a_send_does_not_wait_for_the_next_stage():
    assert run_ranks(send_long_before, 2) == [None, 1_000_000]


class StreamWork:
    """NCCL's handle of a transfer: without a time-out `wait` puts the wait in the stream's order,
    with one the process polls."""

    def __init__(self):
        self.waits = []

    def wait(self, *timeout):
        self.waits.append(timeout)

    def is_completed(self):
        return False


def wait_on_nccl(rank, world_size):
    """What is asked of NCCL's handles, when a message is received and when too many were sent."""
    mesh = build_mesh(Layout(pipefusion_degree=world_size), world_size)
    torch.distributed.get_backend, work = lambda group=None: "nccl", StreamWork()
    link = Link(mesh, torch.device("cpu"))
    link.receive((torch.zeros(2), work, [2]))
    link._sent = [(work, None)] * MAX_SENT
    torch.distributed.isend = lambda message, to, group: work
    link.send(torch.zeros(2), Traffic())
    return work.waits


def test_the_process_does_not_wait_for_nccl():
    assert run_ranks(wait_on_nccl, 3)[1] == [(), ()]


def once_to_the_next_stage(rank, world_size):
    """(what arrived, or bytes sent) where two tensor ranks of a stage have the same message."""
    mesh, traffic, message = build_mesh(Layout(pipefusion_degree=2, tensor_degree=2),
                                        world_size), Traffic(), torch.arange(7.0)
    link = Link(mesh, torch.device("cpu"))
    if link.stage == 0:
        link.send(message, traffic)
        link.drain()
        return traffic.sent_bytes
    return link.receive(link.post_receive(7, torch.float32), traffic).tolist()


def test_tensor_ranks_send_a_message_once_and_all_have_it():
    assert run_ranks(once_to_the_next_stage, 4) == [16, 12, [*range(7)], [*range(7)]]
