"""Bernini's reference videos and pictures, which ComfyUI's Wan reads as further tokens after the image's, for
diffusers' Wan. Used in `amend`."""

import torch

from ..protocol.errors import ConfigError
from .common.forward_state import ForwardValue
from .common.reference_latents import listed

NAME, STREAM = "context_latents", "reference"


def given_latents(conditioning):
    """The reference latents of a call, (1 or B, C, F, rows, columns) each, in their order."""
    return listed(conditioning, NAME)


def num_context_tokens(latent):
    """For Family.lengths: their tokens. latent: how a latent is cut into tokens."""
    return lambda conditioning: sum(latent.num_tokens(each.shape) for each in given_latents(conditioning))


def whole_context(latent):
    """The rule of an argument of the forward: the references as it takes them, one of each for each image; None without
    any. It raises ConfigError for a model that takes more channels than they have, or times of frames."""
    def rule(call):
        found = given_latents(call.conditioning)
        channels = call.config["in_channels"]
        wrong = next((each.shape[1] for each in found if each.shape[1] != channels), None)
        if wrong is not None:
            raise ConfigError("Load a Bernini or Wan text-to-video model: the reference latents of Bernini "
                              f"Conditioning are of {wrong} channels, and this Wan takes {channels}.")
        if found and call.timestep.ndim > 1:
            raise ConfigError("Remove the noise mask, or Bernini Conditioning: references have the time of the whole "
                              "latent, and with a noise mask each frame of this Wan has a time of its own.")
        return [latent.padded(each.expand(len(call.latent), *each.shape[1:])) for each in found] or None
    return rule


def with_context(model, forward):
    """The forward, that also takes `context_latents`, padded to whole tokens: they are embedded as the latent is, have
    positions of their own, turned on by the number of the reference, and are no part of what is made."""
    references, num_own = ForwardValue(model), ForwardValue(model)
    embed, rope, norm = model.patch_embedding, model.rope, model.norm_out
    embed_latent, turn, normalise = embed.forward, rope.forward, norm.forward

    def embedded(latent):
        tokens = embed_latent(latent)
        if references.get() is None:
            return tokens
        num_own.set(tokens[0, 0].numel())
        # (B, C, F, rows, columns) of each -> (B, C, 1, 1, T of all)
        parts = [tokens, *(embed_latent(each.to(latent.dtype)) for each in references.get())]
        return torch.cat([part.flatten(2) for part in parts], 2)[:, :, None, None]

    def turned(latent):
        own = turn(latent)
        if references.get() is None:
            return own
        others = [_turned_on(turn(each), number) for number, each in enumerate(references.get(), 1)]
        return tuple(torch.cat(tables, 1) for tables in zip(own, *others))

    def forward_with(context_latents=None, **arguments):
        with references.holding(context_latents):
            return forward(**arguments)

    def normalised(tokens):
        return normalise(tokens if references.get() is None else tokens[:, :num_own.get()])

    embed.forward, rope.forward, norm.forward = embedded, turned, normalised
    return forward_with


def _turned_on(tables, number):
    """Rotary tables (1, T, 1, H) turned on by a reference's number: as in ComfyUI's Wan, by that number of places along
    an axis that has all of a head's dims."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed
    cos, sin = tables
    place = torch.tensor([float(number)], dtype=torch.float64, device=cos.device)
    more_cos, more_sin = (each.to(cos.dtype) for each in get_1d_rotary_pos_embed(
        cos.shape[-1], place, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64))
    return cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin
