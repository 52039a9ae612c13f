"""Hunyuan3D 2.1, ComfyUI's own module: one row of shape tokens after a timestep token; cross-attention to a vision
model's features of an image; U-shaped, with experts in the last blocks."""

from types import SimpleNamespace

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import PaddedByModel, blocks, compute_dtype_of, config_of, has, size, stored_dtype
from .common.native_module import native_arguments, same_names
from .common.plan import BlockList, ModelPlan
from .common.tp_plan import COLWISE, REPLICATED, ROWWISE, styled

LATENT, ALL = PaddedByModel((1,)), ("time", "image")
NATIVE, NORM = "comfy.ldm.hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain", "blocks.0.attn1.q_norm.weight"


def _adapt(model, config):
    """Undo the swap of a batch's halves in ComfyUI's forward, which assumes the two CFG branches of the same
    latents: here each image of a batch has its own conditioning, and blocks have the batch in its order, which
    identifies cached keys and values. Also replace the dtypes that the forward reads from weights, which packed
    weights do not have."""
    forward, dtype, embedder = model.forward, compute_dtype_of(model), model.t_embedder
    for layer in (model.x_embedder, *(block.attn2.to_k for block in model.blocks)):
        layer.parameters = lambda recurse=True, layer=layer: iter([torch.empty(0, dtype=stored_dtype(layer, dtype()))])
    embedder.time_embed.forward = _typed(embedder.time_embed.forward, lambda: stored_dtype(embedder.mlp[0], dtype()))

    def each_its_own(x, t, context, **options):
        if len(x) == 1:
            return forward(x=x, t=t, context=context, **options)
        half = -(-len(x) // 2)
        output, = forward(x=x, t=t, context=context.roll(half, 0), **options)
        return output.roll(half, 0),
    model.forward = each_its_own


def _typed(forward, dtype):
    """Wrap a forward so that its output is cast to this dtype, whichever dtype the caller requests."""
    def typed(times):
        output = forward(times)
        return SimpleNamespace(type=lambda requested: output.to(dtype()))
    return typed


def _num_moe_layers(shapes):
    return len([name for name in shapes if name.endswith(".moe.gate.weight")])


def _num_experts(shapes):
    return next((shape[0] for name, shape in shapes.items() if name.endswith(".moe.gate.weight")), 8)


SMALL = {"in_channels": 8, "hidden_size": 48, "context_dim": 24, "depth": 5, "num_heads": 4, "qkv_bias": False,
         "num_moe_layers": 2, "guidance_cond_proj_dim": None, "num_experts": 4, "moe_top_k": 2}


class _Plan(ModelPlan):
    skip_name = "skip_tensor"
    graph_breaks = ("moe",)

    def skips(self, num_blocks):
        return {block: 2 * (num_blocks // 2) - block for block in range(num_blocks // 2 + 1, num_blocks)}


HUNYUAN3D21 = Family(
    name="Hunyuan3D 2.1", title="Hunyuan3D 2.1", transformer=NATIVE, adapt_model=_adapt,
    num_heads=lambda config: config["num_heads"], width=lambda config: config["hidden_size"],
    num_channels=lambda config: config["in_channels"], pixels=lambda config: (1, 16, 16),
    activation_factors={"alone": 14.5, "residual": 8.47, "whole": 11.4, "outside": 5.41, "held": 2.5, "block": 12.44,
                        "exchange": 16.79, "own": 0.37, "keys": 2.07, "once": 0.99},
    detection=Detection(
        recognise=has("x_embedder.weight", "t_embedder.mlp.2.weight", "blocks.0.attn1.k_norm.weight",
                      "blocks.0.attn2.to_k.weight"),
        config=config_of(
            in_channels=size("x_embedder.weight", 1), hidden_size=size("x_embedder.weight", 0),
            context_dim=size("blocks.0.attn2.to_k.weight", 1), depth=blocks("blocks."),
            num_heads=lambda shapes: shapes["x_embedder.weight"][0] // shapes[NORM][0], qkv_bias=False,
            num_moe_layers=_num_moe_layers, guidance_cond_proj_dim=None, num_experts=_num_experts, moe_top_k=2),
        convert=same_names),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, ignored=("guidance",), conditioning={"context": "context_dim"},
        arguments=native_arguments(LATENT, "context", times="t"), lengths={"time": lambda conditioning: 1}),
    plan=_Plan(
        blocks=(BlockList("blocks", "blocks.", "depth", returns=(ALL,)),),
        streams={"hidden_states": ALL}, attention={"attn1": ALL},
        # not split: a head takes values from all three projections, so that no rank owns one
        tp_plan=styled(REPLICATED, "skip_linear", "attn*.to_*", "attn*.out_proj") | {
            "mlp.fc1": COLWISE, "mlp.fc2": ROWWISE, "moe.experts.*.net.0.proj": COLWISE, "moe.experts.*.net.2": ROWWISE,
            "moe.shared_experts.net.0.proj": COLWISE, "moe.shared_experts.net.2": ROWWISE},
        cacheable={"attn2.to_k": "run", "attn2.to_v": "run"}),
    testing=SmallConfig(SMALL, NATIVE, SMALL | {"in_channels": 64, "hidden_size": 256, "context_dim": 1024,
                                                "depth": 9, "num_heads": 16, "num_moe_layers": 6, "num_experts": 8},
                        detected="Hunyuan3Dv2_1"))
