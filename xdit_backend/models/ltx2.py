"""LTX-2, LTX-2.3 and LTX-2.5: video and audio, each a stream with its own self-attention and text, which attend to each
other in every block.

A latent has two components, or the video alone. Conditioning frames and guides of the video are as in LTX-Video.
"""

import dataclasses

from ..protocol.errors import CheckpointError
from .common.family import Components, Detection, Family, SmallConfig, derived
from .common.forward_state import ForwardValue
from .common.inputs import because, config_of, from_conditioning, has
from .common.key_mapping import table
from .common.ltx_tokens import IS_LTX, bounds
from .common.plan import BlockList, ModelPlan
from .common.tp_plan import COLWISE
from .ltx import LTX
from .ltx2_audio import (
    ARGUMENTS,
    AUDIO,
    HAS_PROJECTION,
    ISOLATED,
    PUBLISHED_SETTINGS,
    RULES,
    SETTINGS,
    TOKENS,
    VIDEO,
    call_shapes,
    num_audio,
    positions_after_reference,
    split_components,
    unfold,
    unpack_audio,
    with_marker,
)
from .ltx2_block import AGAIN, update_context
from .ltx2_folder import FOLDER, TEXT_PREFIXES

# settings that the tensors imply too -> (config) -> their value
FROM_TENSORS = {"apply_gated_attention": lambda config: config["gated_attn"],
                "caption_proj_before_connector": lambda config: not config["use_prompt_embeddings"],
                **{name: lambda config, name=name: config.get(name, True) for name in ("ff_bias", "audio_ff_bias")}}
KEYS = table(
    (r"^(video|audio)_embeddings_connector\.", None),          # ComfyUI processes the text with them on the host
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
    """Width of the text for video and the text for audio, concatenated."""
    if HAS_PROJECTION(shapes):
        return 2 * shapes["caption_projection.linear_1.weight"][1]
    return shapes["transformer_blocks.0.attn2.to_k.weight"][1] + shapes["transformer_blocks.0.audio_attn2.to_k.weight"][
        1]


def _text(call):
    """[text for the video, text for the audio]"""
    context, widths = from_conditioning("context")(call), (call.config["cross_attention_dim"],
                                                           call.config["audio_cross_attention_dim"])
    return context.chunk(2, -1) if call.config["use_prompt_embeddings"] else context.split(widths, -1)


def _coordinates(call):
    return bounds(call).expand(len(call.latent), -1, -1, -1)


def _adapt(model, config):
    """As in ComfyUI: use its epsilon in the norms of attention, rotary tables as set by the file's metadata, and for
    the gate of each stream the latest timestep of the other."""
    if any(value(config) != config[f"_{name}"] for name, value in FROM_TENSORS.items()):
        raise CheckpointError("Use the publisher's file: the metadata of this LTX-2 file contradicts its tensors "
                              f"({', '.join(FROM_TENSORS)}), as if it were missing or from another file.")
    now, forward, norms_again = [], model.forward, ForwardValue(model, False)
    for block in model.transformer_blocks:
        update_context(block, norms_again.get)
    for module in model.modules():
        if "rope_type" in vars(module):
            module.rope_type = config["_rope_type"]
        if "double_precision" in vars(module):
            module.double_precision = config["_frequencies_precision"] == "float64"
        if hasattr(module, "to_q"):
            module.norm_q.eps = module.norm_k.eps = 1e-5

    def forward_at(*, most_times, num_references, is_normed_again, **inputs):
        now[:] = [most_times]
        norms_again.set(is_normed_again)
        if not num_references:
            return (forward(**inputs),)
        audio = inputs["audio_hidden_states"]
        positions = positions_after_reference(model.audio_rope, num_references, audio.shape[1], len(audio),
                                              audio.device)
        video, audio = forward(**inputs, audio_coords=positions)
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


class _Plan(ModelPlan):
    cross_attention = {"audio_to_video_attn": (VIDEO, AUDIO), "video_to_audio_attn": (AUDIO, VIDEO)}


class _LTX2(Family):
    stream_widths = {"audio": "audio_cross_attention_dim"}


class _Detection(Detection):
    settings = LTX.detection.settings | SETTINGS
    text_prefixes = TEXT_PREFIXES


LTX2 = derived(
    _LTX2, LTX, name="LTX-2", title="LTX-2 video and audio", transformer="LTX2VideoTransformer3DModel",
    adapt_model=_adapt,
    activation_factors={"alone": 21.5, "residual": 12.6, "whole": 17.5, "outside": 9.4, "held": 7.45, "block": 13.7,
                        "exchange": 12.7, "keys": 3.0},
    detection=_Detection(
        recognise=lambda shapes: IS_LTX(shapes) and has("audio_adaln_single.linear.weight")(shapes),
        refusals=(because("it lacks the attention layers between video and audio", _lacks_audio),
                  because("it projects its text by one layer before the connectors", _projects_early)),
        config=config_of(
            **{name: rule for name, rule in LTX.detection.config.rules.items()
               if name != "caption_channels"},
            **RULES, caption_channels=lambda shapes: _text_width(shapes) // 2, _text_width=_text_width),
        convert=KEYS, config_from_tensors=("_text_width",), folder=FOLDER),
    inputs=dataclasses.replace(
        LTX.inputs,
        conditioning=LTX.inputs.conditioning | {"context": "_text_width", "ref_audio": None, AGAIN: None,
                                                ISOLATED: None, "generated_keyframes": None},
        counts=("generated_keyframes",), unfold=lambda conditioning: unfold(LTX.inputs.unfold(conditioning)),
        ignored=(*LTX.inputs.ignored, "audio_denoise_mask"),
        components=Components({"audio": unpack_audio}, split_components, call_shapes,
                              options=("a2v_cross_attn", "v2a_cross_attn", "stg_self_attn_blocks")),
        lengths={"audio": num_audio},
        arguments=LTX.inputs.arguments | ARGUMENTS | {
            "encoder_hidden_states": lambda call: _text(call)[0],
            "audio_encoder_hidden_states": lambda call: _text(call)[1],
            "is_normed_again": lambda call: AGAIN in call.conditioning,
            "video_coords": _coordinates, "video_keyframes_mask": with_marker}),
    plan=_Plan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks.", returns=("image", "audio"), image_fraction=0.78,
                          patched="double"),),
        streams={"hidden_states": "image", "audio_hidden_states": "audio"}, outputs=("image", "audio"), needs_text=True,
        attention={"attn1": VIDEO, "audio_attn1": AUDIO},
        tokens=TOKENS, tp_plan={"*attn*.to_gate_logits": COLWISE}, of_heads=("query_rotary_emb", "key_rotary_emb"),
        cacheable={f"{name}.to_{kind}": "step" for name in ("attn2", "audio_attn2") for kind in "kv"},
        cacheable_outside={"caption_projection": "run", "audio_caption_projection": "run"}),
    testing=SmallConfig(
        LTX.testing.config | {f"_{name}": value
                              for name, value in ({name: values[0] for name,
                                                   values in SETTINGS.items()} | PUBLISHED_SETTINGS).items()}
        | {
            "_text_width": 48, "use_prompt_embeddings": True, "gated_attn": False, "num_layers": 3,
            "audio_in_channels": 32,
            "audio_out_channels": 32, "audio_num_attention_heads": 4, "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 16},
        "comfy.ldm.lightricks.av_model:LTXAVModel", LTX.testing.arguments | PUBLISHED_SETTINGS | {
            "audio_attention_head_dim": 4, "audio_cross_attention_dim": 128, "caption_channels": 24,
            "connector_attention_head_dim": 4, "connector_num_attention_heads": 6, "connector_num_layers": 1},
        more={"apply_gated_attention": True, "cross_attention_adaln": True}))
