"""GGUF files: headers and tensors.

The layout is that of ggml's docs/gguf.md, versions 2 and 3, little-endian; names and shapes as written by
ComfyUI-GGUF's converter.
"""

import math
import os
import struct

import torch

from ...protocol.errors import CheckpointError
from ..header_limits import (
    MAX_DIMS,
    MAX_GGUF_HEADER_BYTES,
    MAX_NAME,
    MAX_STRINGS,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
    check_count,
    check_empty,
    check_name,
    check_sizes,
)
from ..memory_map import map_memory
from .ggml_dequant import numbers

MAGIC = b"GGUF"
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64, "I64": torch.int64,
         "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
# Types unpacked when they are read: numpy does it, which at use would delay every step.
UNPACKED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")
QUANTISED = PACKED + UNPACKED
ORIGINAL = "comfy.gguf.orig_shape."        # metadata key of a tensor's original shape, if stored in another
# GGUF's metadata types -> struct format
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_VALUES = 2 * MAX_TENSORS               # of metadata: a shape per tensor, and others
READ_BYTES = 2 ** 20


def read_gguf(path):
    """({name: (type, shape)}, {name: (first byte, stored shape)}, {key: text} of its metadata) of a file.

    Raises CheckpointError if the file is invalid or incomplete.
    """
    name, size = os.path.basename(path), os.path.getsize(path)
    names = type_names()
    with open(path, "rb") as file:
        try:
            metadata, infos, start = _parse(_Reader(file, size))
        except (struct.error, ValueError) as error:
            raise CheckpointError(f"Download {name} again: it has a header that cannot be read ({error}).") from error
    tensors, stored, ends = {}, {}, []
    for key, (dims, number, offset) in infos.items():
        type_ = names.get(number, f"number {number}")
        if type_ not in PLAIN and type_ not in QUANTISED:
            raise CheckpointError(f"Use a file of this model in F32, F16, BF16 or {', '.join(QUANTISED)}: {name} "
                                  f"holds {key} in the type {type_}, which xDiT does not read.")
        shape = tuple(reversed(dims))
        original = metadata.get(ORIGINAL + key, shape)
        if shape and shape[-1] % block_of(type_)[0] or math.prod(original) != math.prod(shape):
            raise CheckpointError(f"Download {name} again: {key} has the shape {list(shape)} in "
                                  f"{type_}{f' for {list(original)}' * (original != shape)}, which do not match.")
        tensors[key], stored[key] = (type_, original), (start + offset, shape)
        ends.append((start + offset, start + offset + row_bytes(type_, math.prod(shape)), key))
    for (_, stop, key), (first, _, following) in zip(sorted(ends), sorted(ends)[1:]):
        if first < stop:
            raise CheckpointError(f"Download {name} again: {following} starts at byte {first:,}, within {key}.")
    if ends and max(ends)[1] > size:
        raise CheckpointError(f"Download {name} again, it is cut short: its header promises {max(ends)[1]:,} bytes "
                              f"and the file has {size:,}.")
    return tensors, stored, {key: value for key, value in metadata.items() if type(value) is str}


def read_tensors(checkpoint, wanted):
    """{name: tensor} of a GGUF file, as regions of its memory map; quantised ones are uint8 (rows, bytes of a row).
    Tensors that are not wanted(name) are on the meta device."""
    path, = checkpoint.files
    memory = torch.frombuffer(map_memory(path), dtype=torch.uint8)
    tensors = {}
    for name, (first, shape) in checkpoint.stored.items():
        type_ = checkpoint.dtypes[name]
        here = memory[first:first + row_bytes(type_, math.prod(shape))] if wanted(name) else \
            torch.empty(row_bytes(type_, math.prod(shape)), dtype=torch.uint8, device="meta")
        tensors[name] = (here.view(PLAIN[type_]).view(checkpoint.shapes[name]) if type_ in PLAIN else
                         here.view(-1, row_bytes(type_, shape[-1])))
    return tensors


def dequantised(blocks, type_, dtype=torch.float32):
    """Dequantised rows of blocks: uint8 (rows, bytes) -> (rows, columns) of `dtype`, rounded once."""
    if type_ in UNPACKED:
        import gguf
        kind = gguf.GGMLQuantizationType[type_]
        return torch.from_numpy(gguf.quants.dequantize(blocks.cpu().numpy(), kind)).to(blocks.device, dtype)
    return numbers(blocks.reshape(-1, block_of(type_)[1]), type_, dtype).view(len(blocks), -1)


def row_bytes(type_, count):
    """Bytes of this many elements."""
    numbers, num_bytes = block_of(type_)
    return count // numbers * num_bytes


def block_of(type_):
    """(elements, bytes) of a block of a type."""
    import gguf
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]


def type_names():
    """{number in a file: name of a type}."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError("Install the package gguf, which GGUF files need: python -m pip install -r "
                              "requirements.txt (in the folder of the xDiT nodes, with ComfyUI's Python), and restart "
                              "ComfyUI.") from error
    return {type_.value: type_.name for type_ in gguf.GGMLQuantizationType}


class _Reader:
    """Reads numbers and strings of a header, within the limits of a header and of the file."""

    def __init__(self, file, size):
        self._file, self._limit, self._raw = file, min(size, MAX_GGUF_HEADER_BYTES), bytearray()
        self.num_bytes, self.position = size, 0                # of the file; of the next byte
        self._num_strings = 0

    def bytes(self, count):
        start, self.position = self.position, self.position + count
        if self.position > self._limit:
            raise ValueError(f"it ends {self.position - self._limit:,} bytes too early, or is longer than "
                             f"{MAX_GGUF_HEADER_BYTES:,} bytes")
        if self.position > len(self._raw):
            self._raw += self._file.read(max(self.position - len(self._raw), READ_BYTES))
        return self._raw[start:self.position]

    def numbers(self, kind, count=1):
        return struct.unpack(f"<{count}{kind}", self.bytes(count * struct.calcsize(f"<{kind}")))

    def number(self, kind):
        return self.numbers(kind)[0]

    def string(self, max_bytes):
        count = self.number("Q")
        if count > max_bytes:
            raise ValueError(f"it has a text of {count:,} bytes, and at most {max_bytes:,} are read")
        return self.bytes(count).decode()

    def name(self):
        name = self.string(4 * MAX_NAME)                       # bytes, of characters
        check_name(name)
        return name

    def value(self, key):
        """A value of the metadata. For lists: the numbers of a tensor's shape, otherwise None, since nothing else in
        lists is used."""
        type_ = self._type()
        if type_ == ARRAY:
            type_, count = self._type(), self.number("Q")
            if type_ == ARRAY:
                raise ValueError(f"it has lists within the list {key}")
            if key.startswith(ORIGINAL):
                return self._shape(key, type_, count)
            if type_ == STRING:
                self._pass_strings(count)
            else:
                self.bytes(count * struct.calcsize(f"<{NUMBERS[type_]}"))
            return None
        if key.startswith(ORIGINAL):
            raise ValueError(f"{key} is not a list")
        return self.string(MAX_TEXT_BYTES) if type_ == STRING else self.number(NUMBERS[type_])

    def _type(self):
        type_ = self.number("I")
        if type_ not in (*NUMBERS, STRING, ARRAY):
            raise ValueError(f"it has metadata of the unknown type {type_}")
        return type_

    def _shape(self, key, type_, count):
        if type_ == STRING or count > MAX_DIMS:
            raise ValueError(f"{key} is not a list of at most {MAX_DIMS} whole numbers")
        shape = self.numbers(NUMBERS[type_], count)
        check_sizes(key, shape)
        return shape

    def _pass_strings(self, count):
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            raise ValueError(f"it has {self._num_strings:,} texts in lists, and at most {MAX_STRINGS:,} are read")
        position, length_at = self.position, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > len(self._raw):
                self.position = position
                self.bytes(8)
            position += 8 + length_at(self._raw, position)[0]
            if position > self._limit:
                break
        self.position = position
        self.bytes(0)


def _parse(reader):
    """(metadata, {name of a tensor: (dims, number of its type, offset)}, first byte of the data) of a file."""
    if reader.bytes(4) != MAGIC:
        raise ValueError("it does not begin as a GGUF file")
    version = reader.number("I")
    if version not in (2, 3):
        raise ValueError(f"it is of version {version}, and xDiT reads 2 and 3")
    num_tensors, num_values = reader.numbers("Q", 2)
    check_count(num_tensors)
    if num_values > MAX_VALUES:
        raise ValueError(f"it has {num_values:,} values of metadata, and at most {MAX_VALUES:,} are read")
    metadata, infos = {}, {}
    for _ in range(num_values):
        key = reader.name()
        if key in metadata:
            raise ValueError(f"it names {key} twice")
        metadata[key] = reader.value(key)
    for _ in range(num_tensors):
        key = reader.name()
        if key in infos:
            raise ValueError(f"it names {key} twice")
        infos[key] = _info(key, reader)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= READ_BYTES:
        raise ValueError(f"its alignment is {alignment}")
    return metadata, infos, -(-reader.position // alignment) * alignment


def _info(key, reader):
    """(dims, number of its type, offset) of a tensor, within the limits."""
    num_dims = reader.number("I")
    if num_dims > MAX_DIMS:
        raise ValueError(f"{key} has {num_dims:,} dims, and at most {MAX_DIMS} are read")
    dims, type_, offset = reader.numbers("Q", num_dims), reader.number("I"), reader.number("Q")
    check_sizes(key, (*dims, offset), MAX_DIMS + 1)
    check_empty(key, dims, reader.num_bytes)
    return dims, type_, offset
