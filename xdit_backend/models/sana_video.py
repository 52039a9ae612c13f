"""Sana-Video: text to video with Sana's linear attention, rotary positions, and feed-forwards that read neighbouring
frames. ComfyUI has no model of it."""

import math

import torch

from .common.family import Detection, Family, Inputs, Sampled, SmallConfig
from .common.inputs import (
    Unpacked,
    config_of,
    folder_alone,
    from_conditioning,
    has,
    in_config_json,
    text_mask,
    timestep,
)
from .common.linear_attention import attending, projected
from .common.plan import BlockList, ModelPlan, TokenArgument
from .sana import SANA


class _InFrames(Unpacked):
    """Latents of which a row of tokens is a full frame, so that each rank has full frames."""

    def counts(self, shape):
        frames, *sides = super().counts(shape)
        return [frames, math.prod(sides)]


LATENT = _InFrames((1, 2, 2))


def _rotated(tensor_BNTH, tables):
    """Rotate queries or keys by tables of positions, (1, T, 1, H) with each number twice."""
    cos, sin = (table[..., ::2].transpose(1, 2).to(tensor_BNTH.dtype) for table in tables)
    even, odd = tensor_BNTH.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _attend(self, hidden_states, rotary_emb, total=lambda part: part):
    """Linear attention in float32 or wider, normalised by the weights of queries and keys without rotation: (B, T,
    C) -> (B, T, C). total: turns sums over this rank's tokens into sums over all tokens."""
    query, key, value = projected(self, hidden_states)
    # the last row of the sums is that of the keys
    sums = total(torch.cat([value.transpose(2, 3) @ _rotated(key, rotary_emb), key.sum(2, keepdim=True)], 2))
    out = _rotated(query, rotary_emb) @ sums[:, :, :-1].transpose(2, 3)
    out = out / (query @ sums[:, :, -1:].transpose(2, 3) + 1e-15)
    return self.to_out[0](out.transpose(1, 2).flatten(2).to(hidden_states.dtype))


class _Plan(ModelPlan):
    row_count_argument = "frames"


SANA_VIDEO = Family(
    name="Sana-Video", title="Sana-Video", transformer="SanaVideoTransformer3DModel", adapt_model=attending(_attend),
    pixels=lambda config: (4, 8, 8), sampled=Sampled("FLOW", {"shift": 8.0, "multiplier": 1000.0}, "Wan21", memory=2.0),
    refused=SANA.refused,
    activation_factors={"alone": 16.25, "residual": 16.25, "whole": 16.25, "outside": 4.7, "held": 2.01, "block": 15.24,
                        "exchange": 8.0, "own": 0.0, "shared": 0.2},
    detection=Detection(
        recognise=has("caption_norm.weight", "patch_embedding.weight", "transformer_blocks.0.ff.conv_temp.weight"),
        refusals=(folder_alone,),
        config=config_of(
            patch_size=LATENT.patch, guidance_embeds=False, in_channels=in_config_json, out_channels=in_config_json,
            num_attention_heads=in_config_json, attention_head_dim=in_config_json, num_layers=in_config_json,
            num_cross_attention_heads=in_config_json, cross_attention_head_dim=in_config_json,
            cross_attention_dim=in_config_json, caption_channels=in_config_json, mlp_ratio=in_config_json,
            dropout=in_config_json, attention_bias=in_config_json, sample_size=in_config_json, norm_eps=in_config_json,
            norm_elementwise_affine=in_config_json, interpolation_scale=in_config_json, qk_norm=in_config_json,
            guidance_embeds_scale=in_config_json, rope_max_seq_len=in_config_json),
        convert=lambda tensors, config: tensors),
    inputs=Inputs(
        latent=LATENT, conditioning={"context": "caption_channels", "attention_mask": None},
        arguments={"hidden_states": LATENT, "encoder_hidden_states": from_conditioning("context"),
                   "timestep": timestep(), "encoder_attention_mask": text_mask}),
    plan=_Plan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks."),), streams={"hidden_states": "image"},
        attention={}, tokens={"rotary_emb": TokenArgument(1, ("image",))}, token_reductions=("attn1",),
        halos=("ff.conv_temp",)),
    testing=SmallConfig({"in_channels": 16, "out_channels": 16, "num_attention_heads": 4, "attention_head_dim": 12,
                         "num_layers": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 24,
                         "cross_attention_dim": 48, "caption_channels": 24, "patch_size": (1, 2, 2)}, frames=5))
