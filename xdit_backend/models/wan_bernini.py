"""Bernini's reference videos and images for diffusers' Wan, which reads them, like ComfyUI's, as tokens after the
image's. Installed by Family.adapt_model."""

import torch

from ..protocol.errors import ConfigError
from .common.forward_state import ForwardValue
from .common.reference_latents import listed

NAME, STREAM = "context_latents", "reference"


def context_latents(conditioning):
    """The reference latents of a call, (1 or B, C, F, rows, columns) each, in order."""
    return listed(conditioning, NAME)


def num_context_tokens(latent):
    """Entry of Inputs.lengths: number of tokens of the references. latent: rule that cuts a latent into tokens."""
    return lambda conditioning: sum(latent.num_tokens(each.shape) for each in context_latents(conditioning))


def expanded_context(latent):
    """Rule for the forward's references, each expanded to the batch size; None without any. Raises ConfigError for a
    model with another number of channels, or for timesteps that differ between frames."""
    def rule(call):
        found = context_latents(call.conditioning)
        channels = call.config["in_channels"]
        wrong = next((each.shape[1] for each in found if each.shape[1] != channels), None)
        if wrong is not None:
            raise ConfigError("Load a Bernini or Wan text-to-video model: the reference latents of Bernini "
                              f"Conditioning have {wrong} channels, and this Wan model takes {channels}.")
        if found and call.timestep.ndim > 1:
            raise ConfigError("Remove the noise mask, or Bernini Conditioning: references have one timestep, and with "
                              "a noise mask each frame of this Wan model has its own.")
        return [latent.padded(each.expand(len(call.latent), *each.shape[1:])) for each in found] or None
    return rule


def with_context(model, forward):
    """Return the forward with an additional argument `context_latents`, padded to full tokens. References are
    embedded like the latent, have their own positions, rotated further by the number of the reference, and are not
    part of the output."""
    references, num_own = ForwardValue(model), ForwardValue(model)
    embed, rope, norm = model.patch_embedding, model.rope, model.norm_out
    embed_latent, turn, normalise = embed.forward, rope.forward, norm.forward

    def embedded(latent):
        tokens = embed_latent(latent)
        if references.get() is None:
            return tokens
        num_own.set(tokens[0, 0].numel())
        # (B, C, F, rows, columns) of each -> (B, C, 1, 1, T of all)
        all_tokens = [tokens, *(embed_latent(each.to(latent.dtype)) for each in references.get())]
        return torch.cat([part.flatten(2) for part in all_tokens], 2)[:, :, None, None]

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
    """Rotate tables (1, T, 1, H) further by a reference's number: as in ComfyUI's Wan, by that position along an
    axis that has all channels of a head."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed
    cos, sin = tables
    position = torch.tensor([float(number)], dtype=torch.float64, device=cos.device)
    more_cos, more_sin = (each.to(cos.dtype) for each in get_1d_rotary_pos_embed(
        cos.shape[-1], position, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64))
    return cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin
