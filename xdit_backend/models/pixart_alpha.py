"""PixArt-Alpha for 1024 pixels: PixArt-Sigma's model, conditioned on the image's size and aspect ratio too."""

import dataclasses

import torch

from ..memory.staging import on_device
from .common.family import SmallConfig
from .common.inputs import config_of, from_conditioning, has
from .common.key_mapping import table
from .pixart import PIXART

CONDITIONS = {"use_additional_conditions": True}
KEYS = table(*((rf"^{ours}_embedder\.mlp\.{layer}\.", f"adaln_single.emb.{theirs}_embedder.linear_{number}.")
               for ours, theirs in (("csize", "resolution"), ("ar", "aspect_ratio"))
               for layer, number in ((0, 1), (2, 2))))


def _sizes(call):
    """Height and width in pixels, and aspect ratio: those set by a node, or else the full latent's."""
    height, width = call.patch.whole if call.patch else call.latent.shape[2], call.latent.shape[3]
    size, shape = (from_conditioning(name)(call) for name in ("c_size", "c_ar"))

    def rows(*numbers):
        row = on_device(torch.tensor(numbers, dtype=call.latent.dtype), call.latent.device)
        return row.expand(len(call.latent), -1)

    return {"resolution": rows(8 * height, 8 * width) if size is None else size.to(call.latent),
            "aspect_ratio": rows(height / width) if shape is None else shape.to(call.latent)}


PIXART_ALPHA = dataclasses.replace(
    PIXART, name="PixArt-Alpha", title="PixArt-Alpha",
    detection=dataclasses.replace(
        PIXART.detection,
        recognise=has("t_block.1.weight", "y_embedder.y_proj.fc1.weight", "ar_embedder."),
        config=config_of(**PIXART.detection.config.rules | CONDITIONS),
        convert=lambda tensors, config: PIXART.detection.convert(KEYS(tensors, config), config)),
    inputs=dataclasses.replace(
        PIXART.inputs,
        conditioning=PIXART.inputs.conditioning | {"c_size": None, "c_ar": None}, ignored=(),
        arguments=PIXART.inputs.arguments | {"added_cond_kwargs": _sizes}),
    testing=SmallConfig(PIXART.testing.config | CONDITIONS | {"attention_head_dim": 12, "cross_attention_dim": 48},
                        PIXART.testing.native, PIXART.testing.arguments | {"micro_condition": True},
                        detected="PixArtAlpha"))
