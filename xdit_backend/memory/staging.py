"""Copies between a device and host memory that is not page-locked: shared memory, maps of files. Used by workers.

CUDA copies such memory slowly, and makes the process wait for all that it has asked of the device before. Page-locking
it in place (cudaHostRegister) fails on files on disk and under WSL2, and costs for each page what it saves. So small
tensors go through page-locked memory that torch keeps for the purpose, and large ones through two page-locked pieces in
turn.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

PIECE_BYTES = 2 ** 24


def on_device(tensor, device):
    """A small tensor of host memory on `device`, copied when the device comes to it: this process does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PinnedAhead:
    """Tensors of host memory that a forward asks for by name on its way, too large to be copied by the thread that
    launches it: another page-locks them meanwhile, in their order. What has several names is page-locked once.

    Where the device is the host itself, nothing is copied.
    """

    def __init__(self, tensors, device):
        self._tensors, self._device, self._names = dict(tensors), device, frozenset(tensors)
        if device.type == "cuda" and tensors:
            pool, pinned = ThreadPoolExecutor(1, "xdit-pin"), {}
            for name, tensor in tensors.items():
                key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
                pinned[key] = self._tensors[name] = pinned.get(key) or pool.submit(tensor.pin_memory)
            pool.shutdown(wait=False)

    def __contains__(self, name):
        return name in self._names

    def __len__(self):
        return len(self._names)

    def take(self, name):
        """The tensor on the device; each name is asked for once."""
        given = self._tensors.pop(name)
        return (given.result().to(self._device, non_blocking=True) if self._device.type == "cuda"
                else given.to(self._device))


class StagingBuffers:
    """Carries large tensors between host memory and one device, in two pieces: one is filled while the other travels.

    Waiting for a piece takes no core, as CUDA's plain events do, which ask on and on.
    The pieces, page-locked where the device is a CUDA one, are made when they are first needed, and kept. Not for
    several threads at once. piece_bytes: None chooses, and copies directly where the device is the host itself.
    """

    def __init__(self, device, piece_bytes=None):
        self._device = device
        self._piece_bytes = piece_bytes or (PIECE_BYTES if device.type == "cuda" else None)
        self._pieces = []

    def to_device(self, source):
        """A contiguous copy of `source`, from host memory, on the device, in the order of its current stream.

        `source` has been read when this returns.
        """
        if self._piece_bytes is None:
            return source.to(self._device, copy=True, memory_format=torch.contiguous_format)
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self.copy(source, target)
        return target

    @property
    def is_direct(self):
        """Is the device the host itself?"""
        return self._piece_bytes is None

    def copy(self, source, target):
        """Copy `source`, host memory, to `target` on the device, of the same shape and dtype, in the order of its
        current stream. `source` has been read when this returns."""
        if self._piece_bytes is None:
            target.copy_(source)
            return
        for part, place in _parts(source, target, self._piece_bytes):
            piece, travelled = self._next(part.shape, part.dtype)
            piece.copy_(part)
            place.copy_(piece, non_blocking=True)
            travelled.record()

    def copy_pageable(self, source, target):
        """As `copy`, by CUDA's driver from where the source is: for a thread that may wait for its stream."""
        target.copy_(source)

    def to_host(self, source, target):
        """Copy a tensor of the device into `target`, host memory of the same shape and any dtype.
        It is there on return."""
        assert source.shape == target.shape, f"{tuple(source.shape)} into {tuple(target.shape)}"
        if self._piece_bytes is None:
            target.copy_(source)
            return
        travelling = ()
        for part, place in _parts(source, target, self._piece_bytes):
            piece, travelled = self._next(part.shape, target.dtype)
            # on the device: torch copies between types as it likes
            piece.copy_(part.to(target.dtype), non_blocking=True)
            travelled.record()
            if travelling:
                _land(*travelling)
            travelling = (piece, travelled, place)
        _land(*travelling)

    def _next(self, shape, dtype):
        """The piece whose turn it is, as a tensor of this shape, once it is free;
        and the event to record when it travels again."""
        if not self._pieces:
            on_cuda = self._device.type == "cuda"
            self._pieces = [(torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=on_cuda),
                             torch.cuda.Event(blocking=True) if on_cuda else Arrived()) for _ in range(2)]
        self._pieces.reverse()
        memory, travelled = self._pieces[0]
        travelled.synchronize()
        return memory[:shape.numel() * dtype.itemsize].view(dtype).view(shape), travelled


class Arrived:
    """The event of a copy that is over when it has been asked for."""

    def record(self):
        pass

    def synchronize(self):
        pass


def _land(piece, travelled, place):
    travelled.synchronize()
    place.copy_(piece)


def _parts(source, target, most_bytes):
    """Pairs of equal parts of two tensors, none with more bytes than that."""
    item_bytes = max(source.element_size(), target.element_size())
    if source.is_contiguous() and target.is_contiguous():
        source, target = source.view(-1), target.view(-1)
    if source.numel() * item_bytes <= most_bytes:
        yield source, target
    elif source[0].numel() * item_bytes <= most_bytes:
        count = most_bytes // (source[0].numel() * item_bytes)
        yield from zip(source.split(count), target.split(count))
    else:
        for pair in zip(source, target):
            yield from _parts(*pair, most_bytes)
