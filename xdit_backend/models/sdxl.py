"""SDXL and its refiner: a U-Net of three or four levels with heads of 64, conditioned on pooled text and the image's
size as a vector in addition to the text."""

from .common.unet import Architecture, unet, unet_small_config

SDXL = unet(
    name="SDXL", title="SDXL, SDXL refiner, SSD-1B, Vega, KOALA",
    architecture=Architecture((2048, 1280), num_heads=lambda width: width // 64, alone=15.8, block=16.8),
    values=("edm_mean", "edm_std", "edm_vpred.sigma_max", "edm_vpred.sigma_min", "v_pred", "ztsnr"),
    testing=unet_small_config(
        "SDXL",
        {"block_out_channels": (16, 32, 64), "layers_per_block": 1,
         "down_block_types": ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * 2,
         "up_block_types": ("CrossAttnUpBlock2D",) * 2 + ("UpBlock2D",), "transformer_layers_per_block": (1, 1, 2),
         "attention_head_dim": (1, 2, 4), "use_linear_projection": True, "class_embed_type": "projection",
         "projection_class_embeddings_input_dim": 16},
        {"model_channels": 32, "num_res_blocks": [1, 1, 1], "channel_mult": [1, 2, 4], "transformer_depth": [0, 1, 2],
         "transformer_depth_middle": 2, "transformer_depth_output": [0, 0, 1, 1, 2, 2], "context_dim": 2048,
         "num_classes": "sequential", "adm_in_channels": 2816, "use_linear_in_transformer": True, "num_heads": -1,
         "num_head_channels": 64}),
)
