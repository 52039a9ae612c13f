"""HunyuanVideo 1.5 distilled, and for super-resolution: HunyuanVideo 1.5 conditioned on the timestep of the next
step."""

import dataclasses

from .common.family import SmallConfig
from .common.inputs import config_of, from_conditioning, has, sigma_after
from .hunyuan_video15 import HUNYUAN_VIDEO15, NAMES

HUNYUAN_VIDEO15_DISTILLED = dataclasses.replace(
    HUNYUAN_VIDEO15, name="HunyuanVideo 1.5 distilled", title="HunyuanVideo 1.5 distilled, super-resolution",
    detection=dataclasses.replace(
        HUNYUAN_VIDEO15.detection,
        recognise=lambda shapes: NAMES(shapes) and has("time_r_in.")(shapes),
        config=config_of(**HUNYUAN_VIDEO15.detection.config.rules | {"use_meanflow": True})),
    inputs=dataclasses.replace(
        HUNYUAN_VIDEO15.inputs,
        conditioning=HUNYUAN_VIDEO15.inputs.conditioning | {"sigma_after": None},
        ignored=(*HUNYUAN_VIDEO15.inputs.ignored, "disable_time_r"),
        unsupported=lambda arguments: "no time of the next step" if arguments.get("disable_time_r") else None,
        per_call_inputs=sigma_after,
        arguments=HUNYUAN_VIDEO15.inputs.arguments | {"timestep_r": from_conditioning("sigma_after", times=1000)}),
    testing=SmallConfig(
        HUNYUAN_VIDEO15.testing.config | {"in_channels": 14, "use_meanflow": True},
        HUNYUAN_VIDEO15.testing.native,
        HUNYUAN_VIDEO15.testing.arguments | {"in_channels": 98, "meanflow": True},
        input_shapes={"sigma_after": lambda config, shape, tokens: (1,)}))
