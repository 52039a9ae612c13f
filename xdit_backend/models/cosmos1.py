"""Cosmos-Predict1, from text and from input frames: Cosmos-Predict2's model with learned positions, which every block
adds.

Input frames are in the latent, and its last channel marks them. The tables of positions limit the size of latents.
"""

import dataclasses
from types import MethodType

import torch

from ..protocol.errors import ConfigError
from .common.family import Inputs, SmallConfig, derived
from .common.inputs import Unpacked, blocks, config_of, even_sides, from_conditioning, full_shape, has, size, timestep
from .common.key_mapping import table
from .common.plan import BlockList, TokenArgument
from .common.position_slicing import Cut
from .cosmos import COSMOS, SHARED

LATENT, NAME, FIRST = Unpacked((1, 2, 2)), "Cosmos-Predict1", "blocks.block0.blocks."
TABLE, LEARNED = TokenArgument(0, ("image",)), TokenArgument(1, ("image",))

KEYS = table(
    *SHARED, (r"^blocks\.block(\d+)\.", r"transformer_blocks.\1."), (r"\.blocks\.0\.block\.attn\.", ".attn1."),
    (r"\.blocks\.1\.block\.attn\.", ".attn2."), (r"\.to_([qkv])\.0\.", r".to_\1."), (r"\.to_([qk])\.1\.", r".norm_\1."),
    (r"\.blocks\.2\.block\.layer1\.", ".ff.net.0.proj."), (r"\.blocks\.2\.block\.layer2\.", ".ff.net.2."),
    (r"\.blocks\.0\.adaLN_modulation\.", ".norm1.linear_"), (r"\.blocks\.1\.adaLN_modulation\.", ".norm2.linear_"),
    (r"\.blocks\.2\.adaLN_modulation\.", ".norm3.linear_"), (r"^final_layer\.adaLN_modulation\.", "norm_out.linear_"),
    (r"^affline_norm\.", "time_embed.norm."), (r"^extra_pos_embedder\.", "learnable_pos_embed."))


def _max_size(shapes):
    """Frames, rows and columns of the largest latent."""
    return tuple(shapes[f"extra_pos_embedder.pos_emb_{dim}"][0] * patch for dim, patch in zip("thw", LATENT.patch))


def _latent(call):
    _check_size(full_shape(call), call.config)
    return even_sides(NAME, LATENT)(call)


def _check_size(shape, config):
    full = shape[2:]
    if any(length > most for length, most in zip(full, config["max_size"])):
        taken, most = (f"{8 * frames - 7} frames of {8 * columns} x {8 * rows} pixels"
                       for frames, rows, columns in (full, config["max_size"]))
        raise ConfigError(f"Use fewer frames, or a smaller width and height: this {NAME} model has positions for "
                          f"{most}, and the latent has {taken}.")


class _Inputs(Inputs):
    def check_size(self, shape, config):
        _check_size(shape, config)


def _frame_rate(call):
    """Frames per second, float32; None stands for 24."""
    rate = call.conditioning.get("fps")
    return None if rate is None else rate.flatten()[0].float()


def _adapt(model, config):
    COSMOS.adapt_model(model, config)
    model.learnable_pos_embed.forward = MethodType(_learned_positions, model.learnable_pos_embed)


def _learned_positions(self, latent, first=(0, 0, 0)):
    """Learned positions (1, T, C) of a latent, or of a patch that begins at this frame, row and column of tokens.

    Summed and normalised in the latent's dtype, as ComfyUI does.
    """
    frames, rows, columns = (table[start:start + length // patch].to(latent) for table, start, length, patch in zip(
        (self.pos_emb_t, self.pos_emb_h, self.pos_emb_w), first, latent.shape[2:], self.patch_size))
    positions = (frames[:, None, None] + rows[:, None] + columns).flatten(0, 2)
    norm = torch.linalg.vector_norm(positions, dim=-1, keepdim=True,
                                    dtype=torch.promote_types(positions.dtype, torch.float32))
    return (positions / (self.eps + norm * positions.shape[-1] ** -0.5).to(positions.dtype))[None]


def _learned_positions_of_patch(module, forward, rows, tokens, args, kwargs):
    first = [0, 0, 0]
    first[rows.axis] = rows.patch.start // module.patch_size[rows.axis]
    return forward(*args, first=first, **kwargs)


COSMOS1 = dataclasses.replace(
    COSMOS, name=NAME, title="Cosmos-Predict1 text- and video-to-world", adapt_model=_adapt, unsupported_dtypes=(),
    pixels=lambda config: (8, 8, 8),
    activation_factors={"alone": 14.1, "residual": 4.1, "whole": 8.1, "outside": 5.1, "held": 2.1, "block": 11.0,
                        "exchange": 14.0, "shared": 1.1},
    detection=dataclasses.replace(
        COSMOS.detection,
        recognise=has("extra_pos_embedder.pos_emb_t", f"{FIRST}0.block.attn.to_q.0.weight",
                      f"{FIRST}0.adaLN_modulation.1.weight"),
        refusals=(),
        config=config_of(**COSMOS.detection.config.rules | {
            "num_attention_heads": lambda shapes: shapes["x_embedder.proj.1.weight"][0]
            // shapes[f"{FIRST}0.block.attn.to_q.1.weight"][0],
            "attention_head_dim": size(f"{FIRST}0.block.attn.to_q.1.weight", 0), "num_layers": blocks("blocks.block"),
            "text_embed_dim": size(f"{FIRST}1.block.attn.to_k.0.weight", 1),
            "adaln_lora_dim": size(f"{FIRST}0.adaLN_modulation.1.weight", 0),
            "mlp_ratio": 4.0, "max_size": _max_size, "extra_pos_embed_type": "learnable",
            "rope_scale": lambda shapes: (2.0, 1.0, 1.0) if shapes["x_embedder.proj.1.weight"][0] == 4096
            else (2.0, 2.0, 2.0)}),
        convert=KEYS, config_from_tensors=()),
    inputs=derived(
        _Inputs, COSMOS.inputs,
        conditioning={"context": "text_embed_dim", "fps": None}, ignored=("attention_mask",),
        arguments={"hidden_states": _latent, "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"),
                   "fps": _frame_rate, "padding_mask": COSMOS.inputs.arguments["padding_mask"]}),
    plan=dataclasses.replace(
        COSMOS.plan, blocks=(BlockList("transformer_blocks", "blocks.block"),),
        tokens={"image_rotary_emb": TABLE, "extra_pos_emb": LEARNED},
        positions={"rope": Cut(TABLE), "learnable_pos_embed": _learned_positions_of_patch}),
    testing=SmallConfig(
        COSMOS.testing.config | {"rope_scale": (2.0, 1.0, 1.0), "extra_pos_embed_type": "learnable"},
        "comfy.ldm.cosmos.model:GeneralDIT",
        {"max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16, "out_channels": 16,
         "patch_spatial": 2, "patch_temporal": 1, "concat_padding_mask": True, "block_config": "FA-CA-MLP",
         "model_channels": 64, "num_blocks": 3, "num_heads": 4, "block_x_format": "THWBD", "crossattn_emb_channels": 64,
         "pos_emb_cls": "rope3d", "pos_emb_learnable": False, "pos_emb_interpolation": "crop", "affline_emb_norm": True,
         "use_adaln_lora": True, "adaln_lora_dim": 32, "rope_h_extrapolation_ratio": 2.0,
         "rope_w_extrapolation_ratio": 2.0, "rope_t_extrapolation_ratio": 2.0, "extra_per_block_abs_pos_emb": True,
         "extra_per_block_abs_pos_emb_type": "learnable"}, detected="CosmosT2V"))
