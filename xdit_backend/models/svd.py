"""Stable Video Diffusion and SV3D: a U-Net of four levels with heads of 64, whose blocks also have layers along the
frames of a video. ComfyUI passes the frames as a batch, each with the video's conditioning or that of its camera.

# V videos, F frames
"""

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.forward_state import ForwardValue
from .common.inputs import because, config_of, from_conditioning, has, timestep
from .common.native_module import number
from .common.unet import (
    EVEN,
    LATENT,
    OF_VIDEOS,
    PLAN,
    Architecture,
    config_rules,
    convert_of_videos,
    has_temporal_layers,
)

RULES = config_rules(Architecture((1024,), num_heads=lambda width: width // 64, alone=0, block=0)).rules
SAME = ("sample_size", "in_channels", "out_channels", "block_out_channels", "layers_per_block", "cross_attention_dim",
        "transformer_layers_per_block")
EPS = 1e-5  # epsilon of ComfyUI's norms in residual blocks; diffusers' is smaller in some


def _adapt(model, config):
    """Pass each frame to diffusers' forward as a video of one frame, so that it has its own timestep and vector, and
    tell the blocks which frames are one video. The vector has already been embedded by ComfyUI."""
    one_video, forward = ForwardValue(model), model.forward

    def of_frames(sample, num_frames, **inputs):
        with one_video.holding(sample.new_zeros(len(sample) // num_frames, num_frames)):
            output, = forward(sample.unsqueeze(1), **inputs)
        return (output.squeeze(1),)

    for block in (*model.down_blocks, model.mid_block, *model.up_blocks):
        block.register_forward_pre_hook(
            lambda block, args, kwargs: (args, kwargs | {"image_only_indicator": one_video.get()}), with_kwargs=True)
    for name, module in model.named_modules():
        if "_res_block.norm" in name:
            module.eps = EPS
    model.forward, model.add_time_proj = of_frames, torch.nn.Identity()
    model._keep_in_fp32_modules = ["time_mixer"]               # mixing factors are float32, as in ComfyUI's module


def _kinds(name):
    return lambda shapes: tuple(kind.replace("2D", "SpatioTemporal") for kind in RULES[name](shapes))


SVD = Family(
    name="Stable Video Diffusion", title="Stable Video Diffusion, SV3D", transformer=OF_VIDEOS, adapt_model=_adapt,
    activation_factors={"alone": 27.6, "block": 28.6}, num_channels=lambda config: config["out_channels"],
    num_heads=lambda config: None, width=lambda config: config["block_out_channels"][0],
    refused={"data": "the batch is the frames of one video, which read each other"},
    keep_in_compute_dtype=("time_mixer",),
    detection=Detection(
        convert=convert_of_videos, config_from_tensors=("sample_size",),
        recognise=lambda shapes: has("input_blocks.0.0.weight")(shapes) and has_temporal_layers(shapes),
        refusals=(EVEN, because("its temporal layers do not read the input image",
                                lambda shapes: not any(".time_stack.0.attn2." in name for name in shapes))),
        config=config_of(
            **{name: RULES[name] for name in SAME}, num_attention_heads=RULES["attention_head_dim"],
            down_block_types=_kinds("down_block_types"), up_block_types=_kinds("up_block_types"),
            projection_class_embeddings_input_dim=lambda shapes: shapes["label_emb.0.0.weight"][1])),
    inputs=Inputs(
        latent=LATENT,
        conditioning={"context": "cross_attention_dim", "y": "projection_class_embeddings_input_dim",
                      "num_video_frames": None},
        counts=("num_video_frames",),
        arguments={"sample": LATENT, "timestep": timestep(), "encoder_hidden_states": from_conditioning("context"),
                   "added_time_ids": from_conditioning("y"), "num_frames": number("num_video_frames")}),
    plan=PLAN,
    testing=SmallConfig(
        {"sample_size": 96, "out_channels": 4, "cross_attention_dim": 24, "in_channels": 8,
         "block_out_channels": (32, 64, 64), "layers_per_block": 1, "num_attention_heads": (1, 2, 2),
         "down_block_types": ("CrossAttnDownBlockSpatioTemporal",) * 2 + ("DownBlockSpatioTemporal",),
         "up_block_types": ("UpBlockSpatioTemporal",) + ("CrossAttnUpBlockSpatioTemporal",) * 2,
         "transformer_layers_per_block": (1, 1, 1), "projection_class_embeddings_input_dim": 24},
        "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel",
        {"image_size": 32, "use_checkpoint": False, "legacy": False, "use_spatial_transformer": True, "in_channels": 8,
         "out_channels": 4, "model_channels": 64, "num_res_blocks": [1, 1, 1], "channel_mult": [1, 1, 2],
         "transformer_depth": [1, 1, 0], "transformer_depth_middle": 1, "transformer_depth_output": [1, 1, 1, 1, 0, 0],
         "context_dim": 1024, "num_classes": "sequential", "adm_in_channels": 768, "use_linear_in_transformer": True,
         "num_heads": -1, "num_head_channels": 64, "use_temporal_resblock": True, "use_temporal_attention": True,
         "extra_ff_mix_layer": True, "use_spatial_context": True, "merge_strategy": "learned_with_images",
         "merge_factor": 0.0, "video_kernel_size": [3, 1, 1], "disable_temporal_crossattention": False},
        detected="SVD_img2vid", input_shapes={"num_video_frames": lambda config, shape, tokens: shape[:1]}))
