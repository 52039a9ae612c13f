"""NewBie-Image, ComfyUI's own module: Lumina 2's blocks, whose timestep embedding is combined with a pooled vector
of the prompt; grouped-query attention."""

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, blocks, config_of, has, size
from .common.key_mapping import table
from .common.native_module import native_arguments
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.rope_scaling import moves, with_first_row
from .common.tp_plan import QKV, ROWWISE

NATIVE, NORM = "comfy.ldm.lumina.model:NextDiT", "layers.0.attention.q_norm.weight"
LATENT, IMAGE, ALL = Unpacked((2, 2)), ("image",), ("text", "image")


def _of_patch(module, forward, rows, tokens, args, kwargs):
    """The class's embed_all for a patch, whose rows have their positions in the full image."""
    options = with_first_row(kwargs["transformer_options"], rows.patch.start // module.patch_size)
    return forward(*args, **kwargs | {"transformer_options": options})


def _num_heads(shapes):
    return shapes["x_embedder.weight"][0] // shapes[NORM][0]


def _num_key_heads(shapes):
    return (shapes["layers.0.attention.qkv.weight"][0] // shapes[NORM][0] - _num_heads(shapes)) // 2


SMALL = {"patch_size": 2, "in_channels": 4, "dim": 48, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 4,
         "n_kv_heads": 2, "multiple_of": 96, "ffn_dim_multiplier": 1.0, "qk_norm": True, "cap_feat_dim": 24,
         "clip_text_dim": 16, "axes_dims": (4, 4, 4)}
# for files: half of the columns of each layer are a multiple of the block size of every quantised format
WIDE = {"in_channels": 16, "dim": 768, "n_heads": 8, "n_kv_heads": 4, "multiple_of": 1024, "axes_dims": (32, 32, 32)}

NEWBIE = Family(
    name="NewBie-Image", title="NewBie-Image", transformer=NATIVE, num_heads=lambda config: config["n_heads"],
    num_key_heads=lambda config: config["n_kv_heads"], width=lambda config: config["dim"],
    num_channels=lambda config: config["in_channels"],
    activation_factors={"alone": 20.02, "residual": 5.06, "whole": 6.02, "outside": 6.69, "held": 1.6, "block": 19.05,
                        "exchange": 15.47, "own": 0.0},
    detection=Detection(
        recognise=has("clip_text_pooled_proj.", "cap_embedder.1.weight",
                      "noise_refiner.0.attention.k_norm.weight"),
        config=config_of(
            patch_size=2, in_channels=size("x_embedder.weight", 1, 4), dim=size("x_embedder.weight", 0),
            n_layers=blocks("layers."), n_refiner_layers=blocks("noise_refiner."), n_heads=_num_heads,
            n_kv_heads=_num_key_heads, multiple_of=size("layers.0.feed_forward.w1.weight", 0), ffn_dim_multiplier=1.0,
            qk_norm=True, cap_feat_dim=size("cap_embedder.1.weight", 1),
            clip_text_dim=size("clip_text_pooled_proj.0.weight", 0),
            axes_dims=lambda shapes: (shapes[NORM][0] // 3,) * 3),
        convert=table((r"^norm_final\.", None))),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0,
        conditioning={"context": "cap_feat_dim", "rope_scales": None, "clip_text_pooled": "clip_text_dim"},
        ignored=("num_tokens", "attention_mask"),
        arguments=native_arguments(LATENT, "context", "clip_text_pooled", times="timesteps", num_tokens=None,
                                   transformer_options=moves)),
    plan=ModelPlan(
        blocks=(BlockList("noise_refiner", "noise_refiner.", "n_refiner_layers", returns=(IMAGE,),
                          streams={"x": IMAGE}, attention={"attention": IMAGE},
                          tokens={"freqs_cis": TokenArgument(1, IMAGE)}),
                BlockList("layers", "layers.", "n_layers", returns=(ALL,))),
        streams={"x": ALL}, attention={"attention": ALL}, tokens={"freqs_cis": TokenArgument(1, ALL)},
        positions={"embed_all": _of_patch}, unstaged_blocks=("context_refiner",),
        tp_plan={"attention.qkv": QKV, "attention.out": ROWWISE},
        cacheable={"adaLN_modulation": "step"},
        cacheable_outside={"cap_embedder": "run", "context_refiner": "run", "clip_text_pooled_proj": "run",
                           "time_text_embed": "step"}),
    testing=SmallConfig(SMALL, NATIVE, SMALL | WIDE, detected="Lumina2", input_shapes={
        "clip_text_pooled": lambda config, shape, tokens: (shape[0], config["clip_text_dim"])}))
