"""Tensor-parallel plans: the style in which each linear layer of a block is sharded, by the pattern of its path.

A plan is {pattern: style}, as in transformers: {"attn.to_q": "colwise"}. A pattern is a path in the block, in which `*`
stands for any characters of a name; of several patterns that match a path, the last applies. A layer that no pattern
matches is an error, so that no layer is replicated by oversight.

- "colwise": outputs are sharded.
- "rowwise": inputs are sharded, and results are summed by an all-reduce. Only the first rank has the bias.
- "colwise_gather_output": outputs are sharded and all-gathered; for layers that see a timestep or pooled text but no
  tokens, to save memory for weights.
- "replicated": every rank has the layer.

A `Fused` layer consists of several, each of which is sharded by itself.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

COLWISE, ROWWISE, GATHERED, REPLICATED = "colwise", "rowwise", "colwise_gather_output", "replicated"


@dataclass(frozen=True)
class Fused:
    """Style of a layer that consists of several.

    split(block, path, linear): their sizes along the sharded dim, which add up to the layer's. path: of the linear in
    the block.
    """

    style: str
    split: Callable


def styled(style, *patterns):
    """{pattern: style}"""
    return dict.fromkeys(patterns, style)


def parent_of(block, path):
    """The module that holds a layer."""
    return block.get_submodule(path.rpartition(".")[0])


def into(name, following):
    """Fused layers of a gated feed-forward, `name`, each as wide as the inputs of the layer after them; a single one
    without a gate."""
    def split(block, path, linear):
        width = block.get_submodule(path.removesuffix(name) + following).in_features
        return (width,) * (linear.out_features // width)
    return Fused(COLWISE, split)


def _by_heads(block, path, linear):
    module = parent_of(block, path)
    heads = getattr(module, "n_local_heads", 1)
    counts = (heads, *(getattr(module, "n_local_kv_heads", heads),) * 2)
    return tuple(linear.out_features // sum(counts) * count for count in counts)


def _mlp_width(block):
    return getattr(block, "mlp_hidden_dim", block.proj_mlp.out_features)


# queries, keys and values, with equal or fewer key and value heads
QKV = Fused(COLWISE, _by_heads)
# attention and feed-forward of a block that end in one layer (Flux.1)
PARALLEL_MLP = {
    "proj_mlp": Fused(COLWISE, lambda block, path, linear:
                      (_mlp_width(block),) * (linear.out_features // _mlp_width(block))),
    "proj_out": Fused(ROWWISE, lambda block, path, linear: (linear.in_features - _mlp_width(block), _mlp_width(block)))}
# names of diffusers, and of the language models of transformers
DEFAULT_TP_PLAN = (
    # attention
    styled(COLWISE, *(f"{attention}.{name}" for attention in ("*attn*", "*attention") for name in (
        "to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "q_proj", "k_proj", "v_proj")))
    | styled(ROWWISE, *(f"{attention}.{name}" for attention in ("*attn*", "*attention") for name in (
        "to_out", "to_out.0", "to_add_out", "o_proj")))
    # feed-forward
    | {"*.net.0.proj": into("net.0.proj", "net.2"), "*.net.2": ROWWISE}
    | styled(COLWISE, "*feed_forward.w1", "*feed_forward.w3", "*feed_forward.linear_1", "*feed_forward.linear_3",
             "mlp.gate_proj", "mlp.up_proj")
    | styled(ROWWISE, "*feed_forward.w2", "*feed_forward.linear_2", "mlp.down_proj")
    # modulation
    | styled(GATHERED, "*norm*.linear", "*norm*.linear_1", "*norm*.linear_2", "*_mod.1", "adaLN_modulation.*"))


def find_style(tp_plan, path):
    """The style of a layer by its path in the block, from a family's plan or else from the default; None: no pattern
    matches."""
    patterns = (*reversed(tp_plan.items()), *reversed(DEFAULT_TP_PLAN.items()))
    return next((style for pattern, style in patterns if _regex(pattern).fullmatch(path)), None)


@functools.cache
def _regex(pattern):
    return re.compile(re.escape(pattern).replace(r"\*", "[^.]*"))
