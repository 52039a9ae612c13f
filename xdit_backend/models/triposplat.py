"""TripoSplat, ComfyUI's own module: a row of shape tokens, refined alone, then in one sequence with image tokens,
also refined alone, and a camera token. Each block computes the positions of its tokens from the tokens."""

import math
from types import MethodType

import torch
from torch import nn

from .common.example_inputs import SIDES, latent_size
from .common.family import Components, Detection, Family, Inputs, SmallConfig
from .common.inputs import blocks, compute_dtype_of, config_of, has, optional_size, size, stored_dtype
from .common.native_module import native_arguments, same_names
from .common.plan import BlockList, ModelPlan
from .common.tp_plan import COLWISE, REPLICATED, ROWWISE, styled
from .triposplat_latents import Row, call_shapes, first_component, reference_images, split_components, unfold

LATENT, SHAPE, ALL = Row((1, 1)), ("image",), ("image", "text", "camera")
NATIVE, NORM = "comfy.ldm.triposplat.model:LatentSeqMMFlowModel", "blocks.0.attn.q_norm.gamma"
UNSPLIT = "attn.qkv", "attn.out", "gate_map", "content_map", "final_map"


class _Anchors(nn.Module):
    """The fixed positions of shape tokens, (1, T, C), for the first T. The class's forward calls this through `to`."""

    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens):
        return self.table[:, :tokens.shape[1]].to(tokens)


class _Requested:
    """Placeholder for the class's table: `to` returns the positions of the forward's tokens."""

    def __init__(self, anchors):
        self.to = anchors


def _of_patch(module, forward, rows, tokens, args, kwargs):
    """Positions of a patch's tokens."""
    return module.table[:, rows.first_token:rows.first_token + args[0].shape[1]].to(args[0])


def _adapt(model, config):
    """Move the position layers, which the class's forward runs between blocks, into the blocks, for the tokens of a
    rank. Compute the timestep's sinusoids on its device, in the dtype of the weights."""
    embedder, dtype = model.t_embedder, compute_dtype_of(model)
    embedder.forward = lambda times: embedder.mlp(_sines(embedder, times).to(stored_dtype(embedder.mlp[0], dtype())))
    model.anchors = _Anchors(model.pos_emb)
    del model.pos_emb
    model.pos_emb = _Requested(model.anchors)
    for name, tables in (("noise_refiner", model.noise_repo_layers), ("blocks", model.repo_layers)):
        for block, table in zip(model.get_submodule(name), tables, strict=True):
            block.of_tokens, table.forward = (table,), _nothing                # a tuple: not a submodule of the block
            block.forward = MethodType(_with_positions, block)


def _sines(embedder, times):
    with times.device:
        return embedder.timestep_embedding(times, embedder.frequency_embedding_size)


def _nothing(hidden_states):
    return None


def _with_positions(self, x, mod=None, rotary_emb=None, transformer_options=None):
    table = self.of_tokens[0]
    return type(self).forward(self, x, mod=mod, rotary_emb=type(table).forward(table, x),
                              transformer_options=transformer_options)


def _thin(model):
    """Keep the first positions of ComfyUI's class, which has a fixed number of tokens."""
    if torch.is_tensor(model.pos_emb):
        model.pos_emb = model.pos_emb[:, :math.prod(latent_size(TRIPOSPLAT, *SIDES))]


SMALL = {"in_channels": 4, "model_channels": 48, "cond_channels": 24, "out_channels": 4, "num_blocks": 2,
         "num_refiner_blocks": 2, "num_head_channels": 12, "cam_channels": 5, "cond2_channels": 6, "mlp_ratio": 4}

TRIPOSPLAT = Family(
    name="TripoSplat", title="TripoSplat", transformer=NATIVE, adapt_model=_adapt, computes_as_made=True,
    num_heads=lambda config: config["model_channels"] // config["num_head_channels"],
    width=lambda config: config["model_channels"], num_channels=lambda config: config["out_channels"],
    pixels=lambda config: (1, 1, 1),
    activation_factors={"alone": 17.06, "residual": 7.81, "whole": 14.47, "outside": 5.65, "held": 2.42, "block": 13.81,
                        "exchange": 19.86, "own": 0.24, "keys": 1.91, "attends": 9.69, "entered": 4.0},
    detection=Detection(
        recognise=has("cam_out_layer.weight", "repo_layers.0.final_map.weight", NORM),
        config=config_of(
            in_channels=size("input_layer.weight", 1), model_channels=size("input_layer.weight", 0),
            cond_channels=size("cond_embedder.weight", 1), out_channels=size("out_layer.weight", 0),
            num_blocks=blocks("blocks."), num_refiner_blocks=blocks("noise_refiner."), num_head_channels=size(NORM, 1),
            cam_channels=size("cam_out_layer.weight", 0), cond2_channels=optional_size("cond_embedder2.weight", 1),
            mlp_ratio=lambda shapes: shapes["blocks.0.mlp.mlp.0.weight"][0] // shapes["input_layer.weight"][0]),
        convert=same_names),
    inputs=Inputs(
        latent=LATENT, time_scale=1000.0, conditioning={"context": "cond_channels", "reference_image": None},
        ignored=("latent_shapes",), unfold=unfold,
        arguments=native_arguments(LATENT, "context", times="t", ref_latents=reference_images),
        components=Components({"camera": lambda output: output}, split_components, call_shapes, first_component),
        lengths={"camera": lambda conditioning: 1}),
    plan=ModelPlan(
        blocks=(BlockList("noise_refiner", "noise_refiner.", "num_refiner_blocks", streams={"x": SHAPE},
                          returns=(SHAPE,), attention={"attn": SHAPE}, paired="noise_repo_layers"),
                BlockList("blocks", "blocks.", "num_blocks", returns=(ALL,), paired="repo_layers")),
        streams={"x": ALL}, attention={"attn": ALL}, outputs=("image", "camera"), positions={"anchors": _of_patch},
        # not split: each head has its own positions
        tp_plan={"mlp.mlp.0": COLWISE, "mlp.mlp.2": ROWWISE} | styled(REPLICATED, *UNSPLIT),
        unstaged_blocks=("context_refiner",),
        cacheable_outside={"cond_embedder": "run", "cond_embedder2": "run", "context_refiner": "run",
                           "adaLN_modulation": "step"}),
    testing=SmallConfig(SMALL, NATIVE, SMALL | {
        "in_channels": 16, "out_channels": 16, "model_channels": 256, "num_head_channels": 64, "cond2_channels": 128},
        detected="TripoSplat", thin=_thin, input_shapes={
            "reference_image": lambda config, shape, tokens: (shape[0], config["cond2_channels"], 2, 2)}))
