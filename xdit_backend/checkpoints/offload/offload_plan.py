"""The choice of resident and offloaded weights on a rank. The loader on each rank and the host compute it from the
WeightTable."""

import dataclasses

from ...planner.offload_cost import plan_offload
from .block_offload import aligned

SMALL = 1 / 1024               # of its block: smaller weights stay resident: launching a copy takes longer than it


def offload_plan(table, budget_bytes, blocks=None):
    """The OffloadPlan of a rank, as in plan_weights."""
    return plan_weights(table, budget_bytes, blocks)[0]


def plan_weights(table, budget_bytes, blocks=None):
    """(OffloadPlan of a rank, {name of an offloaded weight: its block}).

    table: a WeightTable. budget_bytes: device memory for weights. blocks: of this rank; None: all.
    """
    movable, extra_bytes = _by_block(table, blocks)
    sizes = {block: sum(weights.values()) for block, weights in movable.items()}
    plan = plan_offload(sizes, {block: table.block_costs[block] for block in sizes}, extra_bytes, budget_bytes)
    return plan, {name: block for block in plan.blocks for name in movable[block]}


def with_host_bytes(spec, table):
    """The spec with ModelSpec.host_bytes set. With stages each rank has weights of its own in any case."""
    if not spec.weights_memory or spec.stages is not None:
        return spec
    return dataclasses.replace(spec, host_bytes=unmapped_bytes(table, plan_weights(table, spec.weights_memory)[1]))


def unmapped_bytes(table, names):
    """Bytes of these weights that are stored differently from the file and thus need system RAM of their own."""
    return sum(aligned(table.num_bytes(weight)) for weight in table.weights
               if weight.name in names and not weight.is_mapped)


def _by_block(table, blocks):
    """({block: {name of a weight: its bytes}}, bytes of weights that are always resident)."""
    found, extra_bytes = {}, 0
    for weight in table.weights:
        if weight.block is None:
            extra_bytes += table.num_bytes(weight)
        elif blocks is None or weight.block in blocks:
            found.setdefault(weight.block, {})[weight.name] = table.num_bytes(weight)
    for weights in found.values():
        least = SMALL * sum(weights.values())
        extra_bytes += sum(weights.pop(name) for name in [name for name, size in weights.items() if size < least])
    return found, extra_bytes
