"""Stage C of Stable Cascade, ComfyUI's own module: a U-shaped network on small latents, conditioned on the text,
that each device runs in full."""

from .common.cascade import KEYS, REFUSALS, REFUSED, plan, rules, vector
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, config_of, has, size
from .common.native_module import native_arguments

NATIVE, LATENT = "comfy.ldm.cascade.stage_c:StageC", Unpacked((1, 1))


def _residual_blocks(config):
    """Widths of the residual blocks, in execution order."""
    down, up = ([width for width, count, times in zip(widths, counts, repeat) for _ in range(count * times)]
                for widths, counts, repeat in zip((config["c_hidden"], config["c_hidden"][::-1]), config["blocks"],
                                                  config["block_repeat"]))
    return down + up


SMALL = {"c_in": 16, "c_out": 16, "patch_size": 1, "c_r": 64, "c_clip_seq": 4, "kernel_size": 3, "c_cond": 96,
         "c_hidden": (128, 192), "nhead": (2, 3), "level_config": ("CTA", "CTA"), "blocks": ((1, 2), (2, 1)),
         "block_repeat": ((1, 1), (1, 1)), "c_clip_text": 48, "c_clip_text_pooled": 40, "c_clip_img": 768}

STABLE_CASCADE_C = Family(
    name="Stable Cascade C", title="Stable Cascade (stage C)", transformer=NATIVE, refused=REFUSED,
    unsupported_dtypes=("float16",), activation_factors={"alone": 18.05}, num_heads=lambda config: None,
    width=lambda config: config["c_hidden"][0], num_channels=lambda config: config["c_out"],
    in_channels=lambda config: config["c_in"], pixels=lambda config: (1, 42, 42),
    detection=Detection(
        recognise=has("clf.1.weight", "clip_txt_mapper.weight", "clip_img_mapper.weight",
                      "down_blocks.0.0.depthwise.weight"),
        refusals=REFUSALS, convert=KEYS,
        config=config_of(
            **rules(1), c_cond=size("clip_txt_mapper.weight", 0), c_clip_text=size("clip_txt_mapper.weight", 1),
            c_clip_text_pooled=size("clip_txt_pooled_mapper.weight", 1), c_clip_img=size("clip_img_mapper.weight", 1))),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0,
        conditioning={"clip_text": "c_clip_text", "clip_text_pooled": "c_clip_text_pooled", "clip_img": "c_clip_img",
                      "sca": None, "crp": None},
        arguments=native_arguments(LATENT, "clip_text", "clip_img", "sca", "crp", times="r",
                                   clip_text_pooled=vector("clip_text_pooled"))),
    plan=plan(_residual_blocks),
    testing=SmallConfig(SMALL, NATIVE, SMALL | {"blocks": [[1, 2], [2, 1]]}, detected="Stable_Cascade_C",
                        input_shapes={
                            "clip_text": lambda config, shape, tokens: (shape[0], tokens, config["c_clip_text"]),
                            "clip_img": lambda config, shape, tokens: (shape[0], 1, config["c_clip_img"]),
                            **dict.fromkeys(("sca", "crp"), lambda config, shape, tokens: shape[:1])}))
