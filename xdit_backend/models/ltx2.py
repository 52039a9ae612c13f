"""LTX-2: video and sound, each a stream with self-attention and text of its own, which read each other in every block.
2.3's variant too.

A latent is of two parts, or of the video alone. Of the video given frames and guides are as LTX-Video's.
"""

import dataclasses

from ..protocol.errors import CheckpointError
from .common.family import Tiny
from .common.inputs import because, config_of, given, has
from .common.key_mapping import table
from .common.ltx_tokens import IS_LTX, bounds
from .common.plan import BlockList, ModelPlan
from .ltx import LTX
from .ltx2_audio import (
    ARGUMENTS,
    AUDIO,
    HAS_PROJECTION,
    RULES,
    SAYS,
    SETTINGS,
    TOKENS,
    VIDEO,
    call_shapes,
    num_audio,
    places_after_reference,
    split_parts,
    unfold,
    unpack_audio,
)
from .ltx2_folder import CONNECTORS

SAID = ("apply_gated_attention", "caption_proj_before_connector")              # by the tensors too
KEYS = table(
    (r"^(video|audio)_embeddings_connector\.", None),          # ComfyUI prepares the text with them
    (r"^(audio_)?patchify_proj\.", r"\1proj_in."), (r"^(audio_)?adaln_single\.", r"\1time_embed."),
    (r"^(audio_)?prompt_adaln_single\.", r"\1prompt_adaln."),
    (r"^av_ca_(video|audio)_scale_shift_adaln_single\.", r"av_cross_attn_\1_scale_shift."),
    (r"^av_ca_a2v_gate_adaln_single\.", "av_cross_attn_video_a2v_gate."),
    (r"^av_ca_v2a_gate_adaln_single\.", "av_cross_attn_audio_v2a_gate."),
    (r"\.scale_shift_table_a2v_ca_(video|audio)$", r".\1_a2v_cross_attn_scale_shift_table"),
    (r"\.([qk])_norm\.", r".norm_\1."))


def _lacks_audio(shapes):
    return not has("transformer_blocks.0.audio_to_video_attn.to_k.weight", "audio_patchify_proj.weight",
                   "audio_proj_out.weight")(shapes)


def _projects_early(shapes):
    return not HAS_PROJECTION(shapes) and has("caption_projection.linear_1.weight")(shapes)


def _text_width(shapes):
    """Of the text for video and for sound, side by side."""
    if HAS_PROJECTION(shapes):
        return 2 * shapes["caption_projection.linear_1.weight"][1]
    return shapes["transformer_blocks.0.attn2.to_k.weight"][1] + shapes["transformer_blocks.0.audio_attn2.to_k.weight"][
        1]


def _text(call):
    """[of the video, of the sound]"""
    context, shares = given("context")(call), (call.config["cross_attention_dim"],
                                                call.config["audio_cross_attention_dim"])
    return context.chunk(2, -1) if call.config["use_prompt_embeddings"] else context.split(shares, -1)


def _coordinates(call):
    return bounds(call).expand(len(call.latent), -1, -1, -1)


def _adapt(model, config):
    """As in ComfyUI, attention's norms have its epsilon, rotary tables are those that the file's metadata says, and
    each stream's gate is of the other's latest time.
    """
    if (config["gated_attn"], not config["use_prompt_embeddings"]) != tuple(config[f"_{name}"] for name in SAID):
        raise CheckpointError("Use the publisher's file: this LTX-2 file's metadata says otherwise than its tensors "
                              f"what model it is ({', '.join(SAID)}), as they are another file's, or lost.")
    now, forward = [], model.forward
    for module in model.modules():
        if "rope_type" in vars(module):
            module.rope_type = config["_rope_type"]
        if "double_precision" in vars(module):
            module.double_precision = config["_frequencies_precision"] == "float64"
        if hasattr(module, "to_q"):
            module.norm_q.eps = module.norm_k.eps = 1e-5

    def forward_at(*, most_times, num_references, **inputs):
        now[:] = [most_times]
        if not num_references:
            return (forward(**inputs),)
        audio = inputs["audio_hidden_states"]
        places = places_after_reference(model.audio_rope, num_references, audio.shape[1], len(audio), audio.device)
        video, audio = forward(**inputs, audio_coords=places)
        return ((video, audio[:, num_references:]),)
    model.forward = forward_at

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


LTX2 = dataclasses.replace(
    LTX, name="LTX-2", title="LTX-2 video and audio", transformer="LTX2VideoTransformer3DModel",
    recognise=lambda shapes: IS_LTX(shapes) and has("audio_adaln_single.linear.weight")(shapes),
    refusals=(because("it lacks the attentions between video and sound", _lacks_audio),
              because("it projects its text by one layer before the connectors", _projects_early)),
    config=config_of(
        **{name: rule for name, rule in LTX.config.rules.items()
           if name != "caption_channels"},
        **RULES, caption_channels=lambda shapes: _text_width(shapes) // 2, _text_width=_text_width),
    settings=LTX.settings | SETTINGS, convert=KEYS, adapt_model=_adapt, config_from_tensors=("_text_width",),
    **CONNECTORS,
    conditioning=LTX.conditioning | {"context": "_text_width", "ref_audio": None},
    unfold=lambda conditioning: unfold(LTX.unfold(conditioning)), ignored=(*LTX.ignored, "audio_denoise_mask"),
    parts={"audio": unpack_audio}, split_parts=split_parts, call_shapes=call_shapes, lengths={"audio": num_audio},
    stream_widths={"audio": "audio_cross_attention_dim"}, arguments=LTX.arguments | ARGUMENTS | {
        "encoder_hidden_states": lambda call: _text(call)[0],
        "audio_encoder_hidden_states": lambda call: _text(call)[1],
        "video_coords": _coordinates},
    activation_factors={"alone": 21.5, "residual": 12.6, "whole": 17.5, "outside": 9.4,
          "held": 7.45, "block": 13.7, "exchange": 12.7, "keys": 3.0},
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks.", returns=("image", "audio"), image_fraction=0.78,
                          patched="double"),),
        streams={"hidden_states": "image", "audio_hidden_states": "audio"}, outputs=("image", "audio"), needs_text=True,
        attention={"attn1": VIDEO, "audio_attn1": AUDIO},
        cross_attention={"audio_to_video_attn": (VIDEO, AUDIO), "video_to_audio_attn": (AUDIO, VIDEO)}, tokens=TOKENS,
        of_heads=("query_rotary_emb", "key_rotary_emb"),
        cacheable={f"{name}.to_{kind}": "step" for name in ("attn2", "audio_attn2") for kind in "kv"},
        cacheable_outside={"caption_projection": "run", "audio_caption_projection": "run"}),
    test_config=Tiny(
        LTX.test_config.config | {f"_{name}": value
                           for name, value in ({name: values[0] for name, values in SETTINGS.items()} | SAYS).items()}
        | {
            "_text_width": 48, "use_prompt_embeddings": True, "gated_attn": False, "num_layers": 3,
            "audio_in_channels": 32,
            "audio_out_channels": 32, "audio_num_attention_heads": 4, "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 16},
        "comfy.ldm.lightricks.av_model:LTXAVModel", LTX.test_config.arguments | SAYS | {
            "audio_attention_head_dim": 4, "audio_cross_attention_dim": 128, "caption_channels": 24,
            "connector_attention_head_dim": 4, "connector_num_attention_heads": 6, "connector_num_layers": 1},
        more={"apply_gated_attention": True, "cross_attention_adaln": True}))
