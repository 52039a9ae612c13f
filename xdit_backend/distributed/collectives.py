"""Collectives with uneven sizes, independent of the torch release and the backend, and counts of what a rank sends.

Every rank of the named group calls each function.
"""

import collections
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..system import accelerator

SHORT_S = 2e-4                 # shorter waits are not recorded


class Traffic:
    """Counts of this rank's communication: operations, bytes sent, waits, and whether it waits now.

    waits: [(start, end)] of this process, by time.perf_counter. With gloo they are the time of the communication; with
    NCCL the device waits and the process does not.
    """

    def __init__(self):
        self.num_exchanges = self.sent_bytes = 0
        self.waits = []
        self.entered = {}                                      # see entering
        self.is_broken = False                                 # True after an operation failed on this rank
        self.block = ""                                        # see at_block
        self._names = {}                                       # process group -> its key in `entered`
        self._num_begun = self._num_passed = 0                 # waits of this process
        # waits of its device that may not be over: (event before, event after)
        self._on_device = collections.deque()

    def count(self, num_elements, tensor):
        """Count one operation in which this rank sends num_elements of the tensor's dtype. Call before it begins."""
        self.num_exchanges += 1
        self.sent_bytes += num_elements * tensor.element_size()

    @contextmanager
    def entering(self, participants):
        """Context in which this rank enters a communication: a collective of a process group, or a transfer, whose
        participants are (sender, receiver).

        `entered` counts these by participating ranks, "0,1" or "0>1". If some of the ranks enter and others do not, the
        former wait forever: the counts of a command tell whether ranks wait for one that failed.
        """
        name = self._name_of(participants)
        self.entered[name] = self.entered.get(name, 0) + 1
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise

    @contextmanager
    def at_block(self, name):
        """Context in which a block of the model runs. name: for reports, "3 of 12". `block` is the name of the running
        or failed block."""
        self.block = name
        yield
        self.block = ""

    def _name_of(self, participants):
        if isinstance(participants, tuple):
            return ">".join(map(str, participants))
        if participants not in self._names:
            ranks = dist.get_process_group_ranks(participants or dist.group.WORLD)
            self._names[participants] = ",".join(map(str, ranks))
        return self._names[participants]

    @contextmanager
    def waiting(self, tensor, recorded=True):
        """Context in which this process or its device waits for other ranks.

        tensor: of the communication; its device is the one that waits. recorded: add the wait to `waits`."""
        start, on_device = time.perf_counter(), accelerator.is_gpu(tensor.device)
        if on_device:
            own = accelerator.module(tensor.device)
            before, after = own.Event(), own.Event()
            before.record()
        else:
            self._num_begun += 1
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise
        finally:
            if on_device:
                after.record()
                self._on_device.append((before, after))
            else:
                self._num_passed += 1
        end = time.perf_counter()
        if recorded and end - start >= SHORT_S:
            self.waits.append((start, end))

    def progress(self):
        """(number of finished waits, whether a wait is in progress). Called from another thread."""
        while self._on_device and self._on_device[0][1].query():
            self._on_device.popleft()
            self._num_passed += 1
            self._num_begun += 1
        return self._num_passed, self._num_begun > self._num_passed or (
            bool(self._on_device) and self._on_device[0][0].query())


def all_to_all(chunks, receive_shapes, group, traffic, joined=None):
    """Send chunks[j] to rank j of the group; return what each rank sent here, of shapes receive_shapes[j].

    Chunks may differ in size. joined: optional contiguous tensor that consists of the chunks in order, which saves a
    copy. One collective.
    """
    return start_all_to_all(chunks, receive_shapes, group, traffic, joined)()


def start_all_to_all(chunks, receive_shapes, group, traffic, joined=None):
    """Begin an all_to_all; returns a function that waits for it and returns the received tensors."""
    rank = dist.get_rank(group)
    send = torch.cat([chunk.reshape(-1) for chunk in chunks]) if joined is None else joined.view(-1)
    device, send = send.device, on_wire(send, group)
    receive_sizes = [torch.Size(shape).numel() for shape in receive_shapes]
    receive = send.new_empty(sum(receive_sizes))
    traffic.count(send.numel() - chunks[rank].numel(), send)
    with traffic.entering(group):
        work = dist.all_to_all_single(receive, send, receive_sizes, [chunk.numel() for chunk in chunks], group=group,
                                      async_op=True)

    def wait(sent=send):                       # gloo requires the sent tensor to live until then
        with traffic.waiting(receive):
            work.wait()
        return [chunk.view(shape) for chunk, shape in zip(receive.to(device).split(receive_sizes), receive_shapes)]
    return wait


def all_gather(local, sizes, dim, group, traffic):
    """Concatenate every rank's tensor along `dim`, on every rank. sizes: of each rank along `dim`.

    Uneven sizes are padded to the largest, since gloo has no uneven all-gather.
    """
    largest = max(sizes)
    padded = on_wire(local.movedim(dim, 0).contiguous(), group)
    if padded.shape[0] < largest:
        padded = torch.cat([padded, padded.new_zeros(largest - padded.shape[0], *padded.shape[1:])])
    gathered = padded.new_empty(len(sizes) * largest, *padded.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    traffic.count(padded.numel() * (len(sizes) - 1), padded)
    with traffic.entering(group), traffic.waiting(gathered):
        gather(gathered, padded, group=group)
    chunks = [gathered[index * largest:index * largest + size] for index, size in enumerate(sizes)]
    return torch.cat(chunks).to(local.device).movedim(0, dim)


def start_all_gather(rows, rank, group, traffic):
    """Begin an in-place all-gather of rows; returns a function that waits for it.

    rows: (ranks, ...), contiguous; rows[rank] is filled. With gloo it is made of broadcasts, since gloo's all-gather
    copies all rows twice more.
    """
    traffic.count(rows[rank].numel() * (len(rows) - 1), rows)
    with traffic.entering(group):
        if dist.get_backend(group) == "gloo":
            works = [dist.broadcast(row, dist.get_global_rank(group, index), group=group, async_op=True)
                     for index, row in enumerate(rows)]
        else:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            works = [gather(rows.view(-1), rows[rank].view(-1), group=group, async_op=True)]

    def wait(buffer=rows):                     # gloo requires the buffer to live until then
        with traffic.waiting(buffer):
            for work in works:
                work.wait()
    return wait


def all_reduce(tensors, group, traffic):
    """Sum tensors over the ranks, in one collective; returns the list of sums. A single contiguous tensor is summed in
    place.

    The counted bytes are a ring's: with P ranks each sends 2 (P - 1) / P of the tensor (Patarasuk and Yuan 2009).
    """
    return start_all_reduce(tensors, group, traffic)()


def start_all_reduce(tensors, group, traffic, op=dist.ReduceOp.SUM):
    """Begin an all_reduce; returns a function that waits for it and returns the sums, or the results of another op."""
    joined = tensors[0].contiguous() if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
    if not joined.numel():                                     # text tokens after the first patch
        return lambda: tensors
    device, joined, ranks = joined.device, on_wire(joined, group), dist.get_world_size(group)
    traffic.count(2 * (ranks - 1) * joined.numel() // ranks, joined)
    with traffic.entering(group):
        work = dist.all_reduce(joined, op=op, group=group, async_op=True)

    def wait():
        with traffic.waiting(joined):
            work.wait()
        reduced = joined.to(device).view(-1).split([tensor.numel() for tensor in tensors])
        return [flat.view(tensor.shape) for flat, tensor in zip(reduced, tensors)]
    return wait


def largest(tensor, group, traffic):
    """Element-wise maximum of the ranks' tensors, in place. Traffic is counted as for a sum."""
    return start_all_reduce([tensor], group, traffic, dist.ReduceOp.MAX)()[0]


class RingExchange:
    """One hop of a ring: sends a tensor to the next rank while receiving the previous rank's.

    Receives are posted first. The sent tensor is referenced until `wait`, which gloo requires.
    """

    def __init__(self, tensor, receive_shape, group, traffic):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        following = dist.get_global_rank(group, (rank + 1) % size)
        preceding = dist.get_global_rank(group, (rank - 1) % size)
        self._device, self._sent = tensor.device, on_wire(tensor.contiguous(), group)
        self._received = self._sent.new_empty(receive_shape)
        traffic.count(self._sent.numel(), self._sent)
        self._traffic = traffic
        transfers = [dist.P2POp(how, buffer, peer, group=group) for how, buffer, peer in (
            (dist.irecv, self._received, preceding), (dist.isend, self._sent, following)) if buffer.numel()]
        with traffic.entering(group):
            self._work = dist.batch_isend_irecv(transfers) if transfers else []

    def wait(self):
        with self._traffic.waiting(self._received):
            for work in self._work:
                work.wait()
        return self._received.to(self._device)


def on_wire(tensor, group):
    """The tensor where the backend can send it from: gloo sends system RAM only. With tensors of GPUs it is used if
    ranks share one, or where there is no other backend."""
    return tensor.cpu() if accelerator.is_gpu(tensor.device) and dist.get_backend(group) == "gloo" else tensor
