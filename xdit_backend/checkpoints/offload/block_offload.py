"""Block offloading: blocks whose weights are in system RAM and streamed to the device just before they run, through a
few buffers there.

A weight of such a block is a view of its buffer, whose address is fixed. Its contents are valid while its block runs.
Weights are streamed as stored: float8 or packed bytes, which are unpacked at use.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from ...planner.offload_cost import num_buffers
from ...protocol.errors import CheckpointError, CopyError

ALIGNMENT = 512                            # bytes; of a weight in a buffer, as in torch's allocator


@dataclass(frozen=True)
class CooperativeLoad:
    """This rank among those that have the same blocks, of which each copies a shard from system RAM.

    exchange(rows): all-gathers rows, (num_ranks, bytes) on the device, of which this rank has filled its own. A
    collective: these ranks run the same blocks in the same order, equally often.
    """

    rank: int
    num_ranks: int
    exchange: Callable


@dataclass
class Buffer:
    """Device memory for the weights of one block at a time."""

    memory: torch.Tensor
    holds: int | None = None               # the block whose weights are here, or being copied
    arriving: Future | None = None         # None: no copy in progress
    num_passed: int = 0                    # interleaved forwards that have run the block
    is_used: bool = False                  # some of them have entered it
    is_part: bool = False                  # only this rank's shard of the weights was copied
    needs_exchange: bool = False           # all-gather before the block runs


@dataclass
class OffloadedBlock:
    """The weights of a block, with their host copies and their views of the buffer."""

    weights: list = field(default_factory=list)
    host_copies: list = field(default_factory=list)
    views: list = field(default_factory=list)
    buffer: int = 0

    @property
    def num_bytes(self):
        return sum(aligned(host_copy.nbytes) for host_copy in self.host_copies)


class OffloadedBlocks:
    """The offloaded blocks of a model on this rank.

    copies: a CopyThread, or an object with its methods. Forwards that are interleaved after each block share streamed
    weights: a buffer gets another block when all of them have run the one that it has. files: mapped by weights in
    system RAM.
    """

    def __init__(self, device, copies, files=()):
        self._device, self._copies = device, copies
        self._blocks: dict[int, OffloadedBlock] = {}
        self._buffers: list[Buffer] = []
        self._order: list[int] = []
        self._num_forwards, self._sharing = 1, None
        # since the model was loaded: bytes copied from system RAM, and bytes sent to ranks with the same weights
        self.copied_bytes = self.sent_bytes = 0
        self._mark, self._waits = (lambda: None), []
        self._files = {file: os.stat(file) for file in files}

    def check_files(self):
        """Raise CheckpointError if a file was written to since the model was loaded, since streamed weights may mix old
        and new contents. The map of a file that was removed or replaced is unaffected. Streamed weights are discarded,
        since the file may be restored."""
        for file, was in self._files.items():
            with suppress(OSError):
                now = os.stat(file)
                if now.st_ino == was.st_ino and (now.st_mtime_ns, now.st_size) != (was.st_mtime_ns, was.st_size):
                    self._forget()
                    raise CheckpointError(f"Queue the prompt again, which reloads the file: {file} was written to "
                                          f"while a run was streaming weights from it.")

    def _forget(self):
        """Discard all streamed weights. Buffers keep their addresses."""
        self._copies.drain()
        for buffer in self._buffers:
            buffer.holds = buffer.arriving = None

    @property
    def blocks(self):
        return tuple(self._blocks)

    @property
    def buffer_bytes(self):
        """Device memory of the buffers, when allocated."""
        sizes = [block.num_bytes for block in self._blocks.values()]
        return num_buffers(len(sizes)) * max(sizes, default=0)

    @property
    def device_bytes(self):
        """Device memory of the buffers now."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    @property
    def host_bytes(self):
        """Bytes of the offloaded weights."""
        return sum(host_copy.nbytes for block in self._blocks.values() for host_copy in block.host_copies)

    @property
    def weights(self):
        """{id of a weight: the weight}."""
        return {id(weight): weight for block in self._blocks.values() for weight in block.weights}

    def time_waits(self, mark):
        """Record from now on when the device waits for weights. mark(): the current time, in the order of the device's
        work. Returns a list that receives pairs of marks."""
        self._mark, self._waits = mark, []
        return self._waits

    def add(self, index, weights, host_copies=None):
        """Offload these weights of a block. Blocks are added in order. host_copies: their values in system RAM; None:
        their current storage."""
        self._blocks[index] = OffloadedBlock(list(weights), host_copies or [weight.data for weight in weights])

    def replace(self, weight, host_copy):
        """Set a weight to another value, in system RAM."""
        self.drop()
        for block in self._blocks.values():
            for number, own in enumerate(block.weights):
                if own is weight:
                    block.host_copies[number] = weight.data = host_copy

    def drop(self):
        """Free the buffers; the weights become their host copies. The next forward allocates buffers again."""
        self._copies.drain()
        for block in self._blocks.values():
            block.views = []
            for weight, host_copy in zip(block.weights, block.host_copies):
                weight.data = host_copy
        self._buffers = []

    def restore(self):
        """Allocate the buffers again."""
        if self._buffers:
            return
        sizes = [block.num_bytes for block in self._blocks.values()]
        self._buffers = [Buffer(torch.empty(max(sizes), dtype=torch.uint8, device=self._device))
                         for _ in range(num_buffers(len(sizes)))]
        for number, block in enumerate(self._blocks.values()):
            block.buffer, start = number % len(self._buffers), 0
            memory = self._buffers[block.buffer].memory
            for weight, host_copy in zip(block.weights, block.host_copies):
                weight.data = view_of(memory[start:start + host_copy.nbytes], host_copy)
                block.views.append(weight.data)
                start += aligned(host_copy.nbytes)

    def copy_by(self, is_pageable, sharing=None):
        """Configure copies from now on. is_pageable: of CopyThread. sharing: a CooperativeLoad; None: this rank copies
        everything."""
        self._copies.is_pageable, self._sharing = is_pageable, sharing

    # --- called by the hooks ---

    def begin(self, blocks, num_forwards=1):
        """Forwards of these blocks begin, interleaved after each block. State of an earlier forward that failed is
        discarded."""
        self.restore()
        self._order, self._num_forwards = [index for index in self._blocks if index in blocks], num_forwards
        for buffer in self._buffers:
            buffer.num_passed, buffer.is_used = 0, False
            has_failed = buffer.arriving is not None and buffer.arriving.done() and buffer.arriving.exception()
            if has_failed or (buffer.is_part and self._sharing is None):
                buffer.holds = buffer.arriving = None
            # even if all shards are here: another rank may have run other commands before, and lack them
            buffer.needs_exchange = self._sharing is not None
        self._fetch_from(0)

    def enter(self, index):
        """Called before a forward runs a block: wait for its weights. Raises CopyError if the copy failed."""
        if index not in self._blocks:
            return
        buffer = self._buffers[self._blocks[index].buffer]
        if buffer.holds != index:                              # not prefetched: blocks before it were skipped
            self._fetch(buffer, index)
        buffer.is_used = True
        if buffer.arriving is not None or buffer.needs_exchange:
            requested = self._mark()
            if buffer.arriving is not None:
                self._await(buffer, index)
            if buffer.needs_exchange:
                self._exchange(buffer, self._blocks[index])
            self._waits.append((requested, self._mark()))

    def _await(self, buffer, index):
        try:
            self._copies.wait(buffer.arriving)
        except Exception as error:
            buffer.holds = None
            raise CopyError(
                f"Queue the prompt again, which starts other workers: the weights of block {index} could not be copied "
                f"from system RAM to {self._device} ({type(error).__name__}: {error}). If that fails too, close "
                f"programs that use system RAM, or set weights_memory in xDiT Parallel Config to more GB, so that less "
                f"is copied.") from error
        finally:
            buffer.arriving = None

    def _exchange(self, buffer, block):
        """All-gather the other ranks' shards, in the order of the device's work: neither the block runs before, nor is
        the next one copied into this buffer."""
        num_ranks, part_bytes = self._sharing.num_ranks, self._part_bytes(block)
        if part_bytes:
            self._sharing.exchange(buffer.memory[:num_ranks * part_bytes].view(num_ranks, part_bytes))
            self.sent_bytes += (num_ranks - 1) * part_bytes
        buffer.is_part = buffer.needs_exchange = False

    def leave(self, index):
        """Called after a forward has run a block. After the last forward its buffer is free for the next block."""
        if index not in self._blocks:
            return
        buffer = self._buffers[self._blocks[index].buffer]
        buffer.num_passed += 1
        if buffer.num_passed == self._num_forwards:
            buffer.num_passed, buffer.is_used = 0, False
            self._fetch_from(self._order.index(index) + 1)

    def _fetch_from(self, position):
        """Fetch into every unused buffer the block that needs it next; the last block is followed by the first one of
        the next step."""
        unused = {number for number, buffer in enumerate(self._buffers) if not buffer.is_used}
        for index in self._order[position:] + self._order[:position]:
            number = self._blocks[index].buffer
            if number in unused:
                unused.remove(number)
                if self._buffers[number].holds != index:
                    self._fetch(self._buffers[number], index)

    def _fetch(self, buffer, index):
        pairs = self._pairs(self._blocks[index])
        buffer.holds, buffer.arriving = index, self._copies.start(pairs)
        buffer.is_part = buffer.needs_exchange = self._sharing is not None
        self.copied_bytes += sum(source.nbytes for source, _ in pairs)

    def _part_bytes(self, block):
        """Bytes of each rank's shard of a block."""
        return block.num_bytes // self._sharing.num_ranks // ALIGNMENT * ALIGNMENT

    def _pairs(self, block):
        """[(host memory, its view of the buffer)] that this rank copies of a block: its shard, and the remainder at the
        end. A weight with gaps, whose bytes are not contiguous, is copied in full by all."""
        pairs = [(_flat(host_copy), _flat(view)) if _is_dense(host_copy) else (host_copy, view)
                 for host_copy, view in zip(block.host_copies, block.views)]
        if self._sharing is None:
            return pairs
        part_bytes = self._part_bytes(block)
        first, shared = self._sharing.rank * part_bytes, self._sharing.num_ranks * part_bytes
        own, start = [], 0
        for source, target in pairs:
            if _is_dense(source):
                source, target = source.view(torch.uint8), target.view(torch.uint8)
                ranges = [slice(max(0, begin - start), max(0, end - start))
                          for begin, end in ((first, first + part_bytes), (shared, block.num_bytes))]
                own += [(source[range_], target[range_]) for range_ in ranges if source[range_].numel()]
            else:
                own.append((source, target))
            start += aligned(source.nbytes)
        return own


def aligned(num_bytes, alignment=ALIGNMENT):
    """Offset of the next weight after one of this many bytes."""
    return -(-num_bytes // alignment) * alignment


def _is_dense(tensor):
    """Whether it fills its memory without gaps, in any order of dims."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) == tensor.numel()


def view_of(memory, like):
    """Memory as a tensor, with the strides of `like` if those leave no gaps."""
    flat = memory.view(like.dtype)
    return flat.as_strided(like.shape, like.stride()) if _is_dense(like) else flat.view(like.shape)


def _flat(tensor):
    """A tensor without gaps, flattened in memory order, so that slices of it are contiguous."""
    return tensor.as_strided((tensor.numel(),), (1,))
