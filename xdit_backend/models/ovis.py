"""Ovis-Image: Flux.1's blocks with gated feed-forwards, without guidance and pooled text; text positions are on the
diagonal."""

import dataclasses

from .common.family import FolderRules, Inputs, SmallConfig, derived
from .common.inputs import config_of, has, size
from .common.key_mapping import table
from .common.split_linear import split_linears
from .common.tp_plan import COLWISE
from .flux import BLOCKS, FLUX, LATENT
from .longcat import LONGCAT

GATED = "net.0.proj"                                           # path in a block's feed-forwards

# other names are as in Flux.1
KEYS = table((r"^time_in\.", "timestep_embedder."), (r"^txt_norm\.(?:scale|weight)$", "context_embedder_norm.weight"),
             (r"_mlp\.up_proj\.", "_mlp.0.0."), (r"_mlp\.gate_proj\.", "_mlp.0.1."), (r"_mlp\.down_proj\.", "_mlp.2."),
             (r"\.linear1\.", (".attn.to_q.", ".attn.to_k.", ".attn.to_v.", ".proj_mlp."), (1, 1, 1, 8)))


def _adapt(model, config):
    """Use the dtype's epsilon in the norm of the text, where diffusers has 1e-6, and split gated linears, as in
    ComfyUI: a file may store gate and value in different formats."""
    model.context_embedder_norm.eps = None
    split_linears(model, GATED)


OVIS = dataclasses.replace(
    LONGCAT, name="Ovis-Image", title="Ovis-Image", transformer="OvisImageTransformer2DModel", adapt_model=_adapt,
    num_channels=FLUX.num_channels,
    activation_factors=FLUX.activation_factors | {"alone": 25.3, "residual": 3.3, "whole": 9.75, "held": 0.25,
                                                  "block": 25.1, "exchange": 27.2},
    detection=dataclasses.replace(
        LONGCAT.detection,
        recognise=lambda shapes: BLOCKS(shapes) and has("txt_norm.",
                                                        "double_blocks.0.img_mlp.gate_proj.weight")(shapes),
        config=config_of(**LONGCAT.detection.config.rules | {
            "out_channels": size("final_layer.linear.weight", 0)}),
        convert=lambda tensors, config: FLUX.detection.convert(KEYS(tensors, config), config),
        folder=FolderRules(split_linears=GATED)),
    inputs=derived(
        Inputs, LONGCAT.inputs, ignored=("y", "guidance"),
        arguments=LONGCAT.inputs.arguments | {"img_ids": LATENT.positions}),
    plan=dataclasses.replace(FLUX.plan, full_precision_inputs={"time_proj": (("timestep",), 1000.0)},
                             tp_plan=FLUX.plan.tp_plan | {"*.net.0.proj.*": COLWISE},
                             cacheable_outside={"context_embedder_norm": "run", "context_embedder": "run"}),
    testing=SmallConfig(LONGCAT.testing.config, FLUX.testing.native,
                        LONGCAT.testing.arguments | {"context_in_dim": 64, "yak_mlp": True, "txt_norm": True}))
