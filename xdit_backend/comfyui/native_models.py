"""Models that run as ComfyUI's own modules, built as ComfyUI's loader builds them.

Only comfy.ldm and its imports are used, not ComfyUI's loader, memory manager or nodes.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from contextlib import contextmanager

import torch

from ..protocol.errors import CheckpointError
from ..system import accelerator
from . import operations
from .install_location import comfyui_version, find_comfyui

FUSED_ACTIVATION = "linear_input_act"      # of comfy.ops, from ComfyUI 0.33 on
KITCHEN = "comfy_kitchen"                  # a package, which ComfyUI imports without a fallback from 0.32 on


def build_module(path, config, class_arguments=lambda config: config):
    """Build ComfyUI's module "package.module:Class", with a forward that returns a tuple as diffusers' do.

    class_arguments: of its Family. The layers are torch's (operations.py), so that weights are cast, dequantised and
    sharded like those of diffusers' classes. `wide_modules` of the result compute in float32 whatever the model's
    dtype; `own_buffers` maps each buffer to whether it has the model's dtype, like weights, or float32. Raises
    CheckpointError if this machine has no ComfyUI, or one without the class.
    """
    cls = class_at(path)
    arguments = {key: value for key, value in class_arguments(config).items() if not key.startswith("_")}
    with able_to_compute():
        model = cls(**arguments, dtype=torch.bfloat16, operations=operations)
    model.wide_modules = {name.rpartition(".")[0] for name, parameter in model.named_parameters()
                          if parameter.dtype == torch.float32}
    model.own_buffers = {name: buffer.dtype == torch.bfloat16 for name, buffer in model.named_buffers()}
    for path in model.wide_modules:                            # float64 in a float64 model
        if hasattr(model.get_submodule(path), "weight"):       # else it casts its inputs itself
            model.get_submodule(path).register_forward_pre_hook(_as_weight)
    _free_hidden_states(model)
    model.config, forward = config, model.forward

    @functools.wraps(forward)
    def returned_as_tuple(return_dict=False, **inputs):
        return forward(**{"transformer_options": {}} | inputs),            # a new dict: some models write into it
    model.forward = returned_as_tuple
    return model


@contextmanager
def able_to_compute():
    """Context in which only parameters are created on a requested meta device, since some constructors compute
    tables."""
    if torch.get_default_device().type != "meta":
        yield
        return
    from accelerate import init_empty_weights
    with torch.device("cpu"), init_empty_weights():
        yield


def _free_hidden_states(model):
    """Run sequences of a linear, an activation and a linear as torch does. From ComfyUI 0.33 on, Wan's feed-forward
    calls linear_input_act, whose argument is allocated until the second linear has run. Both compute the same, unless
    weights are quantised tensors of ComfyUI's, which workers do not have."""
    for module in model.modules():
        if isinstance(module, torch.nn.Sequential) and FUSED_ACTIVATION in type(module).forward.__code__.co_names:
            module.forward = types.MethodType(torch.nn.Sequential.forward, module)


def _as_weight(module, args):
    return tuple(each.to(module.weight.dtype) for each in args)


def class_at(path):
    """ComfyUI's class at "package.module:Class". Raises CheckpointError like build_module."""
    module, _, name = path.partition(":")
    with torch.device("cpu"):                                  # for tables that packages create when they are imported
        folder = _import_comfyui()
        try:
            with _names_of_transformers():
                return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            if KITCHEN in str(error):
                raise _lacks_kitchen(folder, error) from error
            raise CheckpointError(f"Update ComfyUI: the version {comfyui_version(folder)} in {folder} has no {name} in "
                                  f"{module}, which this model needs ({error}).") from error


def _lacks_kitchen(folder, error):
    """The CheckpointError of a ComfyUI that needs comfy-kitchen, or a newer one."""
    package = KITCHEN.replace("_", "-")
    with contextlib.suppress(OSError):
        lines = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
        package = next((line.strip() for line in lines if line.startswith(package)), package)
    installed = importlib.metadata.version(KITCHEN) if importlib.util.find_spec(KITCHEN) else "not installed"
    return CheckpointError(f"Install {package} in the Python of the workers: the ComfyUI {comfyui_version(folder)} in "
                           f"{folder}, whose module this model runs as, needs it, and comfy-kitchen is {installed} "
                           f"({error}).")


@contextmanager
def _names_of_transformers():
    """Provide a placeholder for transformers, which workers do not import (worker/bootstrap.py).

    Some of ComfyUI's classes use layers of a text encoder, whose file also imports its tokenizer from transformers.
    """
    if sys.modules.get("transformers", types) is not None:
        yield
        return
    sys.modules["transformers"] = placeholder = types.ModuleType("transformers")
    vars(placeholder)["CLIPTokenizer"] = None
    try:
        yield
    finally:
        sys.modules["transformers"] = None


def _import_comfyui():
    """Make ComfyUI's modules importable; returns its folder. They query devices when they are imported, so the rank's
    device must be the current one."""
    folder = find_comfyui()
    if folder is None:
        raise CheckpointError("Install ComfyUI on this machine, and set XDIT_COMFYUI to its folder: this model runs as "
                              "ComfyUI's own module, and no ComfyUI was found.")
    if "comfy" not in sys.modules and str(folder) not in sys.path:
        sys.path.append(str(folder))                           # last: ComfyUI has its own nodes.py and utils
    # ComfyUI parses the command line only if its main.py requests it
    settings = importlib.import_module("comfy.cli_args").args
    if "comfy.model_management" not in sys.modules:
        settings.use_pytorch_cross_attention = True
        settings.cpu = not accelerator.num_devices()
    return folder
