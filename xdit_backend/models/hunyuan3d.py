"""Hunyuan3D 2 and 2 mini, ComfyUI's own module: a shape as one row of tokens without positions, conditioned on a
vision model's features of images. Two streams, then one sequence of both, as in Flux.1."""

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import PaddedByModel, blocks, config_of, has, size
from .common.key_mapping import table
from .common.native_module import native_arguments
from .common.plan import BlockList, ModelPlan
from .common.tp_plan import COLWISE, GATHERED, QKV, ROWWISE, Fused

LATENT, BOTH = PaddedByModel((1,)), ("text", "image")
NATIVE, NORM = "comfy.ldm.hunyuan3d.model:Hunyuan3Dv2", "double_blocks.0.img_attn.norm.query_norm."


def _num_heads(shapes):
    """Number of attention heads. Files saved by ComfyUI call the scale of a norm its weight."""
    norm = shapes[f"{NORM}weight" if f"{NORM}weight" in shapes else f"{NORM}scale"]
    return shapes["latent_in.weight"][0] // norm[0]


SMALL = {"in_channels": 8, "context_in_dim": 24, "hidden_size": 48, "mlp_ratio": 4.0, "num_heads": 4, "depth": 2,
         "depth_single_blocks": 2, "qkv_bias": True, "guidance_embed": True}

def _fused(count):
    """Sizes of a single block's layers along the dim that attention and feed-forward share. count: of attention's."""
    def split(block, path, linear):
        hidden, size = sorted((linear.in_features, linear.out_features))
        return (hidden,) * count + (size - count * hidden,)
    return split


TP_PLAN = {"*_attn.qkv": QKV, "*_attn.proj": ROWWISE, "*_mlp.0": COLWISE, "*_mlp.2": ROWWISE,
           "linear1": Fused(COLWISE, _fused(3)), "linear2": Fused(ROWWISE, _fused(1)),
           "*_mod.lin": GATHERED, "modulation.lin": GATHERED}

HUNYUAN3D = Family(
    name="Hunyuan3D 2", title="Hunyuan3D 2, 2 mini, 2mv", transformer=NATIVE,
    num_heads=lambda config: config["num_heads"], width=lambda config: config["hidden_size"],
    num_channels=lambda config: config["in_channels"], pixels=lambda config: (1, 16, 16),
    activation_factors={"alone": 13.82, "residual": 1.81, "whole": 5.3, "outside": 5.58, "held": 1.7, "block": 14.33,
                        "exchange": 19.27, "entered": 1.0, "own": 0.0, "keys": 2.03, "once": 0.29},
    detection=Detection(
        recognise=has("latent_in.weight", "cond_in.weight", "double_blocks.", "single_blocks."),
        config=config_of(
            in_channels=size("latent_in.weight", 1), context_in_dim=size("cond_in.weight", 1),
            hidden_size=size("latent_in.weight", 0), mlp_ratio=4.0, num_heads=_num_heads,
            depth=blocks("double_blocks."), depth_single_blocks=blocks("single_blocks."), qkv_bias=True,
            guidance_embed=has("guidance_in.in_layer.weight")),
        convert=table((r"\.scale$", ".weight"))),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, conditioning={"context": "context_in_dim", "guidance": None},
        arguments=native_arguments(LATENT, "context", "guidance")),
    plan=ModelPlan(
        blocks=(BlockList("double_blocks", "double_blocks.", "depth", returns=("image", "text"), image_fraction=0.5,
                          patched="double"),
                BlockList("single_blocks", "single_blocks.", "depth_single_blocks", returns=(BOTH,),
                          streams={"x": BOTH}, patched="single")),
        streams={"img": "image", "txt": "text"}, attention={".": BOTH}, needs_text=True, tp_plan=TP_PLAN,
        cacheable={"img_mod.lin": "step", "txt_mod.lin": "step", "modulation.lin": "step"}),
    testing=SmallConfig(SMALL, NATIVE, SMALL | {"in_channels": 64, "hidden_size": 256, "num_heads": 16},
                        detected="Hunyuan3Dv2",
                        input_shapes={"guidance": lambda config, shape, tokens: (shape[0],)}))
