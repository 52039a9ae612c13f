"""What Stable Audio Open and Stable Audio 3 have in common, which are of one class of ComfyUI's: sound as one row of
tokens after some that stand in front of it."""

import torch

from .inputs import Whole
from .key_mapping import table
from .plan import BlockList, ModelPlan, TokenArgument
from .position_slicing import Cut

LATENT, ALL = Whole((1,)), ("front", "image")
NATIVE, LAYER = "comfy.ldm.audio.dit:AudioDiffusionTransformer", "transformer.layers.0."
ROTARY, SHARED = "transformer.rotary_pos_emb.inv_freq", "transformer.global_cond_embedder.0.weight"
CONDITIONERS, NUMBERED = "conditioner.conditioners.", ("0.weights", "1.weight", "1.bias")
# ComfyUI leaves out biases of norms, which are zero; what says numbers stands beside the model in an all-in-one file
CONVERT = table((r"^conditioner\.", None), (r"\.(cross_attend_norm|ff_norm|pre_norm)\.beta$", None))


def seconds(name):
    """Names of the tensors with which ComfyUI says a number of seconds to the model."""
    return tuple(f"{CONDITIONERS}{name}.embedder.embedding.{leaf}" for leaf in NUMBERED)


def positions(module, forward, rows, tokens, args, kwargs):
    """Of what stands in front, and of a patch of the sound. args: how many tokens there are here, with those."""
    whole = Cut((TokenArgument(0, ALL), None), lambda rows, args, kwargs: (
        [tokens.held("front") + rows.num_tokens, *args[1:]], kwargs))
    return whole(module, forward, rows, tokens, args, kwargs)


def projects_text(shapes):
    """Are text tokens made as wide as those of the sound?"""
    width, given = shapes["to_cond_embed.0.weight"]
    return width != given


def adapt_model(model, config):
    """Frequencies are the file's; until it is read, the class has what memory held."""
    rotary = model.transformer.rotary_pos_emb
    steps = torch.arange(len(rotary.inv_freq), device=rotary.inv_freq.device) / len(rotary.inv_freq)
    rotary.inv_freq = (10000.0 ** -steps).to(rotary.inv_freq.dtype)


PLAN = ModelPlan(
    blocks=(BlockList("transformer.layers", "transformer.layers.", "depth", returns=(ALL,), patched="double"),),
    streams={"x": ALL}, attention={"self_attn": ALL}, tokens={"rotary_pos_emb": (TokenArgument(0, ALL), None)},
    positions={"transformer.rotary_pos_emb.forward_from_seq_len": positions},
    cacheable={"cross_attn.to_kv": "run"}, cacheable_outside={"to_cond_embed": "run", "to_global_embed": "run"})
