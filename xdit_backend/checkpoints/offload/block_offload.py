"""Blocks whose weights stay in host memory and come to the device just before they run, through a few buffers there.
Made by the loader on each rank; the hooks say when a block begins and ends.

A weight of such a block is a view of its buffer, whose address stays. What it holds is right while its block runs. What
comes is what is held: float8 or packed bytes, unpacked where they are used.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from ...planner.offload_cost import num_buffers
from ...protocol.errors import CheckpointError, CopyError

ALIGNMENT = 512                            # bytes; of a weight's place in a buffer, as torch's allocator has it


@dataclass(frozen=True)
class CooperativeLoad:
    """This rank's place among those that hold the same blocks, of which each brings a part from host memory.

    exchange(rows): rows, (num_ranks, bytes) of the device, have all ranks' own when it returns; before, this rank's
    alone. A collective: these ranks run the same blocks in the same order, as often.
    """

    rank: int
    num_ranks: int
    exchange: Callable


@dataclass
class Buffer:
    """Memory of the device for the weights of one block at a time."""

    memory: torch.Tensor
    holds: int | None = None               # the block whose weights are here, or on their way
    arriving: Future | None = None         # None: they are here
    num_passed: int = 0                    # forwards that have run the block, of those that take turns
    is_used: bool = False                  # have some of them begun it?
    is_part: bool = False                  # was only this rank's part of the weights copied?
    needs_exchange: bool = False           # before the block runs


@dataclass
class OffloadedBlock:
    """The weights of a block, where each is in host memory, and where in the buffer."""

    weights: list = field(default_factory=list)
    host_copies: list = field(default_factory=list)
    views: list = field(default_factory=list)
    buffer: int = 0

    @property
    def num_bytes(self):
        return sum(aligned(host_copy.nbytes) for host_copy in self.host_copies)


class OffloadedBlocks:
    """The blocks of a model on this rank whose weights are in host memory.

    copies: a CopyThread, or what has its methods. Forwards that take turns after each block share what has come: a
    buffer gets another block when all of them have run the one that it holds. files: that weights in host memory are
    maps of.
    """

    def __init__(self, device, copies, files=()):
        self._device, self._copies = device, copies
        self._blocks: dict[int, OffloadedBlock] = {}
        self._buffers: list[Buffer] = []
        self._order: list[int] = []
        self._num_forwards, self._sharing = 1, None
        # since the model was loaded: of weights from host memory, and of those sent to ranks that share them
        self.copied_bytes = self.sent_bytes = 0
        self._mark, self._waits = (lambda: None), []
        self._files = {file: os.stat(file) for file in files}

    def check_files(self):
        """Raise CheckpointError where a file was written to since the model was loaded: what came is perhaps of both.
        The map of one that was removed, or has another in its place, is what it was. What has come is forgotten, since
        the file may be put back as it was."""
        for file, was in self._files.items():
            with suppress(OSError):
                now = os.stat(file)
                if now.st_ino == was.st_ino and (now.st_mtime_ns, now.st_size) != (was.st_mtime_ns, was.st_size):
                    self._forget()
                    raise CheckpointError(f"Queue the prompt again, which loads the file anew: {file} was written to "
                                          f"while a run had weights come from it.")

    def _forget(self):
        """Have every block come anew. Buffers keep their addresses."""
        self._copies.drain()
        for buffer in self._buffers:
            buffer.holds = buffer.arriving = None

    @property
    def blocks(self):
        return tuple(self._blocks)

    @property
    def buffer_bytes(self):
        """Bytes of the device that the buffers take, when they are there."""
        sizes = [block.num_bytes for block in self._blocks.values()]
        return num_buffers(len(sizes)) * max(sizes, default=0)

    @property
    def device_bytes(self):
        """The same, now."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    @property
    def host_bytes(self):
        """Bytes of the weights that are in host memory."""
        return sum(host_copy.nbytes for block in self._blocks.values() for host_copy in block.host_copies)

    @property
    def weights(self):
        """{id of a weight: it}"""
        return {id(weight): weight for block in self._blocks.values() for weight in block.weights}

    def time_waits(self, mark):
        """From now on, know when weights are waited for. mark(): now, in the order of the device's work. Returns a
        list, which gets the pairs of marks."""
        self._mark, self._waits = mark, []
        return self._waits

    def add(self, index, weights, host_copies=None):
        """Have these weights of a block come from host memory. Blocks are added in order. host_copies: their values
        there; None: where their values are now."""
        self._blocks[index] = OffloadedBlock(list(weights), host_copies or [weight.data for weight in weights])

    def replace(self, weight, host_copy):
        """Give a weight another value, in host memory."""
        self.drop()
        for block in self._blocks.values():
            for number, own in enumerate(block.weights):
                if own is weight:
                    block.host_copies[number] = weight.data = host_copy

    def drop(self):
        """Let go of the buffers: the weights are what they are in host memory. The next forward makes others."""
        self._copies.drain()
        for block in self._blocks.values():
            block.views = []
            for weight, host_copy in zip(block.weights, block.host_copies):
                weight.data = host_copy
        self._buffers = []

    def restore(self):
        """Have the buffers again."""
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
        """How weights come from now on. is_pageable: CopyThread's. sharing: a Sharing; None: this rank brings all."""
        self._copies.is_pageable, self._sharing = is_pageable, sharing

    # --- what the hooks ask ---

    def begin(self, blocks, num_forwards=1):
        """Forwards of these blocks begin, which take turns after each. Where one before has failed, it is
        forgotten."""
        self.restore()
        self._order, self._num_forwards = [index for index in self._blocks if index in blocks], num_forwards
        for buffer in self._buffers:
            buffer.num_passed, buffer.is_used = 0, False
            has_failed = buffer.arriving is not None and buffer.arriving.done() and buffer.arriving.exception()
            if has_failed or (buffer.is_part and self._sharing is None):
                buffer.holds = buffer.arriving = None
            # also of what is here in whole: another rank may have run other commands before, and lack it
            buffer.needs_exchange = self._sharing is not None
        self._fetch_from(0)

    def enter(self, index):
        """A forward is about to run a block: wait until its weights are here. Raises CopyError where they do not
        come."""
        if index not in self._blocks:
            return
        buffer = self._buffers[self._blocks[index].buffer]
        if buffer.holds != index:                              # not foreseen: blocks before it were passed by
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
                f"from host memory to {self._device} ({type(error).__name__}: {error}). If that fails too, close "
                f"programs that use host memory, or set weights_memory of xDiT Parallel Config to a larger number of "
                f"GB, so that less is copied.") from error
        finally:
            buffer.arriving = None

    def _exchange(self, buffer, block):
        """Have the parts of the other ranks here, in the order of the device's work: no block runs before, nor is the
        next one copied into this buffer."""
        num_ranks, part_bytes = self._sharing.num_ranks, self._part_bytes(block)
        if part_bytes:
            self._sharing.exchange(buffer.memory[:num_ranks * part_bytes].view(num_ranks, part_bytes))
            self.sent_bytes += (num_ranks - 1) * part_bytes
        buffer.is_part = buffer.needs_exchange = False

    def leave(self, index):
        """A forward has run a block. After the last one its buffer is the next block's."""
        if index not in self._blocks:
            return
        buffer = self._buffers[self._blocks[index].buffer]
        buffer.num_passed += 1
        if buffer.num_passed == self._num_forwards:
            buffer.num_passed, buffer.is_used = 0, False
            self._fetch_from(self._order.index(index) + 1)

    def _fetch_from(self, position):
        """Have every buffer that is not used get the block that needs it next; after the last block comes the first
        one of the next step."""
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
        """Of each rank's part of a block."""
        return block.num_bytes // self._sharing.num_ranks // ALIGNMENT * ALIGNMENT

    def _pairs(self, block):
        """[(host memory, its place in the buffer)] of what this rank copies of a block: its part, and what is left at
        the end. A weight with gaps, which has no bytes in a row, is copied in whole by all."""
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
                pieces = [slice(max(0, begin - start), max(0, end - start))
                          for begin, end in ((first, first + part_bytes), (shared, block.num_bytes))]
                own += [(source[piece], target[piece]) for piece in pieces if source[piece].numel()]
            else:
                own.append((source, target))
            start += aligned(source.nbytes)
        return own


def aligned(num_bytes, alignment=ALIGNMENT):
    """Where the next weight begins, after one with so many bytes."""
    return -(-num_bytes // alignment) * alignment


def _is_dense(tensor):
    """Does it fill its part of memory without gaps, whatever the order of its dims?"""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) == tensor.numel()


def view_of(memory, like):
    """Memory as a tensor; in the order of dims of another, where that leaves no gaps."""
    flat = memory.view(like.dtype)
    return flat.as_strided(like.shape, like.stride()) if _is_dense(like) else flat.view(like.shape)


def _flat(tensor):
    """A tensor without gaps as it lies in memory: pieces of it are then in one piece."""
    return tensor.as_strided((tensor.numel(),), (1,))
