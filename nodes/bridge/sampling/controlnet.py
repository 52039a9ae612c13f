"""The outputs of ControlNets for a call of the model, as tensors by the place where workers add them. Called by
remote_model.py and sampler_wrappers.py.

ComfyUI computes them with its own ControlNet, on the device where it samples, one that takes layers of the model with
weights from the model's file. A T2I-Adapter has outputs of the same kind.
"""

import copy

import torch

import comfy.controlnet
import comfy.model_management

from ....xdit_backend.protocol.errors import ConfigError, UnsupportedError
from ..compatibility.proxy_modules import WorkerParameter

# layers of Qwen-Image that its Fun ControlNet calls: the others are its own
OF_QWEN_FUN = ("img_in", "txt_norm", "txt_in", "time_text_embed")


def lend_layers(guider):
    """Give ControlNets that compute with layers of the model itself these layers' weights: as the file has them, with
    the patches of the MODEL that runs, on the device where ComfyUI samples. ComfyUI's clean-up of a run lets them go.

    guider: ComfyUI's, in a run; it has prepared the ControlNets.
    """
    for control in _controls(guider.conds.values()):
        if isinstance(control, comfy.controlnet.ControlLora):
            net = control.control_model
            _free_memory(guider, net, comfy.model_management.get_torch_device())
            control.control_model = _readable(net, comfy.model_management.get_torch_device())
        elif isinstance(control, comfy.controlnet.QwenFunControlNet):
            net = copy.copy(control.extra_args["base_model"])
            _free_memory(guider, torch.nn.ModuleList(map(net.get_submodule, OF_QWEN_FUN)), control.load_device)
            net._modules = {name: _readable(module, control.load_device) if name in OF_QWEN_FUN else module
                            for name, module in net._modules.items()}
            control.set_extra_arg("base_model", net)


def _controls(conds):
    """ComfyUI's ControlNets of lists of its conds, each once."""
    found = {}
    for control in (entry.get("control") for cond in conds for entry in cond or ()):
        while control is not None:
            found[id(control)] = control
            control = getattr(control, "previous_controlnet", None)
    return list(found.values())


def _free_memory(guider, module, device):
    """Have ComfyUI unload what this run does not use, where its device lacks memory for a module's weights."""
    runs = [guider.model_patcher, *guider.loaded_models]
    comfy.model_management.free_memory(
        comfy.model_management.module_size(module), device,
        [loaded for loaded in comfy.model_management.current_loaded_models if loaded.model in runs])


def _readable(module, device):
    """A module like this one, whose weights that the workers hold are here."""
    found = copy.copy(module)
    found._parameters = {name: torch.nn.Parameter(weight.read().to(device), requires_grad=False)
                         if isinstance(weight, WorkerParameter) else weight
                         for name, weight in module._parameters.items()}
    found._modules = {name: child and _readable(child, device) for name, child in module._modules.items()}
    return found


def places_of(family, config, control, shape):
    """{place: (B or 1, ...)} of what ComfyUI's model would add for a latent of this shape. Places:
    Family.control_shapes.

    control: of ComfyUI's ControlNets, {"input": [tensor or None, ...], "middle": ..., "output": ...}; None where there
    is none.
    Raises UnsupportedError where ComfyUI's model takes none, or not these; ConfigError for a ControlNet of another
    model.
    """
    if control is None:
        return {}
    shapes = family.control_shapes(config, shape)
    if not shapes:
        raise UnsupportedError(f"Remove Apply ControlNet: ComfyUI's {family.name} takes no ControlNet conditioning, "
                               "and would drop this workflow's without notice.")
    known, found = {place.partition(".")[0] for place in shapes}, {}
    for name, tensors in control.items():
        if name not in known and any(tensor is not None for tensor in tensors):
            raise UnsupportedError(f"Use a ControlNet for {family.name}: this one was made for another model, as it "
                                   f"gives something for {name} blocks. Taken is {' and '.join(sorted(known))} only.")
        if name in known:
            found |= _numbered(family, name, tensors, sum(place.startswith(f"{name}.") for place in shapes))
    given = sum(tensor is not None for name in known for tensor in control.get(name, ()))
    if not family.is_unet and family.plan.skips(family.num_blocks(config)) and given != len(shapes):
        raise ConfigError(f"Use a ControlNet that was made for this model: this one gives {given} tensors for the "
                          f"{len(shapes)} skips of {family.name}, and ComfyUI's takes one for each.")
    for place, tensor in found.items():
        if (not torch.is_tensor(tensor) or tensor.shape[0] not in (1, shape[0])
                or not _has_shape(tensor.shape[1:], shapes[place])):
            given = tuple(tensor.shape[1:]) if torch.is_tensor(tensor) else type(tensor).__name__
            takes = tuple("any" if length is None else length for length in shapes[place])
            of_size = torch.is_tensor(tensor) and family.is_unet and given[:1] == shapes[place][:1]
            instead = ("a width and a height that are multiples of 64 pixels" if of_size else
                       f"a ControlNet that was made for {family.name}")
            raise ConfigError(f"Use {instead}: the given ControlNet makes {given} for {place.replace('.', ' block ')} "
                              f"of this {family.name} model, and it takes {takes} with this latent.")
    return found


def _has_shape(given, wanted):
    return len(given) == len(wanted) and all(length in (own, None) for own, length in zip(given, wanted))


def _numbered(family, name, tensors, num_blocks):
    """{place: tensor}, in the order in which ComfyUI's model takes them.
    Of more than there are blocks it leaves out the others."""
    if family.is_unet:                                         # each from the end; skips are taken up from the last
        tensors = list(tensors)[::-1][:num_blocks]
        numbers = range(num_blocks - 1, -1, -1) if name == "output" else range(num_blocks)
    else:
        numbers = range(num_blocks)
    return {f"{name}.{number}": tensor for number, tensor in zip(numbers, tensors) if tensor is not None}
