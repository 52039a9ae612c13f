"""Stable Diffusion 3 and 3.5: two streams, joint attention, image first."""

import math

from .describe import Whole, because, blocks, config_of, diffusers_converter, given, has, size, timestep
from .plan import BlockList, Family, ModelPlan, Tiny
from .positions import embedded

LATENT = Whole((2, 2))

SD3 = Family(
    name="SD3", title="SD3, SD3.5", transformer="SD3Transformer2DModel",
    recognise=has("joint_blocks.0.context_block.attn.qkv.weight"),
    refusals=(because("it has a context processor (SD3.5 variants with extra text layers)", has("context_processor.")),),
    config=config_of(
        sample_size=128, patch_size=size("x_embedder.proj.weight", 2), in_channels=size("x_embedder.proj.weight", 1),
        out_channels=lambda shapes: shapes["final_layer.linear.weight"][0] // shapes["x_embedder.proj.weight"][2] ** 2,
        num_layers=blocks("joint_blocks."), attention_head_dim=64, num_attention_heads=size("x_embedder.proj.weight", 0, 64),
        caption_projection_dim=size("context_embedder.weight", 0), joint_attention_dim=size("context_embedder.weight", 1),
        pooled_projection_dim=size("y_embedder.mlp.0.weight", 1), pos_embed_max_size=lambda shapes: math.isqrt(shapes["pos_embed"][1]),
        qk_norm=lambda shapes: "rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in shapes else None,
        dual_attention_layers=lambda shapes: tuple(sorted(
            int(name.split(".")[1]) for name in shapes if name.endswith("x_block.attn2.qkv.weight")))),
    convert=diffusers_converter("convert_sd3_transformer_checkpoint_to_diffusers"), latent=LATENT,
    conditioning={"context": "joint_attention_dim", "y": "pooled_projection_dim"},
    arguments={"hidden_states": LATENT, "timestep": timestep(), "encoder_hidden_states": given("context"),
               "pooled_projections": given("y")},
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "joint_blocks.", returns=("text", "image"), image_share=0.5),),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"},
        attention={"attn": ("image", "text"), "attn2": ("image",)}, positions={"pos_embed": embedded},
        once={"norm1.linear": "step", "norm1_context.linear": "step"}, once_outside={"context_embedder": "run"}),
    tiny=Tiny(
        {"sample_size": 128, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 4, "attention_head_dim": 8,
         "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 24, "pooled_projection_dim": 16,
         "pos_embed_max_size": 32, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        "comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper",
        {"input_size": None, "patch_size": 2, "in_channels": 16, "out_channels": 16, "adm_in_channels": 64,
         "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 96, "out_features": 256}},
         "depth": 4, "num_patches": 64 * 64, "pos_embed_max_size": 64, "pos_embed_scaling_factor": None}),
)
