"""Sana: one stream; linear attention (sums over all tokens); feed-forwards that read neighbouring rows. ComfyUI has
no model of it."""

import torch
import torch.nn.functional as F

from .common.family import Detection, Family, Inputs, Sampled, SmallConfig
from .common.inputs import Unpacked, config_of, folder_alone, from_conditioning, has, in_config_json, text_mask
from .common.linear_attention import attending, projected
from .common.plan import BlockList, ModelPlan

LATENT = Unpacked((1, 1))
SUMS = ("its attention computes sums over all tokens, which have no part of one patch or rank that could be reused "
        "from the previous step")


def _attend(self, hidden_states, total=lambda part: part):
    """Linear attention in float32 or wider: (B, T, C) -> (B, T, C). total: turns sums over this rank's tokens into
    sums over all tokens."""
    query, key, value = projected(self, hidden_states)
    # the last row of the sums is that of the keys
    sums = total(F.pad(value, (0, 1), value=1.0).transpose(2, 3) @ key)
    out = query @ sums.transpose(2, 3)
    out = (out[..., :-1] / (out[..., -1:] + 1e-15)).transpose(1, 2).flatten(2).to(hidden_states.dtype)
    out = self.to_out[0](out)
    return out.clip(-65504, 65504) if out.dtype == torch.float16 else out


class _Plan(ModelPlan):
    row_count_argument = "height"


SANA = Family(
    name="Sana", title="Sana, Sana 1.5", transformer="SanaTransformer2DModel", adapt_model=attending(_attend),
    pixels=lambda config: (1, 32, 32),
    sampled=Sampled("FLOW", {"shift": 3.0, "multiplier": 1000.0}, "LatentFormat", {
        "latent_channels": 32, "scale_factor": 0.41407, "spacial_downscale_ratio": 32}, memory=8.0),
    refused={"pipefusion": SUMS, "displaced": SUMS,
             "tensor": "most of its weights are convolutions, which it does not split"},
    num_channels=lambda config: config["in_channels"],
    activation_factors={"alone": 14.6, "whole": 14.6, "outside": 4.6, "held": 2.3, "block": 13.5, "exchange": 8.0,
                        "own": 0.0},
    detection=Detection(
        recognise=has("caption_norm.weight", "patch_embed.proj.weight", "transformer_blocks.0.ff.conv_depth.weight"),
        refusals=(folder_alone,),
        config=config_of(
            patch_size=1, guidance_embeds=False, in_channels=in_config_json, out_channels=in_config_json,
            num_attention_heads=in_config_json,
            attention_head_dim=in_config_json,
            num_layers=in_config_json, num_cross_attention_heads=in_config_json,
            cross_attention_head_dim=in_config_json, cross_attention_dim=in_config_json,
            caption_channels=in_config_json,
            mlp_ratio=in_config_json, attention_bias=in_config_json, sample_size=in_config_json,
            norm_eps=in_config_json, interpolation_scale=in_config_json, qk_norm=in_config_json,
            timestep_scale=in_config_json, guidance_embeds_scale=in_config_json, dropout=in_config_json),
        convert=lambda tensors, config: tensors),
    inputs=Inputs(
        latent=LATENT, conditioning={"context": "caption_channels", "attention_mask": None},
        arguments={"hidden_states": LATENT, "encoder_hidden_states": from_conditioning("context"),
                   "encoder_attention_mask": text_mask,
                   "timestep": lambda call: call.timestep * call.config.get("timestep_scale", 1.0)}),
    plan=_Plan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks."),), streams={"hidden_states": "image"},
        attention={}, token_reductions=("attn1",), halos=("ff",)),
    testing=SmallConfig({"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 8,
                         "num_layers": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
                         "cross_attention_dim": 32, "caption_channels": 24, "sample_size": 8, "patch_size": 1}))
