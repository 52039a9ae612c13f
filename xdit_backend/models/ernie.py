"""ERNIE-Image: one sequence of image and text, text last. Blocks take tokens before batch, and share one modulation."""

import functools

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, blocks, config_of, from_conditioning, has, needs_diffusers, size, timestep
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.rope_scaling import with_rotations
from .common.tp_plan import ROWWISE

LATENT, BOTH = Unpacked((1, 1)), ("image", "text")


def _adapt(model, config):
    """Read the single modulation of all tokens once, as ComfyUI's blocks do; diffusers' forward repeats it for each
    token."""
    def once(forward, x, rotary_pos_emb, temb, attention_mask=None):
        return forward(x, rotary_pos_emb, [part[:1] for part in temb], attention_mask)
    for block in model.layers:
        block.forward = functools.wraps(block.forward)(functools.partial(once, block.forward))
    make = model.pos_embed.forward

    def rotations(ids, scales):
        """Scale and shift the positions of the image's tokens. Text is at its first row and column, in frames before
        it."""
        is_image = ids[..., :1] == ids[:, :1, :1]
        scale, shift = scales.float().T
        return make(torch.where(is_image, ids * torch.cat([scale.new_ones(1), scale[1:]]) + shift, ids))
    model.forward = with_rotations(model, model.forward, model.pos_embed, "forward", rotations)


def _of_patch(module, forward, rows, tokens, args, kwargs):
    """Offset the rows of a patch to their positions in the full latent."""
    positions = args[0].clone()
    positions[:, :tokens.counts["image"], 1] += rows.patch.start
    return forward(positions)


def _text_lengths(call):
    """Number of text tokens (B,), all of which are real. The image's positions begin after them."""
    return torch.full((len(call.latent),), call.conditioning["context"].shape[1], device=call.latent.device)


class _Plan(ModelPlan):
    tokens_first = True


ERNIE = Family(
    name="ERNIE-Image", title="ERNIE-Image, ERNIE-Image-Turbo", transformer="ErnieImageTransformer2DModel",
    adapt_model=_adapt, width=lambda config: config["hidden_size"], pixels=lambda config: (1, 16, 16),
    activation_factors={"alone": 21.0, "residual": 12.65, "whole": 16.15, "outside": 9.0, "held": 8.05, "block": 14.35,
                        "exchange": 14.25, "own": 0.35},
    detection=Detection(
        recognise=has("layers.0.adaLN_mlp_ln.weight", "layers.0.mlp.linear_fc2.weight"),
        refusals=(needs_diffusers("0.38"),),
        config=config_of(
            hidden_size=size("x_embedder.proj.weight", 0), in_channels=size("x_embedder.proj.weight", 1), patch_size=1,
            num_attention_heads=lambda shapes: shapes["x_embedder.proj.weight"][0]
            // shapes["layers.0.self_attention.norm_q.weight"][0],
            num_layers=blocks("layers."), ffn_hidden_size=size("layers.0.mlp.linear_fc2.weight", 1), rope_theta=256,
            eps=1e-6, out_channels=size("final_linear.weight", 0), text_in_dim=size("text_proj.weight", 1),
            rope_axes_dim=(32, 48, 48)),
        convert=table()),
    inputs=Inputs(
        latent=LATENT, conditioning={"context": "text_in_dim", "rope_scales": None},
        arguments={"hidden_states": LATENT, "timestep": timestep(), "text_bth": from_conditioning("context"),
                   "text_lens": _text_lengths, "rope_scales": from_conditioning("rope_scales")}),
    plan=_Plan(
        blocks=(BlockList("layers", "layers.", returns=(BOTH,)),), streams={"x": BOTH},
        attention={"self_attention": BOTH}, masks={"attention_mask": ()}, positions={"pos_embed": _of_patch},
        tokens={"rotary_pos_emb": TokenArgument(1, BOTH)},
        tp_plan={"mlp.linear_fc2": ROWWISE}, cacheable_outside={"text_proj": "run", "adaLN_modulation": "step"}),
    testing=SmallConfig(
        {"hidden_size": 64, "num_attention_heads": 4, "num_layers": 4, "ffn_hidden_size": 96, "in_channels": 4,
         "out_channels": 4, "text_in_dim": 24, "rope_axes_dim": (4, 4, 8)},
        "comfy.ldm.ernie.model:ErnieImageModel",
        {"hidden_size": 256, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 384, "in_channels": 128,
         "out_channels": 128, "text_in_dim": 64}, detected="ErnieImage"))
