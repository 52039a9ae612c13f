"""How a model is described: as data. One `Family` a file of this folder; the engine and the loader need nothing else."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.nn.functional as F


@dataclass(frozen=True)
class BlockList:
    """A ModuleList of transformer blocks, in execution order.

    in_file: what its blocks' tensors are prefixed with in ComfyUI's and the publisher's files. returns: the streams a
    block returns, in order. image_share: the part of a block's parameters that an image token passes through.
    """

    name: str
    in_file: str
    returns: tuple[str, ...] = ("image",)
    image_share: float = 1.0


@dataclass(frozen=True)
class TokenArgument:
    """A block argument with a token dim, holding all tokens of the streams one after the other (or a tuple of such)."""

    dim: int
    streams: tuple[str, ...]


@dataclass(frozen=True)
class ModelPlan:
    """Where the tokens of a diffusers transformer are.

    streams: block arguments that carry hidden states (B, T, C) from block to block -> "image" or "text". A text
    that is only read by cross-attention is not a stream.
    tokens: other block arguments with a token dim, such as rotary tables.
    exact: modules whose leading arguments the forward rounds to half precision on the way -> the arguments of the
    forward they come from, and the factor it multiplies them by. They get them unrounded, as ComfyUI's models do.
    attention: modules inside a block that mix tokens -> the streams they mix, in the order of their sequence.
    positions: modules outside the blocks that derive positions from the latent's shape -> a function of positions.py.
    once: modules inside a block whose input is the same for all patches -> "step" (of time and pooled conditioning) or "run"
    (of text only). PipeFusion evaluates them once a step or run, not for each patch; its weights are read as often.
    skips(num_blocks): in U-shaped models, blocks that take a `skip` -> the earlier block whose output it is.
    """

    blocks: tuple[BlockList, ...]
    streams: dict[str, str]
    attention: dict[str, tuple[str, ...]]
    tokens: dict[str, TokenArgument] = field(default_factory=dict)
    exact: dict[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)
    positions: dict[str, Callable] = field(default_factory=dict)
    once: dict[str, str] = field(default_factory=dict)
    skips: Callable = lambda num_blocks: {}


@dataclass(frozen=True)
class Family:
    """Everything this project knows of one model family.

    transformer: class name in diffusers. recognise(shapes): is a file with tensors of these names and shapes ours?
    config(shapes): arguments of the diffusers class, from the header alone. convert(tensors, config): from the file's
    names to diffusers' names. amend(model, config): make a loaded model compute as ComfyUI's does, where diffusers' does not.
    inputs(latent, timestep, conditioning, config, patch): arguments of the diffusers forward;
    patch (a messages.Patch) where the latent is a piece. patch_size(config): latent pixels of a token along each dim.
    prediction(output, latent): back to the latent's rows and columns. conditioning: what it understands of ComfyUI's
    arguments to a diffusion model; ignored: what the model itself ignores too. refuse(shapes): why a file of
    this family cannot be run, or None. width(config): channels of a token. num_channels(config): channels of a prediction.
    """

    name: str
    transformer: str
    plan: ModelPlan
    recognise: Callable
    config: Callable
    convert: Callable
    inputs: Callable
    prediction: Callable
    conditioning: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    amend: Callable = lambda model, config: None
    refuse: Callable = lambda shapes: None
    patch_size: Callable = lambda config: (config["patch_size"],) * 2
    num_heads: Callable = lambda config: config["num_attention_heads"]
    num_blocks: Callable = lambda config: config["num_layers"]
    width: Callable = lambda config: config["num_attention_heads"] * config["attention_head_dim"]
    num_channels: Callable = lambda config: config["out_channels"]

    @property
    def has_text_stream(self):
        """Does text take part in self-attention?"""
        return "text" in self.plan.streams.values()


def count_blocks(shapes, prefix):
    """Number of consecutive blocks named `prefix`0., `prefix`1., ... in a file."""
    indices = {int(name[len(prefix):].partition(".")[0]) for name in shapes if name.startswith(prefix)}
    return len(indices)


def pad_to_patches(latent, patch_size):
    """Pad the last dims at their end to multiples of the patch size, wrapping around, as ComfyUI's models do."""
    pad = []
    for size, patch in zip(reversed(latent.shape[2:]), reversed(patch_size)):
        pad += [0, -size % patch]
    return F.pad(latent, pad, mode="circular") if any(pad) else latent
