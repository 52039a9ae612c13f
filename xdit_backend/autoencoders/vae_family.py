"""How a family of VAEs is described: as data. One `VaeFamily` a file of this folder; the loader and the split need
nothing else.

Names of tensors are those of ComfyUI's first_stage_model.state_dict(). The host reads families too, so that their files
import diffusers only where they use it.
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
    """What vae.decode gives: (B, 3, H, W), or (B, 3, F, H, W) of a video."""
    return vae.decode(latent, return_dict=False)[0]


def encode_full(vae, image):
    """The mean that vae.encode gives."""
    latent = vae.encode(image, return_dict=False)[0]
    return latent if isinstance(latent, torch.Tensor) else latent.mode()


def signed_pixels(vae, image):
    """float32 in [0, 1], of a picture in [-1, 1]."""
    return image.float().add_(1).div_(2).clamp_(0, 1)


class OfComfyUI(torch.nn.Module):
    """What is asked of diffusers' autoencoders and classes of ComfyUI's lack."""

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
    """Everything this project knows of one family of VAEs.

    models: whose VAEs they are, in a person's words; () where ComfyUI has no VAE object of it.
    autoencoder: its class in diffusers, which is no other family's; or ComfyUI's, "comfy.module:Class", which is made
        an OfComfyUI.
    marks: a tensor's name with one of these is found in no family after it. The one without takes what has no mark of
    another.
    decoder, encoder: what the names of each half's tensors begin with. Either half may be missing.
    unused: what the names of tensors hold that ComfyUI's modules have and never read.
    config(shapes, settings): the arguments of the class, of shapes by tensors' names; a missing half is described like
        the other. Raises CheckpointError with the reason where the VAE is of a kind that cannot be run. settings: see
        AutoencoderSpec.
    convert(tensors, arguments): the tensors under diffusers' names.
    finish(vae, settings): gives the model without weights what its class has no argument for.
    decode(vae, latent), encode(vae, picture): as ComfyUI does it, given diffusers' autoencoder; encode gives the mean.
    pixels(vae, picture): what decode gives, as ComfyUI's nodes give it, float32. It may write into the picture.
    over_frames(module): does its attention go over the frames of one place, which every rank has?
    by_frames: can its decoder be split by frames too? Most video autoencoders go through their frames in order, a few
        at a time, so that a rank would wait for the one before to end.
    tiles: of an autoencoder that goes over tiles and blends them, which ranks share instead of rows: {its method of one
        tile: function(vae, shape of a tile) -> shape of what the method gives, in the tile's type}.
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
    pixels: Callable = signed_pixels
    over_frames: Callable = lambda module: False
    by_frames: bool = False
    tiles: dict[str, Callable] = field(default_factory=dict)
    # of ComfyUI's class: (class, an object of it) -> a small one like it, whose images and latents
    # nodes/bridge/vae/vae_class_check.py compares; frames, rows and columns of the latent; frames of the image
    build_small: Callable | None = None
    check_size: tuple[int, int, int] = (2, 2, 2)
    check_frames: int = 1

    @property
    def class_name(self):
        return self.autoencoder.rpartition(":")[2]

    @property
    def is_comfyuis(self):
        return ":" in self.autoencoder


def need_diffusers(whose, version):
    """Raise CheckpointError where the installed diffusers has no class yet for such a VAE."""
    installed = importlib.metadata.version("diffusers")
    if Version(installed) < Version(version):
        raise CheckpointError(f"It is {whose}'s, which needs diffusers {version} or newer, and this is {installed}.")


def count_layers(shapes, pattern):
    """How many numbers, from 0 on, give the name of a tensor when they are put into `pattern`."""
    return next(number for number in itertools.count() if pattern.format(number) not in shapes)


def size_of(shapes):
    """A function (name, dim) -> shapes[name][dim], or None where there is no such tensor."""
    return lambda name, dim: shapes[name][dim] if name in shapes else None


class TorchFunctions(TorchFunctionMode):
    """While active, this thread's calls of functions of torch.nn.functional reach these. What they call in turn is
    torch's own, or what was active before; nothing in torch changes."""

    def __init__(self, **functions):
        """functions: {name in torch.nn.functional: function of the same arguments}."""
        super().__init__()
        self._functions = {getattr(F, name): function for name, function in functions.items()}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self._functions.get(function, function)(*args, **(kwargs or {}))


def torchs_own(*names):
    """TorchFunctions by which functions of torch.nn.functional are torch's, whatever was active before."""
    def own(function):
        def whole(*args, **kwargs):
            with torch._C.DisableTorchFunction():
                return function(*args, **kwargs)
        return whole
    return TorchFunctions(**{name: own(getattr(F, name)) for name in names})


@contextmanager
def replaced(owner, **functions):
    """While active, attributes of a module, of Python's or of torch's, are these functions."""
    originals = {name: vars(owner)[name] for name in functions if name in vars(owner)}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name in functions:
            if name in originals:
                setattr(owner, name, originals[name])
            else:                                              # it hid its class's
                delattr(owner, name)
