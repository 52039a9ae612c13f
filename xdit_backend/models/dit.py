"""DiT: one stream; timestep and class in each block's norm; sinusoidal positions added before the blocks. ComfyUI
has no model of it."""

import torch
import torch.nn.functional as F

from .common.family import Detection, Family, Inputs, Sampled, SmallConfig
from .common.inputs import Unpacked, config_of, folder_alone, from_conditioning, has, in_config_json, timestep
from .common.plan import BlockList, ModelPlan
from .common.position_slicing import embedded
from .common.tp_plan import REPLICATED

LATENT, EMBEDDER = Unpacked((2, 2)), "norm1.emb"               # embedder of timestep and class, one in each block


def _classes(call):
    """Classes (B,) from one-hot conditioning; all zeros stand for no class, which has the last index."""
    marked = from_conditioning("context")(call)[:, 0]
    return torch.where(marked.any(1), marked.argmax(1), marked.shape[1])


def _mixed(arguments):
    """Return a reason if the conditioning is not one class of the model's table."""
    classes = arguments["context"]
    is_class = classes.shape[1] == 1 and ((classes == 0) | (classes == 1)).all() and (classes.sum(2) <= 1).all()
    return None if is_class else "a text or a mix of classes (a prompt is one class here, from xDiT Class Label)"


def _adapt(model, config):
    """Arrange tokens by the latent's shape; diffusers' forward assumes a square."""
    def forward(latent, timestep, classes, return_dict):
        hidden = model.pos_embed(latent)
        for block in model.transformer_blocks:
            hidden = block(hidden, timestep=timestep, class_labels=classes)
        conditioning = model.transformer_blocks[0].norm1.emb(timestep, classes, hidden_dtype=hidden.dtype)
        shift, scale = model.proj_out_1(F.silu(conditioning))[:, None].chunk(2, 2)
        tokens = model.proj_out_2(model.norm_out(hidden) * (1 + scale) + shift)
        # (B, n * m, p * q * C) -> (B, C, n * p, m * q)
        cut = tokens.unflatten(2, (*LATENT.patch, -1)).unflatten(1, LATENT.counts(latent.shape))
        return (cut.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3),)
    model.forward = forward


class _Plan(ModelPlan):
    shared_parameters = (f"transformer_blocks.0.{EMBEDDER}.",)


DIT = Family(
    name="DiT", title="DiT (class-conditional)", transformer="DiTTransformer2DModel", adapt_model=_adapt,
    sampled=Sampled(
        "EPS", {"beta_schedule": "sqrt_linear", "linear_start": 0.0001, "linear_end": 0.02}, "SD15", memory=0.5,
        labels="num_embeds_ada_norm"),
    num_channels=lambda config: config["in_channels"],
    activation_factors={"alone": 12.0, "residual": 4.05, "whole": 6.0, "outside": 3.5, "held": 0.7, "block": 9.2,
                        "exchange": 14.65, "attends": 8.6, "entered": 3.5, "own": 0.0},
    detection=Detection(
        recognise=has(f"transformer_blocks.0.{EMBEDDER}.class_embedder.embedding_table.weight", "proj_out_2.weight"),
        refusals=(folder_alone,),
        config=config_of(
            patch_size=2, norm_type="ada_norm_zero", sample_size=in_config_json, num_layers=in_config_json,
            num_attention_heads=in_config_json,
            attention_head_dim=in_config_json,
            in_channels=in_config_json, out_channels=in_config_json, num_embeds_ada_norm=in_config_json,
            norm_num_groups=in_config_json, attention_bias=in_config_json,
            norm_eps=in_config_json),
        convert=lambda tensors, config: tensors),
    inputs=Inputs(
        latent=LATENT, unsupported=_mixed, conditioning={"context": "num_embeds_ada_norm"},
        arguments={"latent": LATENT, "timestep": timestep(), "classes": _classes}),
    plan=_Plan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks."),), streams={"hidden_states": "image"},
        attention={"attn1": ("image",)}, cacheable={EMBEDDER: "step", "norm1.linear": "step"},
        positions={"pos_embed": embedded},
        tp_plan={f"{EMBEDDER}.timestep_embedder.linear_*": REPLICATED}),
    testing=SmallConfig({"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 8, "num_layers": 4,
                         "num_attention_heads": 4, "attention_head_dim": 8, "num_embeds_ada_norm": 10}))
