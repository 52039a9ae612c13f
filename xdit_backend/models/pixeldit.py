"""PixelDiT, ComfyUI's own module: two streams over patches of pixels, then blocks in which each patch's token, made
of its pixels, attends to the other patches' tokens, and its pixels are updated."""

import math

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, because, blocks, config_of, has
from .common.native_module import native_arguments
from .common.pixel_blocks import (
    PREFIX,
    SIDE,
    adapt_model,
    convert,
    full_rows,
    in_file,
    of_file,
    pixels_of_patch,
    under_core,
)
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.rope_scaling import moves
from .common.tp_plan import COLWISE, GATHERED, QKV, REPLICATED, ROWWISE, styled

NATIVE, CHANNELS, TEXT = "comfy.ldm.pixeldit.model:PixDiT_T2I", 3, 300         # largest number of text tokens
LATENT, IMAGE, BOTH = Unpacked((SIDE, SIDE)), ("image",), ("text", "image")
QUERIES, PIXELS = "patch_blocks.0.attn.qkv_x.weight", "pixel_blocks.0.attn.qkv.weight"


def _width(shapes):
    return of_file(QUERIES, 1)(shapes) + SIDE ** 2 * of_file("pixel_embedder.proj.weight", 0)(shapes)


def _heads(config):
    """Greatest common divisor of the two lists' numbers of heads, both of which are sharded."""
    return math.gcd(config["num_groups"], config["pixel_num_groups"])


RULES = {
    "in_channels": CHANNELS, "hidden_size": of_file(QUERIES, 1),
    "num_groups": lambda shapes: of_file(QUERIES, 1)(shapes) // of_file(
        "patch_blocks.0.attn.q_norm_x.weight", 0)(shapes),
    "pixel_hidden_size": of_file("pixel_embedder.proj.weight", 0), "pixel_attn_hidden_size": of_file(PIXELS, 1),
    "pixel_num_groups": lambda shapes: of_file(PIXELS, 1)(shapes) // of_file(
        "pixel_blocks.0.attn.q_norm.weight", 0)(shapes),
    "patch_depth": under_core(blocks("patch_blocks.")), "pixel_depth": under_core(blocks("pixel_blocks.")),
    "txt_embed_dim": of_file("y_embedder.proj.weight", 1), "_pixel_token_width": _width}

SMALL = {"in_channels": CHANNELS, "num_groups": 4, "hidden_size": 64, "pixel_hidden_size": 4,
         "pixel_attn_hidden_size": 48, "pixel_num_groups": 4, "patch_depth": 3, "pixel_depth": 2, "txt_embed_dim": 24,
         "_pixel_token_width": 64 + 4 * SIDE ** 2}

PIXELDIT = Family(
    name="PixelDiT", title="PixelDiT", transformer=NATIVE, adapt_model=adapt_model, unsupported_dtypes=("float16",),
    activation_factors={"alone": 29.91, "residual": 29.64, "held": 6.0, "block": 24.0, "own": 3.2, "outside": 17.7,
                        "once": 9.5, "keys": 1.725},
    num_heads=_heads, width=lambda config: config["hidden_size"], num_channels=lambda config: CHANNELS,
    pixels=lambda config: (1, 1, 1),
    detection=Detection(
        recognise=has(*(PREFIX + name for name in ("pixel_embedder.proj.weight", "y_pos_embedding", QUERIES, PIXELS))),
        refusals=(because(f"its patches are not {SIDE} x {SIDE} pixels, the only size that xDiT supports",
                          lambda shapes: of_file("s_embedder.proj.weight", 1)(shapes) != SIDE ** 2 * CHANNELS),),
        config=config_of(**RULES), convert=convert),
    inputs=Inputs(
        latent=LATENT, conditioning={"context": "txt_embed_dim", "rope_scales": None}, ignored=("attention_mask",),
        lengths={"text": lambda conditioning: min(TEXT, conditioning["context"].shape[1])},
        arguments=native_arguments(LATENT, "context", times="timesteps", transformer_options=moves)),
    plan=ModelPlan(
        blocks=(BlockList("patch_blocks", f"{PREFIX}patch_blocks.", "patch_depth", returns=("image", "text"),
                          image_fraction=0.5),
                BlockList("pixel_blocks", f"{PREFIX}pixel_blocks.", "pixel_depth", streams={"x": "image"}, tokens={},
                          attention={"attn": IMAGE}, width="_pixel_token_width")),
        streams={"x": "image", "y": "text"}, attention={"attn": BOTH}, needs_text=True, rereads_latent=True,
        tokens={"pos_img": TokenArgument(0, IMAGE), "pos_txt": TokenArgument(0, ("text",))},
        token_index_argument=("token_indices", IMAGE),
        positions={"_fetch_patch_pos": Cut(TokenArgument(0, IMAGE), full_rows),
                   "pixel_embedder.pixels": pixels_of_patch},
        # most of their outputs are values for each pixel
        tp_plan=styled(REPLICATED, "adaLN_modulation_msa", "adaLN_modulation_mlp", "compress_to_attn",
                       "expand_from_attn", "mlp.fc1", "mlp.fc2")
        | styled(QKV, "attn.qkv", "attn.qkv_*") | styled(ROWWISE, "attn.proj", "attn.proj_*", "mlp_*.w2")
        | styled(COLWISE, "mlp_*.w1", "mlp_*.w3") | {"adaLN_modulation_*.*": GATHERED},
        cacheable={"adaLN_modulation_img": "step", "adaLN_modulation_txt": "step"},
        cacheable_outside={"y_embedder": "run"}),
    testing=SmallConfig(SMALL, NATIVE, {name: size for name, size in SMALL.items() if not name.startswith("_")} | {
        "hidden_size": 256, "pixel_attn_hidden_size": 256, "txt_embed_dim": 48}, detected="PixelDiTT2I",
                            in_file=in_file))
