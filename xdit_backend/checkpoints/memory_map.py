"""Files as maps in memory, of which a page is read when it is used. Used wherever tensors of a checkpoint are read.

As torch.from_file and safetensors map a file, the system counts all of it as memory that may be written to, and refuses
a file that is larger than its memory; these maps it lets pass.
"""

import functools
import json
import math
import mmap
import os

import torch

from ..protocol.errors import CheckpointError
from ..protocol.open_files import out_of_files

NORESERVE = 0x4000             # Linux's MAP_NORESERVE, which Python's mmap has no name for
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
         "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
         "I8": "int8", "U8": "uint8", "BOOL": "bool"}          # of safetensors' types


def map_memory(path):
    """The bytes of a file that is not empty, as a map. What is written to it stays in memory. Raises CheckpointError
    where it cannot be mapped."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | NORESERVE,
                             prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:                     # ValueError: it is empty by now
        raise unreadable(path, error) from error


def unreadable(path, error):
    """The CheckpointError for a file that the system does not open."""
    name, why = os.path.basename(path), getattr(error, "strerror", None) or error
    return out_of_files(error, CheckpointError) or CheckpointError(
        f"Check that {name} is there, and that this user may read it, or choose another: it cannot be opened ({why}).")


def map_tensors(path):
    """{name: () -> the tensor, a map of it} of a safetensors file whose header is right (safetensors_header.py)."""
    memory = map_memory(path)
    start = 8 + int.from_bytes(memory[:8], "little")
    entries = json.loads(memory[8:start])
    entries.pop("__metadata__", None)

    def tensor(dtype, shape, data_offsets):
        count, dtype = math.prod(shape), getattr(torch, TYPES[dtype], torch.uint8)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=start + data_offsets[0]).view(shape)
    return {name: functools.partial(tensor, **entry) for name, entry in entries.items()}
