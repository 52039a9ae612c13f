"""LTX-Video 0.9: one stream over frames, rows and columns; text by cross-attention; rotary positions in pixels and
seconds.

Conditioning frames have timesteps of their own, per token; guides are frames after the video's, with their own
positions.
"""

from .common.family import Detection, Family, FolderRules, Inputs, SmallConfig
from .common.inputs import because, blocks, config_of, diffusers_converter, from_conditioning, has, size, text_mask
from .common.ltx_tokens import (
    IS_LTX,
    LATENT,
    NUM_HEADS,
    PIXELS,
    bounds,
    guide_bias,
    more_than_guides,
    token_times,
    unfold,
)
from .common.plan import BlockList, ModelPlan, TokenArgument

TABLE = TokenArgument(1, ("image",))


def _in_folder(folder):
    """Whether a first frame is one pixel frame long, as in 0.9.5 and later, whose VAE has different blocks."""
    vae, pipeline = folder.other_configs.get("vae"), folder.other_configs.get("model_index", {}).get("_class_name")
    if vae is None and pipeline != "LTXConditionPipeline":
        return None
    return {"causal_temporal_positioning": vae is None or "LTXVideo095" in str(vae.get("down_block_types"))}


class _Inputs(Inputs):
    biases = {"attn1": guide_bias}


class _Detection(Detection):
    settings = {"causal_temporal_positioning": (False, True), "num_attention_heads": (NUM_HEADS,),
                "positional_embedding_theta": (10000.0,), "positional_embedding_max_pos": ([20, 2048, 2048],),
                "timestep_scale_multiplier": (1000,), "vae_scale_factors": ([8, 32, 32],),
                "use_middle_indices_grid": (False,), "rope_type": ("interleaved",),
                "frequencies_precision": ("float32",),
                "caption_proj_before_connector": (False,), "cross_attention_adaln": (False,)}


LTX = Family(
    name="LTX-Video", title="LTX-Video 0.9", transformer="LTXVideoTransformer3DModel", pixels=lambda config: PIXELS,
    activation_factors={"alone": 16.1, "residual": 8.1, "whole": 12.1, "outside": 7.1, "held": 5.1, "block": 11.0,
                        "exchange": 13.0, "shared": 4.0},
    detection=_Detection(
        recognise=lambda shapes: IS_LTX(shapes) and not has("audio_adaln_single.linear.weight")(shapes),
        refusals=(because("it is LTX-2.3 without audio, of which ComfyUI's own loader ignores the attention gates "
                          "(to_gate_logits). Use the file with audio",
                          has("transformer_blocks.0.attn1.to_gate_logits.")),
                  because("it modulates the text by the timestep (LTX-2 without audio)",
                          has("prompt_adaln_single.linear.weight")),),
        config=config_of(
            in_channels=size("patchify_proj.weight", 1), out_channels=size("proj_out.weight", 0),
            num_attention_heads=NUM_HEADS,
            attention_head_dim=size("transformer_blocks.0.attn2.to_k.weight", 0, NUM_HEADS),
            num_layers=blocks("transformer_blocks."),
            cross_attention_dim=size("transformer_blocks.0.attn2.to_k.weight", 1),
            caption_channels=size("caption_projection.linear_1.weight", 1)),
        folder=FolderRules(metadata=_in_folder),
        convert=diffusers_converter("convert_ltx_transformer_checkpoint_to_diffusers")),
    inputs=_Inputs(
        latent=LATENT, time_scale=1.0,
        conditioning={"context": "caption_channels", "attention_mask": None, "frame_rate": None, "keyframe_idxs": None,
                      "guide_strengths": None},
        unfold=unfold,
        # the last marks frames for LTX-2.5
        ignored=("denoise_mask", "guide_attention_entries", "generated_keyframes"), unsupported=more_than_guides,
        arguments={"hidden_states": LATENT, "encoder_hidden_states": from_conditioning("context"),
                   "timestep": token_times,
                   "encoder_attention_mask": text_mask, "video_coords": lambda call: bounds(call)[..., 0]}),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks.", patched="double"),),
        streams={"hidden_states": "image"},
        attention={"attn1": ("image",)}, tokens={"image_rotary_emb": TABLE, "temb": TABLE},
        of_heads=("image_rotary_emb",),
        cacheable={"attn2.to_k": "run", "attn2.to_v": "run"}, cacheable_outside={"caption_projection": "run"}),
    testing=SmallConfig(
        {"in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 8,
         "cross_attention_dim": 32, "num_layers": 4, "caption_channels": 24, "_causal_temporal_positioning": True},
        "comfy.ldm.lightricks.model:LTXVModel",
        {"in_channels": 128, "cross_attention_dim": 256, "attention_head_dim": 8, "num_layers": 3}))
