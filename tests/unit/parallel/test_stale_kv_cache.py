"""Offloaded keys and values where copies are late: none is under way when memory goes, and host memory is given back.

The device is a fake: streams whose copies are made when somebody waits for them, and the calls that pin host memory.
"""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.support.model_zoo import example
from tests.support.ranks import run_ranks
from tests.unit.parallel.test_pipefusion import Pipeline, cuts
from xdit_backend.parallel.stale_kv_cache import FROM_TOKEN_MAJOR, PAGE_BYTES, KeyValueEntry, KeyValues, Offload
from xdit_backend.protocol import messages
from xdit_backend.protocol.specs import Layout
from xdit_backend.worker.engine import Engine

CPU = torch.device("cpu")


class LateDevice:
    """Stands for CUDA in this process. It is the stream of Offload's copies, too."""

    def __init__(self, patch=setattr, refused_after=10 ** 6):
        self.requested, self.num_made, self.pinned, self.most_pinned, self.left = [], 0, {}, 0, refused_after
        self.copy = torch.Tensor.copy_
        compute = SimpleNamespace(wait_stream=lambda stream: self.synchronize(), wait_event=self.make)
        patch(torch.Tensor, "copy_", lambda to, given, non_blocking=False: self.ask(to, given, non_blocking))
        patch(torch.cuda, "current_stream", lambda device=None: compute)
        patch(torch.cuda, "stream", lambda stream: nullcontext())
        cudart = SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)
        patch(torch.cuda, "cudart", lambda: cudart)

    @property
    def num_in_flight(self):
        return len(self.requested) - self.num_made

    def offload(self):
        offload = Offload(CPU)
        offload._stream, offload._module = self, torch.cuda
        return offload

    def ask(self, to, given, non_blocking):
        if not non_blocking:
            return self.copy(to, given)
        self.requested.append((to, given))
        return to

    def make(self, end):
        for to, given in self.requested[self.num_made:end]:
            self.copy(to, given)
        self.num_made = max(end, self.num_made)

    def wait_stream(self, stream):
        """What the compute stream is asked for is done at once."""

    def record_event(self):
        return len(self.requested)

    def synchronize(self):
        self.make(len(self.requested))

    def touches(self, buffer):
        """Is a copy under way to or from this memory?"""
        return any(buffer.untyped_storage().data_ptr() == side.untyped_storage().data_ptr()
                   for pair in self.requested[self.num_made:] for side in pair)

    def register(self, address, num_bytes, flags):
        if len(self.pinned) == self.left:
            return 2
        assert address % PAGE_BYTES == num_bytes % PAGE_BYTES == 0
        self.pinned[address] = num_bytes
        self.most_pinned = sum(self.pinned.values())
        return 0

    def unregister(self, address):
        assert not self.num_in_flight, "unpinned while copies are under way"
        del self.pinned[address]
        return 0


def kept_late(rank, world_size, name, extrapolation):
    """(Is the result that without offload?, copies under way at a run's end, after close(), bytes pinned, of entries,
    left)"""
    torch.set_grad_enabled(False)
    results, device = [], None
    for offload in (False, True):
        one = example(name, rows=12, columns=6)
        pipeline = Pipeline(rank, world_size, one, Layout(), offload=offload, extrapolation=extrapolation)
        if offload:
            device = LateDevice()
            pipeline.key_values.offload = device.offload()
        results.append(pipeline.sample(cuts(one, 3), 1, 2))
    in_flight, entries = device.num_in_flight, list(pipeline.key_values.cached.values())
    pipeline.key_values.close()
    sizes = [-(-both.numel() * both.element_size() // PAGE_BYTES) * PAGE_BYTES
             for entry in entries for both in (entry.both_KBNTH, entry.before_KBNTH) if both is not None]
    return torch.equal(*results), in_flight, device.num_in_flight, device.most_pinned, sum(sizes), len(device.pinned)


@pytest.mark.parametrize("name, extrapolation", [("SD3", 0.0), ("Flux.1", 0.5)])
def test_copies_that_are_late_change_nothing_and_are_over_when_memory_goes(name, extrapolation):
    """What nobody will use is under way at the end of every step. Of what is pinned, entries are all."""
    (same, in_flight, after, most_pinned, entries, left), = run_ranks(kept_late, 1, name, extrapolation)

    assert same and in_flight > 0 == after
    assert most_pinned == entries > 0 == left


def entry(num_tokens):
    return KeyValueEntry(torch.ones(1, num_tokens, 2, 1, 4).permute(FROM_TOKEN_MAJOR), 0)


def test_a_buffer_that_is_too_small_goes_when_its_copies_are_over(monkeypatch):
    """As of attentions of video and of sound in turn, of an odd number of them."""
    device = LateDevice(monkeypatch.setattr)
    offload, in_flight = device.offload(), []
    sizes = [3, 4, 3, 50, 3]
    entries = [entry(size) for size in sizes]
    for one, following in zip(entries, entries[1:] + entries[:1]):
        old = list(offload._buffers[:2])
        here = offload.take(one, following)
        here += 1
        offload.keep(one, here, slice(0, 1), [slice(None)])
        for buffer in old:
            if buffer is not None and not any(buffer is now for now in offload._buffers):
                in_flight.append(device.touches(buffer))
    device.synchronize()

    assert in_flight and not any(in_flight)
    assert [one.both_KBNTH.mean().item() for one in entries] == [2.0] * len(entries)


def dropped(rank, world_size):
    """(copies under way, pieces of pinned memory) before and after conditioning is dropped,
    and how many buffers are left."""
    engine, device, cached = Engine(rank, CPU, lambda *phase: None), LateDevice(), {}
    for name in ("cond", "uncond"):
        offload = device.offload()
        offload.take(KeyValueEntry(offload.host_buffer((2, 1, 1, 3, 4), torch.ones(1)), 0), entry(3))
        cached[name] = KeyValues(offload)
    engine._predictions._key_values.update(cached)
    buffers = [weakref.ref(buffer) for key_values in cached.values() for buffer in key_values.offload._buffers[:2]]
    before = device.num_in_flight, len(device.pinned)
    engine.execute(messages.DropConditioning(1, list(cached)))
    after = device.num_in_flight, len(device.pinned)
    device.requested, device.num_made = [], 0
    return before, after, sum(buffer() is not None for buffer in buffers)


def test_dropped_conditioning_leaves_no_copies():
    """Of keys and values of two branches, where the VAE's memory is made next."""
    assert run_ranks(dropped, 1) == [((1, 2), (0, 0), 0)]


def test_host_memory_that_cannot_be_pinned_is_told(monkeypatch):
    offload = LateDevice(monkeypatch.setattr, refused_after=1).offload()
    offload.host_buffer((2, 1, 1, 1000, 500), torch.ones(1))

    with pytest.raises(RuntimeError, match=r"^CUDA error: free system RAM, .*: offload_keys_values has 0.00413 GB of "
                       r"system RAM pinned, and the system cannot pin 0.008 GB more \(cudaHostRegister: 2\)\."):
        offload.host_buffer((2, 1, 1, 2000, 500), torch.ones(1))
