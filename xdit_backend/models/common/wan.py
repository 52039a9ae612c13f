"""Shared code of the Wan variants that run as ComfyUI's own modules: config rules, attention and input rules, and
small test configurations."""

import torch.nn.functional as F

from ...protocol.errors import ConfigError
from .inputs import blocks, even_sides, full_shape, has, size

# for all Wan variants; published ones have heads of 128
RULES = {
    "patch_size": (1, 2, 2), "in_dim": size("patch_embedding.weight", 1),
    "out_dim": size("head.head.weight", 0, 4), "dim": size("head.modulation", 2),
    "num_heads": size("head.modulation", 2, 128), "text_dim": size("text_embedding.0.weight", 1),
    "freq_dim": size("time_embedding.0.weight", 1), "ffn_dim": size("blocks.0.ffn.0.weight", 0),
    "num_layers": blocks("blocks."), "cross_attn_norm": has("blocks.0.norm3.weight")}
SMALL = {"patch_size": (1, 2, 2), "in_dim": 4, "out_dim": 4, "dim": 48, "ffn_dim": 32, "freq_dim": 16, "text_dim": 24,
         "num_heads": 4, "num_layers": 4, "cross_attn_norm": True}
# of ComfyUI's class, whose detection assumes heads of 128
ARGUMENTS = {"in_dim": 16, "out_dim": 16, "dim": 256, "ffn_dim": 512, "freq_dim": 256, "text_dim": 4096, "num_heads": 2,
             "num_layers": 2, "cross_attn_norm": True}


def tokens_of_patch(module, forward, rows, tokens, args, kwargs):
    """A patch's part of the (B, C, F, rows, columns) that a module computes for the full latent."""
    axis, full = 2 + rows.axis, forward(*args, **kwargs)
    return full.narrow(axis, rows.first_token * rows.whole_token_rows // rows.num_tokens,
                       tokens.counts["image"] * rows.whole_token_rows // rows.num_tokens)


def read_own_frame(query_BNTH, key_BNTH, value_BNTH, frames, keys_a_frame):
    """Attention of each token to the keys of its own frame only. frames: the frame of each query token, (T,)."""
    of_keys = (frames.new_ones(key_BNTH.shape[2]).cumsum(0) - 1) // keys_a_frame
    return F.scaled_dot_product_attention(query_BNTH, key_BNTH, value_BNTH, frames[:, None] == of_keys[None])


def even_with(latent, name, other, title="", scale=1, is_as_long=False):
    """Rule of a latent for a model that takes no odd sides when it also receives another video.

    latent: the rule without that video. name: of the family. other: ComfyUI's name of that video, which has `scale`
    pixels per latent pixel. title: name of that video in errors, if it must be as large as the latent; is_as_long: it
    must also be as long.
    """
    def rule(call):
        video = call.conditioning.get(other)
        if video is None:
            return latent(call)
        full = full_shape(call)
        sides, needed = tuple(video.shape[-2:]), tuple(scale * side for side in full[-2:])
        if title and sides != needed:
            raise ConfigError(f"Use one node that makes the {title} and the latent with the same width and height: the "
                              f"{title} of {name} has {sides[0]} x {sides[1]}, and this latent needs {needed[0]} x "
                              f"{needed[1]}.")
        if is_as_long and video.shape[2] != full[2]:
            raise ConfigError(f"Use one node that makes the {title} and the latent with the same length: the {title} "
                              f"of {name} has {video.shape[2]} latent frames, and this latent needs {full[2]}.")
        return even_sides(name, latent)(call)
    return rule
