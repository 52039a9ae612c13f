"""Description of a family of VAEs as data: one `VaeFamily` per module of this package.

Tensor names are those of ComfyUI's first_stage_model.state_dict(). The host reads families too, so their modules import
diffusers only inside functions.
"""

import importlib.metadata
import itertools
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch.overrides import TorchFunctionMode

from ..protocol.errors import CheckpointError


def decode_full(vae, latent):
    """Decode with vae.decode: (B, 3, H, W), or (B, 3, F, H, W) of a video."""
    return vae.decode(latent, return_dict=False)[0]


def concatenated(decode_frames):
    """The VaeFamily.decode for a VaeFamily.decode_frames."""
    def decode(vae, latent):
        done = []
        decode_frames(vae, latent, done.append)
        return torch.cat(done, 2)
    return decode


def encode_full(vae, image):
    """Encode with vae.encode; returns the mean."""
    latent = vae.encode(image, return_dict=False)[0]
    return latent if isinstance(latent, torch.Tensor) else latent.mode()


def signed_pixels(vae, image):
    """Convert an image from [-1, 1] to float32 in [0, 1]."""
    return image.float().add_(1).div_(2).clamp_(0, 1)


class OfComfyUI(torch.nn.Module):
    """Attributes of diffusers' autoencoders that ComfyUI's classes lack."""

    def has_every_tile(self):
        """False on ranks whose tiles another rank blends: their other tiles are on the meta device (vae_tiles.py)."""
        return True

    @property
    def device(self):
        return next(self.parameters()).device

    @property
    def dtype(self):
        return next(self.parameters()).dtype


@dataclass(frozen=True)
class VaeFamily:
    """One family of VAEs.

    models: names of the models that use it, for messages; () if ComfyUI has no VAE object for it.
    autoencoder: its class in diffusers, used by no other family; or ComfyUI's, "comfy.module:Class", to which OfComfyUI
        is added as a base.
    markers: parts of tensor names by which the family is detected; no later family has them. The family without markers
        is the default.
    decoder, encoder: prefixes of the tensor names of each half. Either half may be missing.
    unused: parts of the names of tensors that ComfyUI's modules have but never read.
    config(shapes, settings): arguments of the class, from {tensor name: shape}; a missing half is configured like the
        other. Raises CheckpointError for an unsupported variant. settings: see AutoencoderSpec.
    convert(tensors, arguments): the tensors with diffusers' names.
    finish(vae, settings): modifies the model, before its weights are loaded, in ways for which its class has no
        arguments.
    decode(vae, latent), encode(vae, image): as ComfyUI does, with diffusers' autoencoder; encode returns the mean.
    decode_frames(vae, latent, emit): decode that calls emit(frames) for consecutive frames (B, 3, F, H, W) as they
        finish and keeps none of them, for a VAE that decodes a video's frames in order; None: it decodes all at once.
    pixels(vae, image): converts the result of decode to the float32 values of ComfyUI's nodes. May modify the image.
    over_frames(module): whether its attention is over the frames of one position, all of which each rank has.
    by_frames: whether its decoder can be split by frames too. Most video VAEs process their frames in order, a few at a
        time, so that a rank would have to wait for the previous one.
    tiles: for a VAE that blends tiles, which are distributed over ranks instead of rows: {name of its method for one
        tile: function(vae, shape of a tile) -> shape of the method's result, which has the tile's dtype}.
    """

    models: tuple[str, ...]
    autoencoder: str
    markers: tuple[str, ...] = ()
    decoder: tuple[str, ...] = ("decoder.",)
    encoder: tuple[str, ...] = ("encoder.",)
    unused: tuple[str, ...] = ()
    config: Callable | None = None
    convert: Callable = lambda tensors, arguments: tensors
    finish: Callable = lambda vae, settings: None
    decode: Callable = decode_full
    encode: Callable = encode_full
    decode_frames: Callable | None = None
    pixels: Callable = signed_pixels
    over_frames: Callable = lambda module: False
    by_frames: bool = False
    tiles: dict[str, Callable] = field(default_factory=dict)
    # of ComfyUI's class: (class, an object of it) -> a small one like it, with which
    # nodes/bridge/vae/vae_class_check.py compares what it decodes and encodes; frames, rows and columns of the latent;
    # frames of the image to encode
    check_model: Callable | None = None
    check_size: tuple[int, int, int] = (2, 2, 2)
    check_frames: int = 1

    @property
    def class_name(self):
        return self.autoencoder.rpartition(":")[2]

    @property
    def is_comfyuis(self):
        return ":" in self.autoencoder


def need_diffusers(whose, version):
    """Raise CheckpointError if the installed diffusers is too old to have the class of such a VAE."""
    installed = importlib.metadata.version("diffusers")
    if Version(installed) < Version(version):
        raise CheckpointError(f"It is {whose}'s, which needs diffusers {version} or newer, and this is {installed}.")


def count_layers(shapes, pattern):
    """Number of consecutive layers, from 0 on, for which pattern.format(number) is the name of a tensor."""
    return next(number for number in itertools.count() if pattern.format(number) not in shapes)


def size_of(shapes):
    """Return a function (name, dim) -> shapes[name][dim], or None if there is no such tensor."""
    return lambda name, dim: shapes[name][dim] if name in shapes else None


class TorchFunctions(TorchFunctionMode):
    """Context that redirects this thread's calls of functions of torch.nn.functional, without patching torch.

    Functions that the replacements call are torch's own, or those of an outer context.
    """

    def __init__(self, **functions):
        """functions: {name in torch.nn.functional: function with the same arguments}."""
        super().__init__()
        self._functions = {getattr(F, name): function for name, function in functions.items()}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self._functions.get(function, function)(*args, **(kwargs or {}))


def torchs_own(*names):
    """TorchFunctions that restores torch's own functions inside other contexts."""
    def own(function):
        def undisturbed(*args, **kwargs):
            with torch._C.DisableTorchFunction():
                return function(*args, **kwargs)
        return undisturbed
    return TorchFunctions(**{name: own(getattr(F, name)) for name in names})


@contextmanager
def replaced(owner, **functions):
    """Context in which attributes of a Python module, class or torch module are replaced by these functions."""
    originals = {name: vars(owner)[name] for name in functions if name in vars(owner)}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name in functions:
            if name in originals:
                setattr(owner, name, originals[name])
            else:                                              # it shadowed the class's attribute
                delattr(owner, name)
