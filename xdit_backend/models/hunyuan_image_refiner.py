"""HunyuanImage 2.1's refiner: HunyuanImage's blocks over an image as one frame, with the image to refine as
additional channels; guidance."""

import dataclasses

from .common.family import SmallConfig
from .common.inputs import Unpacked, because, config_of, from_conditioning, has, needs_diffusers
from .hunyuan_image import HUNYUAN_IMAGE, is_image

LATENT = Unpacked((1, 1, 1))

def _patches(shapes):
    return shapes["img_in.proj.weight"][2:]


HUNYUAN_IMAGE_REFINER = dataclasses.replace(
    HUNYUAN_IMAGE, name="HunyuanImage refiner", title="HunyuanImage 2.1 refiner", cfg="at cfg above 1",
    pixels=lambda config: (4, 16, 16), activation_factors=HUNYUAN_IMAGE.activation_factors | {"alone": 18.0},
    detection=dataclasses.replace(
        HUNYUAN_IMAGE.detection,
        recognise=lambda shapes: is_image(shapes) and len(shapes["img_in.proj.weight"]) == 5,
        refusals=(because("it cuts frames into larger patches than the refiner, and lacks the pooled text (vector_in) "
                          "of HunyuanVideo",
                          lambda shapes: _patches(shapes) != LATENT.patch),
                  because("it reads glyphs, unlike the refiners that xDiT supports", has("byt5_in.")),
                  needs_diffusers("0.36")),
        config=config_of(
            **HUNYUAN_IMAGE.detection.config.rules | {
                "patch_size": list(LATENT.patch), "rope_axes_dim": (16, 56, 56), "guidance_embeds": has("guidance_in."),
                "use_meanflow": has("time_r_in.")})),
    inputs=dataclasses.replace(
        HUNYUAN_IMAGE.inputs,
        latent=LATENT, conditioning={"context": "text_embed_dim", "guidance": None},
        ignored=("y", "txt_byt5", "disable_time_r"),
        unsupported=lambda arguments: None if arguments.get("disable_time_r") else "the time of the next step",
        lengths={},
        arguments={**{name: rule for name, rule in HUNYUAN_IMAGE.inputs.arguments.items() if not name.endswith("_2")},
                   "hidden_states": LATENT,
                   "guidance": from_conditioning("guidance", times=1000, where="guidance_embeds")}),
    plan=dataclasses.replace(HUNYUAN_IMAGE.plan, cacheable_outside={"context_embedder": "step"}),
    testing=SmallConfig(
        HUNYUAN_IMAGE.testing.config | {"patch_size": (1, 1, 1), "in_channels": 8, "text_embed_2_dim": None,
                                        "rope_axes_dim": (4, 6, 6), "guidance_embeds": True, "use_meanflow": True},
        HUNYUAN_IMAGE.testing.native,
        HUNYUAN_IMAGE.testing.arguments | {"in_channels": 128, "axes_dim": [16, 56, 56], "patch_size": [1, 1, 1],
                                           "guidance_embed": True, "byt5": False, "meanflow": True}, frames=1))
