"""Process groups over shared memory: results have the bits of gloo's, whoever is late; faults are named."""

import datetime
import os
import random
import socket
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import shared_memory
from tests.support.ranks import run_ranks
from xdit_backend.distributed.collectives import (
    RingExchange,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    largest,
    start_all_gather,
    start_all_to_all,
)
from xdit_backend.distributed.fp8_communication import all_gather_fp8, all_to_all_fp8
from xdit_backend.distributed.shared_memory.pair import CHUNK_BYTES, NUM_SLOTS, ExchangeError
from xdit_backend.distributed.shared_memory.process_group import SMALL_BYTES, SharedMemoryGroup
from xdit_backend.system import exchange_segments as segments

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
# elements: of one chunk and less, of several chunks, on both sides of SMALL_BYTES, and of more than all slots
SIZES = 1, 7, 1_000, SMALL_BYTES // 8, SMALL_BYTES // 4 + 1, CHUNK_BYTES // 4 + 3, NUM_SLOTS * CHUNK_BYTES // 4 + 5
NUM_OPERATIONS = 60


def random_operations(rank, world_size, group, seed, count, log):
    """Run operations that are random, and the same on each rank; yields their results on this rank."""
    rng, traffic = random.Random(seed), Traffic()
    own = torch.Generator().manual_seed(1000 * seed + rank)
    waiting = []
    for _ in range(count):
        kind = rng.choice(("all_to_all", "two_at_once", "hop", "gather", "in_place", "reduce", "several", "max",
                           "fp8", "fp8_gather", "stage"))
        dtype, size = rng.choice(DTYPES), rng.choice(SIZES[:-1] if rng.random() < 0.9 else SIZES)
        counts = [[rng.choice((0, 1, size)) for _ in range(world_size)] for _ in range(world_size)]
        log.append((kind, dtype, size))

        def tensor(*shape, dtype=dtype):
            return (100 * torch.randn(shape, generator=own)).to(dtype)
        if kind == "all_to_all":
            yield from all_to_all([tensor(count) for count in counts[rank]], [(of[rank],) for of in counts], group,
                                  traffic)
        elif kind == "two_at_once":
            waits = [start_all_to_all([tensor(count) for count in counts[rank]], [(of[rank],) for of in counts], group,
                                      traffic) for _ in range(2)]
            for wait in reversed(waits):
                yield from wait()
        elif kind == "hop":
            yield RingExchange(tensor(size), (size,), group, traffic).wait()
        elif kind == "gather":
            sizes = [1 + (index + size) % 3 for index in range(world_size)]
            yield all_gather(tensor(2, sizes[rank], size // 7 + 1), sizes, 1, group, traffic)
        elif kind == "in_place":
            rows = torch.zeros(world_size, size, dtype=dtype)
            rows[rank] = tensor(size)
            wait = start_all_gather(rows, rank, group, traffic)
            wait()
            yield rows
        elif kind == "reduce":
            yield from all_reduce([tensor(size)], group, traffic)
        elif kind == "several":
            yield from all_reduce([tensor(size), tensor(3, 2)], group, traffic)
        elif kind == "max":
            yield largest(tensor(size), group, traffic)
        elif kind == "fp8":
            shapes = [(1, 2, 5, 8), (1, 2, 70, 8)]
            for received in all_to_all_fp8([[tensor(*shape, dtype=torch.float32) for shape in shapes]] * world_size,
                                           [shapes] * world_size, [False, True], group, traffic):
                yield from received
        elif kind == "fp8_gather":
            sizes = [66 + index for index in range(world_size)]
            yield all_gather_fp8(tensor(1, 2, sizes[rank], 8, dtype=torch.float32), sizes, group, traffic)
        else:                                                  # from each rank to the next, which waits much later
            message = tensor(size)
            if rank:
                buffer = torch.empty_like(message)
                waiting.append((dist.irecv(buffer, rank - 1, group=group), buffer))
            if rank < world_size - 1:
                waiting.append((dist.isend(message, rank + 1, group=group), message))
            if len(waiting) > 4:
                work, buffer = waiting.pop(0)
                work.wait()
                yield buffer
    for work, buffer in waiting:
        work.wait()
        yield buffer


def differences(rank, world_size, folder, seed, late_rank, count):
    """Operations whose results differ from gloo's, on this rank."""
    torch.manual_seed(0)
    group, log = shared_memory.new_group(folder), []
    wanted = list(random_operations(rank, world_size, dist.group.WORLD, seed, count, []))
    shared_memory.be_late(rank == late_rank, seed)
    found = list(random_operations(rank, world_size, group, seed, count, log))
    return [index for index, (one, other) in enumerate(zip(found, wanted, strict=True))
            if one.dtype != other.dtype or one.shape != other.shape
            or not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))]


@pytest.mark.parametrize("late", ["none", "first", "last"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_have_the_bits_of_gloos(tmp_path, world_size, late):
    late_rank = {"none": None, "first": 0, "last": world_size - 1}[late]

    assert run_ranks(differences, world_size, str(tmp_path), world_size, late_rank, NUM_OPERATIONS) == [[]] * world_size
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_of_thousands_of_operations_have_the_bits_of_gloos(tmp_path, world_size):
    for late_rank in range(world_size):
        assert run_ranks(differences, world_size, str(tmp_path), 10 + late_rank, late_rank, 2_000) == [[]] * world_size


def reductions(rank, world_size, folder):
    group, wrong = shared_memory.new_group(folder), []
    for size in (*SIZES, 2_500_001):
        for dtype in DTYPES:
            tensor = (100 * torch.randn(size, generator=torch.Generator().manual_seed(rank))).to(dtype)
            other = tensor.clone()
            dist.all_reduce(tensor)
            dist.all_reduce(other, group=group)
            wrong += [] if torch.equal(tensor, other) else [(size, dtype)]
    return wrong


@pytest.mark.parametrize("world_size", [3, 4])
def test_sums_are_in_the_order_of_gloos_ring(tmp_path, world_size):
    assert run_ranks(reductions, world_size, str(tmp_path)) == [[]] * world_size


def sums_in_the_order_of_ranks(rank, world_size, folder):
    from xdit_backend.distributed.shared_memory import process_group

    def in_order(of_ranks, chunk, own_rank, reduce):
        total = of_ranks[0].clone()
        for each in of_ranks[1:]:
            total = reduce(total, each)
        of_ranks[own_rank].copy_(total)
    process_group._reduce = in_order
    return reductions(rank, world_size, folder)


def test_another_order_of_sums_is_found(tmp_path):
    assert all(run_ranks(sums_in_the_order_of_ranks, 3, str(tmp_path)))


def send_and_compute(rank, world_size, folder):
    """A message of more bytes than all slots, whose sender waits for nothing until the receiver has it."""
    group = shared_memory.new_group(folder)
    message = torch.arange(3 * NUM_SLOTS * CHUNK_BYTES // 8 + 1)
    if rank == 0:
        work = dist.isend(message, 1, group=group)
        dist.barrier()                                         # of gloo
        return work.is_completed()
    buffer = torch.zeros_like(message)
    dist.irecv(buffer, 0, group=group).wait()
    dist.barrier()
    return torch.equal(buffer, message)


def test_a_message_leaves_while_its_sender_computes(tmp_path):
    assert run_ranks(send_and_compute, 2, str(tmp_path), timeout_s=60) == [True, True]


def receive_and_compute(rank, world_size, folder):
    """A receive that is posted ahead is done before it is waited for."""
    group, buffer = shared_memory.new_group(folder), torch.zeros(CHUNK_BYTES)
    if rank == 1:
        dist.isend(buffer + 7, 0, group=group)
        dist.barrier()
        return True
    work = dist.irecv(buffer, 1, group=group)
    dist.barrier()
    deadline_s = time.monotonic() + 30
    while buffer[-1] != 7 and time.monotonic() < deadline_s:   # the group's thread copies
        time.sleep(0.01)
    return bool((buffer == 7).all()) and work.is_completed()


def test_a_posted_receive_is_done_while_its_rank_computes(tmp_path):
    assert run_ranks(receive_and_compute, 2, str(tmp_path), timeout_s=60) == [True, True]


def wait_for_a_rank_that_leaves(rank, world_size, folder):
    group = shared_memory.new_group(folder)
    if rank == 1:
        group.shutdown()
        return ""
    with pytest.raises(ExchangeError) as raised:
        dist.all_reduce(torch.zeros(5), group=group)
    with pytest.raises(ExchangeError):                         # and from then on
        dist.barrier(group=group)
    return str(raised.value)


def test_a_rank_that_is_gone_is_named(tmp_path):
    first, _, last = run_ranks(wait_for_a_rank_that_leaves, 3, str(tmp_path), timeout_s=60)

    assert first == last == "all_reduce failed: rank 1 closed its connection during an exchange"


def wait_for_a_rank_that_is_late(rank, world_size, folder):
    group, there, text = shared_memory.new_group(folder), torch.full((5,), float(rank)), ""
    if rank == 0:
        work = dist.all_reduce(there, group=group, async_op=True)
        with pytest.raises(ExchangeError) as raised:
            work.wait(datetime.timedelta(seconds=0.2))
        text = str(raised.value)
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.all_reduce(there, group=group)
    return text, there.tolist()


def test_a_wait_is_bounded_and_names_the_rank_that_is_late(tmp_path):
    (text, first), (_, second) = run_ranks(wait_for_a_rank_that_is_late, 2, str(tmp_path), timeout_s=60)

    assert text == "all_reduce was not done after 0.2 s: waiting for rank 1"
    assert first == second == [1.0] * 5


def messages_after_another_size(rank, world_size, folder):
    group = shared_memory.new_group(folder)
    if rank == 0:
        dist.isend(torch.zeros(10), 1, group=group).wait()
        return ""
    with pytest.raises(ExchangeError) as raised:
        dist.recv(torch.zeros(11), 0, group=group)
    return str(raised.value)


def test_ranks_that_disagree_are_told(tmp_path):
    _, text = run_ranks(messages_after_another_size, 2, str(tmp_path), timeout_s=60)

    assert text.startswith("recv failed: rank 0 sent chunk 1 of 40 bytes, and chunk 1 of 44 bytes was expected")


def test_tensors_that_are_not_contiguous_are_rejected():
    group = SharedMemoryGroup(0, (0,), {}, 1.0)

    with pytest.raises(ValueError, match="Pass contiguous tensors to send: one of shape"):
        group._begin("send", [(1, torch.zeros(4, 4).t())])


def test_a_segment_has_the_size_that_was_agreed_on_for_ever():
    descriptor = segments.create_segment(8192)
    with pytest.raises(OSError):
        os.ftruncate(descriptor, 4096)
    with pytest.raises(OSError):
        os.ftruncate(descriptor, 16384)
    with pytest.raises(OSError, match="a segment of 4096 bytes is needed, and the other rank sent one of 8192 bytes"):
        segments.map_segment(os.dup(descriptor), 4096)
    assert not os.get_inheritable(descriptor)
    with segments.map_segment(descriptor, 8192) as mapped:
        assert len(mapped) == 8192


def test_a_segment_that_could_shrink_is_rejected():
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8192)

    with pytest.raises(OSError, match="with seals 0x0"):
        segments.map_segment(descriptor, 8192)


def test_a_process_of_another_user_is_rejected(monkeypatch, tmp_path):
    listening, joining = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with listening, joining:
        listening.bind(str(tmp_path / "exchange"))
        listening.listen()
        joining.connect(str(tmp_path / "exchange"))
        other = os.getuid() + 1
        monkeypatch.setattr(segments.os, "getuid", lambda: other)

        with pytest.raises(OSError, match="connected to the exchange of user"):
            segments._accept(listening, 4096, 5.0)
