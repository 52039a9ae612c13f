"""Comparison of ComfyUI's VAE with the workers' decode and encode, for autoencoders that run as ComfyUI's own class.

The class is no interface: its range of pixels or its number of frames changes between versions. A small random
autoencoder of the class is decoded and encoded once in this process, as ComfyUI's VAE does it and as the workers do
it. The result is stored (class_comparisons.py)."""

import functools

import torch

from ....xdit_backend.autoencoders.vae_family import OfComfyUI, replaced
from ..compatibility import class_comparisons
from ..compatibility.comfyui_version import newer_comfyui
from ..compatibility.weight_creation import weights_at_construction

TOLERANCE = 1e-3                           # of pixels from 0 to 1
DIFFERENCE = "difference"                  # entry of the stored result


def check_vae_class(vae, kind):
    """Raise UnsupportedError where ComfyUI's VAE and the workers would give different pixels or latents. kind: the
    VAE's Kind."""
    cls, family = type(vae.first_stage_model), kind.family
    if family.check_model is None:
        return
    name = f"{family.class_name} {cls.__name__} {vae.latent_channels}"
    # ComfyUI's VAE has functions for the range of pixels
    key = class_comparisons.key_of(cls.__module__, "comfy.sd") | {
        "range": [class_comparisons.code_of(function) for function in (vae.process_input, vae.process_output)]}
    result = class_comparisons.stored(name, key)
    if result is None:
        result = {DIFFERENCE: _compared(vae, kind, cls)}
        class_comparisons.store(name, key, result)
    if result[DIFFERENCE]:
        raise _refusal(family, result[DIFFERENCE])


def _compared(vae, kind, cls):
    """The difference as a clause; "" if there is none. Raises UnsupportedError if ComfyUI's class fails."""
    try:
        with torch.no_grad():
            return _difference(vae, kind, cls) or ""
    except (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError, NotImplementedError) as error:
        raise _refusal(kind.family, f"its VAE fails in a test ({type(error).__name__}: {error})") from error


def _refusal(family, what):
    return newer_comfyui(family.models[0], what, instead="VAE Decode and VAE Encode")


def _difference(vae, kind, cls):
    """The difference as a clause; None if there is none."""
    family = kind.family
    with weights_at_construction():
        model = family.check_model(type(cls.__name__, (OfComfyUI, cls), {}), vae.first_stage_model).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        width = parameter[0].numel() if parameter.ndim > 1 else 1
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * width ** -0.5)
    buffers = dict(vae.first_stage_model.named_buffers())
    for name, buffer in model.named_buffers():                 # such as the mean of latents
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])
    ours, shapes = _copy_with(vae, model), []
    latent = torch.randn(1, vae.latent_channels, *family.check_size, generator=generator)
    want = vae.process_output(model.decode(latent.clone()).float())
    with replaced(model, **{name: functools.partial(_recorded, getattr(model, name), functools.partial(shape_of, model),
                                                    shapes) for name, shape_of in family.tiles.items()}):
        pixels = family.pixels(model, family.decode(model, latent.clone()))
        inputs = vae.process_input(want[:, :, :family.check_frames].clamp(0, 1).clone())
        encoded = family.encode(model, inputs.clone())
    frames = kind.decoded_frames(ours, latent.shape[2]), kind.encoded_frames(ours, inputs.shape[2])
    moments = model.encode(inputs.clone())
    if any(actual != said for actual, said in shapes):
        return f"a tile of its VAE has the shape {shapes[0][0]}, where the pack knows {shapes[0][1]}"
    for what, own, native, count in (("image", pixels, want, frames[0]), ("latent", encoded, moments, frames[1])):
        if own.shape != native.shape or native.shape[2] != count:
            return f"its VAE gives a {what} of shape {tuple(native.shape)}, where the pack knows {count} frames"
        if not (own - native).abs().max() <= TOLERANCE * max(1.0, native.abs().max().item()):
            return (f"its VAE gives a {what} of numbers from {native.min().item():.3g} to {native.max().item():.3g}, "
                    f"where the pack knows {own.min().item():.3g} to {own.max().item():.3g}")
    return None


def _recorded(compute, shape_of, shapes, tile):
    made = compute(tile)
    shapes.append((tuple(made.shape), tuple(shape_of(tile.shape))))
    return made


def _copy_with(vae, model):
    """ComfyUI's VAE with another module, for the functions of Kind."""
    same = object.__new__(type(vae))
    vars(same).update(vars(vae) | {"first_stage_model": model})
    return same
