"""JoyImage (JoyAI-Image-Edit), ComfyUI's own module: two streams with joint attention, image first. Reference images
follow the image as further frames, each of its own size."""

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, blocks, config_of, from_conditioning, has, size, timestep
from .common.native_module import batched_references, num_reference_tokens, same_names
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.tp_plan import QKV, ROWWISE
from .omnigen2 import of_heads

LATENT, IMAGES = Unpacked((1, 2, 2)), ("image", "reference")
NATIVE = "comfy.ldm.joyimage.model:JoyImageTransformer3DModel"
NORM, WIDTH = "double_blocks.0.attn.img_attn_q_norm.weight", "img_in.weight"


def _full_sizes(rows, args, kwargs):
    """Frames, rows and columns of tokens of the full latent, and of each reference."""
    (own, *others), *more = args
    return [[tuple(rows.whole_token_rows if axis == rows.axis else length for axis, length in enumerate(own)),
             *others], *more], kwargs


SMALL = {"patch_size": (1, 2, 2), "in_channels": 4, "hidden_size": 48, "num_layers": 4, "num_attention_heads": 4,
         "text_dim": 24, "mlp_width_ratio": 2.0, "rope_dim_list": (4, 4, 4), "theta": 10000}

JOYIMAGE = Family(
    name="JoyImage", title="JoyImage", transformer=NATIVE, unsupported_dtypes=("float16",),
    num_channels=lambda config: config["in_channels"], width=lambda config: config["hidden_size"],
    activation_factors={"alone": 15.65, "residual": 8.1, "held": 1.75, "exchange": 19.8, "entered": 3.9, "own": 0.88},
    detection=Detection(
        recognise=has(NORM, WIDTH, "double_blocks.0.img_mod.modulate_table", "condition_embedder.time_proj.weight"),
        config=config_of(
            patch_size=(1, 2, 2), in_channels=size(WIDTH, 1), hidden_size=size(WIDTH, 0),
            num_layers=blocks("double_blocks."),
            num_attention_heads=of_heads(WIDTH, NORM),
            text_dim=size("condition_embedder.text_embedder.linear_1.weight", 1),
            mlp_width_ratio=lambda shapes: shapes["double_blocks.0.img_mlp.net.0.proj.weight"][0] / shapes[WIDTH][0],
            rope_dim_list=lambda shapes: (16, 56, 56) if shapes[NORM][0] == 128 else (shapes[NORM][0] // 3,) * 3,
            theta=10000),
        convert=same_names),
    inputs=Inputs(
        latent=LATENT, conditioning={"context": "text_dim", "ref_latents": None},
        lengths={"reference": num_reference_tokens(LATENT)},
        arguments={"hidden_states": LATENT, "timestep": timestep(), "context": from_conditioning("context"),
                   "ref_latents": batched_references}),
    plan=ModelPlan(
        blocks=(BlockList("double_blocks", "double_blocks.", returns=(IMAGES, "text"), image_fraction=0.5,
                          patched="double"),),
        streams={"hidden_states": IMAGES, "encoder_hidden_states": "text"}, attention={"attn": (*IMAGES, "text")},
        tokens={"image_rotary_emb": TokenArgument(1, IMAGES)},
        positions={"get_rotary_pos_embed_for_components": Cut(TokenArgument(1, IMAGES), _full_sizes)},
        tp_plan={"attn.*_attn_qkv": QKV, "attn.*_attn_proj": ROWWISE},
        cacheable_outside={"condition_embedder.text_embedder": "run"}),
    testing=SmallConfig(SMALL, NATIVE, SMALL | {
        "in_channels": 16, "hidden_size": 384, "rope_dim_list": (32, 32, 32)}, detected="JoyImage"))
