"""Kandinsky 5 for images: the video model with a latent without frames."""

import dataclasses

import torch

from .common.family import SmallConfig
from .common.inputs import Unpacked, config_of, even_sides, has, size
from .common.rope_scaling import scaled_positions
from .kandinsky5 import KANDINSKY5, KEY, PIXELS

LATENT = Unpacked((2, 2))


def _positions(call):
    """Positions of one frame, and rows and columns of the tokens."""
    rows, columns = (torch.arange(float(count), device=call.latent.device)
                     for count in LATENT.counts(call.latent.shape))
    return scaled_positions([rows.new_zeros(1), rows + (call.patch.start // 2 if call.patch is not None else 0),
                             columns], call)


def _adapt(model, config):
    KANDINSKY5.adapt_model(model, config)
    forward = model.forward
    model.forward = lambda *, hidden_states, **inputs: (
        forward(hidden_states=hidden_states.unsqueeze(2), **inputs)[0].squeeze(2),)


SMALL = KANDINSKY5.testing

KANDINSKY5_IMAGE = dataclasses.replace(
    KANDINSKY5, name="Kandinsky 5 Image", title="Kandinsky 5 Image", adapt_model=_adapt,
    pixels=lambda config: (1, 8, 8),
    detection=dataclasses.replace(
        KANDINSKY5.detection,
        recognise=lambda shapes: has(KEY, PIXELS)(shapes) and shapes[PIXELS][1] == 64,
        config=config_of(**KANDINSKY5.detection.config.rules | {
            "in_visual_dim": size(PIXELS, 1, 4), "visual_cond": False})),
    inputs=dataclasses.replace(
        KANDINSKY5.inputs,
        latent=LATENT, conditioning={"context": "in_text_dim", "y": "in_text_dim2", "rope_scales": None},
        arguments=KANDINSKY5.inputs.arguments | {"hidden_states": even_sides("Kandinsky 5", LATENT),
                                                 "visual_rope_pos": _positions}),
    testing=SmallConfig(SMALL.config | {"visual_cond": False}, SMALL.native,
                        SMALL.arguments | {"visual_embed_dim": 64, "rope_scale_factor": (1.0, 1.0, 1.0)},
                        detected="Kandinsky5Image"))
