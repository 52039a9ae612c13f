"""Exchanges of a device's tensors through shared memory, on a device that copies late: nothing is announced before its
copy is done."""

import collections
import os
import random
import socket
import threading
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode

from xdit_backend.distributed.shared_memory.memory import DeviceCopies, page_lock, page_unlock
from xdit_backend.distributed.shared_memory.pair import CHUNK_BYTES, NUM_SLOTS, segment_bytes
from xdit_backend.distributed.shared_memory.process_group import SharedMemoryGroup
from xdit_backend.system.exchange_segments import create_segment, map_segment

SIZES = 3, CHUNK_BYTES // 4 + 1, 2 * NUM_SLOTS * CHUNK_BYTES // 4


class LateDevice:
    """Takes the place of torch.cuda: operations in a stream run when somebody waits for them, or by chance."""

    def __init__(self, seed):
        self._lock = threading.RLock()                         # a group's threads may wait for a stream at once
        self._rng, self._current = random.Random(seed), LateStream(self._lock)

    def Stream(self, device):
        return LateStream(self._lock)

    def Event(self):
        return LateEvent(self._rng)

    def current_stream(self, device):
        return self._current

    @contextmanager
    def stream(self, stream):
        with Enqueues(stream):
            yield


class LateStream:
    def __init__(self, lock):
        self.queued, self._lock = collections.deque(), lock

    def wait_event(self, event):
        self.queued.append(event.synchronize)

    def run_one(self):
        with self._lock:
            if self.queued:
                self.queued.popleft()()

    def synchronize(self):
        while self.queued:
            self.run_one()


class LateEvent:
    def __init__(self, rng):
        self._rng, self._stream, self._is_over = rng, None, False

    def record(self, stream):
        self._stream = stream
        stream.queued.append(self._happen)

    def _happen(self):
        self._is_over = True

    def query(self):
        if not self._is_over and self._rng.random() < 0.3:
            self._stream.run_one()
        return self._is_over

    def synchronize(self):
        while not self._is_over:
            self._stream.run_one()


class Enqueues(TorchFunctionMode):
    """Copies go into a stream; other operations run when the stream has come so far."""

    def __init__(self, stream):
        super().__init__()
        self._stream = stream

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            self._stream.queued.append(lambda: args[0].copy_(args[1]))
            return args[0]
        return function(*args, **(kwargs or {}))


class OnLateDevice(SharedMemoryGroup):
    """A group that takes CPU tensors for those of a LateDevice."""

    def __init__(self, *arguments, copies):
        super().__init__(*arguments)
        self._copies["late"] = copies

    def _buffers(self, transfers):
        return "late", self._copies["late"].buffer


class AnnouncesFirst(DeviceCopies):
    """A mutant: does not say when a copy ends."""

    def copy(self, *arguments):
        super().copy(*arguments)


@contextmanager
def two_ranks(seed, copies=DeviceCopies):
    """The groups of both ranks, in this process; one thread of each copies while this one waits for the other."""
    first, second = socket.socketpair()
    for each in (first, second):
        each.setblocking(False)
    descriptor = create_segment(segment_bytes())
    groups = [OnLateDevice(rank, (0, 1), {1 - rank: (own, map_segment(os.dup(descriptor), segment_bytes()))}, 30.0,
                           copies=copies(None, LateDevice(seed + rank)))
              for rank, own in enumerate((first, second))]
    os.close(descriptor)
    try:
        yield groups
    finally:
        for group in groups:
            group.shutdown()


def exchange(groups, size, seed):
    """Names of the tensors that arrived wrong in a send, an all-to-all and an all-reduce."""
    own = torch.Generator().manual_seed(seed)
    sent = [torch.randn(2 * size, generator=own) for _ in groups]
    received, summed = [torch.zeros(2 * size) for _ in groups], [tensor.clone() for tensor in sent]
    message = torch.zeros(size)
    works = [groups[0].send([sent[0][:size]], 1), groups[1].recv([message], 0)]
    works += [group.alltoall_base(into, tensor, [], []) for group, into, tensor in zip(groups, received, sent)]
    works += [group.allreduce([tensor]) for group, tensor in zip(groups, summed)]
    for work in works:
        work.wait()
    wanted = {"message": (message, sent[0][:size]), "sum 0": (summed[0], sent[0] + sent[1]),
              "sum 1": (summed[1], sent[0] + sent[1]),
              "received 0": (received[0], torch.cat([tensor[:size] for tensor in sent])),
              "received 1": (received[1], torch.cat([tensor[size:] for tensor in sent]))}
    return [f"{name}: {int((found != value).sum())} from {(found != value).nonzero()[0].tolist()}"
            for name, (found, value) in wanted.items() if not torch.equal(found, value)]


@pytest.mark.parametrize("size", SIZES)
def test_tensors_of_a_device_that_copies_late_arrive(size):
    for seed in range(3):
        with two_ranks(seed) as groups:
            assert not exchange(groups, size, seed)


def test_a_flag_that_is_set_before_the_copy_is_found():
    with two_ranks(0, AnnouncesFirst) as groups:
        assert exchange(groups, SIZES[1], 0)


def test_memory_is_page_locked_in_this_process_and_an_error_is_raised():
    class Cuda:
        def __init__(self, status):
            self.calls, self._status = [], status

        def cudart(self):
            return self

        def cudaHostRegister(self, *arguments):
            self.calls.append(arguments)
            return self._status

        def cudaHostUnregister(self, *arguments):
            self.calls.append(arguments)

        def check_error(self, status):
            if status:
                raise RuntimeError(f"CUDA error {status}")

    cuda = Cuda(0)
    page_lock(cuda, 4096, 100)
    page_unlock(cuda, 4096)

    assert cuda.calls == [(4096, 100, 0), (4096,)]
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        page_lock(Cuda(2), 4096, 100)
