"""HunyuanImage 2.1 distilled: HunyuanImage conditioned on the timestep of the next step, and on guidance."""

import dataclasses

from .common.family import SmallConfig
from .common.inputs import config_of, from_conditioning, has, sigma_after
from .hunyuan_image import HUNYUAN_IMAGE, is_distilled, is_of_rows_and_columns

HUNYUAN_IMAGE_DISTILLED = dataclasses.replace(
    HUNYUAN_IMAGE, name="HunyuanImage distilled", title="HunyuanImage 2.1 distilled", cfg="at cfg above 1",
    detection=dataclasses.replace(
        HUNYUAN_IMAGE.detection,
        recognise=lambda shapes: is_of_rows_and_columns(shapes) and is_distilled(shapes),
        config=config_of(**HUNYUAN_IMAGE.detection.config.rules | {
            "guidance_embeds": has("guidance_in."), "use_meanflow": has("time_r_in.")})),
    inputs=dataclasses.replace(
        HUNYUAN_IMAGE.inputs,
        conditioning=HUNYUAN_IMAGE.inputs.conditioning | {"guidance": None, "sigma_after": None}, ignored=("y",),
        per_call_inputs=sigma_after,
        arguments=HUNYUAN_IMAGE.inputs.arguments | {
            "guidance": from_conditioning("guidance", times=1000, where="guidance_embeds"),
            "timestep_r": from_conditioning("sigma_after", times=1000, where="use_meanflow")}),
    testing=SmallConfig(
        HUNYUAN_IMAGE.testing.config | {"guidance_embeds": True, "use_meanflow": True},
        HUNYUAN_IMAGE.testing.native,
        HUNYUAN_IMAGE.testing.arguments | {"guidance_embed": True, "meanflow": True},
        input_shapes={"sigma_after": lambda config, shape, tokens: (1,)}))
