"""What files of all kinds of Wan say, for those that are ComfyUI's own modules; and their tiny models."""

from .describe import blocks, has, size

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
