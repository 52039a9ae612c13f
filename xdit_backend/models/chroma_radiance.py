"""Chroma Radiance: Chroma's blocks over patches of pixels, without an autoencoder. After them, a small network per
patch, whose weights are computed from the patch's token, predicts its pixels."""

import dataclasses

import torch

from ..protocol.errors import ConfigError
from .chroma import CHROMA
from .common.family import ConfigRules, SmallConfig, derived
from .common.inputs import Packed, Unpacked, because, has, size, text_positions
from .common.key_mapping import table
from .common.plan import ModelPlan
from .radiance_head import (
    ConvolutionHead,
    LinearHead,
    PatchLinear,
    PatchNetworkBlock,
    PixelEmbedder,
    run_patch_networks,
)

SIDE, CHANNELS, FREQUENCIES = 16, 3, 8     # pixels of a patch's side; channels; frequencies along each side of a patch
LATENT, TOKENS = Unpacked((SIDE, SIDE)), Packed((SIDE, SIDE))
GENERATOR = "nerf_blocks.0.param_generator.weight"

KEYS = table((r"^img_in_patch\.", "x_embedder."), (r"^(nerf_\S*norm)\.scale$", r"\1.weight"),
             (r"^__(x0|sequential)__$", None))


def _adapt(model, config):
    """Embed pixels as tokens, and replace Chroma's last layer by the networks that predict pixels."""
    CHROMA.adapt_model(model, config)
    width, count = config["_pixel_width"], config["_pixel_layers"]
    inner = config["num_attention_heads"] * config["attention_head_dim"]
    head = ConvolutionHead if config["_convolution"] else LinearHead
    model.x_embedder = PatchLinear(CHANNELS, inner, SIDE, SIDE)
    model.norm_out.forward, model.proj_out = lambda tokens, modulation: tokens, torch.nn.Identity()
    model.nerf_image_embedder = PixelEmbedder(CHANNELS, width, FREQUENCIES)
    model.nerf_blocks = torch.nn.ModuleList([PatchNetworkBlock(inner, width, config["_ratio"]) for _ in range(count)])
    last = head(width, CHANNELS)
    model.add_module("nerf_final_layer_conv" if config["_convolution"] else "nerf_final_layer", last)
    model.wide_modules = {"nerf_image_embedder.embedder.0"}
    forward = model.forward

    def on_pixels(*, hidden_states, timestep, **inputs):
        pixels = TOKENS.tokens(hidden_states)
        tokens = forward(hidden_states=pixels, timestep=timestep, **inputs)[0]
        pixel_features = run_patch_networks(model.nerf_image_embedder, model.nerf_blocks,
                                            pixels.flatten(0, 1).unflatten(1, (CHANNELS, -1)).transpose(1, 2),
                                            tokens.flatten(0, 1))
        pixel_features = pixel_features.transpose(1, 2).flatten(1).unflatten(0, pixels.shape[:2])
        image = last(TOKENS.unpack(pixel_features, hidden_states[:, :1].expand(-1, width, -1, -1)))
        return ((hidden_states - image) / timestep.view(-1, 1, 1, 1) if config["_x0"] else image),
    model.forward = on_pixels


def _pixels(call):
    """The image, padded to full patches. Raises ConfigError for other sizes with files that predict x0: ComfyUI's
    model crops its prediction but not its padded input."""
    rows, columns = call.latent.shape[2:]
    if call.config["_x0"] and (rows % SIDE or columns % SIDE):
        raise ConfigError(f"Use a width and a height that are multiples of {SIDE} pixels, as this Chroma Radiance file "
                          f"needs: the image is {columns} x {rows}.")
    return LATENT(call)


def _text_positions(call):
    """Positions of the text tokens: counted, in the dtype of the latent, for newer files, as in ComfyUI."""
    positions = text_positions(call)
    if call.config["_sequential"]:
        positions[:, 0] = torch.arange(len(positions), device=positions.device).to(call.latent.dtype)
    return positions


SMALL = CHROMA.testing.config | {"in_channels": CHANNELS, "_pixel_width": 8, "_pixel_layers": 2, "_ratio": 4,
                                 "_convolution": True, "_x0": False, "_sequential": False}


class _Plan(ModelPlan):
    boundary_halos = {"nerf_final_layer_conv.conv": SIDE}


CHROMA_RADIANCE = dataclasses.replace(
    CHROMA, name="Chroma Radiance", title="Chroma Radiance", adapt_model=_adapt, num_channels=lambda config: CHANNELS,
    pixels=lambda config: (1, 1, 1),
    activation_factors={"alone": 16.87, "residual": 6.1, "whole": 16.04, "outside": 16.29, "held": 2.43, "block": 23.79,
                        "exchange": 19.24, "own": 3.51},
    detection=dataclasses.replace(
        CHROMA.detection,
        recognise=has("nerf_blocks.", "img_in_patch.weight", "distilled_guidance_layer.in_proj.weight"),
        refusals=(because(f"its patches are not {SIDE} x {SIDE} pixels, the only size that xDiT supports",
                          lambda shapes: shapes["img_in_patch.weight"][2:] != (SIDE, SIDE)),),
        config=ConfigRules(CHROMA.detection.config.rules | {
            "in_channels": CHANNELS, "out_channels": CHANNELS,
            "num_attention_heads": size("img_in_patch.weight", 0, 128),
            "_pixel_width": size("nerf_image_embedder.embedder.0.weight", 0),
            "_pixel_layers": lambda shapes: len([name for name in shapes if name.startswith("nerf_blocks.")
                                                 and name.endswith(".param_generator.weight")]),
            "_ratio": lambda shapes: shapes[GENERATOR][0] // (
                3 * shapes["nerf_image_embedder.embedder.0.weight"][0] ** 2),
            "_convolution": has("nerf_final_layer_conv."), "_x0": has("__x0__"), "_sequential": has("__sequential__")}),
        convert=lambda tensors, config: CHROMA.detection.convert(KEYS(tensors, config), config)),
    inputs=dataclasses.replace(
        CHROMA.inputs,
        latent=LATENT,
        arguments=CHROMA.inputs.arguments | {"hidden_states": _pixels, "img_ids": TOKENS.positions,
                                             "txt_ids": _text_positions}),
    plan=derived(_Plan, CHROMA.plan, rereads_latent=True),
    testing=SmallConfig(SMALL, "comfy.ldm.chroma_radiance.model:ChromaRadiance", CHROMA.testing.arguments | {
        "in_channels": CHANNELS, "out_channels": CHANNELS, "patch_size": SIDE, "nerf_hidden_size": 8,
        "nerf_mlp_ratio": 4, "nerf_depth": 2, "nerf_max_freqs": FREQUENCIES, "nerf_tile_size": 512,
        "nerf_final_head_type": "conv", "nerf_embedder_dtype": torch.float32, "use_x0": False,
        "use_sequential_txt_ids": False}, detected="ChromaRadiance"))
