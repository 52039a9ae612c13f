"""The process group: torch.distributed's collectives over the pairs of ranks. docs/design/shared-memory.md.

It is registered with torch as the backend `shared_memory`, so that callers use torch.distributed's functions. As with
NCCL, all ranks begin the operations of a group in the same order; operations of different groups are independent.
Tensors are contiguous. Sums and maxima have the bits of gloo's.
"""

import functools
import os
import threading
import time

import torch
import torch.distributed as dist

from .memory import DeviceMemory, HostMemory
from .pair import ExchangeError, Pair, Transfer, segment_bytes
from .segments import Watcher, connect_pairs

BACKEND = "shared_memory"
SPIN_S = 5e-5                              # how long a waiting rank polls before it sleeps
WAKE_S = 0.1                               # longest sleep before a waiting thread looks again
SMALL_BYTES = 2 ** 15                      # tensors up to this size are reduced by every rank, in one exchange
GLOO_SEGMENT_BYTES = 2 ** 20               # longest segment of gloo's ring, see `chunk_bounds`
REDUCTIONS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}


def register(folder):
    """Register the backend with torch.distributed in this process.

    folder: private to this user and common to the ranks, for their listening sockets while groups are created.
    """
    dist.Backend.register_backend(BACKEND, functools.partial(_create, folder), extended_api=True,
                                  devices=["cpu", "cuda"])


def _create(folder, options, _backend_options):
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
    """A running operation of a group: its transfers in stages. A stage begins when those of the one before are done.

    stages: functions to run when the transfers so far are done, each of which readies the transfers of the next stage.
    """

    def __init__(self, group, kind):
        super().__init__()
        self.kind, self.peers, self.event, self.tensors = kind, set(), None, ()
        self._group, self._num_left, self._next = group, [0], []

    def expect(self, stage=0):
        """Count a transfer of a stage."""
        self._num_left += [0] * (stage + 1 - len(self._num_left))
        self._num_left[stage] += 1

    def then(self, function):
        self._next.append(function)

    def one_done(self):
        self._num_left[0] -= 1
        self.settle()

    def settle(self):
        """Begin the next stages whose transfers are all done."""
        while self._num_left and not self._num_left[0]:
            self._num_left.pop(0)
            if self._next:
                self._next.pop(0)()

    @property
    def is_done(self):
        return not self._num_left

    def is_completed(self):
        return self._group.test(self)

    def wait(self, timeout=None):
        """Wait until the operation is done. timeout: timedelta; None: the group's. Raises ExchangeError."""
        self._group.wait(self, timeout.total_seconds() if timeout else 0.0)
        return True


class SharedMemoryGroup(dist.ProcessGroup):
    """torch.distributed's process group over shared memory. Methods have the names under which torch calls them.

    The thread that waits for an operation carries out the copies. Where none waits, a thread of the group does, when
    another rank has announced something. Both hold `_lock` while they copy, and not while they wait.
    """

    def __init__(self, rank, ranks, connected, timeout_s):
        """ranks: in the world, of each rank of the group. connected: of segments.connect_pairs."""
        super().__init__(rank, len(ranks))
        self._rank, self._size, self._ranks, self._timeout_s = rank, len(ranks), ranks, timeout_s
        self._sockets, self._mapped = ({other: pair[index] for other, pair in connected.items()} for index in (0, 1))
        self._host = {other: HostMemory(mapped) for other, mapped in self._mapped.items()}
        self._device_memory, self._streams = {}, {}
        # nearest following rank first, so that not all ranks send to the same one
        order = [(rank + step) % self._size for step in range(1, self._size)]
        self._pairs = {other: Pair(ranks[other], self._host[other], Link(self._sockets[other]), rank < other)
                       for other in order}
        self._watcher = Watcher(self._sockets.values())
        self._lock, self._num_waiting, self._error = threading.Lock(), 0, None
        self._stop_reading, self._thread, self._armed = None, None, set()
        self._pid = os.getpid()

    def getBackendName(self):
        return BACKEND

    # --- operations ---

    def send(self, tensors, other, tag=0):
        return self._begin("send", sends={other: tensors[0]})

    def recv(self, tensors, other, tag=0):
        return self._begin("recv", receives={other: tensors[0]})

    def alltoall_base(self, output, tensor, output_sizes, sizes, opts=None):
        sent = _split(tensor, sizes, self._size)
        received = _split(output, output_sizes, self._size)
        received[self._rank].copy_(sent[self._rank])
        return self._begin("all_to_all", self._others(sent), self._others(received))

    def _allgather_base(self, output, tensor, opts=None):
        received = _split(output, None, self._size)
        if received[self._rank].data_ptr() != tensor.data_ptr():
            received[self._rank].copy_(tensor.reshape(received[self._rank].shape))
        return self._begin("all_gather", dict.fromkeys(self._pairs, tensor), self._others(received))

    def allgather(self, outputs, tensors, opts=None):
        outputs[0][self._rank].copy_(tensors[0])
        return self._begin("all_gather", dict.fromkeys(self._pairs, tensors[0]), self._others(outputs[0]))

    def broadcast(self, tensors, opts):
        if opts.rootRank == self._rank:
            return self._begin("broadcast", sends=dict.fromkeys(self._pairs, tensors[0]))
        return self._begin("broadcast", receives={opts.rootRank: tensors[0]})

    def barrier(self, opts=None):
        there = torch.zeros(self._size, dtype=torch.uint8)
        return self._begin("barrier", dict.fromkeys(self._pairs, there[:1].clone()), self._others(there.split(1)))

    def allreduce(self, tensors, opts=None):
        tensor, reduce = tensors[0], REDUCTIONS.get(_op_of(opts))
        if reduce is None:
            raise NotImplementedError(f"{BACKEND} reduces by {', '.join(map(str, REDUCTIONS))}")
        flat = tensor.view(-1)
        bounds = chunk_bounds(flat.numel(), flat.element_size(), self._size)
        chunks = [flat[start:end] for start, end in zip(bounds, bounds[1:])]
        return (self._reduce_small if tensor.nbytes <= SMALL_BYTES else self._reduce_large)(flat, chunks, reduce)

    def _reduce_small(self, flat, chunks, reduce):
        """Exchange the tensors; every rank reduces all of them."""
        of_ranks = [flat if rank == self._rank else torch.empty_like(flat) for rank in range(self._size)]
        bounds = [chunk.storage_offset() - flat.storage_offset() for chunk in chunks]
        parts = [[each[start:start + chunk.numel()] for start, chunk in zip(bounds, chunks)] for each in of_ranks]

        def finish(operation):
            for index in range(self._size):
                _reduce([part[index] for part in parts], index, self._rank, reduce)
        return self._begin("all_reduce", dict.fromkeys(self._pairs, flat), self._others(of_ranks), finish)

    def _reduce_large(self, flat, chunks, reduce):
        """Each rank reduces one chunk of all ranks' tensors, and sends it to the others."""
        own = chunks[self._rank]
        parts = [own if rank == self._rank else torch.empty_like(own) for rank in range(self._size)]
        return self._begin("all_reduce", self._others(chunks), self._others(parts),
                           lambda operation: _reduce(parts, self._rank, self._rank, reduce),
                           dict.fromkeys(self._pairs, own), self._others(chunks))

    def _others(self, of_ranks):
        return {other: of_ranks[other] for other in self._pairs}

    def _begin(self, kind, sends=(), receives=(), finish=None, next_sends=(), next_receives=()):
        """Begin an operation; returns it.

        sends, receives: {rank of the group: contiguous tensor}. finish: called when these are done, before next_sends;
        it runs in any thread. next_receives may arrive before that, since their senders have what `sends` sent.
        """
        operation, gated = Operation(self, kind), []
        first = ((sends, True, 0, True), (receives, False, 0, True))
        second = ((next_sends, True, 1, False), (next_receives, False, 1, True))
        tensors = [tensor for each in (sends, receives, next_sends) for tensor in dict(each).values()]
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        with self._lock:
            ready = self._event(device)
            for (each, is_send, stage, is_ready) in first + second:
                for other, tensor in dict(each).items():
                    if not tensor.is_contiguous():
                        raise ValueError(f"{kind} of {BACKEND} needs contiguous tensors, and one of shape "
                                         f"{tuple(tensor.shape)} has strides {tensor.stride()}")
                    if not tensor.numel():
                        continue
                    buffer = self._buffer(tensor, device, ready)
                    transfer = Transfer(buffer, tensor.nbytes, operation, is_ready)
                    operation.expect(stage)
                    operation.peers.add(other)
                    (self._pairs[other].sends if is_send else self._pairs[other].receives).append(transfer)
                    if not is_ready:
                        gated.append(transfer)
            if finish is not None:
                operation.then(lambda: self._finish(operation, finish, gated, device))
            # gloo requires tensors to live until the operation is done, and so do addresses here
            operation.tensors = (sends, receives, next_sends, next_receives)
            operation.settle()
            self._advance()
            self._arm()
        return operation

    def _buffer(self, tensor, device, ready):
        if device is None:
            return tensor.data_ptr()
        return tensor.detach().view(-1).view(torch.uint8), ready

    def _event(self, device):
        if device is None:
            return None
        return torch.get_device_module(device).current_stream(device).record_event()

    def _finish(self, operation, finish, gated, device):
        with torch.inference_mode():
            finish(operation)
        for transfer in gated:
            transfer.is_ready = True

    # --- progress ---

    def _advance(self):
        """Carry out all that does not wait; returns whether anything was. The caller holds the lock."""
        if self._error is not None:
            return False
        moved = False
        try:
            for pair in self._pairs.values():
                moved |= pair.advance()
        except ExchangeError as error:
            self._error = error
        for other, pair in self._pairs.items():
            if pair.is_closed and other in self._sockets:
                self._watcher.remove(self._sockets.pop(other))
        return moved

    def _arm(self):
        """Have the group's thread woken for what no thread waits for. The caller holds the lock."""
        wanted = set() if self._num_waiting or self._error else {
            other for other, pair in self._pairs.items() if not pair.is_idle and other in self._sockets}
        if wanted and self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="shared memory")
            self._thread.start()
        for other in wanted | (self._armed & self._sockets.keys()):
            self._watcher.arm(self._sockets[other], other in wanted)
        self._armed = wanted

    def _run(self):
        while True:
            self._watcher.wait_armed()
            with self._lock:
                if self._stop_reading:
                    return
                if not self._num_waiting:
                    self._advance()
                    self._arm()

    def test(self, operation):
        """Whether an operation is done. Raises ExchangeError."""
        with self._lock:
            self._advance()
            self._check(operation)
            return operation.is_done

    def wait(self, operation, timeout_s=0.0):
        """Wait until an operation is done. timeout_s: 0: the group's. Raises ExchangeError."""
        with self._lock:
            self._num_waiting += 1
            self._arm()
        now_s = time.perf_counter()
        deadline_s, spin_until_s = now_s + (timeout_s or self._timeout_s), now_s + SPIN_S
        try:
            while True:
                with self._lock:
                    moved = self._advance()
                    self._check(operation)
                    if operation.is_done:
                        return
                now_s = time.perf_counter()
                if moved:
                    spin_until_s = now_s + SPIN_S
                elif now_s > deadline_s:
                    raise ExchangeError(f"{operation.kind} was not done after {timeout_s or self._timeout_s:g} s: "
                                        f"waiting for rank {self._late(operation)}")
                elif now_s > spin_until_s:
                    self._watcher.wait(WAKE_S)
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._arm()

    def _check(self, operation):
        if self._error is not None and not operation.is_done:
            raise ExchangeError(f"{operation.kind} failed: {self._error}")

    def _late(self, operation):
        return ", ".join(str(self._ranks[other]) for other in sorted(operation.peers)
                         if not self._pairs[other].is_idle)

    def shutdown(self):
        with self._lock:
            self._stop_reading = True
        for each in self._sockets.values():
            each.close()


def _split(tensor, sizes, num_ranks):
    """Pieces of a tensor along its first dim, by rank. sizes: None or []: equal ones."""
    if not sizes:
        if len(tensor) % num_ranks:
            raise ValueError(f"{len(tensor)} rows cannot be divided among {num_ranks} ranks")
        sizes = [len(tensor) // num_ranks] * num_ranks
    return tensor.split(sizes)


def _op_of(opts):
    return dist.ReduceOp.SUM if opts is None else next((op for op in REDUCTIONS if opts.reduceOp == op), None)


def chunk_bounds(num_elements, element_bytes, num_ranks):
    """Bounds of the chunks in which gloo's ring reduces a tensor, as element indices: num_ranks + 1 of them.

    gloo cuts a tensor into equal segments of at most GLOO_SEGMENT_BYTES, at least two for each rank, a multiple of the
    number of ranks; consecutive ones form a rank's chunk (gloo/allreduce.cc, `ring`).
    """
    num_bytes = num_elements * element_bytes
    largest = element_bytes * max(1, GLOO_SEGMENT_BYTES // element_bytes)
    num_segments = max(-(-num_bytes // largest), 2 * num_ranks)
    num_segments += -num_segments % num_ranks
    segment = -(--(-num_bytes // num_segments) // element_bytes)
    return [min(num_elements, rank * (num_segments // num_ranks) * segment) for rank in range(num_ranks + 1)]


def _reduce(parts, chunk, own_rank, reduce):
    """Reduce all ranks' parts of a chunk into this rank's, in the order of gloo's ring: the chunk starts at the rank
    before the one of its number, goes down the ranks, and ends at that of its number."""
    order = [(chunk - 1 - step) % len(parts) for step in range(len(parts))]
    own = parts[own_rank]
    if not own.numel():
        return
    total = parts[order[0]]
    for rank in order[1:-1]:
        total = reduce(parts[rank], total)
    reduce(parts[order[-1]], total, out=own)
