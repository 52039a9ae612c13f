"""What ComfyUI's nodes replace inside a model and we know the meaning of: named operations, which the workers carry out.

A node hands ComfyUI a function of its own. It is known by where it was written, and by what it does to a marker: a function that
does otherwise, or of another node, is refused (carried.py).
"""

import os

from ...xdit_backend.protocol.errors import UnsupportedError

# kind of ComfyUI's patch -> {(file, function): what it is called in messages.Branch}
KNOWN = {
    "dit": {("nodes_slg.py", "SkipLayerGuidanceDiT.execute.<locals>.skip"): "skip",
            ("nodes_slg.py", "SkipLayerGuidanceDiTSimple.execute.<locals>.skip"): "skip"},
    "attn1": {("nodes_pag.py", "PerturbedAttentionGuidance.execute.<locals>.perturbed_attention"): "values"}}


def operation_of(kind, function):
    """The name of what a function that replaces something of the kind does; None where it is not known."""
    code = getattr(function, "__code__", None)
    name = code and KNOWN.get(kind, {}).get((os.path.basename(code.co_filename), function.__qualname__))
    marker = object()
    does = {"skip": lambda: function(marker, None), "values": lambda: function(None, None, marker, None)}
    return name if name and does[name]() is marker else None


def operations_of(family, config, transformer_options):
    """{block, as ComfyUI calls it: operation} of a call, for the blocks that the model has: ComfyUI's models pass over the others too.

    Raises UnsupportedError where ComfyUI's model heeds no such patches at all.
    """
    found = {}
    for kind, replaced in transformer_options.get("patches_replace", {}).items():
        blocks = _blocks(family, config, kind)
        if replaced and not blocks:
            raise UnsupportedError(f"ComfyUI's {family.name} does not heed what a node replaces in this workflow ({kind}): it is for other "
                                   f"models, and would be dropped without notice. Remove the node (such as Skip Layer Guidance or "
                                   f"Perturbed-Attention Guidance).")
        for place, function in replaced.items():
            name = ".".join(map(str, place))
            if name in blocks:
                found[name] = operation_of(kind, function)
            elif family.by_rows:
                raise UnsupportedError(f"xDiT replaces attention in the middle block of {family.name} only, and a node does so in {name}. "
                                       f"Remove it, or use Load Diffusion Model.")
    return found


def _blocks(family, config, kind):
    """Names of the blocks in which patches of a kind replace something."""
    if family.by_rows:
        return {"middle.0"} if kind == "attn1" else set()
    return {f"{list_.patched}_block.{number}" for list_ in family.plan.blocks if list_.patched and kind == "dit"
            for number in range(config[list_.count])}
