"""Stable Diffusion 1.4 and 1.5, and models trained from them: a U-Net of four levels with eight heads in each. For
Stable Zero123, ComfyUI itself projects the CLIP vision embedding and the camera position."""

from .common.unet import Architecture, unet, unet_small_config

SD15 = unet(
    name="SD 1.5", title="SD 1.5, Stable Zero123",
    architecture=Architecture((768,), num_heads=lambda width: 8, alone=26.05, block=28.05),
    values=("cc_projection.weight", "cc_projection.bias"),
    testing=unet_small_config(
        "SD15",
        {"block_out_channels": (16, 32, 32, 32), "layers_per_block": 1,
         "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
         "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3, "transformer_layers_per_block": (1, 1, 1, 1),
         "attention_head_dim": (4, 4, 4, 4), "use_linear_projection": False},
        {"model_channels": 32, "num_res_blocks": [1, 1, 1, 1], "channel_mult": [1, 2, 2, 2],
         "transformer_depth": [1, 1, 1, 0], "transformer_depth_middle": 1,
         "transformer_depth_output": [1, 1, 1, 1, 1, 1, 0, 0], "context_dim": 768, "use_linear_in_transformer": False,
         "num_heads": 8, "num_head_channels": -1}),
)
