"""Stable Diffusion 2.0 and 2.1, for 512 and 768 pixels: a U-Net of four levels with heads of 64. Some predict
velocity. unCLIP reads an image embedding in addition to the text, and Lotus a task embedding."""

from .common.unet import Architecture, unet, unet_small_config

SD2 = unet(
    name="SD 2", title="SD 2.0, 2.1, unCLIP, Lotus",
    architecture=Architecture((1024,), num_heads=lambda width: width // 64, alone=26.05, block=28.05),
    # from which ComfyUI distinguishes velocity from noise prediction
    values=("output_blocks.11.1.transformer_blocks.0.norm1.bias",),
    testing=unet_small_config(
        "SD20",
        {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 2,
         "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
         "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3, "transformer_layers_per_block": (1, 1, 1, 1),
         "attention_head_dim": (2, 2, 4, 4), "use_linear_projection": True},
        {"model_channels": 64, "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 1, 1, 1],
         "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1,
         "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], "context_dim": 1024,
         "use_linear_in_transformer": True, "num_heads": -1, "num_head_channels": 64}),
)
