"""Stage B of Stable Cascade, ComfyUI's own module: generates the latent of stage A from a latent of stage C, by a
U-shaped network of four levels that each device runs in full."""

from ..protocol.errors import ConfigError
from .common.cascade import KEYS, REFUSALS, REFUSED, plan, rules, vector
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, config_of, from_conditioning, has, size
from .common.native_module import native_arguments

NATIVE, LATENT = "comfy.ldm.cascade.stage_b:StageB", Unpacked((2, 2))


def _latent(call):
    rows, columns = call.latent.shape[-2:]
    least = 2 ** len(call.config["c_hidden"])                  # each level has half the rows and columns
    if rows % 2 or columns % 2 or min(rows, columns) < least:
        raise ConfigError(f"Use a width and a height that are multiples of 8 pixels, and {4 * least} or more: Stable "
                          f"Cascade B takes latents with even sides of {least} or more, and this one has {rows} x "
                          f"{columns}.")
    return LATENT(call)


def _prior(call):
    """The latent of stage C. Raises ConfigError for other shapes."""
    latent, channels = from_conditioning("effnet")(call), call.config["c_effnet"]
    if latent.ndim != 4 or latent.shape[1] != channels or not latent.numel():
        raise ConfigError(f"Connect the latent that stage C generated to StableCascade_StageB_Conditioning: the latent "
                          f"there has the shape {tuple(latent.shape)}, and stage B needs (images, {channels}, rows, "
                          "columns).")
    return latent


def _prior_shape(config, shape, tokens):
    return shape[0], config["c_effnet"], *(-(-side * 4 // 42) for side in shape[-2:])


SMALL = {"c_in": 4, "c_out": 4, "patch_size": 2, "c_r": 64, "c_clip_seq": 4, "kernel_size": 3, "c_cond": 96,
         "c_hidden": (32, 64, 128, 128), "nhead": (-1, -1, 2, 2), "level_config": ("CT", "CT", "CTA", "CTA"),
         "blocks": ((1, 1, 2, 1), (1, 2, 1, 1)), "block_repeat": ((1, 1, 1, 1), (3, 2, 1, 2)), "c_clip": 40,
         "c_effnet": 16, "c_pixels": 3}

STABLE_CASCADE_B = Family(
    name="Stable Cascade B", title="Stable Cascade (stage B)", transformer=NATIVE, refused=REFUSED,
    activation_factors={"alone": 4.48}, num_heads=lambda config: None, width=lambda config: config["c_hidden"][0],
    num_channels=lambda config: config["c_out"], in_channels=lambda config: config["c_in"],
    pixels=lambda config: (1, 4, 4),
    detection=Detection(
        recognise=has("clf.1.weight", "clip_mapper.weight", "effnet_mapper.0.weight",
                      "down_blocks.0.0.depthwise.weight"),
        refusals=REFUSALS, convert=KEYS,
        config=config_of(
            **rules(2), c_cond=lambda shapes: shapes["clip_mapper.weight"][0] // 4,
            c_clip=size("clip_mapper.weight", 1),
            c_effnet=size("effnet_mapper.0.weight", 1), c_pixels=size("pixels_mapper.0.weight", 1))),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, conditioning={"clip": "c_clip", "effnet": None, "sca": None},
        arguments=native_arguments(_latent, "sca", times="r", clip=vector("clip"),
                                   effnet=_prior)),
    plan=plan(),
    testing=SmallConfig(SMALL, NATIVE, SMALL, detected="Stable_Cascade_B",
                        input_shapes={"effnet": _prior_shape, "sca": lambda config, shape, tokens: shape[:1]}))
