"""Load a diffusers transformer from a file of any format its family knows, or from a diffusers folder. Called by the engine on each rank.

All ranks map the same file, so the machine holds it once; a rank reads only the tensors it needs.
"""

import importlib

import torch

from ..protocol.errors import CheckpointError
from .header import read_header


def load_transformer(spec, family, device, on_progress=lambda done, total: None):
    """Build the family's diffusers model with the weights of a file or folder, in spec's dtypes, on `device`.

    Returns (model, config).

    Weights in the compute dtype stay maps of the file on CPU devices. float8 storage keeps weights in float8 and casts
    them layer by layer. on_progress(done, total) counts parameters moved. Raises CheckpointError when the tensors of the
    file and of the model do not match.
    """
    from accelerate import init_empty_weights
    from safetensors import safe_open

    model_class = getattr(importlib.import_module("diffusers"), family.transformer)
    header = read_header(spec.path)
    config = header.config or family.config(header.shapes)
    with init_empty_weights():
        model = model_class.from_config(config)
    tensors = {}
    for path in header.files:
        with safe_open(path, "pt") as file:
            tensors |= {name.removeprefix(header.prefix): file.get_tensor(name) for name in file.keys()  # noqa: SIM118
                        if name.startswith(header.prefix)}
    tensors = tensors if header.config is not None else family.convert(tensors, config)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if missing or unexpected:
        raise CheckpointError(f"{spec.path} does not fit {family.transformer}: {len(missing)} tensors are missing "
                              f"({', '.join(missing[:3])} ...), {len(unexpected)} are unknown ({', '.join(unexpected[:3])} ...).")
    model.eval().requires_grad_(False)
    if spec.storage_dtype.startswith("float8"):                # before moving, so that the device never holds more than float8
        model.enable_layerwise_casting(storage_dtype=getattr(torch, spec.storage_dtype),
                                       compute_dtype=getattr(torch, spec.compute_dtype))
    _move(model, device, spec, on_progress)
    return model, config


def _move(model, device, spec, on_progress):
    """Cast and move one tensor after the other, so that never two copies of the model exist."""
    compute_dtype = getattr(torch, spec.compute_dtype)
    keep = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for done, (name, tensor) in enumerate(tensors):
        dtype = tensor.dtype
        is_table = name.endswith(("freqs_cos", "freqs_sin"))   # rotary tables stay as precise as they were made
        if dtype.is_floating_point and dtype.itemsize > 1 and not is_table:
            dtype = torch.float32 if any(part in name.split(".") for part in keep) and compute_dtype != torch.float64 \
                else compute_dtype
        tensor.data = tensor.data.to(device, dtype)
        if done % 32 == 0:
            on_progress(done, len(tensors))
    on_progress(len(tensors), len(tensors))
