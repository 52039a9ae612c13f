"""Cosmos-Predict2, text-to-image and image-to-video: one stream over frames, rows and columns; text by cross-attention;
rotary positions.

Frames of an input image are in the latent without noise, marked by an additional channel, and have their own timesteps.
"""

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, because, blocks, config_of, frame_times, from_conditioning, has, size
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut

LATENT, TABLE, TIMES = Unpacked((1, 2, 2)), TokenArgument(0, ("image",)), TokenArgument(1, ("image",), ndim=3)
SIDE, HEAD_SIZE = 8192, 128                                    # ComfyUI's model has no largest position

SHARED = (                                                     # also of Cosmos-Predict1's files
    (r"(^accum_|_extra_state$|^pos_embedder\.|^logvar\.)", None),          # training state, or computed by the model
    (r"^final_layer\.linear\.", "proj_out."), (r"^t_embedder\.1\.", "time_embed.t_embedder."),
    (r"^x_embedder\.proj\.1\.", "patch_embed.proj."))
KEYS = table(
    *SHARED, (r"^blocks\.", "transformer_blocks."), (r"\.adaln_modulation_self_attn\.", ".norm1.linear_"),
    (r"\.adaln_modulation_cross_attn\.", ".norm2.linear_"), (r"\.adaln_modulation_mlp\.", ".norm3.linear_"),
    (r"^final_layer\.adaln_modulation\.", "norm_out.linear_"), (r"^t_embedding_norm\.", "time_embed.norm."),
    (r"\.self_attn\.", ".attn1."), (r"\.cross_attn\.", ".attn2."), (r"\.([qkv])_proj\.", r".to_\1."),
    (r"\.output_proj\.", ".to_out.0."),
    (r"\.([qk])_norm\.", r".norm_\1."), (r"\.mlp\.layer1\.", ".ff.net.0.proj."), (r"\.mlp\.layer2\.", ".ff.net.2."))


def is_cosmos(shapes):
    return has("blocks.0.mlp.layer1.weight", "blocks.0.adaln_modulation_self_attn.1.weight")(shapes)


def _scale(shapes):
    """Ratio of frames, rows and columns to the trained sizes of the position embedding, as ComfyUI computes it."""
    width, pixels = shapes["x_embedder.proj.1.weight"]
    if pixels // 4 - 1 == 16:
        return (1.0, 4.0, 4.0)
    return (1.0, 3.0, 3.0) if width == 2048 else (5 / 6, 2.0, 2.0)


def _times(call):
    """Timesteps (B,), or (B, 1, F, 1, 1) if frames differ."""
    times = frame_times(call)
    return times if times.ndim == 1 else times[:, None, :, None, None]


def _adapt(model, config):
    """Normalise queries and keys with ComfyUI's epsilon."""
    for block in model.transformer_blocks:
        for norm in (block.attn1.norm_q, block.attn1.norm_k, block.attn2.norm_q, block.attn2.norm_k):
            norm.eps = 1e-6


COSMOS = Family(
    name="Cosmos-Predict2", title="Cosmos-Predict2 text-to-image, image-to-video",
    transformer="CosmosTransformer3DModel", adapt_model=_adapt, pixels=lambda config: (4, 8, 8),
    # ComfyUI then has float32 hidden states, which diffusers' forward does not support
    unsupported_dtypes=("float16",),
    activation_factors={"alone": 12.35, "residual": 4.2, "whole": 7.3, "outside": 4.35, "held": 1.4, "block": 10.9,
                        "exchange": 12.8, "own": 0.7},
    detection=Detection(
        recognise=lambda shapes: is_cosmos(shapes) and not has("llm_adapter.")(shapes),
        refusals=(because("it adds learned positions in every block", has("extra_pos_embedder.")),),
        config=config_of(
            in_channels=lambda shapes: shapes["x_embedder.proj.1.weight"][1] // 4 - 1,
            out_channels=size("final_layer.linear.weight", 0, 4),
            num_attention_heads=size("x_embedder.proj.1.weight", 0, HEAD_SIZE), attention_head_dim=HEAD_SIZE,
            num_layers=blocks("blocks."), text_embed_dim=size("blocks.0.cross_attn.k_proj.weight", 1),
            adaln_lora_dim=size("blocks.0.adaln_modulation_mlp.1.weight", 0),
            max_size=(SIDE, SIDE, SIDE), rope_scale=_scale, concat_padding_mask=True, extra_pos_embed_type=None),
        convert=KEYS, config_from_tensors=("max_size",)),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, conditioning={"context": "text_embed_dim"}, ignored=("fps", "denoise_mask", "y"),
        arguments={"hidden_states": LATENT, "timestep": _times, "encoder_hidden_states": from_conditioning("context"),
                   "padding_mask": lambda call: LATENT(call)[:1, :1, 0] * 0}),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "blocks."),), streams={"hidden_states": "image"},
        attention={"attn1": ("image",)},
        tokens={"image_rotary_emb": TABLE, "embedded_timestep": TIMES, "temb": TIMES}, positions={"rope": Cut(TABLE)},
        cacheable={"attn2.to_k": "run", "attn2.to_v": "run"},
        lllite_targets={"attn1.to_q": "self_attn_q_proj", "attn1.to_k": "self_attn_k_proj",
                        "attn1.to_v": "self_attn_v_proj", "attn2.to_q": "cross_attn_q_proj",
                        "ff.net.0.proj": "mlp_layer1"}),
    testing=SmallConfig(
        {"in_channels": 5, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 4,
         "text_embed_dim": 24, "adaln_lora_dim": 8, "max_size": (64, 64, 64), "rope_scale": (1.0, 3.0, 3.0),
         "extra_pos_embed_type": None},
        "comfy.ldm.cosmos.predict2:MiniTrainDIT",
        {"max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16, "out_channels": 16,
         "patch_spatial": 2, "patch_temporal": 1, "concat_padding_mask": True, "model_channels": 256, "num_blocks": 3,
         "num_heads": 2, "crossattn_emb_channels": 64, "pos_emb_cls": "rope3d", "use_adaln_lora": True,
         "adaln_lora_dim": 32, "rope_h_extrapolation_ratio": 4.0, "rope_w_extrapolation_ratio": 4.0,
         "rope_t_extrapolation_ratio": 1.0, "rope_enable_fps_modulation": False}, detected="CosmosT2IPredict2"))
