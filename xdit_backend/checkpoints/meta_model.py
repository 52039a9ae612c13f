"""diffusers' model of a checkpoint on the meta device, after a check that the checkpoint has all tensors that it needs,
and none that would be ignored."""

import importlib
import inspect

import torch

from ..models.common.limits import MAX_BLOCKS
from ..models.common.unet import settings_of
from ..protocol.bounded_json import shown
from ..protocol.errors import CheckpointError
from .build_transformer import build
from .detection import plain
from .quantisation.quantised_weights import packed_weights, set_packed_parameters

NUM_NAMED = 3                              # tensors named in a message
FLOATS = "F", "BF16"                       # prefixes of floating-point types in files


def meta_model(checkpoint, quantisation=""):
    """The diffusers model of a Checkpoint on the meta device, with weights as stored.

    quantisation: see packed_weights. Raises CheckpointError that names missing or unknown tensors, wrong shapes, or an
    unsupported setting.
    """
    family, name, folder_config = checkpoint.family, checkpoint.name, None
    if checkpoint.folder is not None:
        folder_config = _folder_settings(checkpoint)
        _check_folder_config(folder_config, family, name)
    integers = {key for key, dtype in checkpoint.dtypes.items() if key not in checkpoint.quantised
             and not dtype.startswith(FLOATS)}
    try:
        tensors = {key: torch.empty(shape, dtype=torch.int64 if key in integers else None, device="meta")
                   for key, shape in checkpoint.shapes.items()}
        config = checkpoint.config
        _check_counts(config)
        with torch.device("meta"):
            model = build(family, config)
        tensors = checkpoint.under_diffusers_names(tensors)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"Download {name} again, or choose another file: it lacks the tensor {error.args[0]}, "
                              f"which a {family.name} model needs.") from error
    except (ValueError, IndexError, TypeError, AttributeError, RuntimeError, ArithmeticError, AssertionError,
            MemoryError) as error:
        raise CheckpointError(f"Download {name} again, or choose another file: it looks like a {family.name} model, "
                              f"but its tensors have shapes that none has ({error}).") from error
    if checkpoint.folder is not None and checkpoint.folder_config is None:
        _check_folder_agrees(folder_config, model.config, family, name)
    _compare(model.state_dict(), tensors, family, name)
    set_packed_parameters(model, packed_weights(checkpoint, model, quantisation))
    return model


def _check_counts(config):
    """Raise ValueError for settings with more layers than any model has, since each would be built before tensors are
    compared."""
    for key, value in config.items():
        if any(word in key for word in ("layers", "blocks", "depth")) and type(value) is int and value > MAX_BLOCKS:
            raise ValueError(f"{key} is {value:,}, and at most {MAX_BLOCKS} are read")


def _folder_settings(checkpoint):
    if checkpoint.folder_config is not None:
        return checkpoint.folder_config
    try:
        return settings_of(checkpoint.folder.config)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"Download {checkpoint.name} again, or choose another folder: settings of its "
                              f"config.json are of other types than diffusers writes ({error}).") from error


def _check_folder_agrees(folder_config, config, family, name):
    """Reject a U-Net whose config.json contradicts its tensors."""
    for key in family.detection.config.rules:
        if key in folder_config and key not in family.detection.config_from_tensors and (plain(folder_config[key])
                                                                               != plain(config[key])):
            raise CheckpointError(f"Download the folder again, or choose another: {name} is a model of {family.name} "
                                  f"whose config.json says {key} = {shown(folder_config[key])}, and its tensors are of "
                                  f"{config[key]!r}.")


def _check_folder_config(config, family, name):
    """Reject settings that the family does not support, and those that diffusers' class would ignore."""
    cls = getattr(importlib.import_module("diffusers"), family.transformer)
    defaults = {key: parameter.default for key, parameter in inspect.signature(cls.__init__).parameters.items()
                if key != "self"}
    configured = {key: value for key, value in config.items() if not key.startswith("_")}
    rules = family.detection.config.rules
    for key, value in {**defaults, **configured}.items():
        inferred = *family.detection.config_from_tensors, *family.detection.folder.arguments
        if key in inferred or callable(rules.get(key)):
            continue
        if key not in defaults:
            expected, fits = None, not value                   # older releases of diffusers wrote disabled options
        else:
            expected = rules.get(key, defaults[key])
            fits = plain(value) == plain(expected)
        if not fits:
            raise CheckpointError(f"Use another model, or Load Diffusion Model: {name} is a model of {family.name} "
                                  f"whose config.json says {key} = {shown(value)}, and xDiT runs {family.name} with "
                                  f"{expected!r} only.")


def _compare(needed, found, family, name):
    missing, unknown = [key for key in needed if key not in found], [key for key in found if key not in needed]
    other = [f"{key} is {list(found[key].shape)} and should be {list(needed[key].shape)}" for key in needed
             if key in found and found[key].shape != needed[key].shape]
    integers = [key for key in needed if key in found and needed[key].is_floating_point()
             and not found[key].is_floating_point()]
    for keys, what in ((missing, f"lacks tensors of a {family.name} model"),
                       (other, f"has tensors of shapes that do not fit a {family.name} model"),
                       (unknown, f"has tensors that a {family.name} model does not"),
                       (integers, "has whole numbers where the weights have fractions")):
        if keys:
            more = f", and {len(keys) - NUM_NAMED} more" if len(keys) > NUM_NAMED else ""
            raise CheckpointError(f"Download {name} again, or choose another file: it {what}: "
                                  f"{', '.join(keys[:NUM_NAMED])}{more}.")
