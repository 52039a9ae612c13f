"""Names and shapes of published files of Stable Audio Open 1.0, Stable Audio 3 and ACE-Step 1.0, which ComfyUI's own
modules take. Used by test_header.py."""

from tests.unit.checkpoints.published_comfyui import blocks, linear, norm


def _norms(width, *leaves):
    return {f"{name}.{leaf}": (width,) for name in ("pre_norm", "cross_attend_norm", "ff_norm") for leaf in leaves}


def _around(width, channels, text, seconds, text_width):
    """What stands around the blocks. text_width: of text that is projected."""
    return {"transformer.rotary_pos_emb.inv_freq": (16,), "preprocess_conv.weight": (channels, channels, 1),
            "postprocess_conv.weight": (channels, channels, 1),
            **linear("to_timestep_embed.0", width, 256), **linear("to_timestep_embed.2", width, width),
            **linear("to_cond_embed.0", text_width, text, False),
            **linear("to_cond_embed.2", text_width, text_width, False),
            **linear("to_global_embed.0", width, seconds, False), **linear("to_global_embed.2", width, width, False),
            **linear("transformer.project_in", width, channels, False),
            **linear("transformer.project_out", channels, width, False)}


def _block(width, text_width, twice=False):
    queries, keys, all_three = (2, 3, 5) if twice else (1, 2, 3)
    return {**linear("self_attn.to_qkv", all_three * width, width, False),
            **linear("self_attn.to_out", width, width, False),
            **linear("cross_attn.to_q", queries * width, width, False),
            **linear("cross_attn.to_kv", keys * text_width, text_width, False),
            **linear("cross_attn.to_out", width, width, False), **linear("ff.ff.0.proj", 8 * width, width),
            **linear("ff.ff.2", width, 4 * width)}


STABLE_AUDIO_OPEN = {**_around(1536, 64, 768, 1536, 768), "timestep_features.weight": (128, 1), **blocks(
    "transformer.layers.", 24, {**_norms(1536, "gamma", "beta"), **_block(1536, 768)})}


# of fixed sizes: a file has the positions' frequencies and the norms' zero biases too
MINIMAX_MUSIC3 = {
    "cond_layer_logits": (8,), "cond_layer_scale": (1,), "latent_conditioners.0.weight": (2048, 4096, 3),
    "latent_conditioners.0.bias": (2048,), **{f"diffusion_transformer.{name}": shape for name, shape in {
        "preprocess_conv.weight": (2304, 2304, 1), "postprocess_conv.weight": (128, 128, 1),
        "timestep_features.weight": (128, 1), **linear("to_timestep_embed.0", 2048, 256),
        **linear("to_timestep_embed.2", 2048, 2048), "transformer.rotary_pos_emb.inv_freq": (16,),
        **linear("transformer.project_in", 2048, 2304, False), **linear("transformer.project_out", 128, 2048, False),
        **blocks("transformer.layers.", 36, {
            **{f"{norm}.{leaf}": (2048,) for norm in ("pre_norm", "ff_norm") for leaf in ("gamma", "beta")},
            **linear("self_attn.to_qkv", 6144, 2048, False), **linear("self_attn.to_out", 2048, 2048, False),
            **linear("ff.ff.0.proj", 16384, 2048), **linear("ff.ff.2", 2048, 8192)})}.items()}}


def stable_audio3(width, depth, twice):
    """Medium is 1536 wide, of 24 blocks whose attention is taken away from attention; small 1024, of 20 blocks."""
    norms = {f"{attention}.{name}_norm.gamma": (64,) for attention in ("self_attn", "cross_attn") for name in "qk"}
    return {**_around(width, 256, 768, 768, width), "transformer.memory_tokens": (64, width),
            **linear("transformer.global_cond_embedder.0", width, width),
            **linear("transformer.global_cond_embedder.2", 6 * width, width), **blocks("transformer.layers.", depth, {
                **_norms(width, "gamma"), **norms, **_block(width, width, twice), "to_scale_shift_gate": (6 * width,),
                **linear("to_local_embed.0", width, 257), **linear("to_local_embed.2", width, width)})}


def _square(width, *names):
    return {key: shape for name in names for key, shape in linear(name, width, width).items()}


def _conv(name, *shape, bias=True):
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


ACE_STEP = {
    **blocks("transformer_blocks.", 24, {
        "scale_shift_table": (6, 2560),
        **_square(2560, *(f"{attention}.{name}" for attention in ("attn", "cross_attn")
                          for name in ("to_q", "to_k", "to_v", "to_out.0"))),
        **_square(2560, *(f"cross_attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"))),
        **_conv("ff.inverted_conv.conv", 12800, 2560, 1), **_conv("ff.depth_conv.conv", 12800, 1, 3),
        **_conv("ff.point_conv.conv", 2560, 6400, 1, bias=False)}),
    **linear("timestep_embedder.linear_1", 2560, 256), **linear("timestep_embedder.linear_2", 2560, 2560),
    **linear("t_block.1", 15360, 2560), **linear("speaker_embedder", 2560, 512),
    **linear("genre_embedder", 2560, 768), "lyric_embs.weight": (6693, 1024),
    **linear("lyric_encoder.embed.out.0", 1024, 1024), **norm("lyric_encoder.embed.out.1", 1024),
    **norm("lyric_encoder.after_norm", 1024),
    **blocks("lyric_encoder.encoders.", 6, {
        "self_attn.pos_bias_u": (16, 64), "self_attn.pos_bias_v": (16, 64),
        **_square(1024, *(f"self_attn.linear_{name}" for name in ("q", "k", "v", "out"))),
        **linear("self_attn.linear_pos", 1024, 1024, False), **linear("feed_forward.w_1", 4096, 1024),
        **linear("feed_forward.w_2", 1024, 4096), **norm("norm_ff", 1024), **norm("norm_mha", 1024)}),
    **linear("lyric_proj", 2560, 1024),
    **{key: shape for number, width in enumerate((1024, 768)) for key, shape in {
        **linear(f"projectors.{number}.0", 5120, 2560), **linear(f"projectors.{number}.2", 5120, 5120),
        **linear(f"projectors.{number}.4", width, 5120)}.items()},
    **_conv("proj_in.early_conv_layers.0", 2048, 8, 16, 1), **norm("proj_in.early_conv_layers.1", 2048),
    **_conv("proj_in.early_conv_layers.2", 2560, 2048, 1, 1), "final_layer.scale_shift_table": (2, 2560),
    **linear("final_layer.linear", 128, 2560)}
