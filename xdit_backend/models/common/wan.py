"""What files of all kinds of Wan say, for those that are ComfyUI's own modules; and their tiny models."""

import torch.nn.functional as F

from ...protocol.errors import ConfigError
from .inputs import blocks, even_sides, has, size, whole_shape

# of all kinds of Wan; published ones have heads of 128
RULES = {
    "patch_size": (1, 2, 2), "in_dim": size("patch_embedding.weight", 1),
    "out_dim": size("head.head.weight", 0, 4), "dim": size("head.modulation", 2),
    "num_heads": size("head.modulation", 2, 128), "text_dim": size("text_embedding.0.weight", 1),
    "freq_dim": size("time_embedding.0.weight", 1), "ffn_dim": size("blocks.0.ffn.0.weight", 0),
    "num_layers": blocks("blocks."), "cross_attn_norm": has("blocks.0.norm3.weight")}
TINY = {"patch_size": (1, 2, 2), "in_dim": 4, "out_dim": 4, "dim": 48, "ffn_dim": 32, "freq_dim": 16, "text_dim": 24,
        "num_heads": 4, "num_layers": 4, "cross_attn_norm": True}
# ComfyUI's, whose detection takes a head of 128 for granted
ARGUMENTS = {"in_dim": 16, "out_dim": 16, "dim": 256, "ffn_dim": 512, "freq_dim": 256, "text_dim": 4096, "num_heads": 2,
             "num_layers": 2, "cross_attn_norm": True}


def tokens_of_patch(module, forward, rows, tokens, args, kwargs):
    """Of (B, C, F, rows, columns) that a module makes of something whole, a patch's."""
    axis, whole = 2 + rows.axis, forward(*args, **kwargs)
    return whole.narrow(axis, rows.first_token * rows.whole_token_rows // rows.num_tokens,
                        tokens.counts["image"] * rows.whole_token_rows // rows.num_tokens)


def read_own_frame(query_BNTH, key_BNTH, value_BNTH, frames, keys_a_frame):
    """Attention of tokens, of which these are the frames, (T,), to the keys of their own frame alone."""
    of_keys = (frames.new_ones(key_BNTH.shape[2]).cumsum(0) - 1) // keys_a_frame
    return F.scaled_dot_product_attention(query_BNTH, key_BNTH, value_BNTH, frames[:, None] == of_keys[None])


def even_with(latent, name, other, title="", scale=1, is_as_long=False):
    """The rule of a latent, for a model that takes no odd sides where it is given another video, of whose pixels so
    many are one of the latent's. latent: without that. name: of the family. other: of that video, to ComfyUI. title: to
    people, where it has to be as large as the latent; is_as_long: and as long."""
    def rule(call):
        video = call.conditioning.get(other)
        if video is None:
            return latent(call)
        whole = whole_shape(call)
        sides, needed = tuple(video.shape[-2:]), tuple(scale * side for side in whole[-2:])
        if title and sides != needed:
            raise ConfigError(f"Make the {title} and the latent of one width and height, by one node: the {title} of "
                              f"{name} is of {sides[0]} x {sides[1]}, and {needed[0]} x {needed[1]} belong to this "
                              f"latent.")
        if is_as_long and video.shape[2] != whole[2]:
            raise ConfigError(f"Make the {title} and the latent of one length, by one node: the {title} of {name} is "
                              f"of {video.shape[2]} frames of latents, and {whole[2]} belong to this latent.")
        return even_sides(name, latent)(call)
    return rule
