"""Copies between a device and pageable system RAM: shared memory segments and memory-mapped files.

CUDA copies pageable memory slowly, and blocks the process until all work enqueued on the device before is done. Pinning
it in place (cudaHostRegister) fails for mapped files and under WSL2, and costs as much per page as it saves. Small
tensors therefore go through torch's cached pinned memory, and large ones through two alternating pinned chunks.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from ..system import accelerator

CHUNK_BYTES = 2 ** 24


def on_device(tensor, device):
    """A small tensor from system RAM on `device`, copied asynchronously."""
    return tensor.pin_memory().to(device, non_blocking=True) if accelerator.is_gpu(device) else tensor.to(device)


class PinnedAhead:
    """Tensors in system RAM that a forward takes by name, too large to be copied by the thread that launches kernels:
    another thread pins them ahead, in order. A tensor with several names is pinned once.

    If the device is the host, nothing is copied.
    """

    def __init__(self, tensors, device):
        self._tensors, self._device, self._names = dict(tensors), device, frozenset(tensors)
        if accelerator.is_gpu(device) and tensors:
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
        """The tensor on the device; each name is taken once."""
        tensor = self._tensors.pop(name)
        return (tensor.result().to(self._device, non_blocking=True) if accelerator.is_gpu(self._device)
                else tensor.to(self._device))


class StagingBuffers:
    """Copies large tensors between system RAM and one device through two chunks: one is filled while the other is
    transferred.

    Waiting for a chunk blocks without polling, unlike CUDA's default events. The chunks, pinned for a GPU, are
    allocated on first use and reused. Not thread-safe. chunk_bytes: None: a default size, and direct copies if the
    device is the host.
    """

    def __init__(self, device, chunk_bytes=None):
        self._device = device
        self._chunk_bytes = chunk_bytes or (CHUNK_BYTES if accelerator.is_gpu(device) else None)
        self._chunks = []

    def to_device(self, source):
        """A contiguous copy of `source`, in system RAM, on the device, in the order of its current stream.

        `source` has been read on return.
        """
        if self._chunk_bytes is None:
            return source.to(self._device, copy=True, memory_format=torch.contiguous_format)
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self.copy(source, target)
        return target

    @property
    def is_direct(self):
        """Whether the device is the host."""
        return self._chunk_bytes is None

    def copy(self, source, target):
        """Copy `source` in system RAM to `target` on the device, of the same shape and dtype, in the order of its
        current stream. `source` has been read on return."""
        if self._chunk_bytes is None:
            target.copy_(source)
            return
        for section, destination in _slices(source, target, self._chunk_bytes):
            chunk, travelled = self._next(section.shape, section.dtype)
            chunk.copy_(section)
            destination.copy_(chunk, non_blocking=True)
            travelled.record()

    def copy_pageable(self, source, target):
        """As `copy`, by CUDA's driver directly from pageable memory, for a thread that may wait for its stream."""
        target.copy_(source)

    def to_host(self, source, target):
        """Copy a tensor on the device to `target`, in system RAM, of the same shape and any dtype. The copy is complete
        on return."""
        assert source.shape == target.shape, f"{tuple(source.shape)} into {tuple(target.shape)}"
        if self._chunk_bytes is None:
            target.copy_(source)
            return
        travelling = ()
        for section, destination in _slices(source, target, self._chunk_bytes):
            chunk, travelled = self._next(section.shape, target.dtype)
            # cast on the device, since torch casts on either side of a copy
            chunk.copy_(section.to(target.dtype), non_blocking=True)
            travelled.record()
            if travelling:
                _land(*travelling)
            travelling = (chunk, travelled, destination)
        _land(*travelling)

    def _next(self, shape, dtype):
        """The next chunk as a tensor of this shape, once it is free, and the event to record after its transfer."""
        if not self._chunks:
            on_gpu = accelerator.is_gpu(self._device)
            self._chunks = [(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=on_gpu),
                             accelerator.sleeping_event(self._device) if on_gpu else Arrived()) for _ in range(2)]
        self._chunks.reverse()
        memory, travelled = self._chunks[0]
        travelled.synchronize()
        return memory[:shape.numel() * dtype.itemsize].view(dtype).view(shape), travelled


class Arrived:
    """An event for synchronous copies."""

    def record(self):
        pass

    def synchronize(self):
        pass


def _land(chunk, travelled, destination):
    travelled.synchronize()
    destination.copy_(chunk)


def _slices(source, target, max_bytes):
    """Pairs of equal slices of two tensors, none with more bytes than max_bytes."""
    item_bytes = max(source.element_size(), target.element_size())
    if source.is_contiguous() and target.is_contiguous():
        source, target = source.view(-1), target.view(-1)
    if source.numel() * item_bytes <= max_bytes:
        yield source, target
    elif source[0].numel() * item_bytes <= max_bytes:
        count = max_bytes // (source[0].numel() * item_bytes)
        yield from zip(source.split(count), target.split(count))
    else:
        for pair in zip(source, target):
            yield from _slices(*pair, max_bytes)
