"""What a safetensors file says of itself, read without its tensors. Used by the host to recognise a model offline."""

import json
import os
import struct
from dataclasses import dataclass

from ..models import FAMILIES
from ..models.plan import Family
from ..protocol.errors import CheckpointError

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
MAX_HEADER_BYTES = 100 * 2 ** 20


@dataclass(frozen=True)
class Header:
    """Names, dtypes and shapes of the diffusion model in a file; names without the prefix they have in it."""

    path: str
    prefix: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]                 # safetensors' own names, e.g. "BF16"
    metadata: dict[str, str]


def read_header(path):
    """Read a safetensors file's header. Raises CheckpointError for files that are not whole safetensors files."""
    name = os.path.basename(path)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size):
            raise CheckpointError(f"{name} is not a safetensors file. Choose a .safetensors file of a diffusion model.")
        try:
            entries = json.loads(file.read(length))
            metadata = entries.pop("__metadata__", {})
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            tensors = {key: (entry["dtype"], tuple(entry["shape"])) for key, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{name} has a header that cannot be read ({error}). Download the file again.") from error
    if 8 + length + end > size:
        raise CheckpointError(f"{name} is cut short: its header promises {8 + length + end:,} bytes and the file has {size:,}. "
                              f"Download it again.")
    prefix = next(p for p in PREFIXES if not p or any(key.startswith(p) for key in tensors))
    ours = {key[len(prefix):]: value for key, value in tensors.items() if key.startswith(prefix)}
    return Header(path, prefix, {key: shape for key, (_, shape) in ours.items()},
                  {key: dtype for key, (dtype, _) in ours.items()}, metadata)


def recognise(header) -> Family:
    """Name the family of a file. Raises CheckpointError when it is none that can be run, saying which can."""
    name = os.path.basename(header.path)
    if any(key.endswith((".scale_weight", ".weight_scale", ".comfy_quant")) or key == "scaled_fp8" for key in header.shapes):
        raise CheckpointError(f"{name} holds scaled (quantised) weights, which are not supported yet. "
                              f"Use the bf16, fp16 or plain fp8 file of the same model.")
    for family in FAMILIES.values():
        if family.recognise(header.shapes):
            reason = family.refuse(header.shapes)
            if reason:
                raise CheckpointError(f"{name} is a {family.name} model, but {reason}.")
            return family
    raise CheckpointError(f"{name} is not a diffusion model that xDiT runs. It runs {', '.join(FAMILIES)}, from "
                          f".safetensors files in ComfyUI's or the publisher's format.")
