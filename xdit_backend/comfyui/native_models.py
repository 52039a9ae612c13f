"""Transformers that are ComfyUI's own modules, built as ComfyUI's loader builds them, without what else ComfyUI does.

Called by checkpoints/build_transformer.py. Of ComfyUI, comfy.ldm is imported and what it imports; its loader, memory
manager and nodes stay out of it.
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
from . import operations
from .install_location import comfyui_version, find_comfyui

KITCHEN = "comfy_kitchen"                  # a package, which ComfyUI imports without a fallback from 0.32 on


def build_module(path, config, class_arguments=lambda config: config):
    """The module at "package.module:Class" of ComfyUI, whose forward returns as diffusers' do: a tuple.
    class_arguments: of its Family.

    Its layers are torch's own (operations.py), so that weights are cast, unpacked and shared out as those of diffusers'
    classes are. Its `wide_modules` are those that compute in float32, whatever the model's type; its `own_buffers`
    say of each whether it is held in that type, as weights are, or in float32. Raises CheckpointError where this
    machine has no ComfyUI, or one without the class.
    """
    cls = class_at(path)
    arguments = {key: value for key, value in class_arguments(config).items() if not key.startswith("_")}
    with able_to_compute():
        model = cls(**arguments, dtype=torch.bfloat16, operations=operations)
    model.wide_modules = {name.rpartition(".")[0] for name, parameter in model.named_parameters()
                          if parameter.dtype == torch.float32}
    model.own_buffers = {name: buffer.dtype == torch.bfloat16 for name, buffer in model.named_buffers()}
    for path in model.wide_modules:                            # which are float64 in a model of that type
        if hasattr(model.get_submodule(path), "weight"):       # else it casts what it adds by itself
            model.get_submodule(path).register_forward_pre_hook(_as_weight)
    model.config, forward = config, model.forward

    @functools.wraps(forward)
    def returned_as_tuple(return_dict=False, **inputs):
        return forward(**{"transformer_options": {}} | inputs),            # of its own: some models write into it
    model.forward = returned_as_tuple
    return model


@contextmanager
def able_to_compute():
    """Classes compute with tables as they are made: where all is asked for on the meta device, parameters are there
    alone."""
    if torch.get_default_device().type != "meta":
        yield
        return
    from accelerate import init_empty_weights
    with torch.device("cpu"), init_empty_weights():
        yield


def _as_weight(module, args):
    return tuple(each.to(module.weight.dtype) for each in args)


def class_at(path):
    """ComfyUI's class at "package.module:Class". Raises CheckpointError as build_module does."""
    module, _, name = path.partition(":")
    with torch.device("cpu"):                                  # of tables that packages make as they are imported
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
    """Some of ComfyUI's classes are built of a text encoder's, in whose file is its tokenizer's, too. Workers leave
    transformers out (worker/bootstrap.py): here it has the name that the file imports."""
    if sys.modules.get("transformers", types) is not None:
        yield
        return
    sys.modules["transformers"] = stand_in = types.ModuleType("transformers")
    vars(stand_in)["CLIPTokenizer"] = None
    try:
        yield
    finally:
        sys.modules["transformers"] = None


def _import_comfyui():
    """Make ComfyUI's modules importable, and return its folder. They look at the devices as they are imported, so the
    rank's own is the current one by now."""
    folder = find_comfyui()
    if folder is None:
        raise CheckpointError("Install ComfyUI on this machine, and name its folder in XDIT_COMFYUI: this model runs "
                              "as ComfyUI's own module, and no ComfyUI is found here.")
    if "comfy" not in sys.modules and str(folder) not in sys.path:
        sys.path.append(str(folder))                           # last: ComfyUI has a nodes.py and an utils of its own
    # no command line is read but where ComfyUI's main.py asks for it
    settings = importlib.import_module("comfy.cli_args").args
    if "comfy.model_management" not in sys.modules:
        settings.use_pytorch_cross_attention = True
        settings.cpu = not torch.cuda.is_available()
    return folder
