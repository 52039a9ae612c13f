"""A rank of the simulation: takes the place of torch.distributed's functions in a process that has joined a group by
gloo, and has the referee (server.py) carry out every exchange.

What arrives is there when it is waited for, and NaN until then (bytes of 0xFF). Buffers must not be touched before.
Tensors must be as ProcessGroupNCCL wants them. `get_backend` says "nccl", so that the product takes those branches.
"""

import ctypes
import importlib.util
import pickle
import socket
import sys
import uuid
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .referee import WORLD, Operation

# of those that torch maps to NCCL's
DTYPES = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}
REDUCTIONS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
OTHERS = ("all_gather", "all_gather_object", "all_to_all", "broadcast_object_list", "gather", "gather_object",
          "isend_object_list", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
          "scatter_object_list", "send_object_list", "recv_object_list")
NUM_FRAMES = 5                             # of a place in the source
ROOT = Path(__file__).resolve().parents[3]


class StrictNcclError(RuntimeError):
    """What NCCL forbids, or would wait for without end."""


class Buffer:
    """Elements of a contiguous tensor, as bytes."""

    def __init__(self, tensor, first=0, count=None):
        count = tensor.numel() if count is None else count
        self.dtype, self.num_bytes = str(tensor.dtype), count * tensor.element_size()
        self._tensor, self._start = tensor, tensor.data_ptr() + first * tensor.element_size()

    @property
    def _memory(self):
        return (ctypes.c_char * self.num_bytes).from_address(self._start)

    def read(self):
        return bytes(self._memory) if self.num_bytes else b""

    def write(self, content):
        if self.num_bytes:
            self._memory[:] = content

    def poison(self):
        self.write(b"\xff" * self.num_bytes)

    def overlaps(self, other):
        return self._start < other._start + other.num_bytes and other._start < self._start + self.num_bytes


@dataclass
class P2POp:
    """torch's own refuses functions that are not its own."""

    op: object
    tensor: torch.Tensor
    peer: int
    group: object = None


class Work:
    """The handle of an operation."""

    def __init__(self, rank, number, operation, buffers, on_arrival):
        """buffers: those that nobody may touch before the end. on_arrival({peer: bytes}) puts what arrived."""
        self._rank, self._number, self._operation, self._on_arrival = rank, number, operation, on_arrival
        self._expected = [(buffer, buffer.read()) for buffer in buffers]

    def is_completed(self):
        if self._expected is not None and self._rank.request("test", self._number):
            self.wait()
        return self._expected is None

    def wait(self, timeout=None):
        if self._expected is not None:
            self.finish(self._rank.request("wait", self._number, place()))
        return True

    def finish(self, arrived):
        changed = [buffer for buffer, content in self._expected if buffer.read() != content]
        if changed:
            self._rank.fault(f"BUFFER: {changed[0].num_bytes} bytes of {changed[0].dtype} were changed while the "
                             f"device may use them for {self._operation.kind} of {self._operation.communicator}, "
                             f"launched at {self._operation.where} and waited for at {place()}")
        self._on_arrival(arrived)
        self._expected = self._on_arrival = None


class StrictRank:
    """The connection of a rank to its referee, and torch.distributed's functions over it."""

    def __init__(self, address, queues):
        self.rank, self.world_size, self._queues = dist.get_rank(), dist.get_world_size(), queues
        names = [str(uuid.uuid4())]
        dist.broadcast_object_list(names)
        connecting = socket.socket(socket.AF_UNIX)
        connecting.connect(address)
        self._connection, self._num_launched = Connection(connecting.detach()), 0
        self._communicators = {}                               # id of a group -> (its communicator's name, the group)
        self.request("join", names[0], self.rank, self.world_size)

    def install(self):
        """Take the place of torch's functions until the process ends."""
        from torch.testing._internal.distributed import fake_pg  # noqa: F401       # registers the backend
        if not hasattr(dist, "ProcessGroupNCCL"):              # in a torch for CPUs
            dist.ProcessGroupNCCL = SimpleNamespace(Options=SimpleNamespace)
        for name in ("all_to_all_single", "all_gather_into_tensor", "all_reduce", "broadcast", "barrier", "isend",
                     "irecv", "send", "recv", "batch_isend_irecv", "new_group", "split_group", "destroy_process_group",
                     "get_backend"):
            setattr(dist, name, getattr(self, name))
        if hasattr(dist, "all_gather_single"):
            dist.all_gather_single = self.all_gather_into_tensor
        dist.P2POp = P2POp
        torch.cuda.synchronize = lambda device=None: self.request("synchronize", place())
        for name in OTHERS:
            setattr(dist, name, lambda *_, name=name, **__: self.fault(f"{name} is not simulated, at {place()}"))

    def request(self, *message):
        self._connection.send(message)
        error, answer = self._connection.recv()
        if error:
            raise StrictNcclError(error)
        return answer

    def fault(self, text):
        self.request("fault", text)

    def leave(self, error=None):
        """This rank launches nothing more. error: what it raised."""
        if self._connection is not None:
            if error is not None:
                self._connection.send(("gone", f"{type(error).__name__}: {error}"))
            self._connection.close()
            self._connection = None

    # --- operations ---

    def _launched(self, group, kind, sends, receives, agreed=(), on_arrival=None, shared=None):
        """The Work of an operation. sends, receives: {peer: Buffer}. shared: the Buffer of what is reduced in place."""
        for name, buffer in (*sends.items(), *receives.items()):
            self._check(buffer._tensor, kind)
        operation = Operation(
            self._communicator(group), tuple(dist.get_process_group_ranks(_world_or(group))), kind,
            {peer: (buffer.read(), buffer.dtype) for peer, buffer in sends.items()},
            {peer: (buffer.num_bytes, buffer.dtype) for peer, buffer in receives.items()}, agreed, place())
        for buffer in receives.values() if shared is None else (shared,):
            if shared is not None or not any(buffer.overlaps(sent) for sent in sends.values()):
                buffer.poison()

        def put(arrived):
            for peer, content in arrived.items():
                receives[peer].write(content)
        number, self._num_launched = self._num_launched, self._num_launched + 1
        work = Work(self, number, operation, [*sends.values(), *receives.values()], on_arrival or put)
        arrived = self.request("launch", number, operation)
        if self._queues == "launch":
            work.finish(arrived)
        return work

    def _check(self, tensor, kind):
        of_channels = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
        if not any(tensor.is_contiguous(memory_format=each) for each in (torch.contiguous_format, of_channels)):
            self.fault(f"{kind}: a tensor {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous, at "
                       f"{place()}")
        if tensor.dtype not in DTYPES:
            self.fault(f"{kind}: NCCL has no {tensor.dtype}, at {place()}")

    def _communicator(self, group):
        if group is None or group is dist.group.WORLD:
            return WORLD
        if id(group) not in self._communicators:
            self.fault(f"a group of other ranks, or one that is destroyed, is used at {place()}")
        return self._communicators[id(group)][0]

    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, group=None,
                          async_op=False):
        ranks = dist.get_process_group_ranks(_world_or(group))

        def pieces(tensor, sizes):
            sizes = sizes or [len(tensor) // len(ranks)] * len(ranks)
            if sum(sizes) != len(tensor):
                self.fault(f"all_to_all: {sizes} are not the parts of {tuple(tensor.shape)}, at {place()}")
            row = tensor.numel() // max(1, len(tensor))
            starts = [sum(sizes[:index]) * row for index in range(len(sizes))]
            return {rank: Buffer(tensor, start, size * row) for rank, start, size in zip(ranks, starts, sizes)}
        return _result(self._launched(group, "all_to_all", pieces(input, input_split_sizes),
                                      pieces(output, output_split_sizes)), async_op)

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        ranks, count = dist.get_process_group_ranks(_world_or(group)), input_tensor.numel()
        if output_tensor.numel() != count * len(ranks):
            self.fault(f"all_gather: {len(ranks)} of {tuple(input_tensor.shape)} are not {tuple(output_tensor.shape)}, "
                       f"at {place()}")
        receives = {rank: Buffer(output_tensor, index * count, count) for index, rank in enumerate(ranks)}
        return _result(self._launched(group, "all_gather", dict.fromkeys(ranks, Buffer(input_tensor)), receives,
                                      (count, str(input_tensor.dtype))), async_op)

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        ranks, buffer = dist.get_process_group_ranks(_world_or(group)), Buffer(tensor)

        def reduce(arrived):
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                total, *others = (torch.frombuffer(bytearray(arrived[rank]), dtype=tensor.dtype) for rank in ranks)
                for other in others:
                    total = REDUCTIONS[op](total, other)
                buffer.write(Buffer(total).read())
        if op not in REDUCTIONS:
            self.fault(f"all_reduce by {op} is not simulated, at {place()}")
        each = dict.fromkeys(ranks, buffer)
        return _result(self._launched(group, "all_reduce", each, each, (tensor.numel(), str(tensor.dtype), str(op)),
                                      reduce if tensor.numel() else lambda arrived: None, buffer), async_op)

    def broadcast(self, tensor, src=0, group=None, async_op=False):
        buffer = Buffer(tensor)
        others = [rank for rank in dist.get_process_group_ranks(_world_or(group)) if rank != src]
        sends, receives = (dict.fromkeys(others, buffer), {}) if self.rank == src else ({}, {src: buffer})
        return _result(self._launched(group, "broadcast", sends, receives, (tensor.numel(), str(tensor.dtype), src)),
                       async_op)

    def barrier(self, group=None, async_op=False, device_ids=None):
        return _result(self._launched(group, "barrier", {}, {}), async_op)

    def isend(self, tensor, dst, group=None):
        return self._launched(group, "p2p", {dst: Buffer(tensor)}, {})

    def irecv(self, tensor, src, group=None):
        return self._launched(group, "p2p", {}, {src: Buffer(tensor)})

    def send(self, tensor, dst, group=None):
        self.isend(tensor, dst, group).wait()

    def recv(self, tensor, src, group=None):
        self.irecv(tensor, src, group).wait()

    def batch_isend_irecv(self, transfers):
        """One kernel for all of them, as NCCL has it."""
        sends = {each.peer: Buffer(each.tensor) for each in transfers if each.op == self.isend}
        receives = {each.peer: Buffer(each.tensor) for each in transfers if each.op == self.irecv}
        assert len(sends) + len(receives) == len(transfers)
        return [self._launched(transfers[0].group, "p2p", sends, receives)]

    # --- groups ---

    def get_backend(self, group=None):
        return "nccl"

    def new_group(self, ranks, timeout=None, pg_options=None):
        own = self._split([ranks])
        return dist.GroupMember.NON_GROUP_MEMBER if own is None else own

    def split_group(self, parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None):
        return self._split(split_ranks)

    def _split(self, groups):
        """This rank's group: one of torch that knows its ranks, and exchanges nothing."""
        groups = tuple(tuple(sorted(ranks)) for ranks in groups)
        number = self.request("split", groups, place())
        own = None
        for ranks in groups:
            if self.rank in ranks:
                own = c10d.new_group(ranks, backend="fake")
                name = f"communicator {number} of ranks {', '.join(map(str, ranks))}"
                self._communicators[id(own)] = name, own
        return own

    def destroy_process_group(self, group=None):
        if group is None or group is dist.group.WORLD:
            self.leave()
        else:
            self.request("destroy", self._communicator(group), place())
            del self._communicators[id(group)]
        c10d.destroy_process_group(group)


def place():
    """Where in the product or in a test this is, the innermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None and len(found) < NUM_FRAMES:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.parent != Path(__file__).parent:
            found.append(f"{path.relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


def _world_or(group):
    return dist.group.WORLD if group is None else group


def _result(work, async_op):
    return work if async_op else work.wait() and None


def run_strictly(rank, world_size, strict, source, arguments):
    """Call a test's function on this rank under the simulation. strict: (address, queues, name of a mutant)."""
    address, queues, mutant = strict
    own = StrictRank(address, queues)
    own.install()
    module_name, path, function_name = source
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module_name])
    if mutant:
        from .mutants import MUTANTS
        MUTANTS[mutant](rank)
    try:
        result = getattr(sys.modules[module_name], function_name)(rank, world_size, *pickle.loads(arguments))
    except Exception as error:
        own.leave(error)
        raise
    own.leave()
    return result
