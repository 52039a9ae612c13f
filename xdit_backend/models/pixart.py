"""PixArt-Sigma: one stream; text by cross-attention; sine positions added before the blocks."""

from .plan import BlockList, Family, ModelPlan, count_blocks
from .positions import embedded_patch

NUM_HEADS, PATCH_SIZE = 16, 2

# name in the publisher's file -> names in diffusers; several names: the tensor is cut into as many equal parts
NAMES = {
    "x_embedder.proj": ("pos_embed.proj",),
    "t_embedder.mlp.0": ("adaln_single.emb.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("adaln_single.emb.timestep_embedder.linear_2",),
    "t_block.1": ("adaln_single.linear",),
    "y_embedder.y_proj.fc1": ("caption_projection.linear_1",),
    "y_embedder.y_proj.fc2": ("caption_projection.linear_2",),
    "final_layer.linear": ("proj_out",),
}
BLOCK_NAMES = {
    "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn.proj": ("attn1.to_out.0",),
    "cross_attn.q_linear": ("attn2.to_q",),
    "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
    "cross_attn.proj": ("attn2.to_out.0",),
    "mlp.fc1": ("ff.net.0.proj",),
    "mlp.fc2": ("ff.net.2",),
}
UNUSED = ("pos_embed", "y_embedder.y_embedding")              # computed by the model; for training


def _config(shapes):
    hidden, channels = shapes["x_embedder.proj.weight"][:2]
    return {
        "sample_size": 128, "patch_size": PATCH_SIZE, "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // PATCH_SIZE ** 2,
        "num_layers": count_blocks(shapes, "blocks."),
        "num_attention_heads": NUM_HEADS, "attention_head_dim": hidden // NUM_HEADS, "cross_attention_dim": hidden,
        "caption_channels": shapes["y_embedder.y_proj.fc1.weight"][1],
        "attention_bias": True, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6,
        "use_additional_conditions": False,
    }


def _convert(tensors, config):
    converted = {"scale_shift_table": tensors["final_layer.scale_shift_table"]}
    for name, tensor in tensors.items():
        if name in UNUSED or name == "final_layer.scale_shift_table":
            continue
        prefix, rest, names = "", name, NAMES
        if name.startswith("blocks."):
            _, index, rest = name.split(".", 2)
            prefix, names = f"transformer_blocks.{index}.", BLOCK_NAMES
        stem, _, kind = rest.rpartition(".")
        targets = [f"{target}.{kind}" for target in names[stem]] if stem in names else [rest]
        for target, part in zip(targets, tensor.chunk(len(targets))):
            converted[prefix + target] = part
    return converted


def _inputs(latent, timestep, conditioning, config, patch=None):
    return {"hidden_states": latent, "timestep": timestep, "encoder_hidden_states": conditioning["context"],
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


PIXART = Family(
    name="PixArt-Sigma",
    transformer="PixArtTransformer2DModel",
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "blocks."),),
        streams={"hidden_states": "image"},
        attention={"attn1": ("image",)},
        once={"attn2.to_k": "run", "attn2.to_v": "run"},
        positions={"pos_embed": embedded_patch},
    ),
    recognise=lambda shapes: "t_block.1.weight" in shapes and "y_embedder.y_proj.fc1.weight" in shapes,
    refuse=lambda shapes: "it takes the picture's size as an input (PixArt-Alpha); PixArt-Sigma models work"
    if "ar_embedder.mlp.0.weight" in shapes else None,
    config=_config,
    convert=_convert,
    inputs=_inputs,
    prediction=lambda output, latent: output[:, :latent.shape[1]],
    conditioning=("context",),
    ignored=("c_size", "c_ar"),
    num_channels=lambda config: config["in_channels"],         # the other half is the variance, which nothing uses
)
