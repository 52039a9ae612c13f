"""Construction of a checkpoint's transformer, diffusers' or ComfyUI's: its config, and the model without weights. No
weights are read."""

import importlib
import json

from ..comfyui.class_checks import check_class
from ..comfyui.native_models import build_module
from ..protocol.bounded_json import parse_json, shown
from ..protocol.errors import CheckpointError
from .header_limits import MAX_CONFIG_BYTES, MAX_CONFIG_VALUES


def model_config(checkpoint):
    """Arguments of the diffusers class: from the shapes of a file, or from the config.json of a folder, except for
    those that ComfyUI reads from the tensors."""
    family = checkpoint.family
    if checkpoint.folder_config is None:
        return family.detection.config(checkpoint.shapes) | metadata_settings(checkpoint)
    rules = {name: family.detection.config.rules[name] for name in family.detection.config_from_tensors}
    rules = {name: rule(checkpoint.shapes) if callable(rule) else rule for name, rule in rules.items()}
    return checkpoint.folder_config | rules | metadata_settings(checkpoint)


def metadata_of(checkpoint):
    """The metadata of a file; for a diffusers folder, its JSON files in the same format."""
    family = checkpoint.family
    if checkpoint.folder_config is None or not family.detection.settings:
        return checkpoint.metadata
    settings = family.detection.folder.metadata(checkpoint.folder)
    if settings is None:
        raise CheckpointError("Download the whole folder, or use the file of this model in ComfyUI's format: "
                              f"{checkpoint.name} is a model of {family.name}, whose variants only a folder with "
                              "vae/config.json tells from each other.")
    return {"config": json.dumps({"transformer": settings})}


def metadata_settings(checkpoint):
    """The family's settings from the metadata, with "_" before their names. Raises CheckpointError for unsupported
    values."""
    family = checkpoint.family
    settings = settings_in(checkpoint.model_metadata if family.detection.settings else {}, checkpoint.name)
    for name, values in family.detection.settings.items():
        if settings.get(name, values[0]) not in values:
            raise CheckpointError(f"Use Load Diffusion Model: {checkpoint.name} is a model of {family.name} whose "
                                  f"metadata says {name} = {shown(settings[name])}, and xDiT runs "
                                  f"{' or '.join(map(repr, values))} only.")
    return {f"_{name}": settings.get(name, values[0]) for name, values in family.detection.settings.items()}


def settings_in(metadata, name):
    """The settings of the transformer in the metadata of a file of this name."""
    try:
        return dict(parse_json(metadata.get("config", "{}").encode(), MAX_CONFIG_BYTES,
                               MAX_CONFIG_VALUES).get("transformer", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"Download {name} again: it has metadata that cannot be read ({error}).") from error


def build(family, config):
    """The family's model: diffusers', which computes as ComfyUI's does, or ComfyUI's own."""
    if family.is_comfyuis:
        model = build_module(family.transformer, config, family.class_arguments)
    else:
        model = _class_of(family).from_config(config)
    family.adapt_model(model, config)
    if family.is_comfyuis:
        check_class(model, family)                             # including changes by adapt_model
    return model


def _class_of(family):
    """diffusers' class. Its import may fail because of other installed packages, which is not the file's fault."""
    diffusers = importlib.import_module("diffusers")
    try:
        return getattr(diffusers, family.transformer)
    except (ImportError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"Repair or remove the package that is named last, in ComfyUI's Python: diffusers cannot "
                              f"import {family.transformer}: {error}") from error


def build_empty(family, config):
    """As build, with parameters on the meta device; buffers have the values that the model computes."""
    from accelerate import init_empty_weights
    with init_empty_weights():
        return build(family, config)
