"""The collectives the methods are built from, wrapped once: uneven sizes, names that changed between torch releases.

Every function here is called by every rank of the group it names. It also counts what a rank sends.
"""

import collections
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

SHORT_S = 2e-4                 # a wait that is not worth recording


class Traffic:
    """Exchanges that this rank has begun with others, bytes it has sent in them, when it waited for them, and whether
    it does now.

    waits: [(start, end)] of this process, by time.perf_counter. Over gloo they are what an exchange takes; NCCL has the
    device wait, and not the process.
    """

    def __init__(self):
        self.num_exchanges = self.sent_bytes = 0
        self.waits = []
        self.entered = {}                                      # see entering
        self.is_broken = False                                 # has an exchange failed on this rank?
        self.block = ""                                        # see at_block
        self._names = {}                                       # process group -> its key in `entered`
        self._num_begun = self._num_passed = 0                 # waits of this process
        # waits of its device that may not be over: (event before, event after)
        self._on_device = collections.deque()

    def count(self, num_elements, tensor):
        """One exchange, in which this rank sends so many elements of this tensor's dtype. Called before it begins."""
        self.num_exchanges += 1
        self.sent_bytes += num_elements * tensor.element_size()

    @contextmanager
    def entering(self, place):
        """This rank enters an exchange under this: a collective of a process group, or a transfer from one rank to
        another, of which place is (sender, receiver).

        `entered` counts these by the ranks that take part, "0,1" or "0>1". All of these ranks enter an exchange, or
        those that have wait for ever: so the counts of a command say whether a rank that failed is waited for.
        """
        name = self._name_of(place)
        self.entered[name] = self.entered.get(name, 0) + 1
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise

    @contextmanager
    def at_block(self, name):
        """A block of the model runs under this, of this name for a report: "3 of 12". `block` is that of the block that
        runs, or has failed."""
        self.block = name
        yield
        self.block = ""

    def _name_of(self, place):
        if isinstance(place, tuple):
            return ">".join(map(str, place))
        if place not in self._names:
            self._names[place] = ",".join(map(str, dist.get_process_group_ranks(place or dist.group.WORLD)))
        return self._names[place]

    @contextmanager
    def waiting(self, tensor, recorded=True):
        """This process, or its device, waits for other ranks under this. tensor: of the exchange, where it is.
        recorded: in `waits`."""
        start, on_device = time.perf_counter(), tensor.is_cuda
        if on_device:
            before, after = torch.cuda.Event(), torch.cuda.Event()
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
        """(waits that are over, is there one now?). Called by another thread than the rest."""
        while self._on_device and self._on_device[0][1].query():
            self._on_device.popleft()
            self._num_passed += 1
            self._num_begun += 1
        return self._num_passed, self._num_begun > self._num_passed or (
            bool(self._on_device) and self._on_device[0][0].query())


def all_to_all(pieces, receive_shapes, group, traffic, joined=None):
    """Send pieces[j] to rank j of the group; return what each rank sent here, shaped receive_shapes[j].

    Pieces may differ in size. joined: one contiguous tensor that they follow one another in, where there is one.
    Everything travels in one exchange.
    """
    return start_all_to_all(pieces, receive_shapes, group, traffic, joined)()


def start_all_to_all(pieces, receive_shapes, group, traffic, joined=None):
    """all_to_all in the background: returns a function that waits for it and returns what arrived."""
    rank = dist.get_rank(group)
    send = torch.cat([piece.reshape(-1) for piece in pieces]) if joined is None else joined.view(-1)
    device, send = send.device, on_wire(send, group)
    receive_sizes = [torch.Size(shape).numel() for shape in receive_shapes]
    receive = send.new_empty(sum(receive_sizes))
    traffic.count(send.numel() - pieces[rank].numel(), send)
    with traffic.entering(group):
        work = dist.all_to_all_single(receive, send, receive_sizes, [piece.numel() for piece in pieces], group=group,
                                      async_op=True)

    def wait(sent=send):                       # gloo needs what is sent to live until then
        with traffic.waiting(receive):
            work.wait()
        return [part.view(shape) for part, shape in zip(receive.to(device).split(receive_sizes), receive_shapes)]
    return wait


def all_gather(local, sizes, dim, group, traffic):
    """Concatenate every rank's tensor along `dim`, on every rank. `sizes` are the ranks' sizes along `dim`.

    Uneven sizes travel padded to the largest, because gloo has no uneven all-gather.
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
    parts = [gathered[index * largest:index * largest + size] for index, size in enumerate(sizes)]
    return torch.cat(parts).to(local.device).movedim(0, dim)


def start_all_gather(rows, rank, group, traffic):
    """Every rank's row, in the background, to where it stays: returns a function that waits for them.

    rows: (ranks, ...), contiguous, of which this rank's is there already. gloo's own all-gather would copy all rows
    twice more.
    """
    traffic.count(rows[rank].numel() * (len(rows) - 1), rows)
    with traffic.entering(group):
        if dist.get_backend(group) == "gloo":
            works = [dist.broadcast(row, dist.get_global_rank(group, index), group=group, async_op=True)
                     for index, row in enumerate(rows)]
        else:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            works = [gather(rows.view(-1), rows[rank].view(-1), group=group, async_op=True)]

    def wait(kept=rows):                       # gloo needs what is sent, and where it arrives, to live until then
        with traffic.waiting(kept):
            for work in works:
                work.wait()
    return wait


def all_reduce(tensors, group, traffic):
    """The sums of these tensors over the ranks, in one exchange: [tensor], each in the place of its own where there is
    one only.

    A ring sends each of a rank's P parts 2 (P - 1) times (Patarasuk and Yuan 2009), which is what is counted.
    """
    return start_all_reduce(tensors, group, traffic)()


def start_all_reduce(tensors, group, traffic, op=dist.ReduceOp.SUM):
    """all_reduce in the background: returns a function that waits for it and returns the sums, or what another op
    gives."""
    joined = tensors[0].contiguous() if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
    if not joined.numel():                                     # text, after the first patch
        return lambda: tensors
    device, joined, ranks = joined.device, on_wire(joined, group), dist.get_world_size(group)
    traffic.count(2 * (ranks - 1) * joined.numel() // ranks, joined)
    with traffic.entering(group):
        work = dist.all_reduce(joined, op=op, group=group, async_op=True)

    def wait():
        with traffic.waiting(joined):
            work.wait()
        pieces = joined.to(device).view(-1).split([tensor.numel() for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors)]
    return wait


def largest(tensor, group, traffic):
    """The largest of the ranks' tensors, number by number, in the place of this one. Counted as a sum."""
    return start_all_reduce([tensor], group, traffic, dist.ReduceOp.MAX)()[0]


class RingExchange:
    """One step of a ring: the tensor goes to the next rank while the one from the previous rank arrives.

    Receives are posted first and the sent tensor is kept until `wait`, which gloo needs.
    """

    def __init__(self, tensor, receive_shape, group, traffic):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        following = dist.get_global_rank(group, (rank + 1) % size)
        preceding = dist.get_global_rank(group, (rank - 1) % size)
        self._device, self._sent = tensor.device, on_wire(tensor.contiguous(), group)
        self._received = self._sent.new_empty(receive_shape)
        traffic.count(self._sent.numel(), self._sent)
        self._traffic = traffic
        transfers = [dist.P2POp(how, piece, peer, group=group) for how, piece, peer in (
            (dist.irecv, self._received, preceding), (dist.isend, self._sent, following)) if piece.numel()]
        with traffic.entering(group):
            self._work = dist.batch_isend_irecv(transfers) if transfers else []

    def wait(self):
        with self._traffic.waiting(self._received):
            for work in self._work:
                work.wait()
        return self._received.to(self._device)


def on_wire(tensor, group):
    """gloo carries host memory only; it is used with CUDA when two ranks share a device."""
    return tensor.cpu() if tensor.is_cuda and dist.get_backend(group) == "gloo" else tensor
