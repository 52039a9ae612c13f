"""Copies through two pieces in turn: every element arrives, and no piece is filled while it still travels."""

import threading

import pytest
import torch

from tests.support.fake_cuda import CUDA, fake_cuda_device
from xdit_backend.memory import staging as transfers
from xdit_backend.memory.staging import PinnedAhead, StagingBuffers, on_device

CPU = torch.device("cpu")
SHAPES = [(), (0, 3), (1,), (1000,), (7, 5, 3), (2, 300), (300, 2), (3, 4, 50, 2)]


class LateCopies:
    """A device whose copies are made when they are waited for,
    or when the next one to the same piece has to be over."""

    def __init__(self, monkeypatch):
        self.requested, self.copy = [], torch.Tensor.copy_
        monkeypatch.setattr(torch.Tensor, "copy_",
                            lambda to, given, non_blocking=False: self.ask(to, given, non_blocking))
        monkeypatch.setattr(transfers, "Arrived", self.event)

    def ask(self, to, given, non_blocking):
        if non_blocking:
            assert to.dtype == given.dtype, "what is converted on its way may go through memory that nobody keeps"
            self.requested.append((to, given))
        else:
            self.copy(to, given)
        return to

    def event(self):
        device = self

        class Event:
            seen = 0

            def record(self):
                self.seen = len(device.requested)

            def synchronize(self):
                device.run(self.seen)
        return Event()

    def run(self, end):
        for index, job in enumerate(self.requested[:end]):
            if job is not None:
                self.copy(*job)
                self.requested[index] = None


@pytest.mark.parametrize("chunk_bytes", [None, 8, 64, 1000, 10 ** 6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_arrives(shape, chunk_bytes):
    staging, source = StagingBuffers(CPU, chunk_bytes), torch.randn(shape)

    target = torch.full(shape, torch.nan, dtype=torch.float64)
    staging.to_host(source, target)

    assert torch.equal(staging.to_device(source), source) and torch.equal(target, source.double())


def test_strided_tensors_arrive():
    """A decoded picture's channels come last in shared memory, and its columns are a part of it."""
    staging, source = StagingBuffers(CPU, 256), torch.randn(3, 20, 30)
    image = torch.zeros(20, 50, 3)

    staging.to_host(source.movedim(0, -1), image[:, 10:40])

    assert (torch.equal(image[:, 10:40].movedim(-1, 0), source)
            and image[:, :10].abs().sum() == image[:, 40:].abs().sum() == 0)
    for each in (staging, StagingBuffers(CPU)):
        brought = each.to_device(source.movedim(0, -1))
        assert torch.equal(brought, source.movedim(0, -1)) and brought.is_contiguous()


@pytest.mark.parametrize("never_waits", [False, True])
def test_a_piece_is_filled_again_only_when_it_has_travelled(monkeypatch, never_waits):
    """On a device that copies as late as it may. Where a piece is not waited for, something is lost."""
    staging, source, target = StagingBuffers(CPU, 64), torch.arange(100.0), torch.zeros(100)
    device = LateCopies(monkeypatch)
    if never_waits:
        monkeypatch.setattr(transfers, "Arrived", _NeverWaits)

    brought = staging.to_device(source)
    device.run(len(device.requested))
    staging.to_host(source, target)

    assert (torch.equal(brought, source) and torch.equal(target, source)) is not never_waits


def test_what_is_fetched_into_another_type_is_converted_on_the_device(monkeypatch):
    staging, source, target = StagingBuffers(CPU, 64), torch.randn(100).bfloat16(), torch.zeros(100)
    LateCopies(monkeypatch)

    staging.to_host(source, target)

    assert torch.equal(target, source.float())


def test_waiting_for_a_piece_leaves_the_core_to_others(monkeypatch):
    """CUDA's own events are waited for by asking on and on."""
    made, empty = [], torch.empty
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: made.append(options) or transfers.Arrived())
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **options: empty(*shape, **options))

    with fake_cuda_device(monkeypatch):
        StagingBuffers(CUDA)._next(torch.Size((8,)), torch.float32)

    assert made == [{"blocking": True}] * 2


class _NeverWaits:
    def record(self):
        pass

    def synchronize(self):
        pass


def test_at_most_two_pieces_are_held(monkeypatch):
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: made.append(shape) or empty(*shape, **options))
    staging = StagingBuffers(CPU, 64)

    for _ in range(3):
        staging.to_host(torch.randn(500), torch.zeros(500))

    assert made == [(64,), (64,)]


def test_a_cpu_worker_copies_directly_and_touches_no_cuda(monkeypatch):
    """A context on a GPU takes 0.3 GB of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for CUDA"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("asked for CUDA"))
    source = torch.randn(5)

    brought = StagingBuffers(CPU).to_device(source)
    source_there = on_device(source, CPU)

    assert source_there is source and torch.equal(brought, source) and brought.data_ptr() != source.data_ptr()


def test_what_a_forward_adds_on_its_way_is_page_locked_by_another_thread_and_once(monkeypatch):
    """Hundreds of megabytes a step, while which the forward's kernels are to be launched."""
    threads, moved, big = [], [], torch.randn(1, 7, 5)

    def pin(tensor):
        threads.append(threading.get_ident())
        return tensor.clone()
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: moved.append(non_blocking) or tensor)
    ahead = PinnedAhead({"input.0": big[:, 2:], "input.1": big[:, 2:], "input.2": big}, torch.device("cuda:0"))
    taken = [ahead.take(f"input.{number}") for number in range(3)]

    assert torch.equal(taken[1], big[:, 2:]) and torch.equal(taken[2], big)
    assert len(threads) == 2 and threading.get_ident() not in threads and moved == [True] * 3
    assert "input.0" in ahead and len(ahead) == 3, "how a forward runs is the same to its end"
