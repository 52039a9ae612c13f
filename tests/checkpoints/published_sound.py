"""Names and shapes of published files of Stable Audio Open 1.0 and Stable Audio 3, which ComfyUI's own modules take.
Used by test_header.py."""

from tests.checkpoints.published_comfyui import blocks


def _linear(name, outputs, inputs, bias=True):
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _norms(width, *leaves):
    return {f"{name}.{leaf}": (width,) for name in ("pre_norm", "cross_attend_norm", "ff_norm") for leaf in leaves}


def _around(width, channels, text, seconds, text_width):
    """What stands around the blocks. text_width: of text that is projected."""
    return {"transformer.rotary_pos_emb.inv_freq": (16,), "preprocess_conv.weight": (channels, channels, 1),
            "postprocess_conv.weight": (channels, channels, 1),
            **_linear("to_timestep_embed.0", width, 256), **_linear("to_timestep_embed.2", width, width),
            **_linear("to_cond_embed.0", text_width, text, False),
            **_linear("to_cond_embed.2", text_width, text_width, False),
            **_linear("to_global_embed.0", width, seconds, False), **_linear("to_global_embed.2", width, width, False),
            **_linear("transformer.project_in", width, channels, False),
            **_linear("transformer.project_out", channels, width, False)}


def _block(width, text_width, twice=False):
    queries, keys, all_three = (2, 3, 5) if twice else (1, 2, 3)
    return {**_linear("self_attn.to_qkv", all_three * width, width, False),
            **_linear("self_attn.to_out", width, width, False),
            **_linear("cross_attn.to_q", queries * width, width, False),
            **_linear("cross_attn.to_kv", keys * text_width, text_width, False),
            **_linear("cross_attn.to_out", width, width, False), **_linear("ff.ff.0.proj", 8 * width, width),
            **_linear("ff.ff.2", width, 4 * width)}


STABLE_AUDIO_OPEN = {**_around(1536, 64, 768, 1536, 768), "timestep_features.weight": (128, 1), **blocks(
    "transformer.layers.", 24, {**_norms(1536, "gamma", "beta"), **_block(1536, 768)})}


def stable_audio3(width, depth, twice):
    """Medium is 1536 wide, of 24 blocks whose attention is taken away from attention; small 1024, of 20 blocks."""
    norms = {f"{attention}.{name}_norm.gamma": (64,) for attention in ("self_attn", "cross_attn") for name in "qk"}
    return {**_around(width, 256, 768, 768, width), "transformer.memory_tokens": (64, width),
            **_linear("transformer.global_cond_embedder.0", width, width),
            **_linear("transformer.global_cond_embedder.2", 6 * width, width), **blocks("transformer.layers.", depth, {
                **_norms(width, "gamma"), **norms, **_block(width, width, twice), "to_scale_shift_gate": (6 * width,),
                **_linear("to_local_embed.0", width, 257), **_linear("to_local_embed.2", width, width)})}
