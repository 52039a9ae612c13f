"""Construction of diffusers' autoencoder, or ComfyUI's own, from the tensors of a VAE that ComfyUI has loaded."""

from collections.abc import Mapping
from types import MappingProxyType

import diffusers
import torch

from ..autoencoders import FAMILIES, supported
from ..autoencoders.vae_family import OfComfyUI
from ..comfyui.native_models import able_to_compute, class_at
from ..memory.staging import StagingBuffers
from ..protocol.errors import CheckpointError

# Substring of a tensor's name -> owner of the VAE. Tested before the family without markers, which has these names too.
OTHER_VAES = {
    "bn.running_mean": "Flux.2's with its norm, which the host takes off",
    "decoder.conv_in.conv.": "another video VAE",
    "encoder.conv_in.conv.": "another video VAE",
    "decoder.stages.": "Sana's deep compression autoencoder",
}


def load_autoencoder(tensors: Mapping[str, torch.Tensor], dtype, device,
                     settings: Mapping[str, str] = MappingProxyType({})):
    """The VAE with copies of these weights, in `dtype` on `device`. It has no encoder or decoder if their tensors are
    missing. device: None: in system RAM, without copies if they have this dtype.

    Names are those of ComfyUI's first_stage_model.state_dict(). settings: see AutoencoderSpec. Raises CheckpointError
    if tensors do not fit.
    """
    family = _family_of(tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in family.unused)}
    try:
        config = family.config({name: tuple(tensor.shape) for name, tensor in tensors.items()}, settings)
    except CheckpointError as error:
        raise _refusal(str(error)) from None
    vae = _without_weights(family, config, settings)
    weights = family.convert(tensors, config)
    for half, quant in (("encoder", "quant_conv"), ("decoder", "post_quant_conv")):
        name = getattr(family, half)[0].rstrip(".") if family.is_comfyuis else half
        if not any(each.startswith(f"{name}.") for each in weights):
            delattr(vae, name)
            if getattr(vae, quant, None) is not None:
                setattr(vae, quant, None)
    _check_fit(tensors, weights, vae)
    copy = torch.Tensor.contiguous if device is None else StagingBuffers(torch.device(device)).to_device
    vae.load_state_dict({name: copy(weight).to(dtype) for name, weight in weights.items()}, assign=True)
    if family.is_comfyuis:                                     # tables that are in no file, in ComfyUI's dtype
        vae.to(device or "cpu", dtype)
    return vae.eval().requires_grad_(False)


def _without_weights(family, config, settings):
    if family.is_comfyuis:                                     # which may rebuild tables and submodules
        with torch.device("meta"), able_to_compute():
            vae = class_of(family)(**config)
            family.finish(vae, settings)
        return vae
    with torch.device("meta"):
        vae = class_of(family)(**config)
    family.finish(vae, settings)
    return vae


def class_of(family):
    """The class of its autoencoder. Raises CheckpointError if it is ComfyUI's and this machine has none."""
    if not family.is_comfyuis:
        return getattr(diffusers, family.autoencoder)
    theirs = class_at(family.autoencoder)
    return type(theirs.__name__, (OfComfyUI, theirs), {})


def _refusal(reason):
    return CheckpointError(f"Use VAE Decode or VAE Encode for this VAE, which xDiT cannot run. {reason} Distributed "
                           f"VAE Decode and Encode work with the VAEs of {supported()}.")


def _family_of(tensors):
    families = [family for family in FAMILIES.values() if family.models]
    for family in families:
        if any(mark in name for mark in family.markers for name in tensors):
            return family
    for part, owner in OTHER_VAES.items():
        if any(part in name for name in tensors):
            raise _refusal(f"It is {owner}.")
    return next(family for family in families if not family.markers)


def _check_fit(tensors, weights, vae):
    needed = {name: tuple(parameter.shape) for name, parameter in vae.state_dict().items()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    wrong = [name for name in sorted({*needed, *found}) if needed.get(name) != found.get(name)]
    if wrong:
        name = wrong[0]
        raise _refusal(f"{len(wrong)} tensors do not fit, the first is {name}: shape {found.get(name, 'none')} is "
                      f"given, {needed.get(name, 'none')} is needed.")
    num_elements, num_converted = (sum(tensor.numel() for tensor in each.values()) for each in (tensors, weights))
    if num_converted != num_elements:                          # converters skip unknown tensors
        raise _refusal(f"Of the {num_elements} elements of its tensors, {num_elements - num_converted} are of unknown "
                       f"ones.")
