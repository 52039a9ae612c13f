"""Headers of safetensors files, read without their tensors."""

import math
import os
import struct

from ..protocol.bounded_json import parse_json, shown
from ..protocol.errors import CheckpointError
from .header_limits import MAX_HEADER_BYTES, MAX_TENSORS, check_count, check_empty, check_name, check_sizes

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4,
              "I16": 2, "I8": 1, "U8": 1,
              "BOOL": 1}                   # by safetensors' types
MAX_VALUES = 14 * MAX_TENSORS              # brackets, commas and colons of a header, with four dims per tensor


def read_safetensors(path):
    """({name: (dtype, shape)}, metadata, function name -> bytes of a tensor) of a safetensors file."""
    name, size, length = os.path.basename(path), os.path.getsize(path), header_bytes(path)
    with open(path, "rb") as file:
        file.seek(8)
        raw = file.read(length)
    try:
        entries = parse_json(raw, MAX_HEADER_BYTES, MAX_VALUES)
        if not isinstance(entries, dict):
            raise ValueError("it is not an object")
        metadata = _checked_metadata(entries.pop("__metadata__", {}))
        check_count(len(entries))
        tensors = {key: _checked_entry(key, entry, size) for key, entry in entries.items()}
        end = _check_offsets({key: (*tensors[key], *entry["data_offsets"]) for key, entry in entries.items()})
    except ValueError as error:
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


def header_bytes(path):
    """The length of a safetensors file's header. Raises CheckpointError if the file is not one, or the header is too
    long."""
    name, size = os.path.basename(path), os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= size - 8:
        raise _no_file_of_tensors(name, start)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"Download {name} again: it has a header of {length:,} bytes, and at most "
                              f"{MAX_HEADER_BYTES:,} are read.")
    return length


def _checked_metadata(metadata):
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        raise ValueError("its metadata are not all texts")
    return metadata


def _checked_entry(key, entry, num_bytes):
    """(dtype, shape) of an entry, with types and sizes within the limits. num_bytes: of the file."""
    check_name(key)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{key} does not have exactly a dtype, a shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in ITEM_BYTES:
        raise ValueError(f"{key} is of the unknown type {shown(entry['dtype'])}")
    check_sizes(key, entry["shape"])
    check_sizes(key, entry["data_offsets"], 2)
    if len(entry["data_offsets"]) != 2:
        raise ValueError(f"{key} has data_offsets that are not two")
    check_empty(key, entry["shape"], num_bytes)
    return entry["dtype"], tuple(entry["shape"])


def _no_file_of_tensors(name, start):
    """The error for a file that is not a safetensors file. start: its first bytes."""
    if not start:
        return CheckpointError(f"Download {name} again: it is empty.")
    if start.lstrip().startswith(b"<"):
        return CheckpointError(f"Log in where it is from, and download {name} again: it is a web page, which some "
                               f"sites send in place of a file that needs a login.")
    return CheckpointError(f"Choose a .safetensors file of a diffusion model: {name} is not a safetensors file.")


def _check_offsets(entries):
    """The end of the last tensor. entries: {name: (dtype, shape, start, stop)}. Raises ValueError unless they are
    consecutive."""
    end = 0
    for key, (dtype, shape, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{key} has {stop - start:,} bytes, and a {dtype} of shape {list(shape)} takes "
                             f"{math.prod(shape) * ITEM_BYTES[dtype]:,}")
        if start != end:
            raise ValueError(f"{key} starts at byte {start:,}, and what comes before it ends at {end:,}")
        end = stop
    return end
