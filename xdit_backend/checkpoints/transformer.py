"""Load a diffusers transformer from a file of any format its family knows, or from a diffusers folder. Called by the engine on each rank.

All ranks map the same file, so the machine holds it once; a rank reads only the tensors it needs.
"""

import importlib

import torch

from ..protocol.errors import CheckpointError
from .header import read_header


def load_transformer(spec, family, device, on_progress=lambda done, total: None, choose_blocks=None):
    """Build the family's diffusers model with the weights of a file or folder, in spec's dtypes, on `device`.

    choose_blocks(model without weights) -> a range: load these blocks only, and read nothing of the others, which stay on
    the meta device. Blocks are numbered over all of the plan's lists. Returns (model, config).

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
    blocks = choose_blocks(model) if choose_blocks else None
    tensors = {}
    for path in header.files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(header.prefix):
                    short = name.removeprefix(header.prefix)
                    here = blocks is None or (block := _block_of(short, model, family, header)) is None or block in blocks
                    tensors[short] = file.get_tensor(name) if here else torch.empty(header.shapes[short], device="meta")
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
    family.amend(model, config)
    return model, config


def _block_of(name, model, family, header):
    """Index of the block that a tensor of the file belongs to, over all lists; None for what is outside the blocks."""
    first = 0
    for list_ in family.plan.blocks:
        prefix = f"{list_.name}." if header.config is not None else list_.in_file
        if name.startswith(prefix):
            return first + int(name[len(prefix):].partition(".")[0])
        first += len(model.get_submodule(list_.name))
    return None


def block_sizes(model, plan):
    """Parameters of each block, over all lists of the plan: [(number, share an image token meets)]."""
    return [(sum(parameter.numel() for parameter in block.parameters()), list_.image_share)
            for list_ in plan.blocks for block in model.get_submodule(list_.name)]


def _move(model, device, spec, on_progress):
    """Cast and move one tensor after the other, so that never two copies of the model exist."""
    compute_dtype = getattr(torch, spec.compute_dtype)
    keep = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    tensors = [(f"{prefix}.{name}", tensor, hasattr(module, "_diffusers_hook")) for prefix, module in model.named_modules()
               for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    for done, (name, tensor, cast_by_layer) in enumerate(tensors):
        if tensor.is_meta:                                     # a block of another stage
            continue
        dtype = tensor.dtype
        is_table = name.endswith(("freqs_cos", "freqs_sin"))   # rotary tables stay as precise as they were made
        if dtype.is_floating_point and not is_table and not (cast_by_layer and dtype.itemsize == 1):
            dtype = torch.float32 if any(part in name.split(".") for part in keep) and compute_dtype != torch.float64 \
                else compute_dtype
        tensor.data = tensor.data.to(device, dtype)
        if done % 32 == 0:
            on_progress(done, len(tensors))
    on_progress(len(tensors), len(tensors))
