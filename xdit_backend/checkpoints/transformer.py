"""The diffusers transformer of a file or folder: its config, the model without weights, and what a rank holds of it.

Pure: nothing of the weights is read.
"""

import importlib
import json

import torch

from ..protocol.errors import CheckpointError
from .layers import BESIDE
from .shares import tensor_splits


def model_config(checkpoint):
    """Arguments of the diffusers class: from the shapes of a file, or from the config.json of a folder, except for
    those that ComfyUI reads from the tensors."""
    family = checkpoint.family
    if checkpoint.folder_config is None:
        return family.config(checkpoint.shapes) | metadata_settings(checkpoint)
    rules = {name: family.config.rules[name] for name in family.config_from_tensors}
    rules = {name: rule(checkpoint.shapes) if callable(rule) else rule for name, rule in rules.items()}
    return checkpoint.folder_config | rules | metadata_settings(checkpoint)


def metadata_of(checkpoint):
    """The metadata of a file; of a diffusers folder, what its JSON files say, in the words of such metadata."""
    family = checkpoint.family
    if checkpoint.folder_config is None or not family.settings:
        return checkpoint.metadata
    settings = family.folder_metadata(checkpoint.folder)
    if settings is None:
        raise CheckpointError(f"{checkpoint.name} is a model of {family.name}, of which a folder with its "
                              f"vae/config.json alone says which of them it is. Download the whole folder, or use the "
                              f"file of this model in ComfyUI's format.")
    return {"config": json.dumps({"transformer": settings})}


def metadata_settings(checkpoint):
    """The family's settings as the metadata has them, under "_" and their names. Raises CheckpointError for values that
    are not supported."""
    family = checkpoint.family
    metadata = checkpoint.model_metadata if family.settings else {}
    try:
        settings = dict(json.loads(metadata.get("config", "{}")).get("transformer", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.name} has metadata that cannot be read ({error}). Download it "
                              f"again.") from error
    for name, values in family.settings.items():
        if settings.get(name, values[0]) not in values:
            raise CheckpointError(f"{checkpoint.name} is a model of {family.name} whose metadata says {name} = "
                                  f"{settings[name]!r}, and xDiT runs {' or '.join(map(repr, values))} only. Use Load "
                                  f"Diffusion Model.")
    return {f"_{name}": settings.get(name, values[0]) for name, values in family.settings.items()}


def build(family, config):
    """The family's diffusers model, which computes as ComfyUI's does."""
    model = getattr(importlib.import_module("diffusers"), family.transformer).from_config(config)
    family.amend(model, config)
    return model


def held_bytes(model, family, spec):
    """Bytes that a rank with all blocks holds of parameters and buffers: the first of tensor ranks, which has most.
    The model may be on the meta device."""
    tensors = held(model, family, spec)
    splits = tensor_splits(model, family.plan, spec.tensor_degree) if spec.tensor_degree > 1 else {}
    return round(sum(tensor.numel() * dtype.itemsize * (splits[name].share(spec.tensor_degree) if name in splits else 1)
                     for name, tensor, dtype in tensors))


def block_bytes(model, family, spec):
    """Bytes of each block, over all lists of the plan, as a rank holds them."""
    tensors = held(model, family, spec)
    return [sum(tensor.numel() * dtype.itemsize for name, tensor, dtype in tensors if name.startswith(
                tuple(f"{each}.{index}." for each in list_.names)))
            for list_ in family.blocks for index in range(len(model.get_submodule(list_.name)))]


def block_sizes(model, family):
    """Parameters of each block, over all lists of the plan: [(number, share an image token meets)]."""
    def size(block):
        packed = sum(module.out_features * module.in_features - module.weight.numel() for module in block.modules()
                     if type(module) is torch.nn.Linear)
        return sum(parameter.numel() for parameter in block.parameters()) + packed
    return [(sum(map(size, block_copies)), list_.image_share) for list_ in family.blocks
            for block_copies in zip(*map(model.get_submodule, list_.names))]


def held(model, family, spec):
    """[(name, tensor, the dtype in which a rank holds it)] of all parameters and buffers."""
    storage, compute = getattr(torch, spec.storage_dtype), getattr(torch, spec.compute_dtype)
    exact = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if compute.itemsize == 2 else set()
    beside = {name for name, _ in model.named_buffers() if name.rpartition(".")[2] in BESIDE}
    # which the model makes, and no file holds
    tables = {name for name, _ in model.named_buffers()} - model.state_dict().keys()

    def dtype_of(name, tensor):
        parts = set(name.split("."))
        # rotary tables stay as they were made
        if not tensor.is_floating_point() or parts & {"freqs_cos", "freqs_sin", "inv_freq"}:
            return tensor.dtype
        if name in beside or f"{name}_scale" in beside:        # as the file has it
            return tensor.dtype
        if storage != compute:                                 # cast where they are used
            return compute if name in tables or parts & set(family.keep_in_compute_dtype) else storage
        return torch.float32 if parts & exact else compute
    return [(name, tensor, dtype_of(name, tensor))
            for name, tensor in (*model.named_parameters(), *model.named_buffers())]
