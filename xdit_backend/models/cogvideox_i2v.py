"""CogVideoX-5b-I2V: CogVideoX with a table of learned token positions instead of rotary ones."""

import dataclasses

from ..protocol.errors import ConfigError
from .cogvideox import COGVIDEOX, LATENT, LEARNED, is_cogvideox
from .common.family import SmallConfig
from .common.inputs import config_of, frames_first, has, token_range

# rows of the table for text, and for the tokens of 13 latent frames of 720 x 480 pixels
NUM_TEXTS, NUM_POSITIONS = 226, 17550


def _latent(call):
    num_tokens = token_range(call, LATENT)[2]
    if num_tokens > NUM_POSITIONS:
        raise ConfigError("Use a smaller or shorter video, such as 49 frames of 720 x 480 pixels: CogVideoX-5b-I2V "
                          f"has positions for {NUM_POSITIONS} tokens, and this latent has {num_tokens}.")
    return LATENT(call)


def _adapt(model, config):
    """Use the table's rows in order for latents of any size, as ComfyUI's model does; diffusers' takes latents of
    one size, and rotates too."""
    frames_first(model, config)
    embed = model.patch_embed
    forward, embed.use_learned_positional_embeddings, embed.use_positional_embeddings = embed.forward, False, False

    def with_positions(text_embeds, image_embeds):
        embeds, num_texts = forward(text_embeds, image_embeds), text_embeds.shape[1]
        positions = embed.pos_embedding[:, NUM_TEXTS:NUM_TEXTS + embeds.shape[1] - num_texts].to(embeds.dtype)
        embeds[:, num_texts:] += positions
        return embeds
    embed.forward = with_positions


def _positions_of_patch(module, forward, rows, tokens, args, kwargs):
    full_table, module.pos_embedding = module.pos_embedding, module.pos_embedding[:, rows.first_token:]
    try:
        return forward(*args, **kwargs)
    finally:
        module.pos_embedding = full_table


COGVIDEOX_I2V = dataclasses.replace(
    COGVIDEOX, name="CogVideoX-I2V", title="CogVideoX-5b-I2V", adapt_model=_adapt,
    activation_factors={"alone": 12.07, "residual": 4.07, "whole": 7.05, "outside": 2.57, "held": 1.07, "block": 11.0,
                        "exchange": 14.0, "own": 0.0, "early": 0.95, "cut": 1.19},
    detection=dataclasses.replace(
        COGVIDEOX.detection,
        recognise=lambda shapes: is_cogvideox(shapes, 4) and has(LEARNED)(shapes), refusals=(),
        config=config_of(**COGVIDEOX.detection.config.rules | {"use_learned_positional_embeddings": True})),
    inputs=dataclasses.replace(
        COGVIDEOX.inputs,
        arguments={name: rule for name, rule in COGVIDEOX.inputs.arguments.items() if name != "image_rotary_emb"}
        | {"hidden_states": _latent}),
    plan=dataclasses.replace(COGVIDEOX.plan, tokens={}, positions={"patch_embed": _positions_of_patch}),
    testing=SmallConfig(COGVIDEOX.testing.config | {"use_learned_positional_embeddings": True,
                                                    "ofs_embed_dim": None, "num_attention_heads": 6},
                        COGVIDEOX.testing.native,
                        # a width of which sinusoids take three parts
                        COGVIDEOX.testing.arguments | {"in_channels": 32, "num_attention_heads": 6,
                                                       "use_rotary_positional_embeddings": False,
                                                       "use_learned_positional_embeddings": True}))
