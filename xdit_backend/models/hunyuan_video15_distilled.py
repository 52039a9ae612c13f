"""HunyuanVideo 1.5 distilled, and for super-resolution: HunyuanVideo 1.5 conditioned on the timestep of the next
step."""

import dataclasses

from .common.family import SmallConfig
from .common.inputs import config_of, from_conditioning, has, sigma_after
from .hunyuan_video15 import HUNYUAN_VIDEO15, NAMES

HUNYUAN_VIDEO15_DISTILLED = dataclasses.replace(
    HUNYUAN_VIDEO15, name="HunyuanVideo 1.5 distilled", title="HunyuanVideo 1.5 distilled, super-resolution",
    recognise=lambda shapes: NAMES(shapes) and has("time_r_in.")(shapes),
    config=config_of(**HUNYUAN_VIDEO15.config.rules | {"use_meanflow": True}),
    conditioning=HUNYUAN_VIDEO15.conditioning | {"sigma_after": None},
    ignored=(*HUNYUAN_VIDEO15.ignored, "disable_time_r"),
    unsupported_arguments=lambda arguments: "no time of the next step" if arguments.get("disable_time_r") else None,
    per_call_inputs=sigma_after,
    arguments=HUNYUAN_VIDEO15.arguments | {"timestep_r": from_conditioning("sigma_after", times=1000)},
    test_config=SmallConfig(
        HUNYUAN_VIDEO15.test_config.config | {"in_channels": 14, "use_meanflow": True},
        HUNYUAN_VIDEO15.test_config.native,
        HUNYUAN_VIDEO15.test_config.arguments | {"in_channels": 98, "meanflow": True},
        input_shapes={"sigma_after": lambda config, shape, tokens: (1,)}))
