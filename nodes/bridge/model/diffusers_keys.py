"""Tensors of a diffusers folder under ComfyUI's names.

Inverts a family's conversion: the names are those of ComfyUI's class, and running the conversion on row numbers shows
the tensor and row that each row comes from.
"""

import importlib

import torch

import comfy.latent_formats
import comfy.model_detection
import comfy.ops
import comfy.supported_models

from ....xdit_backend.protocol.errors import CheckpointError
from ..compatibility.weight_creation import weights_at_construction

INSTEAD = "Use the file of this model in ComfyUI's format."


def under_comfyui_names(tensors, checkpoint):
    """Return {ComfyUI's name: tensor} for all tensors of a folder, on any device. Some are concatenated along dim 0.

    Raises CheckpointError if some have no ComfyUI name.
    """
    family, config = checkpoint.family, checkpoint.config
    if family.sampled:                                         # no model of ComfyUI's; ours has diffusers' names
        return tensors
    tensors = family.detection.with_split_linears(tensors)
    # these already have ComfyUI's names
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(family.detection.text_prefixes)}
    used = set(found)
    for name, num_dims in _names(family, config).items():
        sources = _converted(family, config, name, 0)
        if sources and sources.keys() <= tensors.keys():
            rows = _converted(family, config, name,
                              sum(len(tensors[source]) if tensors[source].ndim else 1 for source in sources))
            tensor = _concatenated(rows, tensors)
            found[name] = tensor.flatten() if num_dims == 1 else tensor        # one dim in ComfyUI, several here
            used |= sources.keys()
    if used != tensors.keys():
        # ComfyUI's own conversion covers other families
        found = comfy.model_detection.convert_diffusers_mmdit(dict(tensors), "") or {}
        if sum(tensor.numel() for tensor in found.values()) != sum(tensor.numel() for tensor in tensors.values()):
            raise CheckpointError(f"{INSTEAD} {checkpoint.name} is a diffusers folder of a {family.name} model, and "
                                  "some of its tensors have no known name in ComfyUI's format.")
    return found


def marker_tensors_of(checkpoint):
    """Return {ComfyUI's name: tensor} of tensors whose presence, or length for a number, stands for a setting of
    config.json in ComfyUI's detection."""
    markers = checkpoint.family.detection.folder.marker_tensors
    found = {name: checkpoint.folder_config.get(key) for key, name in markers.items()}
    return {name: torch.zeros(0 if value is True else value) for name, value in found.items() if value}


def refuse_undetectable(tensors, checkpoint):
    """Raise CheckpointError if ComfyUI cannot detect settings of the folder's config.json from its tensors under
    ComfyUI's names."""
    family, config, name = checkpoint.family, checkpoint.config, checkpoint.name
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    scales = {name.removesuffix("weight") + "scale": shape for name, shape in shapes.items()
              if name.endswith("_norm.weight")}
    # files of Flux.1 name scale what ComfyUI's module names weight
    detected = family.detection.config(shapes | scales)
    for key, value in detected.items():
        if (key not in family.detection.config_from_tensors and config.get(key) is not None
                and _plain(value) != _plain(config[key])):
            raise CheckpointError(f"{INSTEAD} {name} is a {family.name} model with {key} = {config[key]!r}, which "
                                  f"ComfyUI cannot detect from its tensors: it would use {value!r}.")


def _plain(value):
    return list(value) if isinstance(value, (tuple, list)) else value


def _concatenated(rows, tensors):
    rows = {source: where.flatten() for source, where in rows.items()}
    source, where = next(iter(rows.items()))
    if len(rows) == 1 and torch.equal(where, torch.arange(len(where))):
        return tensors[source]
    tensor = tensors[source].new_empty(sum(map(len, rows.values())), *tensors[source].shape[1:])
    for source, where in rows.items():
        tensor[where.to(tensor.device)] = tensors[source]
    return tensor


def _converted(family, config, name, num_rows):
    """{diffusers' name: its rows} in a tensor of num_rows; {} if the conversion does not know its name."""
    try:
        return family.detection.convert({name: torch.arange(num_rows)}, config)
    except (KeyError, RuntimeError, IndexError, ValueError):   # raised by conversions that need several tensors
        return {}


def _names(family, config):
    """{ComfyUI's name of each tensor that such a model has or may have: its number of dims}"""
    names = {name: tensor.ndim
             for name, tensor in (_template(family.testing) | _template(family.testing, family.testing.more)).items()}
    for list_ in family.blocks:
        inside = {name.removeprefix(list_.file_prefix).partition(".")[2]: num_dims for name, num_dims in names.items()
                  if name.startswith(list_.file_prefix)}
        names |= {f"{list_.file_prefix}{number}.{name}": num_dims for number in range(config[list_.count])
                  for name, num_dims in inside.items()}
    return names


def _template(testing, more={}):
    module, _, name = testing.native.partition(":")
    options = {"device": "meta", "dtype": torch.float32, "operations": comfy.ops.disable_weight_init}
    with weights_at_construction():
        return getattr(importlib.import_module(module), name)(**testing.arguments | more, **options).state_dict()
