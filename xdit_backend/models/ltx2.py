"""LTX-2: video and sound, each a stream with self-attention and text of its own, which read each other in every block. 2.3's variant too.

A latent is of two parts, or of the video alone. Of the video given frames and guides are as LTX-Video's.
"""

import torch

from ..protocol.errors import CheckpointError, ConfigError
from .describe import because, config_of, given, has, size, text_mask
from .keys import table
from .ltx import LATENT, LTX, NUM_HEADS, PIXELS, bounds, is_ltx, more_than_guides, token_times
from .plan import BlockList, Family, ModelPlan, Tiny, TokenArgument

VIDEO, AUDIO, FREQUENCIES, CONNECTORS = ("image",), ("audio",), 16, ("video_embeddings_connector.", "audio_embeddings_connector.")
SAID = ("apply_gated_attention", "caption_proj_before_connector")              # by the tensors too
OF_VIDEO, OF_AUDIO = TokenArgument(1, VIDEO), TokenArgument(1, AUDIO)
TABLE, AUDIO_TABLE = TokenArgument(-2, VIDEO), TokenArgument(-2, AUDIO)        # of all heads at once, or of each
KEYS = table(
    (r"^(video|audio)_embeddings_connector\.", None),          # ComfyUI prepares the text with them
    (r"^(audio_)?patchify_proj\.", r"\1proj_in."), (r"^(audio_)?adaln_single\.", r"\1time_embed."),
    (r"^(audio_)?prompt_adaln_single\.", r"\1prompt_adaln."),
    (r"^av_ca_(video|audio)_scale_shift_adaln_single\.", r"av_cross_attn_\1_scale_shift."),
    (r"^av_ca_a2v_gate_adaln_single\.", "av_cross_attn_video_a2v_gate."),
    (r"^av_ca_v2a_gate_adaln_single\.", "av_cross_attn_audio_v2a_gate."),
    (r"\.scale_shift_table_a2v_ca_(video|audio)$", r".\1_a2v_cross_attn_scale_shift_table"), (r"\.([qk])_norm\.", r".norm_\1."))

has_projection = has("caption_projection.linear_2.weight")


def _text_width(shapes):
    """Of the text for video and for sound, side by side."""
    if has_projection(shapes):
        return 2 * shapes["caption_projection.linear_1.weight"][1]
    return shapes["transformer_blocks.0.attn2.to_k.weight"][1] + shapes["transformer_blocks.0.audio_attn2.to_k.weight"][1]


def _parted(latents, times, config):
    """The video, its timestep, and of this call: the sound, (B, C, T, F), its times, and the latest time of each."""
    video, *sounds = latents
    channels = config["audio_in_channels"] // FREQUENCIES
    if len(sounds) > 1 or any(sound.ndim != 4 or sound.shape[1::2] != (channels, FREQUENCIES) for sound in sounds):
        raise ConfigError(f"The latent has parts of the shapes {', '.join(str(tuple(part.shape)) for part in latents)}, and LTX-2 works on "
                          f"a video and a sound of (batch, {channels}, length, {FREQUENCIES}). Make them with the nodes for LTX-2's "
                          f"latents, and join them with LTXVConcatAVLatent.")
    most = torch.stack([part.max() for part in times])[None]
    return video, times[0], dict(zip(("audio",), sounds)) | {"audio_times": times[1], "most_times": most}


def _num_sounds(conditioning):
    """Tokens of sound; where a latent has none, one that nothing reads."""
    return conditioning["audio"].shape[2] if "audio" in conditioning else 1


def _tokens(asked):
    if "audio" not in asked.conditioning:
        return asked.latent.new_zeros(len(asked.latent), 1, asked.config["audio_in_channels"])
    return asked.conditioning["audio"].transpose(1, 2).flatten(2)              # (B, C, T, F) -> (B, T, C * F)


def _sound(tokens):
    return tokens.unflatten(2, (-1, FREQUENCIES)).transpose(1, 2)


def _text(asked):
    """[of the video, of the sound]"""
    context, shares = given("context")(asked), (asked.config["cross_attention_dim"], asked.config["audio_cross_attention_dim"])
    return context.chunk(2, -1) if asked.config["use_prompt_embeddings"] else context.split(shares, -1)


def _latest(times):
    """(B,), of all of an image's tokens."""
    return 1000 * (times if times.ndim == 1 else times.flatten(1).max(1).values)


def _coordinates(asked):
    return bounds(asked).expand(len(asked.latent), -1, -1, -1)


def _amend(model, config):
    """As in ComfyUI, attention's norms have its epsilon, rotary tables are those that the file's metadata says, and each stream's gate is
    of the other's latest time.
    """
    if (config["gated_attn"], not config["use_prompt_embeddings"]) != tuple(config[f"_{name}"] for name in SAID):
        raise CheckpointError(f"This LTX-2 file's metadata says otherwise than its tensors what model it is ({', '.join(SAID)}): they "
                              f"are another file's, or lost. Use the publisher's file.")
    now, forward = [], model.forward
    for module in model.modules():
        if "rope_type" in vars(module):
            module.rope_type = config["_rope_type"]
        if "double_precision" in vars(module):
            module.double_precision = config["_frequencies_precision"] == "float64"
        if hasattr(module, "to_q"):
            module.norm_q.eps = module.norm_k.eps = 1e-5

    def parted(*, most_times, **inputs):
        now[:] = [most_times]
        return (forward(**inputs),)
    model.forward = parted

    def gate(module, which):
        embed = module.forward
        module.forward = lambda times, batch_size, hidden_dtype: embed(
            (config["_av_ca_timestep_scale_multiplier"] * now[0][0, which]).expand(batch_size), batch_size=batch_size,
            hidden_dtype=hidden_dtype)
    gate(model.av_cross_attn_video_a2v_gate, 1)
    gate(model.av_cross_attn_audio_v2a_gate, 0)

    def at_starts(rope):
        table = rope.forward
        rope.forward = lambda coords, device=None: table(coords[..., 0], device=device)
    if not config["_use_middle_indices_grid"]:
        at_starts(model.rope)
        at_starts(model.audio_rope)


LTX2 = Family(
    name="LTX-2", title="LTX-2 video and sound", transformer="LTX2VideoTransformer3DModel",
    recognise=lambda shapes: is_ltx(shapes) and has("audio_adaln_single.linear.weight")(shapes),
    refusals=(because("it lacks the attentions between video and sound", lambda shapes: not has(
        "transformer_blocks.0.audio_to_video_attn.to_k.weight", "transformer_blocks.0.audio_attn2.to_k.weight",
        "audio_patchify_proj.weight")(shapes)),
              because("it projects its text by one layer before the connectors", lambda shapes: not has_projection(shapes) and has(
                  "caption_projection.linear_1.weight")(shapes))),
    config=config_of(
        **{name: rule for name, rule in LTX.config.rules.items() if name != "caption_channels"},  # type: ignore[attr-defined]
        audio_num_attention_heads=NUM_HEADS, audio_in_channels=size("audio_patchify_proj.weight", 1),
        audio_out_channels=size("audio_proj_out.weight", 0),
        audio_attention_head_dim=size("audio_patchify_proj.weight", 0, NUM_HEADS),
        audio_cross_attention_dim=size("transformer_blocks.0.audio_attn2.to_k.weight", 1), use_prompt_embeddings=has_projection,
        caption_channels=lambda shapes: _text_width(shapes) // 2, _text_width=_text_width,
        gated_attn=has("transformer_blocks.0.attn1.to_gate_logits.weight"),
        audio_gated_attn=has("transformer_blocks.0.attn1.to_gate_logits.weight"),
        cross_attn_mod=has("prompt_adaln_single.linear.weight"), audio_cross_attn_mod=has("prompt_adaln_single.linear.weight")),
    settings=LTX.settings | {
        "audio_num_attention_heads": (NUM_HEADS,), "audio_positional_embedding_max_pos": ([20],), "use_middle_indices_grid": (False, True),
        "rope_type": ("interleaved", "split"), "frequencies_precision": ("float32", "float64"),
        "av_ca_timestep_scale_multiplier": (1.0, 1000.0), "apply_gated_attention": (False, True),
        "caption_proj_before_connector": (False, True), "caption_projection_first_linear": (True, False), "cross_attention_adaln": (False, True)},
    convert=KEYS, latent=LATENT, time_scale=1.0, amend=_amend, prepares=CONNECTORS, pixels=lambda config: PIXELS,
    conditioning={"context": "_text_width", "attention_mask": None, "frame_rate": None, "keyframe_idxs": None},
    parts={"audio": _sound}, parted=_parted, lengths={"audio": _num_sounds},
    stream_widths={"audio": "audio_cross_attention_dim"},
    ignored=("denoise_mask", "audio_denoise_mask", "guide_attention_entries"), beyond=more_than_guides,
    arguments={"hidden_states": LATENT, "audio_hidden_states": _tokens, "encoder_hidden_states": lambda asked: _text(asked)[0],
               "audio_encoder_hidden_states": lambda asked: _text(asked)[1], "timestep": token_times,
               "audio_timestep": lambda asked: 1000 * asked.conditioning["audio_times"], "sigma": lambda asked: _latest(asked.timestep),
               "audio_sigma": lambda asked: _latest(asked.conditioning["audio_times"]), "most_times": given("most_times"),
               "encoder_attention_mask": text_mask, "audio_encoder_attention_mask": text_mask, "video_coords": _coordinates,
               "audio_num_frames": lambda asked: _num_sounds(asked.conditioning),
               "isolate_modalities": lambda asked: "audio" not in asked.conditioning},
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks.", returns=("image", "audio"), image_share=0.78, patched="double"),),
        streams={"hidden_states": "image", "audio_hidden_states": "audio"}, outputs=("image", "audio"),
        needs_text=True,
        attention={"attn1": VIDEO, "audio_attn1": AUDIO},
        across={"audio_to_video_attn": (VIDEO, AUDIO), "video_to_audio_attn": (AUDIO, VIDEO)},
        tokens={"temb": OF_VIDEO, "temb_ca_scale_shift": OF_VIDEO, "temb_audio": OF_AUDIO, "temb_ca_audio_scale_shift": OF_AUDIO,
                "video_rotary_emb": TABLE, "ca_video_rotary_emb": TABLE, "audio_rotary_emb": AUDIO_TABLE,
                "ca_audio_rotary_emb": AUDIO_TABLE},
        of_heads=("query_rotary_emb", "key_rotary_emb"),
        once={f"{name}.to_{kind}": "step" for name in ("attn2", "audio_attn2") for kind in "kv"},
        once_outside={"caption_projection": "run", "audio_caption_projection": "run"}),
    tiny=Tiny(
        {"in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32, "num_layers": 4,
         "caption_channels": 24, "audio_in_channels": 32, "audio_out_channels": 32, "audio_num_attention_heads": 4,
         "audio_attention_head_dim": 4, "audio_cross_attention_dim": 16, "use_prompt_embeddings": True, "gated_attn": False,
         "_text_width": 48, "_causal_temporal_positioning": True, "_use_middle_indices_grid": True, "_rope_type": "split",
         "_frequencies_precision": "float64", "_av_ca_timestep_scale_multiplier": 1000.0, "_apply_gated_attention": False,
         "_caption_proj_before_connector": False},
        "comfy.ldm.lightricks.av_model:LTXAVModel",
        {"in_channels": 128, "cross_attention_dim": 256, "attention_head_dim": 8, "audio_attention_head_dim": 4,
         "audio_cross_attention_dim": 128, "caption_channels": 24, "num_layers": 3, "causal_temporal_positioning": True,
         "use_middle_indices_grid": True, "rope_type": "split", "frequencies_precision": "float64",
         "av_ca_timestep_scale_multiplier": 1000.0, "connector_attention_head_dim": 4, "connector_num_attention_heads": 6,
         "connector_num_layers": 1}),
)
