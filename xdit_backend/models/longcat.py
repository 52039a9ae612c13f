"""LongCat-Image: Flux.1's blocks without guidance and pooled text. Text positions are on the diagonal, and image
positions after them."""

import dataclasses

import torch

from ..memory.staging import on_device
from .common.family import Inputs, SmallConfig, derived
from .common.inputs import config_of, from_conditioning, has, timestep
from .common.key_mapping import table
from .flux import BLOCKS, FLUX, LATENT

WIDTH = 3584  # width of the text, by which ComfyUI recognises the model

# other names are as in Flux.1
KEYS = table((r"^time_in\.", "time_embed.timestep_embedder."))


def _of_longcat(settings):
    """Flux.1's settings without those that the class lacks."""
    return {name: value for name, value in settings.items()
            if name not in ("out_channels", "pooled_projection_dim", "guidance_embeds")}


def _text_positions(call):
    """Positions of the text tokens, (T, 3), on the diagonal of rows and columns."""
    positions = torch.arange(float(call.conditioning["context"].shape[1]), device=call.latent.device)
    return torch.stack([torch.zeros_like(positions), positions, positions], 1)


def _shifts(arguments):
    """RoPE shifts of images: one along the first axis, and the length of the text along the others."""
    length = float(arguments["context"].shape[1])
    return {"shift_t": 1.0, "shift_y": length, "shift_x": length}


def _image_positions(call):
    """Positions of the image tokens. With Scale ROPE, ComfyUI's shifts are part of its conditioning."""
    if "rope_scales" in call.conditioning:
        return LATENT.positions(call)
    return LATENT.positions(call) + on_device(torch.tensor([*_shifts(call.conditioning).values()]),
                                              call.latent.device)


class _Inputs(Inputs):
    def rope_options(self, conditioning):
        return _shifts(conditioning)


LONGCAT = dataclasses.replace(
    FLUX, name="LongCat-Image", title="LongCat-Image", transformer="LongCatImageTransformer2DModel", cfg="yes",
    adapt_model=lambda model, config: None, num_channels=lambda config: config["in_channels"] // 4,
    detection=dataclasses.replace(
        FLUX.detection,
        recognise=lambda shapes: BLOCKS(shapes) and not has("vector_in.")(shapes)
        and shapes.get("txt_in.weight", ())[1:] == (WIDTH,),
        config=config_of(**_of_longcat(FLUX.detection.config.rules)),
        convert=lambda tensors, config: FLUX.detection.convert(KEYS(tensors, config), config)),
    inputs=derived(
        _Inputs, FLUX.inputs,
        conditioning={"context": "joint_attention_dim", "ref_latents": None,
                      "ref_latents_method": None, "rope_scales": None},
        arguments={"hidden_states": LATENT, "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"),
                   "img_ids": _image_positions, "txt_ids": _text_positions}),
    plan=dataclasses.replace(FLUX.plan, full_precision_inputs={"time_embed": (("timestep",), 1000.0)}),
    testing=SmallConfig(
        _of_longcat(FLUX.testing.config), FLUX.testing.native,
        FLUX.testing.arguments | {"vec_in_dim": None, "context_in_dim": WIDTH, "guidance_embed": False,
                                  "txt_ids_dims": [1, 2]}))
