"""Ovis-Image: Flux.1's blocks with gated feed-forwards; no guidance, no pooled text; text stands on the diagonal."""

import dataclasses

import torch

from ..vocabulary.describe import config_of, has, size
from ..vocabulary.family import Tiny
from ..vocabulary.keys import table
from .flux import BLOCKS, FLUX, LATENT
from .longcat import LONGCAT

GATE, UP = ".gate_proj.", ".up_proj."

# the rest is as Flux.1's
KEYS = table((r"^time_in\.", "timestep_embedder."), (r"^txt_norm\.(?:scale|weight)$", "context_embedder_norm.weight"),
             (r"_mlp\.down_proj\.", "_mlp.2."),
             (r"\.linear1\.", (".attn.to_q.", ".attn.to_k.", ".attn.to_v.", ".proj_mlp."), (1, 1, 1, 8)))


def _convert(tensors, config):
    """diffusers has what is gated and its gate as one."""
    gates = {name: name.replace(UP, GATE) for name in tensors if UP in name}
    gated = {name.replace(UP, ".0."): torch.cat([tensors[name], tensors[gate]]) for name, gate in gates.items()}
    left = {name: tensor for name, tensor in tensors.items() if name not in gates and name not in gates.values()}
    return FLUX.convert(KEYS(left | gated, config), config)


def _amend(model, config):
    """ComfyUI's norm of the text has the smallest number of its type, where diffusers' has 1e-6."""
    model.context_embedder_norm.eps = None


OVIS = dataclasses.replace(
    LONGCAT, name="Ovis-Image", title="Ovis-Image", transformer="OvisImageTransformer2DModel",
    recognise=lambda shapes: BLOCKS(shapes) and has("txt_norm.", "double_blocks.0.img_mlp.gate_proj.weight")(shapes),
    config=config_of(**LONGCAT.config.rules | {
        "out_channels": size("final_layer.linear.weight", 0)}),
    convert=_convert, amend=_amend, rope_options=FLUX.rope_options, ignored=("y", "guidance"),
    num_channels=FLUX.num_channels, arguments=LONGCAT.arguments | {"img_ids": LATENT.positions},
    plan=dataclasses.replace(FLUX.plan, exact={"time_proj": (("timestep",), 1000.0)},
                             once_outside={"context_embedder_norm": "run", "context_embedder": "run"}),
    tiny=Tiny(LONGCAT.tiny.config, FLUX.tiny.native,
              LONGCAT.tiny.arguments | {"context_in_dim": 64, "yak_mlp": True, "txt_norm": True}))
