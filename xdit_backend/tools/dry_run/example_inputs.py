"""Shapes of the latents and conditioning that ComfyUI passes to a model for a size in pixels."""

# tokens of additional conditioning: CLIP vision of an image, glyphs, a class
VISION_TOKENS = 257


def latent_shape(family, config, size, frames=1, batch=1):
    """(B, C, T), (B, C, H, W) or (B, C, F, H, W) of the model's input. size: (columns, rows) of pixels."""
    of_frames, of_rows, of_columns = family.pixels(config)
    sizes = [-(-size[1] // of_rows), -(-size[0] // of_columns)]
    if len(family.patch_size(config)) == 3:
        sizes.insert(0, (frames - 1) // of_frames + 1)
    if len(family.patch_size(config)) == 1:                    # audio, with as many latents as an image has tokens
        sizes = [sizes[0] * sizes[1]]
    return (frames * batch if family.has_frames_as_batch else batch, family.taken_channels(config), *sizes)


def conditioning_shapes(family, config, shape, tokens):
    """({name: shape} of conditioning of a run, {name: shape} of conditioning of one call). shape: of the latents.
    tokens: of text. Start images and references are left out."""
    batch, found = shape[0], {}
    for name, width in family.inputs.conditioning.items():
        special = _special(name, config, shape, width)
        if special is not None:
            found |= special
        elif name in ("context", "clip_text"):
            found[name] = (batch, tokens, config[width])
        elif name in ("input_ids", "position_ids", "ref_patches"):             # of text that the model itself embeds
            found[name] = family.testing.input_shapes[name](config, shape, tokens)
        elif name in family.inputs.counts:
            found[name] = (tokens,)
        elif width is not None and config.get(width) is not None and name not in ("clip_fea", "txt_byt5"):
            found[name] = (batch, config[width])
    if "guidance" in family.inputs.conditioning and config.get("guidance_embeds"):
        found["guidance"] = (batch,)
    if not family.inputs.components.names:
        return found, {}
    return found, family.inputs.components.shapes(config, shape)


def _special(name, config, shape, width):
    """{name: shape} of conditioning with a rule of its own; None for others."""
    batch = shape[0]
    if name == "clip_fea" and config.get(width) is not None and config.get("added_kv_proj_dim"):
        return {name: (batch, config.get("pos_embed_seq_len") or VISION_TOKENS, config[width])}
    if name == "y" and config.get("num_class_embeds"):
        return {name: (batch,)}
    if name == "num_video_frames":
        return {name: (batch,)}
    if name == "vace_context":
        return {name: (batch, 1, config["vace_in_channels"], *shape[2:])}
    if name == "vace_strength":
        return {"vace_strength.0": (1,)}
    if name == "encoder_hidden_states_llama3":
        return {name: (batch, max(config["llama_layers"]) + 1, 128, config[width])}
    if name == "encoder_hidden_states_t5":
        return {name: (batch, config["text_len_t5"], config[width])}
    if name.startswith("text_embedding_mask"):
        return {name: (batch, config["text_len_t5" if name.endswith("t5") else "text_len"])}
    if name in ("t5xxl_ids", "t5xxl_weights"):
        return {name: (batch, 256) if name == "t5xxl_ids" else (batch, 256, 1)}
    if name == "lyric_embed":
        return {name: (batch, 256, config[width])}
    if name == "local_add_cond":
        return {name: (batch, config["local_add_cond_dim"], *shape[2:])}
    if name == "lyric_token_idx":
        return {name: (batch, 256)}
    if name == "conditioning_scale":
        return {name: (batch, 1, 1)}
    if name == "lyrics_strength":
        return {name: (3,)}
    if name == "refer_audio":
        return {name: shape}
    if name == "lq_latent":                                    # of an image with a fourth of the width and height
        pixels = 4 * config["latent_spatial_down_factor"]
        return {name: (batch, config["lq_latent_channels"], *(-(-side // pixels) for side in shape[2:]))}
    if name in ("degrade_sigma", "sca", "crp"):
        return {name: (batch,)}
    if name == "condition":                                    # the video's latent, and a mask
        return {name: (batch, config["vid_in_channels"] - config["vid_out_channels"], *shape[2:])}
    if name == "reference_image":                              # its tokens are appended to the text's
        return {name: (batch, config["cond2_channels"], 1, 1)}
    if name == "clip_img":
        return {name: (batch, 1, config[width])}
    if name == "effnet":                                       # of an image four times as large as the latent
        return {name: (batch, config["c_effnet"], *(max(1, side * 4 // 42) for side in shape[2:]))}
    if name == "ofs":
        return {name: (1,)} if config.get("ofs_embed_dim") else {}
    return {} if name == "guidance" or name.endswith("attention_mask") else None
