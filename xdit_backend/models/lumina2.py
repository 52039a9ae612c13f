"""Lumina-Image 2.0: image and text refined separately, then one sequence of both, text first; grouped-query
attention."""

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, all_text, blocks, config_of, from_conditioning, has, size, timestep
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.rope_scaling import complex_rotations, with_rotations

LATENT, BOTH, IMAGE, SEQUENCE = Unpacked((2, 2)), ("text", "image"), TokenArgument(1, ("image",)), TokenArgument(
    1, ("text", "image"))
HEAD_SIZE = size("layers.0.attention.q_norm.weight", 0)

KEYS = table(
    (r"^norm_final\.", None), (r"^cap_embedder\.", "time_caption_embed.caption_embedder."),
    (r"^t_embedder\.mlp\.0\.", "time_caption_embed.timestep_embedder.linear_1."),
    (r"^t_embedder\.mlp\.2\.", "time_caption_embed.timestep_embedder.linear_2."),
    (r"^final_layer\.adaLN_modulation\.1\.", "norm_out.linear_1."), (r"^final_layer\.linear\.", "norm_out.linear_2."),
    (r"^(context_refiner\.\d+)\.attention_norm1\.", r"\1.norm1."), (r"\.attention_norm1\.", ".norm1.norm."),
    (r"\.attention_norm2\.", ".norm2."), (r"\.adaLN_modulation\.1\.", ".norm1.linear."),
    (r"\.attention\.qkv\.", (".attn.to_q.", ".attn.to_k.", ".attn.to_v."),
     ("num_attention_heads", "num_kv_heads", "num_kv_heads")),
    (r"\.attention\.out\.", ".attn.to_out.0."), (r"\.attention\.([qk])_norm\.", r".attn.norm_\1."),
    (r"\.w([123])\.", r".linear_\1."))


def _num_heads(shapes):
    return shapes["x_embedder.weight"][0] // HEAD_SIZE(shapes)


def _adapt(model, config):
    """Scale and shift the positions of the image's tokens, which come after the text's and alone have the highest
    frame."""
    rope = model.rope_embedder

    def rotations(ids, scales):
        positions, is_image = ids.double(), ids[..., :1] == ids[..., :1].amax(1, keepdim=True)
        scaled = torch.cat([positions[..., :1], positions[..., 1:] * scales[1:, 0] + scales[1:, 1]], -1)
        return complex_rotations(torch.where(is_image, scaled, positions), rope.axes_dim, rope.theta)
    model.forward = with_rotations(model, model.forward, rope, "_get_freqs_cis", rotations)


LUMINA2 = Family(
    name="Lumina 2", title="Lumina 2", transformer="Lumina2Transformer2DModel", adapt_model=_adapt,
    width=lambda config: config["hidden_size"], num_key_heads=lambda config: config["num_kv_heads"],
    activation_factors={"alone": 26.5, "residual": 6.5, "whole": 11.4, "outside": 4.5, "held": 1.45, "block": 25.2,
                        "exchange": 17.0, "own": 0.0},
    detection=Detection(
        recognise=lambda shapes: has("cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight")(shapes)
        and "x_pad_token" not in shapes and not has("clip_text_pooled_proj.")(shapes),
        config=config_of(
            patch_size=2, in_channels=size("x_embedder.weight", 1, 4),
            out_channels=size("final_layer.linear.weight", 0, 4),
            hidden_size=size("x_embedder.weight", 0), num_attention_heads=_num_heads,
            cap_feat_dim=size("cap_embedder.1.weight", 1),
            num_kv_heads=lambda shapes: (shapes["layers.0.attention.qkv.weight"][0] // HEAD_SIZE(shapes)
                                         - _num_heads(shapes)) // 2,
            num_layers=blocks("layers."), num_refiner_layers=blocks("noise_refiner."),
            axes_dim_rope=lambda shapes: (HEAD_SIZE(shapes) // 3,) * 3),
        convert=KEYS),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, sign=-1.0, conditioning={"context": "cap_feat_dim", "rope_scales": None},
        ignored=("num_tokens", "attention_mask", "clip_text_pooled"),
        arguments={"hidden_states": LATENT, "timestep": timestep(-1, 1),
                   "encoder_hidden_states": from_conditioning("context"), "encoder_attention_mask": all_text,
                   "rope_scales": from_conditioning("rope_scales")}),
    plan=ModelPlan(
        blocks=(BlockList("noise_refiner", "noise_refiner.", "num_refiner_layers", streams={"hidden_states": "image"},
                          attention={"attn": ("image",)}, tokens={"image_rotary_emb": IMAGE}),
                BlockList("layers", "layers.", returns=(BOTH,))),
        streams={"hidden_states": BOTH}, attention={"attn": BOTH}, tokens={"image_rotary_emb": SEQUENCE},
        positions={"rope_embedder": Cut((None, None, IMAGE, SEQUENCE, None, None))},
        cacheable={"norm1.linear": "step"},
        cacheable_outside={"time_caption_embed.caption_embedder": "run", "context_refiner": "run"}),
    testing=SmallConfig(
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "hidden_size": 48, "num_layers": 2,
         "num_refiner_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2, "axes_dim_rope": (4, 4, 4),
         "cap_feat_dim": 24, "multiple_of": 8},
        "comfy.ldm.lumina.model:NextDiT",
        {"in_channels": 16, "dim": 192, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 2,
         "cap_feat_dim": 48, "axes_dims": [16, 16, 16], "axes_lens": [300, 512, 512],
         "qk_norm": True}, detected="Lumina2"))
