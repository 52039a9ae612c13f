"""AuraFlow: two streams, text first, then one of both. Eight learned tokens precede the text; positions are a
learned table."""

import math

import torch
import torch.nn.functional as F

from ..memory.staging import on_device
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import (
    Packed,
    Unpacked,
    blocks,
    compute_dtype_of,
    config_of,
    from_conditioning,
    has,
    size,
    timestep,
)
from .common.key_mapping import SWAPPED, table
from .common.plan import BlockList, ModelPlan
from .common.tp_plan import COLWISE, ROWWISE, styled

# number of heads as in ComfyUI, which does not detect it
LATENT, BOTH, NUM_HEADS = Unpacked((2, 2)), ("text", "image"), 12

KEYS = table(
    (r"^t_embedder\.mlp\.0\.", "time_step_proj.linear_1."), (r"^t_embedder\.mlp\.2\.", "time_step_proj.linear_2."),
    (r"^cond_seq_linear\.", "context_embedder."), (r"^init_x_linear\.", "pos_embed.proj."),
    (r"^positional_encoding$", "pos_embed.pos_embed"), (r"^modF\.1\.", "norm_out.linear.", SWAPPED),
    (r"^final_linear\.", "proj_out."),
    (r"^(single_layers\.\d+)\.attn\.w1", r"\1.attn.w2"), (r"\.attn\.w1([qkv])\.", r".attn.add_\1_proj."),
    (r"\.attn\.w1o\.", ".attn.to_add_out."), (r"\.attn\.w2([qkv])\.", r".attn.to_\1."),
    (r"\.attn\.w2o\.", ".attn.to_out.0."),
    (r"\.mod(X|CX)\.1\.", ".norm1.linear."),
    (r"\.modC\.1\.", ".norm1_context.linear."), (r"\.mlpC\.", ".ff_context."), (r"\.mlpX?\.", ".ff."),
    (r"\.c_fc(\d)\.", r".linear_\1."),
    (r"\.c_proj\.", ".out_projection."), (r"^double_layers\.", "joint_transformer_blocks."),
    (r"^single_layers\.", "single_transformer_blocks."))


def _adapt(model, config):
    """Take positions from the middle of the table, which is enlarged for larger latents, and do not round the
    timestep's sinusoids like weights."""
    embed, sines = model.pos_embed, []
    project, dtype = model.time_step_proj.forward, compute_dtype_of(model)
    embed.forward = lambda latent, patch=None: embed.proj(Packed(LATENT.patch).tokens(latent)) + _positions(
        embed.pos_embed, latent, patch)

    def remembered(times):
        angles = times[:, None] * on_device(1000 * torch.exp(-math.log(10000) * torch.arange(128) / 128), times.device)
        sines[:] = [torch.cat([angles.cos(), angles.sin()], 1)]
        return sines[0]
    model.time_step_embed.forward = remembered
    model.time_step_proj.forward = lambda rounded: project(sines[0].to(dtype()))


def _positions(learned, latent, patch):
    """Positions of a latent or its patch, (1, tokens, hidden). learned: (1, side * side, hidden)."""
    counts = LATENT.counts((*latent.shape[:2], patch.whole if patch else latent.shape[2], latent.shape[3]))
    side, most = math.isqrt(learned.shape[1]), max(counts)
    square = learned.to(latent.dtype).unflatten(1, (side, side)).movedim(3, 1)
    if most > side:
        square, side = F.interpolate(square, (most, most), mode="bilinear"), most
    top, left = ((side - count) // 2 for count in counts)
    top += patch.start // 2 if patch else 0
    return square[:, :, top:top + -(-latent.shape[2] // 2), left:left + counts[1]].flatten(2).transpose(1, 2)


AURAFLOW = Family(
    name="AuraFlow", title="AuraFlow", transformer="AuraFlowTransformer2DModel", adapt_model=_adapt,
    activation_factors={"alone": 13.1, "residual": 5.1, "whole": 9.0, "outside": 4.1, "held": 2.05, "block": 12.0,
                        "exchange": 14.0, "own": 0.0},
    detection=Detection(
        recognise=has("double_layers.0.attn.w1q.weight", "positional_encoding"),
        config=config_of(
            patch_size=2, sample_size=64, in_channels=size("init_x_linear.weight", 1, 4),
            out_channels=size("final_linear.weight", 0, 4),
            num_mmdit_layers=blocks("double_layers."), num_single_dit_layers=blocks("single_layers."),
            attention_head_dim=size("init_x_linear.weight", 0, NUM_HEADS), num_attention_heads=NUM_HEADS,
            joint_attention_dim=size("cond_seq_linear.weight", 1),
            caption_projection_dim=size("cond_seq_linear.weight", 0),
            pos_embed_max_size=size("positional_encoding", 1)),
        convert=KEYS, config_from_tensors=("sample_size",)),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, conditioning={"context": "joint_attention_dim"}, ignored=("y",),
        lengths={"text": lambda conditioning: conditioning["context"].shape[1] + 8},
        arguments={"hidden_states": LATENT, "encoder_hidden_states": from_conditioning("context"),
                   "timestep": timestep()}),
    plan=ModelPlan(
        blocks=(BlockList("joint_transformer_blocks", "double_layers.", "num_mmdit_layers", returns=BOTH,
                          image_fraction=0.5, patched="double",
                          streams={"hidden_states": "image", "encoder_hidden_states": "text"}),
                BlockList("single_transformer_blocks", "single_layers.", "num_single_dit_layers", returns=(BOTH,),
                          patched="single")),
        streams={"hidden_states": BOTH}, attention={"attn": BOTH}, needs_text=True,
        positions={"pos_embed": lambda module, forward, rows, tokens, args, kwargs: forward(*args, rows.patch)},
        tp_plan=styled(COLWISE, "ff*.linear_1", "ff*.linear_2") | {"ff*.out_projection": ROWWISE},
        cacheable={"norm1.linear": "step", "norm1_context.linear": "step"},
        cacheable_outside={"context_embedder": "run"}),
    testing=SmallConfig(
        {"sample_size": 64, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 2,
         "num_single_dit_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 24,
         "caption_projection_dim": 64, "pos_embed_max_size": 36},
        "comfy.ldm.aura.mmdit:MMDiT",
        {"in_channels": 4, "out_channels": 4, "patch_size": 2, "dim": 96, "n_layers": 3, "n_double_layers": 2,
         "n_heads": 12, "global_conddim": 96, "cond_seq_dim": 2048, "max_seq": 64}, detected="AuraFlow"))
