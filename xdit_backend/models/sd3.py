"""Stable Diffusion 3 and 3.5: two streams, joint attention, image first. Variants have additional layers for the
text."""

import math

import torch

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import (
    Unpacked,
    because,
    blocks,
    config_of,
    diffusers_converter,
    from_conditioning,
    has,
    size,
    timestep,
)
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan
from .common.position_slicing import embedded

# number of heads as in ComfyUI, for any width
LATENT, OF_TEXT, NUM_TEXT_HEADS = Unpacked((2, 2)), "context_processor.", 8

KEYS = table(                                                  # for the layers that process only the text
    (r"^context_processor\.layers\.", OF_TEXT), (r"\.attn\.proj\.", ".attn1.to_out.0."),
    (r"\.attn\.qkv\.", (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."), (1, 1, 1)),
    (r"\.mlp\.fc1\.", ".ff.net.0.proj."), (r"\.mlp\.fc2\.", ".ff.net.2."))
CONVERT = diffusers_converter("convert_sd3_transformer_checkpoint_to_diffusers")


def _convert(tensors, config):
    of_text = {name: tensor for name, tensor in tensors.items() if name.startswith(OF_TEXT)}
    return CONVERT({name: tensor for name, tensor in tensors.items() if name not in of_text},
                   config) | KEYS(of_text, config)


def _latent(call):
    height = call.patch.whole if call.patch else call.latent.shape[2]
    _check_size((*call.latent.shape[:2], height, call.latent.shape[3]), call.config)
    return LATENT(call)


def _check_size(shape, config):
    _, _, height, width = shape
    most = config["pos_embed_max_size"] * 2
    if max(height, width) > most:
        raise ConfigError(f"Use a smaller latent: this SD3 model has positions for {most * 8} x {most * 8} pixels, "
                          f"and the latent has {width * 8} x {height * 8}.")


class _Inputs(Inputs):
    def check_size(self, shape, config):
        _check_size(shape, config)


def _adapt(model, config):
    """Add positions in float32, whatever dtype they are stored in, and run the layers for the text first."""
    from diffusers.models.attention import BasicTransformerBlock
    embed, width = model.pos_embed, config["joint_attention_dim"]
    crop, forward = embed.cropped_pos_embed, model.forward
    layers = [BasicTransformerBlock(width, NUM_TEXT_HEADS, width // NUM_TEXT_HEADS, activation_fn="gelu-approximate",
                                    attention_bias=True, norm_elementwise_affine=False, norm_eps=1e-6)
              for _ in range(config.get("_context_layers", 0))]
    model.context_processor = torch.nn.Sequential(
        *layers, *[torch.nn.LayerNorm(width, 1e-6, elementwise_affine=False) for _ in layers[:1]])
    model.forward = lambda *, encoder_hidden_states, **inputs: forward(
        encoder_hidden_states=model.context_processor(encoder_hidden_states), **inputs)

    def cropped(height, width):
        positions = crop(height, width)
        return positions if positions.dtype.itemsize > 4 else positions.float()
    embed.cropped_pos_embed = cropped


SD3 = Family(
    name="SD3", title="SD3, SD3.5", transformer="SD3Transformer2DModel", adapt_model=_adapt,
    activation_factors={"alone": 12.35, "narrowing": 0.754, "residual": 4.9, "whole": 7.6, "outside": 5.65, "held": 1.2,
                        "block": 10.0, "exchange": 13.2, "once": 1.85},
    detection=Detection(
        recognise=has("joint_blocks.0.context_block.attn.qkv.weight"),
        refusals=(because("it lacks the square table of positions (pos_embed) that published models have",
                          lambda shapes: math.isqrt(shapes.get("pos_embed", (1, 2))[1]) ** 2
                          != shapes.get("pos_embed", (1, 2))[1]),),
        config=config_of(
            sample_size=128, patch_size=size("x_embedder.proj.weight", 2),
            in_channels=size("x_embedder.proj.weight", 1),
            out_channels=lambda shapes: (shapes["final_layer.linear.weight"][0]
                                         // shapes["x_embedder.proj.weight"][2] ** 2),
            num_layers=blocks("joint_blocks."), attention_head_dim=64,
            num_attention_heads=size("x_embedder.proj.weight", 0, 64),
            caption_projection_dim=size("context_embedder.weight", 0),
            joint_attention_dim=size("context_embedder.weight", 1),
            pooled_projection_dim=size("y_embedder.mlp.0.weight", 1),
            pos_embed_max_size=lambda shapes: math.isqrt(shapes["pos_embed"][1]),
            qk_norm=lambda shapes: "rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in shapes else None,
            dual_attention_layers=lambda shapes: tuple(sorted(
                int(name.split(".")[1]) for name in shapes if name.endswith("x_block.attn2.qkv.weight"))),
            _context_layers=blocks("context_processor.layers.")),
        convert=_convert, config_from_tensors=("sample_size",)),
    inputs=_Inputs(
        latent=LATENT,
        conditioning={"context": "joint_attention_dim", "y": "pooled_projection_dim"},
        arguments={"hidden_states": _latent, "timestep": timestep(), "pooled_projections": from_conditioning("y"),
                   "encoder_hidden_states": from_conditioning("context")}),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "joint_blocks.", returns=("text", "image"), image_fraction=0.5,
                          control="output", patched="double"),),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"},
        cacheable={"norm1.linear": "step", "norm1_context.linear": "step"},
        attention={"attn": ("image", "text"), "attn2": ("image",)}, positions={"pos_embed": embedded},
        cacheable_outside={"context_embedder": "run", "context_processor": "run"}),
    testing=SmallConfig(
        {"sample_size": 128, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 4,
         "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 24,
         "pooled_projection_dim": 16, "pos_embed_max_size": 32, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        "comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper",
        {"input_size": None, "patch_size": 2, "in_channels": 16, "out_channels": 16, "adm_in_channels": 64,
         "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 96, "out_features": 256}},
         "depth": 4, "num_patches": 64 * 64, "pos_embed_max_size": 64, "pos_embed_scaling_factor": None}))
