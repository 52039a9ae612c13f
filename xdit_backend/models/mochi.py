"""Mochi: two streams of different widths, image first, joint attention; the first text tokens only; learned position
frequencies."""

from types import MethodType

import torch
import torch.nn.functional as F

from ..protocol.errors import UnsupportedError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import (
    Unpacked,
    all_text,
    blocks,
    compute_dtype_of,
    config_of,
    even_sides,
    from_conditioning,
    has,
    size,
    text_mask,
)
from .common.key_mapping import SWAPPED, table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut

LATENT, BOTH, TABLE = Unpacked((1, 2, 2)), ("image", "text"), TokenArgument(0, ("image",))

KEYS = table(
    (r"^x_embedder\.", "patch_embed."), (r"^t_embedder\.mlp\.0\.", "time_embed.timestep_embedder.linear_1."),
    (r"^t_embedder\.mlp\.2\.", "time_embed.timestep_embedder.linear_2."), (r"^t5_y_embedder\.", "time_embed.pooler."),
    (r"^t5_yproj\.", "time_embed.caption_proj."), (r"^final_layer\.mod\.", "norm_out.linear.", SWAPPED),
    (r"^final_layer\.linear\.", "proj_out."), (r"^blocks\.", "transformer_blocks."), (r"\.mod_x\.", ".norm1.linear."),
    (r"\.mod_y\.", ".norm1_context.linear."),
    (r"\.attn\.qkv_x\.", (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."), (1, 1, 1)),
    (r"\.attn\.qkv_y\.", (".attn1.add_q_proj.", ".attn1.add_k_proj.", ".attn1.add_v_proj."), (1, 1, 1)),
    (r"\.attn\.([qk])_norm_x\.", r".attn1.norm_\1."), (r"\.attn\.([qk])_norm_y\.", r".attn1.norm_added_\1."),
    (r"\.attn\.proj_x\.", ".attn1.to_out.0."), (r"\.attn\.proj_y\.", ".attn1.to_add_out."),
    (r"\.mlp_x\.w1\.", ".ff.net.0.proj.", SWAPPED), (r"\.mlp_y\.w1\.", ".ff_context.net.0.proj.", SWAPPED),
    (r"\.mlp_x\.w2\.", ".ff.net.2."), (r"\.mlp_y\.w2\.", ".ff_context.net.2."))


def _convert(tensors, config):
    """Rename the norm of the last block's text, which has another class."""
    last = f"transformer_blocks.{config['num_layers'] - 1}.norm1_context.linear"
    return {name.replace(f"{last}.", f"{last}_1."): tensor for name, tensor in KEYS(tensors, config).items()}


def _num_text_tokens(conditioning):
    """Number of text tokens in attention: those up to the last real one. The others only take part in pooling."""
    number, length = conditioning.get("num_tokens"), conditioning["context"].shape[1]
    return length if number is None else min(length, int(number))


def _text(call):
    return from_conditioning("context")(call)[:, :_num_text_tokens(call.conditioning)]


def _pooled_text(call):
    """Mask of the text tokens that are pooled, (B, T) bool."""
    mask, count = text_mask(call), _num_text_tokens(call.conditioning)
    if mask is not None and mask[:, count:].any():
        raise UnsupportedError("Use a text encoder that pads at the end, or Load Diffusion Model: the conditioning's "
                               "attention mask excludes text tokens before the last real one, which xDiT does not "
                               "support for Mochi.")
    return (all_text(call) if mask is None else mask)[:, :count]


def _full_counts(rows, args, kwargs):
    """The call's arguments for the full latent: frequencies, frames, rows and columns."""
    frequencies, *counts = args
    counts[rows.axis] = rows.whole_token_rows
    return [frequencies, *counts], kwargs


def _adapt(model, config):
    """Compute rotations and norms in the compute dtype, as ComfyUI does, and attention for the batch at once;
    diffusers attends to each image's text separately."""
    norms = {"MochiRMSNorm": _norm, "MochiModulatedRMSNorm": _scaled_norm, "MochiRMSNormZero": _first_norm}
    dtype = compute_dtype_of(model)

    def tables(frequencies, positions):
        frequencies = frequencies.to(dtype())
        angles = torch.einsum("nd,dhf->nhf", positions.to(frequencies), frequencies).flatten(1)
        return angles.cos(), angles.sin()
    model.rope._create_rope = tables
    for block in model.transformer_blocks:
        block.attn1.processor = _attend
    for module in model.modules():
        if type(module).__name__ in norms:
            module.forward = MethodType(norms[type(module).__name__], module)


def _norm(self, hidden):
    return F.rms_norm(hidden, hidden.shape[-1:], self.weight.to(hidden.dtype), self.eps)


def _scaled_norm(self, hidden, scale=None):
    normed = F.rms_norm(hidden, hidden.shape[-1:], eps=self.eps)
    return normed if scale is None else normed * scale.to(hidden.dtype)


def _first_norm(self, hidden, emb):
    scale, *others = self.linear(self.silu(emb)).chunk(4, 1)
    return F.rms_norm(hidden, hidden.shape[-1:], eps=self.norm.eps) * (1 + scale[:, None]), *others


def _attend(attn, image, encoder_hidden_states, attention_mask, image_rotary_emb):
    def heads(tensor):
        return tensor.unflatten(2, (attn.heads, -1))           # (B, T, N, H)

    def rotated(tensor):
        cos, sin = (table.unflatten(1, (attn.heads, -1)) for table in image_rotary_emb)
        even, odd = tensor[..., 0::2], tensor[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(tensor.dtype)

    text = encoder_hidden_states
    query = torch.cat([rotated(attn.norm_q(heads(attn.to_q(image)))), attn.norm_added_q(heads(attn.add_q_proj(text)))],
                      1)
    key = torch.cat([rotated(attn.norm_k(heads(attn.to_k(image)))), attn.norm_added_k(heads(attn.add_k_proj(text)))], 1)
    value = torch.cat([heads(attn.to_v(image)), heads(attn.add_v_proj(text))], 1)
    out = F.scaled_dot_product_attention(*(each.transpose(1, 2)
                                           for each in (query, key, value))).transpose(1, 2).flatten(2)
    image, text = out.split([image.shape[1], text.shape[1]], 1)
    return attn.to_out[0](image), text if attn.context_pre_only else attn.to_add_out(text)


def _thin(model):
    """Narrow the image's feed-forwards of ComfyUI's class, whose width it asserts, to those of diffusers' class."""
    for block in getattr(model, "blocks", ()):
        wide = block.mlp_x
        block.mlp_x = type(wide)(wide.w1.in_features, 4 * wide.w1.in_features, multiple_of=256, ffn_dim_multiplier=None,
                                 device=wide.w1.weight.device, dtype=wide.w1.weight.dtype, operations=torch.nn)


class _Mochi(Family):
    stream_widths = {"text": "pooled_projection_dim"}


MOCHI = _Mochi(
    name="Mochi", title="Mochi", transformer="MochiTransformer3DModel", adapt_model=_adapt,
    pixels=lambda config: (6, 8, 8),
    activation_factors={"alone": 16.6, "residual": 5.0, "whole": 8.2, "outside": 4.0, "held": 2.0, "block": 13.6,
                        "exchange": 13.0, "own": 0.0},
    detection=Detection(
        recognise=has("t5_yproj.weight", "pos_frequencies"),
        config=config_of(
            patch_size=2, in_channels=size("x_embedder.proj.weight", 1), num_attention_heads=size("pos_frequencies", 1),
            attention_head_dim=lambda shapes: 2 * shapes["pos_frequencies"][2], num_layers=blocks("blocks."),
            pooled_projection_dim=size("t5_yproj.weight", 0), text_embed_dim=size("t5_yproj.weight", 1),
            time_embed_dim=size("t_embedder.mlp.0.weight", 1)),
        convert=_convert),
    inputs=Inputs(
        latent=LATENT, sign=-1.0, time_scale=1.0,
        conditioning={"context": "text_embed_dim", "attention_mask": None, "num_tokens": None},
        lengths={"text": _num_text_tokens},
        arguments={"hidden_states": even_sides("Mochi", LATENT), "encoder_hidden_states": _text,
                   "timestep": lambda call: 1000 * (1 - call.timestep), "encoder_attention_mask": _pooled_text}),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "blocks.", returns=BOTH, image_fraction=0.7, patched="double"),),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"}, attention={"attn1": BOTH},
        tokens={"image_rotary_emb": TABLE}, masks={"encoder_attention_mask": ()}, of_heads=("image_rotary_emb",),
        positions={"rope": Cut(TABLE, _full_counts)},
        cacheable={"norm1.linear": "step", "norm1_context.linear": "step"},
        cacheable_outside={"time_embed.pooler": "run", "time_embed.caption_proj": "run"}),
    testing=SmallConfig(
        {"patch_size": 2, "in_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 4,
         "pooled_projection_dim": 32, "text_embed_dim": 24, "time_embed_dim": 16},
        "comfy.ldm.genmo.joint_model.asymm_models_joint:AsymmDiTJoint",
        {"depth": 3, "patch_size": 2, "num_heads": 6, "hidden_size_x": 192, "hidden_size_y": 96, "mlp_ratio_x": 64.0,
         "mlp_ratio_y": 4.0, "learn_sigma": False, "in_channels": 12, "qk_norm": True, "qkv_bias": False,
         "timestep_scale": 1000.0, "use_t5": True, "t5_feat_dim": 64}, detected="GenmoMochi", thin=_thin))
