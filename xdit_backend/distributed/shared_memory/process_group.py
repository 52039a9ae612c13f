"""The process group: torch.distributed's collectives over the pairs of ranks. docs/design/transports.md.

It is registered with torch as the backend `shared_memory`, so that callers use torch.distributed's functions. As with
NCCL, all ranks begin the operations of a group in the same order; operations of different groups are independent.
Tensors are contiguous. Sums and maxima have the bits of gloo's.
"""

import functools
import threading
import time

import torch
import torch.distributed as dist

from ...system import accelerator
from .memory import DeviceCopies, SegmentMemory
from .pair import ExchangeError, Pair, Transfer, segment_bytes

BACKEND = "shared_memory"
SPIN_S = 5e-5                              # how long a waiting rank polls before it sleeps
GRACE_S = 2e-4                             # after which the group's thread takes over an operation
WAKE_S = 0.1                               # longest sleep before a waiting thread looks again
SMALL_BYTES = 2 ** 15                      # tensors up to this size are reduced by every rank, in one exchange
GLOO_SEGMENT_BYTES = 2 ** 20               # longest segment of gloo's ring, see `chunk_bounds`
REDUCTIONS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}


def register(folder):
    """Register the backend with torch.distributed in this process.

    folder: private to this user and common to the ranks, for their listening sockets while groups are created.
    """
    dist.Backend.register_backend(BACKEND, functools.partial(_create, folder), extended_api=True,
                                  devices=["cpu", *accelerator.known_types()])


def _create(folder, options, _backend_options):
    from ...system.exchange_segments import connect_pairs  # exists on Linux only
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    timeout_s = options.timeout.total_seconds()
    connected = connect_pairs(options.store, options.group_rank, options.group_size, folder, segment_bytes(),
                              timeout_s)
    return SharedMemoryGroup(options.group_rank, ranks, connected, timeout_s)


class Link:
    """The notices of a pair, over its socket."""

    def __init__(self, connected):
        self._socket = connected

    def send(self, notice):
        try:
            self._socket.send(notice)
        except BlockingIOError as error:                       # a lost notice would leave the other rank waiting
            raise ExchangeError("the socket of a pair is full of notices that the other rank does not read") from error
        except OSError:                                        # closed: `receive` reports that
            pass

    def receive(self):
        try:
            return self._socket.recv(64) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None


class Operation(dist.Work):
    """A running operation of a group. Its transfers are in two stages; `finish_first` runs when those of the first are
    done, and readies what the second sends."""

    def __init__(self, group, kind, tensors):
        """tensors: referenced until the operation is done."""
        super().__init__()
        self.kind, self.num_first, self.num_second, self.finish_first = kind, 0, 0, None
        self._group, self._tensors = group, tensors

    def first_done(self):
        if self.num_first == 1 and self.finish_first is not None:
            self.finish_first()
            self.finish_first = None
        self.num_first -= 1                                    # last, since `is_done` is read without the lock

    def second_done(self):
        self.num_second -= 1

    @property
    def is_done(self):
        return not (self.num_first or self.num_second)

    def is_completed(self):
        return self._group.test(self)

    def wait(self, timeout=None):
        """Wait until the operation is done. timeout: timedelta; None: the group's. Raises ExchangeError."""
        self._group.wait(self, timeout.total_seconds() if timeout else 0.0)
        self._tensors = None
        return True


class SharedMemoryGroup(dist.ProcessGroup):
    """torch.distributed's process group over shared memory. Methods have the names under which torch calls them.

    The thread that waits for an operation carries out the copies. Where none has waited for GRACE_S, a thread of the
    group does. Both hold `_lock` while they copy, and not while they wait.
    """

    def __init__(self, rank, ranks, connected, timeout_s):
        """ranks: in the world, of each rank of the group. connected: of system.exchange_segments.connect_pairs."""
        from ...system.exchange_segments import Watcher
        super().__init__(rank, len(ranks))
        self._rank, self._size, self._ranks, self._timeout_s = rank, len(ranks), ranks, timeout_s
        # nearest following rank first, so that not all ranks send to the same one
        self._others = [(rank + step) % self._size for step in range(1, self._size)]
        self._sockets, self._mapped = ({other: connected[other][index] for other in self._others} for index in (0, 1))
        self._memories = {other: SegmentMemory(self._mapped[other]) for other in self._others}
        self._pairs = {other: Pair(ranks[other], self._memories[other], Link(self._sockets[other]), rank < other)
                       for other in self._others}
        self._copies = {}                                      # device -> DeviceCopies
        self._watcher = Watcher(self._sockets.values())
        self._lock, self._num_waiting, self._error = threading.Lock(), 0, None
        self._thread, self._is_shut, self._armed = None, False, set()

    def getBackendName(self):
        return BACKEND

    # --- operations ---

    def send(self, tensors, other, tag=0):
        return self._begin("send", sends=[(other, tensors[0])])

    def recv(self, tensors, other, tag=0):
        return self._begin("recv", receives=[(other, tensors[0])])

    def alltoall_base(self, output, tensor, output_sizes, sizes, opts=None):
        sent, received = _split(tensor, sizes, self._size), _split(output, output_sizes, self._size)
        if sent[self._rank].numel():
            received[self._rank].copy_(sent[self._rank])
        return self._begin("all_to_all", self._each(sent), self._each(received))

    def _allgather_base(self, output, tensor, opts=None):
        received = _split(output.view(-1), None, self._size)
        if received[self._rank].data_ptr() != tensor.data_ptr():
            received[self._rank].copy_(tensor.view(-1))
        return self._begin("all_gather", self._all(tensor), self._each(received))

    def allgather(self, outputs, tensors, opts=None):
        outputs[0][self._rank].copy_(tensors[0])
        return self._begin("all_gather", self._all(tensors[0]), self._each(outputs[0]))

    def broadcast(self, tensors, opts):
        if opts.rootRank == self._rank:
            return self._begin("broadcast", self._all(tensors[0]))
        return self._begin("broadcast", receives=[(opts.rootRank, tensors[0])])

    def barrier(self, opts=None):
        there = torch.zeros(self._size, dtype=torch.uint8)
        return self._begin("barrier", self._all(there[self._rank:self._rank + 1]), self._each(there.split(1)))

    def allreduce(self, tensors, opts=None):
        tensor, reduce = tensors[0], _reduction(opts)
        flat = tensor.view(-1)
        bounds = chunk_bounds(flat.numel(), flat.element_size(), self._size)
        return (self._reduce_small if tensor.nbytes <= SMALL_BYTES else self._reduce_large)(flat, bounds, reduce)

    def _reduce_small(self, flat, bounds, reduce):
        """Exchange the tensors; every rank reduces all of them."""
        of_ranks = [flat if rank == self._rank else torch.empty_like(flat) for rank in range(self._size)]

        def finish():
            for chunk, (start, end) in enumerate(zip(bounds, bounds[1:])):
                _reduce([tensor[start:end] for tensor in of_ranks], chunk, self._rank, reduce)
        return self._begin("all_reduce", self._all(flat), self._each(of_ranks), finish)

    def _reduce_large(self, flat, bounds, reduce):
        """Each rank reduces one chunk of all ranks' tensors, and sends it to the others."""
        chunks = [flat[start:end] for start, end in zip(bounds, bounds[1:])]
        own = chunks[self._rank]
        of_ranks = [own if rank == self._rank else torch.empty_like(own) for rank in range(self._size)]
        return self._begin("all_reduce", self._each(chunks), self._each(of_ranks),
                           lambda: _reduce(of_ranks, self._rank, self._rank, reduce), self._all(own),
                           self._each(chunks))

    def _each(self, of_ranks):
        return [(other, of_ranks[other]) for other in self._others]

    def _all(self, tensor):
        return [(other, tensor) for other in self._others]

    def _begin(self, kind, sends=(), receives=(), finish=None, next_sends=(), next_receives=()):
        """Begin an operation; returns it.

        sends, receives: [(rank of the group, contiguous tensor)]. finish: called when these are done, before
        next_sends, in any thread. next_receives may be done before that: who sends them has received `sends`.
        """
        operation, gated = Operation(self, kind, (sends, receives, next_sends, next_receives)), []
        with self._lock:
            device, buffer_of = self._buffers(sends or receives)
            for stage, is_send, transfers in ((0, True, sends), (0, False, receives), (1, True, next_sends),
                                              (1, False, next_receives)):
                for other, tensor in transfers:
                    if not tensor.is_contiguous():
                        raise ValueError(f"Pass contiguous tensors to {kind}: one of shape {tuple(tensor.shape)} has "
                                         f"strides {tensor.stride()}")
                    num_bytes = tensor.nbytes
                    if not num_bytes:
                        continue
                    if stage:
                        operation.num_second += 1
                    else:
                        operation.num_first += 1
                    transfer = Transfer(buffer_of(tensor), num_bytes,
                                        operation.second_done if stage else operation.first_done)
                    pair = self._pairs[other]
                    (pair.sends if is_send else pair.receives).append(transfer)
                    if stage and is_send:
                        transfer.is_ready = False
                        gated.append(transfer)
            if finish is not None:
                operation.finish_first = lambda: self._finish(finish, gated, device)
                if not operation.num_first:
                    operation.num_first = 1
                    operation.first_done()
            self._advance()
            if not operation.is_done:
                self._look_after()
        return operation

    def _finish(self, finish, gated, device):
        with torch.inference_mode():
            if device is None:
                finish()
            else:
                self._copies[device].run(finish)
        for transfer in gated:
            transfer.is_ready = True

    def _buffers(self, transfers):
        """(device of the tensors, function that returns a tensor's buffer); None for the CPU."""
        device = transfers[0][1].device if transfers else None
        if device is None or device.type == "cpu":
            return None, torch.Tensor.data_ptr
        if device not in self._copies:
            self._copies[device] = DeviceCopies(device)
        return device, self._copies[device].buffer

    # --- progress ---

    def _advance(self):
        """Carry out all that does not wait; returns whether anything was. The caller holds the lock."""
        moved = False
        if self._error is not None:
            return moved
        try:
            for other, pair in self._pairs.items():
                if pair.advance():
                    moved = True
                if pair.is_closed and other in self._sockets:
                    self._watcher.remove(self._sockets.pop(other))
        except ExchangeError as error:
            self._error = error
        return moved

    def _look_after(self):
        """Have the group's thread carry out what no thread waits for. The caller holds the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="shared memory")
            self._thread.start()
        if not self._num_waiting:
            self._watcher.set_timer(GRACE_S)

    def _run(self):
        """The group's thread."""
        while True:
            self._watcher.wait_armed()
            events = [None]
            while events:
                with self._lock:
                    if self._is_shut:
                        return
                    self._watcher.set_timer(0)
                    if self._num_waiting:
                        break
                    self._advance()
                    self._arm({other for other, pair in self._pairs.items() if not pair.is_idle})
                    events = self._copying()
                for event in events[:1]:
                    event.synchronize()

    def _copying(self):
        """Events of a device's unfinished copies."""
        return [event for pair in self._pairs.values() for event in pair.copying] if self._copies else []

    def _arm(self, wanted):
        """Wake the group's thread when sockets to these ranks become readable. The caller holds the lock."""
        wanted = wanted & self._sockets.keys()
        for other in wanted | (self._armed & self._sockets.keys()):
            self._watcher.arm(self._sockets[other], other in wanted)
        self._armed = wanted

    def test(self, operation):
        """Whether an operation is done. Raises ExchangeError."""
        with self._lock:
            self._advance()
            self._check(operation)
            return operation.is_done

    def wait(self, operation, timeout_s=0.0):
        """Wait until an operation is done. timeout_s: 0: the group's. Raises ExchangeError."""
        if operation.is_done:
            return
        with self._lock:
            self._num_waiting += 1
            self._watcher.set_timer(0)
            if self._armed:
                self._arm(set())
        spin_until_s = deadline_s = 0.0
        try:
            while True:
                with self._lock:
                    moved = self._advance()
                    if operation.is_done:
                        return
                    self._check(operation)
                now_s = time.perf_counter()
                deadline_s = deadline_s or now_s + (timeout_s or self._timeout_s)
                if moved or not spin_until_s:
                    spin_until_s = now_s + SPIN_S
                elif now_s > deadline_s:
                    raise ExchangeError(f"{operation.kind} was not done after {timeout_s or self._timeout_s:g} s: "
                                        f"waiting for rank {self._late()}")
                elif now_s > spin_until_s:
                    self._sleep(min(WAKE_S, deadline_s - now_s + 1e-3))
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not all(pair.is_idle for pair in self._pairs.values()):
                    self._look_after()

    def _sleep(self, timeout_s):
        """Wait until there may be something to do."""
        with self._lock:
            events = self._copying()
        if events:
            events[0].synchronize()
        else:
            self._watcher.wait(timeout_s)

    def _check(self, operation):
        if self._error is not None:
            raise ExchangeError(f"{operation.kind} failed: {self._error}")

    def _late(self):
        return ", ".join(str(pair.other) for pair in self._pairs.values() if pair.sends or pair.receives)

    def shutdown(self):
        """Close the connections. Other ranks still receive what this one has sent."""
        with self._lock:
            self._is_shut = True
            self._watcher.set_timer(1e-6)
            sockets, self._sockets = self._sockets, {}
            for memory in self._memories.values():
                memory.close()
        for each in sockets.values():
            each.close()


def _split(tensor, sizes, num_ranks):
    """Split a tensor along its first dim, by rank. sizes: None or []: equal ones."""
    if not sizes:
        if len(tensor) % num_ranks:
            raise ValueError(f"{len(tensor)} rows cannot be divided among {num_ranks} ranks")
        sizes = [len(tensor) // num_ranks] * num_ranks
    return tensor.split(sizes)


def _reduction(opts):
    for op, reduce in REDUCTIONS.items():
        if opts is None or opts.reduceOp == op:
            return reduce
    raise NotImplementedError(f"Use one of {', '.join(map(str, REDUCTIONS))}: {BACKEND} has no {opts.reduceOp}")


def chunk_bounds(num_elements, element_bytes, num_ranks):
    """Bounds of the chunks in which gloo's ring reduces a tensor, as element indices: num_ranks + 1 of them.

    gloo cuts a tensor into equal segments of at most GLOO_SEGMENT_BYTES, at least two for each rank, a multiple of the
    number of ranks; consecutive ones form a rank's chunk (gloo/allreduce.cc, `ring`).
    """
    num_bytes = num_elements * element_bytes
    largest = element_bytes * max(1, GLOO_SEGMENT_BYTES // element_bytes)
    num_segments = max(-(-num_bytes // largest), 2 * num_ranks)
    num_segments += -num_segments % num_ranks
    segment = -((-num_bytes // num_segments) // element_bytes)
    return [min(num_elements, rank * (num_segments // num_ranks) * segment) for rank in range(num_ranks + 1)]


def _reduce(of_ranks, chunk, own_rank, reduce):
    """Reduce a chunk of all ranks into this rank's, in the order of gloo's ring: the chunk starts at the rank
    before the one of its number, goes down the ranks, and ends at that of its number."""
    order = [(chunk - 1 - step) % len(of_ranks) for step in range(len(of_ranks))]
    own = of_ranks[own_rank]
    if not own.numel():
        return
    total = of_ranks[order[0]]
    for rank in order[1:-1]:
        total = reduce(of_ranks[rank], total)
    reduce(of_ranks[order[-1]], total, out=own)
