"""Copies between tensors and a pair's segment: by this process for CPU tensors, by the device for others."""

import ctypes
import struct

import torch

HEADER = struct.Struct("<QQ")              # number of the chunk, from 1; its bytes


class SegmentMemory:
    """A mapped segment, as the memory of a Pair. Buffers are addresses of CPU tensors, or DeviceBuffers."""

    def __init__(self, mapped):
        self._mapped = mapped
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._locked = None                                    # module of the device that has page-locked it

    def copy_in(self, offset, buffer, start, num_bytes):
        if isinstance(buffer, int):
            ctypes.memmove(self._address + offset, buffer + start, num_bytes)  # releases the interpreter's lock
            return None
        return buffer.copy(self._slot(offset, num_bytes, buffer), start, is_out=True)

    def copy_out(self, offset, buffer, start, num_bytes):
        if isinstance(buffer, int):
            ctypes.memmove(buffer + start, self._address + offset, num_bytes)
            return None
        return buffer.copy(self._slot(offset, num_bytes, buffer), start, is_out=False)

    def read_header(self, offset):
        return HEADER.unpack_from(self._mapped, offset)

    def write_header(self, offset, number, num_bytes):
        HEADER.pack_into(self._mapped, offset, number, num_bytes)

    def _slot(self, offset, num_bytes, buffer):
        if self._locked is None:
            self._locked = buffer.copies.module
            page_lock(self._locked, self._address, len(self._mapped))
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=num_bytes, offset=offset)

    def close(self):
        """Undo the page-locking. The segment stays mapped until nothing refers to it."""
        if self._locked is not None:
            page_unlock(self._locked, self._address)


class DeviceCopies:
    """Copies of a device's tensors to and from segments, in a stream for each direction, so that both overlap with each
    other and with computation."""

    def __init__(self, device, module=None):
        """module: of torch for the device's type; None: torch's own."""
        self.module, self._device = module or torch.get_device_module(device), device
        self._streams = self.module.Stream(device), self.module.Stream(device)

    def buffer(self, tensor):
        """DeviceBuffer of a contiguous tensor, as the current stream leaves it."""
        ready = self.module.Event()
        ready.record(self.module.current_stream(self._device))
        return DeviceBuffer(self, tensor.detach().view(-1).view(torch.uint8), ready)

    def copy(self, target, source, ready, is_out):
        stream = self._streams[0 if is_out else 1]
        event = self.module.Event()
        with torch.inference_mode(), self.module.stream(stream):
            stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            event.record(stream)
        return event

    def run(self, function):
        """Call a function whose computations are done when this returns."""
        with self.module.stream(self._streams[1]):
            function()
        self._streams[1].synchronize()


class DeviceBuffer:
    """Bytes of a device's tensor, which may be used once the event `ready` has happened."""

    def __init__(self, copies, tensor, ready):
        self.copies, self._bytes, self._ready = copies, tensor, ready

    def copy(self, slot, start, is_out):
        """Begin to copy from `start` to a slot of the segment if is_out, else from it; returns the event of its end."""
        own = self._bytes.narrow(0, start, len(slot))
        return self.copies.copy(slot if is_out else own, own if is_out else slot, self._ready, is_out)


def page_lock(module, address, num_bytes):
    """Page-lock memory in this process, if the device's module can (CUDA, ROCm); other devices copy from pageable
    memory. Raises RuntimeError."""
    if hasattr(module, "cudart"):
        module.check_error(int(module.cudart().cudaHostRegister(address, num_bytes, 0)))


def page_unlock(module, address):
    if hasattr(module, "cudart"):
        module.cudart().cudaHostUnregister(address)
