"""Which weights of a model a rank's device holds, and which come from host memory. Asked by the loader on each rank,
and by the host beforehand: both have the model on the meta device.
"""

from ..forecast.offloading import plan_offload
from .transformer import block_sizes, held

SMALL = 1 / 1024               # of its block: such a weight stays, since a copy takes longer to ask for than to make


def plan_weights(model, family, spec, splits, budget_bytes, blocks=None):
    """(the OffloadPlan of a rank, {name of a weight that comes from host memory: its block}).

    model: on the meta device, as it is held; a U-Net's all stays. splits: of spec.tensor_degree. budget_bytes: of the
    device, that weights may take. blocks: of this rank; None: all.
    """
    movable, beside_bytes = _by_block(model, family, spec, splits, blocks)
    costs = [size * share for size, share in block_sizes(model, family)] if movable else []
    sizes = {block: sum(weights.values()) for block, weights in movable.items()}
    plan = plan_offload(sizes, {block: costs[block] for block in sizes}, beside_bytes, budget_bytes)
    return plan, {name: block for block in plan.blocks for name in movable[block]}


def _by_block(model, family, spec, splits, blocks):
    """({block: {name of a weight: its bytes}}, bytes of what stays on the device in any case)."""
    found, beside_bytes, block_of = {}, 0, _places(model, family)
    for name, tensor, dtype in held(model, family, spec):
        block = block_of.get(".".join(name.split(".")[:2]))
        if block is not None and blocks is not None and block not in blocks:
            continue
        share = splits[name].share(spec.tensor_degree) if name in splits else 1
        size = round(tensor.numel() * dtype.itemsize * share)
        if block is None or name.startswith(family.plan.outside):
            beside_bytes += size
        else:
            found.setdefault(block, {})[name] = size
    for weights in found.values():
        least = SMALL * sum(weights.values())
        beside_bytes += sum(weights.pop(name) for name in [name for name, size in weights.items() if size < least])
    return found, beside_bytes


def _places(model, family):
    """{how the names of a block's weights begin: its index over all lists of the plan}"""
    if family.is_unet:
        return {}
    blocks = [[f"{each}.{number}" for each in list_.names] for list_ in family.blocks
              for number in range(len(model.get_submodule(list_.name)))]
    return {name: index for index, names in enumerate(blocks) for name in names}
