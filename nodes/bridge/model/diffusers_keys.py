"""Tensors of a diffusers folder under ComfyUI's names. Used by detection.py and state_dict.py.

This inverts a family's conversion: ComfyUI's class says which names there are, and running the conversion on row
numbers shows which tensor and row each comes from.
"""

import importlib

import torch

import comfy.latent_formats
import comfy.model_detection
import comfy.ops
import comfy.supported_models

from ....xdit_backend.protocol.errors import CheckpointError

INSTEAD = "Use the file of this model in ComfyUI's format."


def under_comfyui_names(tensors, checkpoint):
    """{ComfyUI's name: tensor} of all tensors of a folder, on any device. One may be put together from several, along
    dim 0.

    Raises CheckpointError where not all have a name there.
    """
    family, config = checkpoint.family, checkpoint.config
    if family.sampled:                                         # ComfyUI has no model of it; ours has diffusers' names
        return tensors
    tensors = family.with_split_linears(tensors)
    # they have those names
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(family.text_prefixes)}
    used = set(found)
    for name, num_dims in _names(family, config).items():
        parts = _converted(family, config, name, 0)
        if parts and parts.keys() <= tensors.keys():
            rows = _converted(family, config, name,
                              sum(len(tensors[part]) if tensors[part].ndim else 1 for part in parts))
            whole = _together(rows, tensors)
            found[name] = whole.flatten() if num_dims == 1 else whole          # one row there, several here
            used |= parts.keys()
    if used != tensors.keys():
        # which takes some for other families
        found = comfy.model_detection.convert_diffusers_mmdit(dict(tensors), "") or {}
        if sum(tensor.numel() for tensor in found.values()) != sum(tensor.numel() for tensor in tensors.values()):
            raise CheckpointError(f"{INSTEAD} {checkpoint.name} is a diffusers folder of a {family.name} model, and "
                                  "ComfyUI's names are not known for all tensors of it.")
    return found


def marker_tensors_of(checkpoint):
    """{ComfyUI's name: tensor} of the tensors whose presence tells ComfyUI what config.json says, or whose length does
    where that is a number."""
    found = {name: checkpoint.folder_config.get(key) for key, name in checkpoint.family.marker_tensors.items()}
    return {name: torch.zeros(0 if value is True else value) for name, value in found.items() if value}


def refuse_undetectable(tensors, checkpoint):
    """Raise CheckpointError where ComfyUI could not tell from a folder's tensors, under its names,
    what the folder's config.json says."""
    family, config, name = checkpoint.family, checkpoint.config, checkpoint.name
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    scales = {name.removesuffix("weight") + "scale": shape for name, shape in shapes.items()
              if name.endswith("_norm.weight")}
    # files of Flux.1 say scale where ComfyUI's module says weight
    seen = family.config(shapes | scales)
    for key, value in seen.items():
        if (key not in family.config_from_tensors and config.get(key) is not None
                and _plain(value) != _plain(config[key])):
            raise CheckpointError(f"{INSTEAD} {name} is a model of {family.name} with {key} = {config[key]!r}, which "
                                  f"ComfyUI could not tell from its tensors: it would take it for {value!r}.")


def _plain(value):
    return list(value) if isinstance(value, (tuple, list)) else value


def _together(rows, tensors):
    rows = {part: where.flatten() for part, where in rows.items()}
    part, where = next(iter(rows.items()))
    if len(rows) == 1 and torch.equal(where, torch.arange(len(where))):
        return tensors[part]
    whole = tensors[part].new_empty(sum(map(len, rows.values())), *tensors[part].shape[1:])
    for part, where in rows.items():
        whole[where.to(whole.device)] = tensors[part]
    return whole


def _converted(family, config, name, num_rows):
    """{diffusers' name: the rows that it has} of a tensor of so many rows;
    {} where its name is nothing to the conversion."""
    try:
        return family.convert({name: torch.arange(num_rows)}, config)
    except (KeyError, RuntimeError, IndexError, ValueError):   # one that takes several tensors at a time
        return {}


def _names(family, config):
    """{ComfyUI's name of each tensor of such a model, and of some that it may lack: how many dims it has}."""
    names = {name: tensor.ndim
             for name, tensor in (_template(family.test_config) | _template(family.test_config,
                                                                            family.test_config.more)).items()}
    for list_ in family.blocks:
        inside = {name.removeprefix(list_.file_prefix).partition(".")[2]: num_dims for name, num_dims in names.items()
                  if name.startswith(list_.file_prefix)}
        names |= {f"{list_.file_prefix}{number}.{name}": num_dims for number in range(config[list_.count])
                  for name, num_dims in inside.items()}
    return names


def _template(tiny, more={}):
    module, _, name = tiny.native.partition(":")
    place = {"device": "meta", "dtype": torch.float32, "operations": comfy.ops.disable_weight_init}
    return getattr(importlib.import_module(module), name)(**tiny.arguments | more, **place).state_dict()
