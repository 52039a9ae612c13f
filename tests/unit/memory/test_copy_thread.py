"""Copies beside computing on a pretended device, whose streams are as far apart as their events allow: a buffer is
written to neither before its block has run, nor read before its weights have come."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from xdit_backend.checkpoints.offload.block_offload import OffloadedBlocks
from xdit_backend.memory.copy_thread import CopyThread

CPU = torch.device("cpu")
NUM_BLOCKS, STEPS = 5, 3


class Stream:
    """What is asked of it is done later: by `run`."""

    def __init__(self):
        self.requested = []

    def record_event(self):
        event = threading.Event()
        self.requested.append((None, event.set))
        return event

    def wait_event(self, event):
        self.requested.append((event, lambda: None))

    def synchronize(self):
        pass


def run(first, second):
    """Do all that two streams have been asked for; the first is ahead of the second wherever its events allow it."""
    queues = [list(first.requested), list(second.requested)]
    while any(queues):
        for queue in queues:
            if queue and (queue[0][0] is None or queue[0][0].is_set()):
                queue.pop(0)[1]()
                break
        else:
            raise AssertionError("both streams wait for each other")


class LateStaging:
    """In place of StagingBuffers."""

    def __init__(self, stream):
        self._stream = stream

    def copy(self, source, target):
        self._stream.requested.append((None, lambda: target.copy_(source)))


@pytest.fixture
def device(monkeypatch):
    """(compute stream, copy stream, the blocks, their weights, the thread)"""
    compute, copies = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    thread = CopyThread(CPU, LateStaging(copies))
    thread._stream, thread._module = copies, torch.cuda
    offloaded = OffloadedBlocks(CPU, thread)
    weights = [torch.nn.Parameter(torch.full((8,), float(number)), requires_grad=False)
               for number in range(NUM_BLOCKS)]
    for number, weight in enumerate(weights):
        offloaded.add(number, [weight])
    return compute, copies, offloaded, weights


def steps(compute, offloaded, weights):
    """Have the compute stream read each block's weights, in some steps. Returns what it will have found."""
    found = []
    for _ in range(STEPS):
        offloaded.begin(range(NUM_BLOCKS))
        for number, weight in enumerate(weights):
            offloaded.enter(number)
            compute.requested.append((None, lambda weight=weight.data: found.append(weight.clone().unique().tolist())))
            offloaded.leave(number)
    offloaded._copies.start([]).result()                       # all copies have been asked for
    return found


@pytest.mark.parametrize("is_copy_ahead", [True, False], ids=["copies are early", "copies are late"])
def test_streams_wait_for_each_other(device, is_copy_ahead):
    compute, copies, offloaded, weights = device
    found = steps(compute, offloaded, weights)

    run(*((copies, compute) if is_copy_ahead else (compute, copies)))

    assert found == [[float(number)] for _ in range(STEPS) for number in range(NUM_BLOCKS)]


def test_a_thread_ends_with_what_it_copies_for():
    thread = CopyThread(CPU, LateStaging(Stream()))
    thread.start([]).result()
    own = thread._thread
    assert own.is_alive()
    del thread
    own.join(10)

    assert not own.is_alive()


def test_a_copy_that_fails_is_told_where_it_is_waited_for_and_the_thread_goes_on():
    class Failing:
        def copy(self, source, target):
            time.sleep(0.01)
            target.copy_(source)

    thread, target = CopyThread(CPU, Failing()), torch.zeros(3)
    wrong, right = thread.start([(torch.ones(4), target)]), thread.start([(torch.ones(3), target)])

    with pytest.raises(RuntimeError, match="size"):
        thread.wait(wrong)
    thread.wait(right)
    thread.drain()
    assert target.tolist() == [1, 1, 1]


def test_a_stream_that_cannot_be_used_is_told_where_a_copy_is_waited_for():
    def broken(stream):
        raise RuntimeError("no driver")
    thread, target = CopyThread(CPU, LateStaging(Stream())), torch.zeros(3)
    thread._stream, thread._module = Stream(), SimpleNamespace(stream=broken, current_stream=lambda device: Stream())

    with pytest.raises(RuntimeError, match="no driver"):
        thread.wait(thread.start([(torch.ones(3), target)]))
