"""Shared code of Stable Audio Open and Stable Audio 3, which use one class of ComfyUI's: audio as one row of tokens
after a few conditioning tokens in front."""

import torch

from .inputs import PaddedByModel
from .key_mapping import table
from .plan import BlockList, ModelPlan, TokenArgument
from .position_slicing import Cut
from .tp_plan import COLWISE, ROWWISE, Fused, into, parent_of

LATENT, ALL = PaddedByModel((1,)), ("front", "image")
NATIVE, LAYER = "comfy.ldm.audio.dit:AudioDiffusionTransformer", "transformer.layers.0."
ROTARY, SHARED = "transformer.rotary_pos_emb.inv_freq", "transformer.global_cond_embedder.0.weight"
CONDITIONERS, NUMBERED = "conditioner.conditioners.", ("0.weights", "1.weight", "1.bias")
# ComfyUI drops the biases of norms, which are zero, and the number conditioners, which an all-in-one file has outside
# the diffusion model
CONVERT = table((r"^conditioner\.", None), (r"\.(cross_attend_norm|ff_norm|pre_norm)\.beta$", None))


def seconds(name):
    """Names of the tensors with which ComfyUI embeds a number of seconds."""
    return tuple(f"{CONDITIONERS}{name}.embedder.embedding.{leaf}" for leaf in NUMBERED)


def positions(module, forward, rows, tokens, args, kwargs):
    """Positions of the tokens in front and of a patch of the audio. args: the number of tokens here, including those
    in front."""
    cut = Cut((TokenArgument(0, ALL), None), lambda rows, args, kwargs: (
        [tokens.held("front") + rows.num_tokens, *args[1:]], kwargs))
    return cut(module, forward, rows, tokens, args, kwargs)


def projects_text(shapes):
    """Whether the model projects text tokens to the width of the audio tokens."""
    width, text_width = shapes["to_cond_embed.0.weight"]
    return width != text_width


def adapt_model(model, config):
    """Initialise the rotary frequencies, which the class leaves uninitialised until the file's are loaded."""
    rotary = model.transformer.rotary_pos_emb
    steps = torch.arange(len(rotary.inv_freq), device=rotary.inv_freq.device) / len(rotary.inv_freq)
    rotary.inv_freq = (10000.0 ** -steps).to(rotary.inv_freq.dtype)


def _fused(plain, differential):
    """Fused layers of an attention. differential: number of them if it subtracts an attention with queries and keys of
    its own."""
    def split(block, path, linear):
        count = differential if getattr(parent_of(block, path), "differential", False) else plain
        return (linear.out_features // count,) * count
    return Fused(COLWISE, split)


TP_PLAN = {"*_attn.to_q": _fused(1, 2), "*_attn.to_kv": _fused(2, 3), "*_attn.to_qkv": _fused(3, 5),
           "ff.ff.0.proj": into("ff.0.proj", "ff.2"), "ff.ff.2": ROWWISE}
PLAN = ModelPlan(
    blocks=(BlockList("transformer.layers", "transformer.layers.", "depth", returns=(ALL,), patched="double"),),
    streams={"x": ALL}, attention={"self_attn": ALL}, tokens={"rotary_pos_emb": (TokenArgument(0, ALL), None)},
    positions={"transformer.rotary_pos_emb.forward_from_seq_len": positions},
    tp_plan=TP_PLAN,
    cacheable={"cross_attn.to_kv": "run"}, cacheable_outside={"to_cond_embed": "run", "to_global_embed": "run"})
