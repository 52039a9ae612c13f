"""Ideogram 4, ComfyUI's own module: one sequence of text and image. The text is hidden states of 13 layers of a
language model."""

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, blocks, config_of, has, size
from .common.native_module import native_arguments, same_names
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.tp_plan import GATHERED, QKV, ROWWISE
from .omnigen2 import of_heads

LATENT, ALL = Unpacked((1, 1)), ("text", "image")
NATIVE = "comfy.ldm.ideogram4.model:Ideogram4Transformer2DModel"
NORM = "layers.0.attention.norm_q.weight"


def _full_sizes(rows, args, kwargs):
    """The call's arguments with the number of rows of the full latent."""
    return [rows.whole_rows, *args[1:]], kwargs


SMALL = {"in_channels": 16, "num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 12,
         "intermediate_size": 64, "adaln_dim": 16, "llm_features_dim": 24, "mrope_section": (2, 2, 2)}


class _Inputs(Inputs):
    runs_without_text = True


IDEOGRAM4 = Family(
    name="Ideogram 4", title="Ideogram 4", transformer=NATIVE, unsupported_dtypes=("float16",),
    num_channels=lambda config: config["in_channels"], pixels=lambda config: (1, 16, 16),
    width=lambda config: config["num_attention_heads"] * config["attention_head_dim"],
    activation_factors={"alone": 16.35, "residual": 5.55, "held": 2.45, "block": 14.7, "exchange": 16.8, "entered": 7.0,
                        "given": 1.29, "own": 0.0},
    detection=Detection(
        recognise=has(NORM, "embed_image_indicator.weight", "llm_cond_proj.weight"),
        config=config_of(
            in_channels=size("input_proj.weight", 1), num_layers=blocks("layers."), attention_head_dim=size(NORM, 0),
            num_attention_heads=of_heads("input_proj.weight", NORM),
            intermediate_size=size("layers.0.feed_forward.w1.weight", 0), adaln_dim=size("adaln_proj.weight", 0),
            llm_features_dim=size("llm_cond_proj.weight", 1),
            mrope_section=lambda shapes: (24, 20, 20) if shapes[NORM][0] == 256 else (shapes[NORM][0] // 6,) * 3),
        convert=same_names),
    inputs=_Inputs(
        latent=LATENT, time_scale=1.0, conditioning={"context": "llm_features_dim"},
        arguments=native_arguments(LATENT, "context", times="timesteps")),
    plan=ModelPlan(
        blocks=(BlockList("layers", "layers.", returns=(ALL,)),),
        streams={"x": ALL}, attention={"attention": ALL}, tokens={"freqs_cis": TokenArgument(1, ALL)},
        positions={"_image_position_ids": Cut(TokenArgument(0, ("image",)), _full_sizes)},
        tp_plan={"attention.qkv": QKV, "attention.o": ROWWISE, "adaln_modulation": GATHERED}),
    testing=SmallConfig(SMALL, NATIVE, SMALL | {
        "in_channels": 128, "attention_head_dim": 96, "mrope_section": (16, 16, 16), "adaln_dim": 64,
        "intermediate_size": 128},
                            detected="Ideogram4"))
