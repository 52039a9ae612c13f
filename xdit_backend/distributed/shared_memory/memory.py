"""Copies between tensors and a pair's segment: by this process for CPU tensors, by a device's copy engines otherwise."""

import ctypes
import struct

import torch

HEADER = struct.Struct("<QQ")              # number of the chunk, from 1; its bytes
CUDA_HOST_REGISTER_DEFAULT = 0


class HostMemory:
    """A mapped segment, and copies of CPU tensors to and from it. Buffers are addresses."""

    def __init__(self, mapped):
        self._mapped = mapped
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def copy_in(self, offset, address, start, num_bytes):
        ctypes.memmove(self._address + offset, address + start, num_bytes)     # releases the interpreter's lock

    def copy_out(self, offset, address, start, num_bytes):
        ctypes.memmove(address + start, self._address + offset, num_bytes)

    def read_header(self, offset):
        return HEADER.unpack_from(self._mapped, offset)

    def write_header(self, offset, number, num_bytes):
        HEADER.pack_into(self._mapped, offset, number, num_bytes)

    def close(self):
        """Release the segment. It stays mapped until nothing refers to it."""


class DeviceMemory(HostMemory):
    """A mapped segment that is page-locked, and copies of a device's tensors to and from it, in a stream for each
    direction. Buffers are (flat uint8 tensor, event after which it may be used)."""

    def __init__(self, mapped, device, streams):
        super().__init__(mapped)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._module, self._streams = torch.get_device_module(device), streams
        page_lock(self._bytes, device)
        self._device = device

    def copy_in(self, offset, buffer, start, num_bytes):
        tensor, ready = buffer
        return self._copy(self._bytes.narrow(0, offset, num_bytes), tensor.narrow(0, start, num_bytes), ready,
                          self._streams[0])

    def copy_out(self, offset, buffer, start, num_bytes):
        tensor, ready = buffer
        return self._copy(tensor.narrow(0, start, num_bytes), self._bytes.narrow(0, offset, num_bytes), ready,
                          self._streams[1])

    def _copy(self, target, source, ready, stream):
        with torch.inference_mode(), self._module.stream(stream):
            stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(stream)
        return event

    def close(self):
        page_unlock(self._bytes, self._device)


def page_lock(tensor, device):
    """Page-lock a CPU tensor's memory in this process for copies of a CUDA device; others copy from pageable memory."""
    if device.type == "cuda":
        status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, CUDA_HOST_REGISTER_DEFAULT)
        torch.cuda.check_error(int(status))


def page_unlock(tensor, device):
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
