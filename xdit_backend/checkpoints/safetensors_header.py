"""What the header of a safetensors file says, read without its tensors. Used by checkpoint.py."""

import json
import math
import os
import struct

from ..protocol.errors import CheckpointError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4,
              "I16": 2, "I8": 1, "U8": 1,
              "BOOL": 1}                   # of safetensors' types
MAX_HEADER_BYTES = 100 * 2 ** 20


def read_safetensors(path):
    """({name: (dtype, shape)}, metadata, a function name -> bytes of a tensor) of a safetensors file."""
    name = os.path.basename(path)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size):
            raise _no_file_of_tensors(name, start)
        try:
            entries = json.loads(file.read(length))
            metadata = entries.pop("__metadata__", {})
            if not all(type(value) is str for value in metadata.values()):
                raise ValueError("its metadata are not all texts")
            tensors = {key: (entry["dtype"], tuple(entry["shape"])) for key, entry in entries.items()}
            end = _check_places({key: (*tensors[key], *entry["data_offsets"]) for key, entry in entries.items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"Download {name} again: it has a header that cannot be read ({error}).") from error
    if 8 + length + end > size:
        raise CheckpointError(f"Download {name} again, it is cut short: its header promises {8 + length + end:,} "
                              f"bytes and the file has {size:,}.")

    def read(key):
        start, stop = entries[key]["data_offsets"]
        with open(path, "rb") as file:
            file.seek(8 + length + start)
            return file.read(stop - start)
    return tensors, metadata, read


def _no_file_of_tensors(name, start):
    """The error of a file that begins so, where a safetensors file was to be."""
    if not start:
        return CheckpointError(f"Download {name} again: it is empty.")
    if start.lstrip().startswith(b"<"):
        return CheckpointError(f"Log in where it is from, and download {name} again: it is a web page, which some "
                               f"sites send in place of a file that needs a login.")
    return CheckpointError(f"Choose a .safetensors file of a diffusion model: {name} is not a safetensors file.")


def _check_places(entries):
    """Where the last tensor ends. entries: {name: (dtype, shape, start, stop)}.
    Raises ValueError where they do not follow one another."""
    end = 0
    for key, (dtype, shape, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{key} is of the unknown type {dtype}")
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"{key} has shape {list(shape)} and bytes {start} to {stop}")
        if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{key} has {stop - start:,} bytes, and a {dtype} of shape {list(shape)} takes "
                             f"{math.prod(shape) * ITEM_BYTES[dtype]:,}")
        if start != end:
            raise ValueError(f"{key} starts at byte {start:,}, and what comes before it ends at {end:,}")
        end = stop
    return end
