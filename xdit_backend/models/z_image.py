"""Z-Image and Z-Image-Turbo: image and text refined separately, then one sequence of both. Each is padded to full
groups of tokens."""

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import blocks, config_of, from_conditioning, has, needs_diffusers, size, timestep
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.rope_scaling import scales_and_shifts
from .common.z_image import EMBEDDER, GROUP, LATENT, embed_times, first_row, is_z_image, num_pads, padded, rotations_of

IMAGE, ALL = ("image", "pad"), ("image", "pad", "text")
HEAD_SIZE = size("layers.0.attention.q_norm.weight", 0)

KEYS = table(
    (r"^norm_final\.", None), (r"^(x_embedder|final_layer)\.", r"all_\1.2-1."),
    (r"\.attention\.([qk])_norm\.", r".attention.norm_\1."),
    (r"\.attention\.qkv\.", (".attention.to_q.", ".attention.to_k.", ".attention.to_v."), (1, 1, 1)),
    (r"\.attention\.out\.", ".attention.to_out.0."))


def _adapt(model, config):
    """Give a patch its rows' positions, and the full latent's padding."""
    forward, pad, position = model.forward, model._pad_with_ids, []
    embed_times(model, config)

    def with_position(*, first_row, num_pads, rope_scales=None, **inputs):
        position[:] = first_row, num_pads, rope_scales
        return (torch.stack(forward(**inputs)[0]).squeeze(2),)

    def pad_with_positions(features, counts, start, device, noise=None):
        if start[0] == 1:                                      # text; the image's positions begin after its end
            return pad(features, counts, start, device, noise)
        first_row, num_pads, scales = position
        ids = model.create_coordinate_grid(counts, (start[0], first_row, 0), device).flatten(0, 2)
        if scales is not None:
            scale, shift = scales_and_shifts(scales).to(device)[1:].T
            ids = torch.cat([ids[:, :1].double(), ids[:, 1:] * scale + shift], 1)
        features = torch.cat([features, features[-1:].expand(num_pads, -1)])
        is_pad = torch.arange(len(features), device=device) >= len(ids)
        return features, torch.cat([ids, ids.new_zeros(num_pads, 3)]), is_pad, len(features), None

    model.forward, model._pad_with_ids, model.rope_embedder = with_position, pad_with_positions, rotations_of(model)


Z_IMAGE = Family(
    name="Z-Image", title="Z-Image, Z-Image-Turbo", transformer="ZImageTransformer2DModel", adapt_model=_adapt,
    num_heads=lambda config: config["n_heads"], width=lambda config: config["dim"],
    activation_factors={"alone": 16.0, "residual": 5.4, "whole": 9.2, "outside": 6.0, "held": 2.3, "block": 14.9,
                        "exchange": 14.3, "own": 0.0},
    detection=Detection(
        recognise=lambda shapes: is_z_image(shapes) and not has(EMBEDDER)(shapes), refusals=(needs_diffusers("0.37"),),
        config=config_of(
            in_channels=size("x_embedder.weight", 1, 4), dim=size("x_embedder.weight", 0), n_layers=blocks("layers."),
            n_refiner_layers=blocks("noise_refiner."),
            n_heads=lambda shapes: shapes["x_embedder.weight"][0] // HEAD_SIZE(shapes),
            n_kv_heads=lambda shapes: shapes["x_embedder.weight"][0] // HEAD_SIZE(shapes),
            cap_feat_dim=size("cap_embedder.1.weight", 1),
            axes_dims=lambda shapes: [HEAD_SIZE(shapes) // 4, HEAD_SIZE(shapes) * 3 // 8, HEAD_SIZE(shapes) * 3 // 8],
            axes_lens=[8192, 4096, 4096], siglip_feat_dim=None, _time_width=size("t_embedder.mlp.0.weight", 0)),
        convert=KEYS, config_from_tensors=("axes_lens",)),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, sign=-1.0, multiple=GROUP,
        conditioning={"context": "cap_feat_dim", "rope_scales": None},
        ignored=("num_tokens", "attention_mask", "clip_text_pooled"),
        lengths={"text": lambda conditioning: padded(conditioning["context"].shape[1])},
        arguments={"x": lambda call: list(LATENT(call).unsqueeze(2)), "t": timestep(-1, 1),
                   "cap_feats": lambda call: list(from_conditioning("context")(call)), "first_row": first_row,
                   "num_pads": num_pads, "rope_scales": from_conditioning("rope_scales")}),
    plan=ModelPlan(
        blocks=(BlockList("noise_refiner", "noise_refiner.", "n_refiner_layers", returns=(IMAGE,),
                          added="noise_refiner", streams={"x": IMAGE},
                          attention={"attention": IMAGE}, tokens={"freqs_cis": TokenArgument(1, IMAGE)}),
                BlockList("layers", "layers.", "n_layers", returns=(ALL,), added="double_block")),
        streams={"x": ALL}, attention={"attention": ALL}, tokens={"freqs_cis": TokenArgument(1, ALL)},
        cacheable={"adaLN_modulation": "step"}, cacheable_outside={"cap_embedder": "run", "context_refiner": "run"}),
    testing=SmallConfig(
        {"in_channels": 4, "dim": 64, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 4, "n_kv_heads": 4,
         "cap_feat_dim": 24, "axes_dims": [4, 6, 6], "axes_lens": [512, 128, 128]},
        "comfy.ldm.lumina.model:NextDiT",
        {"in_channels": 16, "dim": 384, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4,
         "cap_feat_dim": 48, "axes_dims": [24, 36, 36], "axes_lens": [1536, 512, 512], "qk_norm": True,
         "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0,
         "pad_tokens_multiple": 32}, detected="ZImage"))
