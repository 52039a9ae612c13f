"""Limits of model files' headers, checked before anything is computed from them.

The largest published diffusion model that xDiT supports has 3,510 tensors (LTX-2), with names of up to 70 characters
and shapes of up to 5 dims. ComfyUI's NVFP4 files have up to five tensors for each of its 1,564 matrices, and an
all-in-one checkpoint adds VAEs and text encoders: about 12,000 tensors. The largest GGUF headers are those of language
models, with their vocabularies: Gemma 3 has 262,144 tokens, GPT-OSS 201,088 tokens and 446,189 merges in about 14 MB.
Safetensors' own limit is 100 MB (its README), GGML's are 4 dims and names of 64 bytes (ggml.h).
"""

import math

from ..protocol.bounded_json import shown

MAX_TENSORS = 2 ** 14
MAX_DIMS = 8
MAX_SIZE = 2 ** 63                         # torch's sizes and offsets are signed 64-bit integers
MAX_NAME = 1024                            # characters of a tensor's name, or of a metadata key
MAX_HEADER_BYTES = 8 * 2 ** 20             # of safetensors; of a folder's files together
MAX_GGUF_HEADER_BYTES = 32 * 2 ** 20
MAX_STRINGS = 2 ** 20                      # in all lists of a GGUF file's metadata together
MAX_TEXT_BYTES = 2 ** 20                   # of one string of a GGUF file's metadata
# of a JSON file of a folder; DiT's model_index.json, with the names of 1,000 classes, has 42,000 bytes
MAX_CONFIG_BYTES, MAX_CONFIG_VALUES = 2 ** 20, 2 ** 16
MAX_LAYER_BYTES, MAX_LAYER_VALUES = 4096, 64                   # of JSON about one quantised layer


def check_count(num_tensors):
    """Raise ValueError for more tensors than any published model has."""
    if num_tensors > MAX_TENSORS:
        raise ValueError(f"{num_tensors:,} tensors, and at most {MAX_TENSORS:,} are read")


def check_name(name):
    """Raise ValueError for an implausible tensor name."""
    if type(name) is not str or len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(f"a name that is not printable text of at most {MAX_NAME:,} characters")


def check_sizes(key, numbers, max_count=MAX_DIMS):
    """Raise ValueError unless these are sizes of a tensor, or offsets in a file."""
    if not isinstance(numbers, (list, tuple)) or len(numbers) > max_count:
        raise ValueError(f"{key} has the sizes or offsets {shown(numbers)}, which are not a list of at most "
                         f"{max_count} numbers")
    for number in numbers:
        if type(number) is not int or not 0 <= number < MAX_SIZE:
            raise ValueError(f"{key} has the sizes or offsets {shown(numbers)}, which are not all whole numbers from 0 "
                             "to 2^63 - 1")


def check_empty(key, shape, num_bytes):
    """Raise ValueError for a tensor without elements whose other sizes exceed the bytes of its file, since rows are
    enumerated when weights are compared."""
    if 0 in shape and math.prod(size for size in shape if size) > num_bytes:
        raise ValueError(f"{key} has shape {list(shape)}, of which a file of {num_bytes:,} bytes has nothing")
