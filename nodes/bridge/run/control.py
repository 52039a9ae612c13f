"""The outputs of ControlNets for a call of the model, as tensors by the place where workers add them. Called by
remote.py and wrappers.py.

ComfyUI computes them with its own ControlNet, on the device where it samples. A T2I-Adapter has outputs of the same
kind.
"""

import torch

import comfy.controlnet

from ....xdit_backend.protocol.errors import ConfigError, UnsupportedError

TAKE_WEIGHTS = {comfy.controlnet.ControlLora: "a Control-LoRA",
                comfy.controlnet.QwenFunControlNet: "Qwen-Image's Fun ControlNet"}


def refuse_controls(conds):
    """Raise UnsupportedError for ControlNets that compute with layers of the model itself. conds: lists of ComfyUI's
    conds."""
    for control in (entry.get("control") for cond in conds for entry in cond or ()):
        while control is not None:
            if type(control) in TAKE_WEIGHTS:
                raise UnsupportedError("Use a ControlNet that has layers of its own, or Load Diffusion Model: "
                                       f"{TAKE_WEIGHTS[type(control)]} computes with the model's, and xDiT's workers "
                                       "hold them.")
            control = getattr(control, "previous_controlnet", None)


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
                or tuple(tensor.shape[1:]) != shapes[place]):
            given = tuple(tensor.shape[1:]) if torch.is_tensor(tensor) else type(tensor).__name__
            of_size = torch.is_tensor(tensor) and family.is_unet and given[:1] == shapes[place][:1]
            instead = ("a width and a height that are multiples of 64 pixels" if of_size else
                       f"a ControlNet that was made for {family.name}")
            raise ConfigError(f"Use {instead}: the given ControlNet makes {given} for {place.replace('.', ' block ')} "
                              f"of this {family.name} model, and it takes {shapes[place]} with this latent.")
    return found


def _numbered(family, name, tensors, num_blocks):
    """{place: tensor}, in the order in which ComfyUI's model takes them.
    Of more than there are blocks it leaves out the others."""
    if family.is_unet:                                         # each from the end; skips are taken up from the last
        tensors = list(tensors)[::-1][:num_blocks]
        numbers = range(num_blocks - 1, -1, -1) if name == "output" else range(num_blocks)
    else:
        numbers = range(num_blocks)
    return {f"{name}.{number}": tensor for number, tensor in zip(numbers, tensors) if tensor is not None}
