"""What the cost model needs to know of a family's model, derived from its config and its modules' shapes."""

import torch

from ..forecast.cost import Net
from .transformer import build

OF_TEXT = ("attn2.to_k", "attn2.to_v")                         # cross-attention's, which image tokens do not pass


def net_of(family, config):
    """The Net of a model with this config of diffusers; no weights are made."""
    from accelerate import init_empty_weights
    with init_empty_weights():
        model = build(family, config)
    blocks = [(list_.image_share, block) for list_ in family.plan.blocks for block in model.get_submodule(list_.name)]
    width, num_blocks = family.width(model.config), len(blocks)
    elements = sum(share * _matrix_elements(block, family.plan.once) for share, block in blocks) / num_blocks
    heads = family.num_heads(model.config)
    joint = any("text" in streams for streams in family.plan.attention.values())
    return Net(blocks=num_blocks, width=width, heads=heads, elements=elements / width ** 2,
               parameters=sum(parameter.numel() for parameter in model.parameters()), joint=joint,
               key_heads=model.config.get("num_kv_heads") or heads, skips=bool(family.plan.skips(num_blocks)), text_once=True)


def _matrix_elements(block, once):
    """Elements of the matrices that every token passes: those that run once a step or run, or on text, are left out."""
    return sum(module.weight.numel() for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)
               and not any(name == part or name.startswith(f"{part}.") for part in (*once, *OF_TEXT)))
