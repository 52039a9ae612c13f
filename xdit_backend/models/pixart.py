"""PixArt-Sigma: one stream; text by cross-attention; sinusoidal positions added before the blocks."""

import math

import torch

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, because, blocks, config_of, from_conditioning, has, size, timestep
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan

LATENT = Unpacked((2, 2))

KEYS = table(
    (r"^pos_embed$|^y_embedder\.y_embedding$", None),          # computed by the model; for training only
    (r"^x_embedder\.proj\.", "pos_embed.proj."), (r"^t_block\.1\.", "adaln_single.linear."),
    (r"^t_embedder\.mlp\.0\.", "adaln_single.emb.timestep_embedder.linear_1."),
    (r"^t_embedder\.mlp\.2\.", "adaln_single.emb.timestep_embedder.linear_2."),
    (r"^y_embedder\.y_proj\.fc1\.", "caption_projection.linear_1."),
    (r"^y_embedder\.y_proj\.fc2\.", "caption_projection.linear_2."),
    (r"^final_layer\.linear\.", "proj_out."), (r"^final_layer\.", ""), (r"^blocks\.", "transformer_blocks."),
    (r"\.attn\.qkv\.", (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."), (1, 1, 1)),
    (r"\.attn\.proj\.", ".attn1.to_out.0."),
    (r"\.cross_attn\.kv_linear\.", (".attn2.to_k.", ".attn2.to_v."), (1, 1)),
    (r"\.cross_attn\.q_linear\.", ".attn2.to_q."),
    (r"\.cross_attn\.proj\.", ".attn2.to_out.0."), (r"\.mlp\.fc1\.", ".ff.net.0.proj."),
    (r"\.mlp\.fc2\.", ".ff.net.2."))


def _scale(shapes):
    """The model's native size as a multiple of 512 pixels, from the file's table of positions; None without a table."""
    return math.isqrt(shapes["pos_embed"][1]) * 2 // 64 if "pos_embed" in shapes else None


def _latent(call):
    height, width = call.patch.whole if call.patch else call.latent.shape[2], call.latent.shape[3]
    if height % 2 or width % 2 or height + width < 66:
        raise ConfigError("Use sides that are multiples of 16, and together at least 528: PixArt cannot generate "
                          f"{width * 8} x {height * 8} pixels.")
    return call.latent


def _adapt(model, config):
    """Compute positions as ComfyUI's model does: scaled by the latent's size, in the dtype of the latent."""
    embed = model.pos_embed
    embed.pos_embed = None                                     # diffusers' forward then only embeds
    embedded = embed.forward
    embed.forward = lambda latent, patch=None: embedded(latent) + _positions(latent, patch, config)


def _positions(latent, patch, config):
    """Sinusoids of the columns and rows of a latent or its patch: (1, tokens, hidden).

    Rows and columns count up to the rounded mean side of the latent, in tokens, divided by the scale: the file's, or
    else the latent's own size.
    """
    height = patch.whole if patch else latent.shape[2]
    num_rows, num_columns = height // 2, latent.shape[3] // 2
    side = round((height + latent.shape[3]) // 2 / 64)          # in units of 512 pixels
    frequencies = config["num_attention_heads"] * config["attention_head_dim"] // 4
    dtype, device = latent.dtype, latent.device
    exponents = torch.arange(frequencies, dtype=dtype, device=device) / frequencies

    def sines(count):
        interpolation = count / (side * 64 // 2)
        scaled = torch.arange(count, dtype=dtype,
                              device=device) / interpolation / float(config.get("interpolation_scale") or side)
        angles = scaled[:, None] * (1.0 / 10000 ** exponents)
        return torch.cat([angles.sin(), angles.cos()], 1)      # (count, hidden / 2)

    start = patch.start // 2 if patch else 0
    rows, columns = sines(num_rows)[start:start + latent.shape[2] // 2], sines(num_columns)
    shape = (len(rows), len(columns), -1)
    return torch.cat([columns.expand(shape), rows[:, None].expand(shape)], 2).flatten(0, 1)[None]


PIXART = Family(
    name="PixArt-Sigma", title="PixArt-Sigma", transformer="PixArtTransformer2DModel", adapt_model=_adapt,
    keep_in_compute_dtype=("scale_shift_table",), num_channels=lambda config: config["in_channels"],
    activation_factors={"alone": 12.4, "residual": 4.4, "whole": 6.3, "outside": 3.4, "held": 1.35, "block": 12.0,
                        "exchange": 14.0, "own": 0.0},
    detection=Detection(
        recognise=lambda shapes: has("t_block.1.weight", "y_embedder.y_proj.fc1.weight")(shapes)
        and not has("ar_embedder.")(shapes),
        refusals=(because("its table of positions is for less than 512 pixels, which ComfyUI's model does not support "
                          "either",
                          lambda shapes: _scale(shapes) == 0),),
        config=config_of(
            interpolation_scale=_scale, sample_size=128, patch_size=2, in_channels=size("x_embedder.proj.weight", 1),
            out_channels=size("final_layer.linear.weight", 0, 4), num_layers=blocks("blocks."),
            num_attention_heads=16, attention_head_dim=size("x_embedder.proj.weight", 0, 16),
            cross_attention_dim=size("x_embedder.proj.weight", 0),
            caption_channels=size("y_embedder.y_proj.fc1.weight", 1),
            attention_bias=True, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
            norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6, use_additional_conditions=False),
        convert=KEYS, config_from_tensors=("interpolation_scale", "sample_size")),
    inputs=Inputs(
        latent=LATENT, conditioning={"context": "caption_channels"}, ignored=("c_size", "c_ar"),
        arguments={"hidden_states": _latent, "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"),
                   "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "blocks."),), streams={"hidden_states": "image"},
        attention={"attn1": ("image",)},
        cacheable={"attn2.to_k": "run", "attn2.to_v": "run"}, cacheable_outside={"caption_projection": "run"},
        positions={"pos_embed": lambda module, forward, rows, tokens, args, kwargs: forward(*args, rows.patch)}),
    testing=SmallConfig(
        {"sample_size": 128, "patch_size": 2, "in_channels": 4, "out_channels": 8, "num_layers": 4,
         "num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32, "caption_channels": 24,
         "attention_bias": True, "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single",
         "norm_elementwise_affine": False, "norm_eps": 1e-6, "use_additional_conditions": False},
        "comfy.ldm.pixart.pixartms:PixArtMS",
        {"hidden_size": 192, "num_heads": 16, "depth": 2, "caption_channels": 96, "model_max_length": 300,
         "micro_condition": False},
        detected="PixArtSigma"))
