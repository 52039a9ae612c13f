"""MiniMax H3: video and audio in one sequence with text, keyframes and references. Each token is modulated by its
kind and its timestep. Audio has its own noise schedule."""

from types import MethodType

import torch
from torch import nn

from .common.family import Components, Detection, Family, FolderRules, Inputs, SmallConfig
from .common.inputs import (
    blocks,
    compute_dtype_of,
    config_of,
    from_conditioning,
    has,
    needs_diffusers,
    optional_size,
    size,
)
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.split_linear import split_linears
from .common.tp_plan import COLWISE, GATHERED
from .minimax_h3_sequence import (
    LATENT,
    SHIFTS,
    audio_tokens,
    call_shapes,
    indices,
    num_audio_tokens,
    num_reference_tokens,
    positions,
    rescale_audio,
    split_components,
    tags,
    time_rows,
    times,
    unfold,
    unpack_audio,
    video_tokens,
)
from .minimax_h3_time_curve import ComputesIn, TimeCurve

ALL, GATED = ("text", "reference", "audio", "image"), "net.0.proj"
NORM, CURVE = "blocks.0.attn.q_norm.weight", "adaln_t_table"
KEYS = table(
    (r"^video_patch_proj\.", "proj_in."), (r"^audio_patch_proj\.", "audio_proj_in."),
    (r"^condition_proj\.", "context_embedder."), (rf"^{CURVE}$", "time_embedder.table"),
    (r"^time_embedder\.proj_in\.", "time_embedder.linear_1."),
    (r"^time_embedder\.proj_out\.", "time_embedder.linear_2."),
    (r"^final_layer\.video_out\.", "proj_out."), (r"^final_layer\.audio_out\.", "audio_proj_out."),
    (r"^final_layer\.norm\.", "norm_out.norm."), (r"^final_layer\.adaln_proj\.", "norm_out."),
    (r"^token_refiner\.blocks\.", "token_refiner.refiner_blocks."), (r"^blocks\.", "transformer_blocks."),
    (r"\.attn\.qkv_proj\.", (".attn.to_q.", ".attn.to_k.", ".attn.to_v."), (1, 1, 1)),
    (r"\.attn\.([qk])_norm\.", r".attn.norm_\1."), (r"\.attn\.out_proj\.", ".attn.to_out.0."),
    (r"\.mlp\.fc1\.", (".ff.net.0.proj.1.", ".ff.net.0.proj.0."), (1, 1)), (r"\.mlp\.fc2\.", ".ff.net.2."))
WIDE = ("proj_in", "audio_proj_in", "proj_out", "audio_proj_out")              # float32, whatever the dtype of the rest


def _of_times(shapes):
    """Shape of the timestep embedder's first weight; of the published model for files with a curve instead."""
    return shapes.get("time_embedder.proj_in.weight", (5376, 256))


def _modulations(self, temb):
    """A block's modulations from the curve coordinates of a timestep, in float32 like ComfyUI's."""
    modulations = self.linear(temb).view(-1, 6 * self.hidden_size)
    return modulations.to(self.arithmetic()).chunk(6, -1)


def _last_norm(self, hidden_states, temb, timestep_indices):
    shift, scale = self.linear(temb).chunk(2, -1)
    return self.norm(hidden_states) * (1 + scale[timestep_indices]) + shift[timestep_indices]


def _adapt(model, config):
    """Use the file's rotary frequencies, split gated linears, and ComfyUI's rounding of timesteps or the file's time
    curve. Return only the generated audio's prediction, scaled by the slope of its schedule."""
    split_linears(model, GATED)
    if config.get("_has_frequencies"):
        model.rope.register_buffer("inv_freq", model.rope.inv_freq)
    wide, dtype, forward = [*WIDE], compute_dtype_of(model), model.forward
    if config.get("_curve_points"):
        model.time_proj = nn.Identity()
        model.time_embedder = TimeCurve(config["_curve_points"], config["time_embed_dim"])
        for block in model.transformer_blocks:
            block.adaln_proj.arithmetic = dtype
            block.adaln_proj.forward = MethodType(_modulations, block.adaln_proj)
        model.norm_out.forward = MethodType(_last_norm, model.norm_out)
        wide += ["time_embedder", "norm_out.linear",
                 *(f"transformer_blocks.{number}.adaln_proj.linear" for number in range(config["num_layers"]))]
    else:
        embed = model.time_embedder.forward
        model.time_embedder.forward = lambda times: embed(times).to(dtype())
        wide += ["time_embedder.linear_1", "time_embedder.linear_2"]
    model.wide_modules = wide
    others = "context_embedder", "norm_out.linear", *(
        f"transformer_blocks.{number}.adaln_proj.linear" for number in range(config["num_layers"]))
    for path in {*wide, *others}:
        is_wide = path in wide
        model.get_submodule(path)._diffusers_hook = ComputesIn(
            (lambda: torch.promote_types(dtype(), torch.float32)) if is_wide else dtype)

    def forward_of_components(*, num_audio_tokens, slope, **inputs):
        video, audio = forward(**inputs)
        return ((video, audio[:, :num_audio_tokens] * slope),)
    model.forward = forward_of_components


SMALL = {"num_attention_heads": 8, "attention_head_dim": 16, "hidden_size": 64, "num_layers": 4,
         "num_refiner_layers": 1, "ffn_dim": 256, "in_channels": 4, "audio_in_channels": 6, "text_dim": 24,
         "freq_dim": 16, "time_embed_hidden_dim": 32, "time_embed_dim": 20, "rope_freq_dim": 2}

MINIMAX_H3 = Family(
    name="MiniMax H3", title="MiniMax H3 video and audio", transformer="MiniMaxH3Transformer3DModel",
    adapt_model=_adapt, unsupported_dtypes=("float16",),
    # all heads together are a third wider than the hidden states
    activation_factors={"alone": 16.75, "residual": 6.06, "outside": 7.6, "held": 2.5, "block": 14.11,
                        "exchange": 20.37, "keys": 2.67, "own": 0.0},
    width=lambda config: config["hidden_size"], num_channels=lambda config: config["in_channels"],
    in_channels=lambda config: 4 * config["in_channels"], pixels=lambda config: (4, 16, 16),
    detection=Detection(
        recognise=has(NORM, "video_patch_proj.weight", "audio_patch_proj.weight",
                      "final_layer.adaln_proj.linear.weight"),
        refusals=(needs_diffusers("0.40"),),
        config=config_of(
            num_attention_heads=lambda shapes: shapes["blocks.0.attn.qkv_proj.weight"][0] // 3 // shapes[NORM][0],
            attention_head_dim=size(NORM, 0), hidden_size=size("video_patch_proj.weight", 0),
            num_layers=blocks("blocks."),
            num_refiner_layers=blocks("token_refiner.blocks."), ffn_dim=size("blocks.0.mlp.fc2.weight", 1),
            in_channels=size("final_layer.video_out.weight", 0, 4),
            audio_in_channels=size("audio_patch_proj.weight", 1),
            text_dim=size("condition_proj.weight", 1), freq_dim=lambda shapes: _of_times(shapes)[1],
            time_embed_hidden_dim=lambda shapes: _of_times(shapes)[0],
            time_embed_dim=size("blocks.0.adaln_proj.linear.weight", 1), rope_freq_dim=size("rope.inv_freq", 0),
            _has_frequencies=has("rope.inv_freq"), _curve_points=optional_size(CURVE, 0)),
        convert=KEYS, folder=FolderRules({"rope_freq_dim": "rope.inv_freq"}, split_linears=GATED)),
    inputs=Inputs(
        latent=LATENT, sign=-1.0,
        conditioning={"context": "text_dim", **dict.fromkeys(("token_tags", "keyframes", "keyframe_audios",
                                                              "keyframe_indices", "keyframe_audio_indices",
                                                              "ref_videos",
                                                              "ref_audios", "video_levels", "video_level_indices",
                                                              "audio_levels", "audio_level_indices"))},
        counts=("keyframe_indices", "keyframe_audio_indices"), unfold=unfold,
        components=Components({"audio": unpack_audio}, split_components, call_shapes, options=tuple(SHIFTS),
                              rescale=rescale_audio),
        lengths={"audio": num_audio_tokens, "reference": num_reference_tokens},
        arguments={"hidden_states": video_tokens, "audio_hidden_states": audio_tokens,
                   "encoder_hidden_states": from_conditioning("context"), "timestep": times,
                   "timestep_indices": time_rows,
                   "token_tags": tags, "position_ids": positions, "video_indices": indices("video"),
                   "audio_indices": indices("audio"), "text_indices": indices("text"),
                   "num_audio_tokens": lambda call: num_audio_tokens(call.conditioning),
                   "slope": lambda call: call.conditioning["audio_slope"].view(-1, 1, 1)}),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "blocks.", returns=(ALL,), patched="double"),),
        streams={"hidden_states": ALL}, attention={"attn": ALL}, outputs=("image", "audio"), needs_text=True,
        tokens={"adaln_indices": TokenArgument(0, ALL), "rotary_emb": TokenArgument(0, ALL)},
        tp_plan={"ff.net.0.proj.*": COLWISE, "adaln_proj.linear": GATHERED},
        cacheable={"adaln_proj": "step"}, cacheable_outside={"context_embedder": "run", "token_refiner": "run"}),
    testing=SmallConfig(SMALL, "comfy.ldm.minimax.model:MiniMaxH3Model",
                        {"hidden_size": 64, "num_layers": 4, "token_refiner_num_layers": 1,
                         "num_attention_heads": 8, "attention_head_dim": 16, "ffn_hidden_size": 256, "text_dim": 24,
                         "timestep_input_dim": 16, "time_embed_hidden_size": 32, "time_embed_dim": 20,
                         "rope_inv_freq_len": 2}))
