"""Stable Diffusion's x4 upscaler: a U-Net of four levels with eight heads in each; in the upper three levels, the
first attention reads the text. It generates an image four times as large as an input image, which is concatenated to
the latent with noise of a given level."""

import dataclasses

from .common.inputs import from_conditioning
from .common.unet import Architecture, unet, unet_small_config

LEVELS = 1000                              # number of noise levels
UPPER = (True, True, True, False)


def _level(call):
    """Noise level of the input image, (B,) int64."""
    return from_conditioning("y")(call).long()


FAMILY = unet(
    name="SD x4 upscaler", title="SD x4 upscaler",
    architecture=Architecture((1024,), num_heads=lambda width: 8, alone=15.33, block=17.4, num_classes=LEVELS,
                              only_cross_attention=UPPER),
    testing=unet_small_config(
        "SD_X4Upscaler",
        {"block_out_channels": (16, 32, 32, 32), "layers_per_block": 1,
         "down_block_types": ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * 3,
         "up_block_types": ("CrossAttnUpBlock2D",) * 3 + ("UpBlock2D",), "transformer_layers_per_block": (1, 1, 1, 1),
         "attention_head_dim": (4, 4, 4, 4), "use_linear_projection": True, "in_channels": 7,
         "num_class_embeds": LEVELS, "only_cross_attention": UPPER},
        {"model_channels": 32, "num_res_blocks": [1, 1, 1, 1], "channel_mult": [1, 2, 2, 2], "in_channels": 7,
         "transformer_depth": [0, 1, 1, 1], "transformer_depth_middle": 1,
         "transformer_depth_output": [0, 0, 1, 1, 1, 1, 1, 1], "context_dim": 1024, "num_classes": LEVELS,
         "disable_self_attentions": list(UPPER), "use_linear_in_transformer": True, "num_heads": 8,
         "num_head_channels": -1}))
SD_X4 = dataclasses.replace(
    FAMILY, pixels=lambda config: (1, 4, 4),
    inputs=dataclasses.replace(
        FAMILY.inputs,
        conditioning={"context": "cross_attention_dim", "y": None},
        arguments=FAMILY.inputs.arguments | {"class_labels": _level}))
