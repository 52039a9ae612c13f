"""Copies between host memory and a GPU that is still at work:
they are right, and the process does not wait for them."""

import pytest
import torch

from xdit_backend.memory.staging import StagingBuffers, on_device
from xdit_backend.parallel.stale_kv_cache import KeyValueEntry, Offload
from xdit_backend.protocol.shared_memory import SegmentStore

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
A_WHILE = 10 ** 8                          # cycles of a kernel that does nothing, some 50 ms
SHAPE = (2, 1, 24, 4608, 128)              # keys and values of one attention of Flux.1 at 1024 px


def kept_by(device, shape, steps=4, num_entries=3):
    """What attentions see and what host memory holds after steps over patches,
    on a device that is late with everything."""
    offload, seen = Offload(device), []
    entries = [KeyValueEntry(offload.host_buffer(shape, torch.zeros(0, dtype=torch.float16)), 0)
               for _ in range(num_entries)]
    quarter = shape[3] // 4

    def late():
        if device.type == "cuda":
            torch.cuda._sleep(A_WHILE)
    for index, entry in enumerate(entries):
        here = offload.buffer(entry)
        late()
        here.copy_(torch.arange(shape[3], dtype=torch.float16)[:, None] / 64 + index)
        offload.keep(entry, here, slice(0, shape[1]), [slice(0, shape[3])])
    for step in range(steps):
        for index, entry in enumerate(entries):
            here = offload.take(entry, entries[(index + 1) % num_entries])
            late()
            changed = slice(step % 4 * quarter, (step % 4 + 1) * quarter)
            here[:, :, :, changed] += 1 + index
            offload.keep(entry, here, slice(0, shape[1]), [changed])
            late()
            seen.append(here[:, :, :2, :, :2].clone())
    offload.close()
    return [tensor.cpu() for tensor in seen] + [entry.both_KBNTH.clone() for entry in entries]


@pytest.mark.parametrize("batch", [1, 2])
def test_offloaded_keys_and_values_are_right_on_a_late_device(batch):
    shape = (SHAPE[0], batch, *SHAPE[2:])

    for got, want in zip(kept_by(CUDA, shape), kept_by(CPU, shape)):
        assert torch.equal(got, want)


def test_the_process_does_not_wait_for_what_it_offloads():
    offload = Offload(CUDA)
    entry = KeyValueEntry(offload.host_buffer(SHAPE, torch.zeros(0, dtype=torch.float16)), 0)
    here, done = offload.buffer(entry), torch.cuda.Event()
    torch.cuda.synchronize()

    torch.cuda._sleep(20 * A_WHILE)
    done.record()
    offload.keep(entry, here, slice(0, 1), [slice(100, 2000)])
    has_waited = done.query()
    offload.close()

    assert not has_waited


def test_memory_that_cannot_be_pinned_is_told_and_nothing_else_fails(monkeypatch):
    """What CUDA refuses it also tells whoever asks next."""
    offload, number = Offload(CUDA), torch.zeros(0, dtype=torch.float16)
    memory = torch.empty(2 ** 24, dtype=torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: memory)
        offload.host_buffer((2, 1, 4, 512, 64), number)
        with pytest.raises(RuntimeError, match="offload_keys_values has .* GB of system RAM pinned"):
            offload.host_buffer((2, 1, 4, 512, 64), number)

    assert torch.ones(3, device=CUDA).sum().item() == 3
    offload.close()


def test_the_process_does_not_wait_for_a_small_tensor():
    small, done = torch.arange(2.0 ** 18), torch.cuda.Event()
    on_device(small, CUDA)                                     # torch makes the page-locked memory that it keeps
    torch.cuda.synchronize()

    torch.cuda._sleep(20 * A_WHILE)
    done.record()
    there = on_device(small, CUDA)
    small.fill_(-1)

    assert not done.query()
    assert torch.equal(there.cpu(), torch.arange(2.0 ** 18))


@pytest.mark.parametrize("on_disk", [False, True])
def test_shared_memory_travels_in_pieces(on_disk, monkeypatch):
    """Also where it overflowed to disk, as in a container with 64 MB of /dev/shm: nothing is page-locked in place."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("page-locks memory that is not its own"))
    store, staging = SegmentStore(), StagingBuffers(CUDA, 2 ** 22)
    try:
        if on_disk:
            store.folder, store.overflow_folder = store.overflow_folder, store.folder
        _, given = store.create((3, 5, 2 ** 20), torch.float32)
        _, back = store.create((3, 5, 2 ** 20), torch.float32)
        given.copy_(torch.randn(given.shape))

        there = staging.to_device(given)
        torch.cuda._sleep(A_WHILE)
        there += 1
        staging.to_host(there, back)

        assert torch.equal(back, given + 1)
    finally:
        store.close()


def test_pieces_are_right_under_a_late_device():
    staging, source = StagingBuffers(CUDA, 2 ** 20), torch.randn(2 ** 22)
    target = torch.zeros(2 ** 22)

    torch.cuda._sleep(A_WHILE)
    there = staging.to_device(source)
    torch.cuda._sleep(A_WHILE)
    staging.to_host(there * 2, target)

    assert torch.equal(target, source * 2)
