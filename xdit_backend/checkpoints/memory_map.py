"""Files as memory maps, whose pages are read when they are used.

For the maps of torch.from_file and safetensors, the system reserves the size of the file as writable memory, and
refuses a file larger than its memory; these maps reserve nothing.
"""

import functools
import json
import math
import os

import torch

from .. import system
from ..protocol.errors import CheckpointError
from ..protocol.open_files import out_of_files

TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
         "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
         "I8": "int8", "U8": "uint8", "BOOL": "bool"}          # safetensors' type -> torch's


def map_memory(path):
    """A non-empty file as a memory map. Writes stay in memory; on Windows the map is read-only.

    Raises CheckpointError if it cannot be mapped.
    """
    try:
        with open(path, "rb") as file:
            return system.map_file(file)
    except (OSError, ValueError) as error:                     # ValueError: the file has become empty
        raise unreadable(path, error) from error


def unreadable(path, error):
    """The CheckpointError for a file that cannot be opened."""
    name, why = os.path.basename(path), getattr(error, "strerror", None) or error
    return out_of_files(error, CheckpointError) or CheckpointError(
        f"Check that {name} is there, and that this user may read it, or choose another: it cannot be opened ({why}).")


def map_tensors(path):
    """{name: function that returns the tensor, a region of the map} of a safetensors file with a valid header
    (safetensors_header.py)."""
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
