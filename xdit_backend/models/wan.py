"""Wan 2.1 text-to-video: one stream over frames, rows and columns; text by cross-attention; rotary positions."""

import torch

from .describe import Whole, because, blocks, config_of, diffusers_converter, given, has, size, timestep
from .plan import BlockList, Family, ModelPlan, Tiny, TokenArgument
from .positions import Cut

LATENT, TABLE = Whole((1, 2, 2)), TokenArgument(1, ("image",))
PARTS = {"patch_embedding", "text_embedding", "time_embedding", "time_projection", "blocks", "head", "scaled_fp8"}


def _more_parts(shapes):
    extra = sorted({name.split(".")[0] for name in shapes} - PARTS)
    return f"it has parts that text-to-video models lack ({', '.join(extra)})" if extra else None


def _amend(model, config):
    """The time embedder gets the sines of the time as they are: diffusers rounds them to the type that weights are held in."""
    embedder, sines = model.condition_embedder, []
    make_sines, embed = embedder.timesteps_proj.forward, embedder.time_embedder.forward

    def remember(timestep):
        sines[:] = [make_sines(timestep)]
        return sines[0]
    embedder.timesteps_proj.forward = remember
    embedder.time_embedder.forward = lambda rounded: embed(
        sines[0].to(rounded.dtype if rounded.dtype.itemsize > 4 else torch.float32))


WAN = Family(
    name="Wan 2.1", title="Wan 2.1 text-to-video", transformer="WanTransformer3DModel",
    recognise=has("blocks.0.self_attn.norm_q.weight", "head.modulation", "patch_embedding.weight"),
    refusals=(because("it takes pictures as well (image-to-video); text-to-video models work", lambda shapes: has("img_emb.")(shapes)
                      or shapes["patch_embedding.weight"][1] != shapes["head.head.weight"][0] // 4), _more_parts),
    config=config_of(
        patch_size=LATENT.patch, in_channels=size("patch_embedding.weight", 1), out_channels=size("head.head.weight", 0, 4),
        num_attention_heads=size("patch_embedding.weight", 0, 128), attention_head_dim=128,
        text_dim=size("text_embedding.0.weight", 1), freq_dim=size("time_embedding.0.weight", 1),
        ffn_dim=size("blocks.0.ffn.0.weight", 0), num_layers=blocks("blocks."), cross_attn_norm=has("blocks.0.norm3.weight")),
    convert=diffusers_converter("convert_wan_transformer_to_diffusers"), latent=LATENT,
    amend=_amend, unrounded=("patch_embedding",),
    conditioning={"context": "text_dim"},
    arguments={"hidden_states": LATENT, "timestep": timestep(), "encoder_hidden_states": given("context")},
    plan=ModelPlan(
        blocks=(BlockList("blocks", "blocks."),), streams={"hidden_states": "image"}, attention={"attn1": ("image",)},
        tokens={"rotary_emb": TABLE}, positions={"rope": Cut(TABLE)}, once_outside={"condition_embedder.text_embedder": "run"}),
    tiny=Tiny(
        {"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
         "text_dim": 24, "freq_dim": 256, "ffn_dim": 32, "num_layers": 4},
        "comfy.ldm.wan.model:WanModel",
        {"model_type": "t2v", "in_dim": 16, "dim": 256, "ffn_dim": 512, "freq_dim": 256, "text_dim": 4096, "out_dim": 16, "num_heads": 2,
         "num_layers": 3, "text_len": 512}),
)
