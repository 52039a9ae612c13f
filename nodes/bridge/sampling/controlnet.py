"""ControlNet outputs for a call of the model, as tensors by the block to which workers add them.

ComfyUI computes them with its own ControlNet on the device where it samples. A ControlNet that calls layers of the
model gets their weights from the model's file. T2I-Adapters have outputs of the same kind.
"""

import copy

import torch

import comfy.controlnet
import comfy.model_management

from ....xdit_backend.protocol.errors import ConfigError, UnsupportedError
from ..compatibility.proxy_modules import WorkerParameter

# layers of Qwen-Image that its Fun ControlNet calls; its other layers are its own
OF_QWEN_FUN = ("img_in", "txt_norm", "txt_in", "time_text_embed")


def lend_layers(guider):
    """Give ControlNets that call layers of the model these layers' weights: from the file, with the patches of the
    running MODEL, on the device where ComfyUI samples. ComfyUI's clean-up after the run releases them.

    guider: ComfyUI's, during a run, with prepared ControlNets.
    """
    for control in _controls(guider.conds.values()):
        if isinstance(control, comfy.controlnet.ControlLora):
            model = control.control_model
            _free_memory(guider, model, comfy.model_management.get_torch_device())
            control.control_model = _readable(model, comfy.model_management.get_torch_device())
        elif isinstance(control, comfy.controlnet.QwenFunControlNet):
            model = copy.copy(control.extra_args["base_model"])
            _free_memory(guider, torch.nn.ModuleList(map(model.get_submodule, OF_QWEN_FUN)), control.load_device)
            model._modules = {name: _readable(module, control.load_device) if name in OF_QWEN_FUN else module
                            for name, module in model._modules.items()}
            control.set_extra_arg("base_model", model)


def _controls(conds):
    """ComfyUI's ControlNets in lists of its conds, without duplicates."""
    found = {}
    for control in (entry.get("control") for cond in conds for entry in cond or ()):
        while control is not None:
            found[id(control)] = control
            control = getattr(control, "previous_controlnet", None)
    return list(found.values())


def _free_memory(guider, module, device):
    """Have ComfyUI unload models that this run does not use if its device lacks memory for a module's weights."""
    runs = [guider.model_patcher, *guider.loaded_models]
    comfy.model_management.free_memory(
        comfy.model_management.module_size(module), device,
        [loaded for loaded in comfy.model_management.current_loaded_models if loaded.model in runs])


def _readable(module, device):
    """Copy a module, with the weights that are on the workers read to this device."""
    found = copy.copy(module)
    found._parameters = {name: torch.nn.Parameter(weight.read().to(device), requires_grad=False)
                         if isinstance(weight, WorkerParameter) else weight
                         for name, weight in module._parameters.items()}
    found._modules = {name: child and _readable(child, device) for name, child in module._modules.items()}
    return found


def control_residuals(family, config, control, shape):
    """Return {block: (B or 1, ...)} that ComfyUI's model would add for a latent of this shape. Blocks are named as in
    Family.control_shapes.

    control: output of ComfyUI's ControlNets, {"input": [tensor or None, ...], "middle": ..., "output": ...}, or None.
    Raises UnsupportedError if ComfyUI's model supports no ControlNet, or not this one; ConfigError for a ControlNet of
    another model.
    """
    if control is None:
        return {}
    shapes = family.control_shapes(config, shape)
    if not shapes:
        raise UnsupportedError(f"Remove Apply ControlNet: ComfyUI's {family.name} supports no ControlNet and would "
                               "silently ignore this workflow's.")
    known, found = {block.partition(".")[0] for block in shapes}, {}
    for name, tensors in control.items():
        if name not in known and any(tensor is not None for tensor in tensors):
            raise UnsupportedError(f"Use a ControlNet for {family.name}: this one was made for another model, as it "
                                   f"has outputs for {name} blocks. Supported are {' and '.join(sorted(known))} only.")
        if name in known:
            found |= _numbered(family, name, tensors, sum(block.startswith(f"{name}.") for block in shapes))
    num_outputs = sum(tensor is not None for name in known for tensor in control.get(name, ()))
    if family.plan.has_one_output_a_skip(family.num_blocks(config)) and num_outputs != len(shapes):
        raise ConfigError(f"Use a ControlNet that was made for this model: this one has {num_outputs} outputs for the "
                          f"{len(shapes)} skip connections of {family.name}, which need one each.")
    for block, tensor in found.items():
        if (not torch.is_tensor(tensor) or tensor.shape[0] not in (1, shape[0])
                or not _has_shape(tensor.shape[1:], shapes[block])):
            actual = tuple(tensor.shape[1:]) if torch.is_tensor(tensor) else type(tensor).__name__
            expected = tuple("any" if length is None else length for length in shapes[block])
            of_size = torch.is_tensor(tensor) and family.plan.is_unet and actual[:1] == shapes[block][:1]
            instead = ("a width and a height that are multiples of 64 pixels" if of_size else
                       f"a ControlNet that was made for {family.name}")
            raise ConfigError(f"Use {instead}: this ControlNet's output for {block.replace('.', ' block ')} of this "
                              f"{family.name} model is {actual}, and it must be {expected} for this latent.")
    return found


def _has_shape(actual, wanted):
    return len(actual) == len(wanted) and all(length in (own, None) for own, length in zip(actual, wanted))


def _numbered(family, name, tensors, num_blocks):
    """{block: tensor}, in the order in which ComfyUI's model consumes them. Surplus tensors are ignored."""
    if family.plan.is_unet:                                    # consumed from the end of the list
        tensors = list(tensors)[::-1][:num_blocks]
        numbers = range(num_blocks - 1, -1, -1) if name == "output" else range(num_blocks)
    else:
        numbers = range(num_blocks)
    return {f"{name}.{number}": tensor for number, tensor in zip(numbers, tensors) if tensor is not None}
