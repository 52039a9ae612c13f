"""List the weights of a model on each rank: bytes that stay resident, bytes that are streamed, and bytes of the blocks.

MODEL is the name of a published model, or a safetensors or GGUF file or a diffusers folder, of which only the header is
read. The numbers are those by which the workers load, to the byte. Stages are balanced by cost, as on identical devices
with enough memory.
"""

import itertools

from ...checkpoints.offload.offload_plan import plan_weights
from ...config import ALL_ON_DEVICE, ParallelConfig, check_weights_memory
from ...planner.descriptions import describe_layout
from ...protocol.errors import ConfigError
from ...protocol.specs import Stages
from ..dry_run.simulated_rank import check_layout, own_blocks, table_of, world_size_of
from .size import parse_layout, subject_of

ELSE = "outside"


def add_arguments(parser):
    parser.add_argument("model", metavar="MODEL", help="a published model's name, or a file or folder")
    parser.add_argument("--layout", default="one", metavar="NAME",
                        help="one, or axes with degrees such as tensor2 or pipefusion2-ulysses2")
    parser.add_argument("--weight-dtype", metavar="TYPE",
                        help="type of the weights, as in Load xDiT Model (default: as in the file, or bf16)")
    parser.add_argument("--weights-memory", default=ALL_ON_DEVICE, metavar="GB",
                        help="resident weights per device, as in xDiT Parallel Config; the others are offloaded to "
                             "system RAM")
    parser.add_argument("--each", action="store_true", help="also list every weight")
    parser.set_defaults(size=None, frames=None, text=None, branches=None, patches=0)


def main(options):
    subject, layout = subject_of(options), parse_layout(options.layout)
    check_layout(subject.checkpoint, layout)
    check_weights_memory(options.weights_memory)
    budget_bytes = ParallelConfig(weights_memory=options.weights_memory).weights_memory_bytes
    if budget_bytes is None:
        raise ConfigError(f"Give --weights-memory a number of GB, or {ALL_ON_DEVICE}: "
                          f"{options.weights_memory} depends on a run.")
    stages = Stages(layout.pipefusion_degree, layout.stage_ranks) if layout.pipefusion_degree > 1 else None
    table = table_of(subject.checkpoint, subject.spec(stages, layout.tensor_degree))
    print("\n".join(lines(table, subject.checkpoint.family.name, layout, budget_bytes, options.each)))


def lines(table, title, layout, budget_bytes=0, each=False):
    """Lines of text about a WeightTable under a Layout. budget_bytes: of weights per device, with the buffers of
    streamed ones; 0: all. each: list every weight."""
    degree = table.spec.tensor_degree
    yield (f"{title}, {describe_layout(layout)}: {len(table.weights)} weights, {_gb(table.rank_bytes())} GB on a rank "
           f"with all {len(table.block_costs)} blocks")
    yield f"{'rank':>4} {'VRAM GB':>8} {'streamed GB':>12}  blocks"
    streamed = {}
    for rank in range(world_size_of(layout)):
        blocks = own_blocks(table, rank) if table.spec.stages is not None else None
        num_bytes, moved_bytes = table.rank_bytes(blocks, rank % degree), 0
        if budget_bytes:
            plan, streamed = plan_weights(table, budget_bytes, blocks)
            num_bytes, moved_bytes = plan.device_bytes, plan.offloaded_bytes
        yield (f"{rank:>4} {_gb(num_bytes):>8} {_gb(moved_bytes):>12}  "
               f"{_range(blocks) if blocks is not None else 'all'}")
    yield f"{'block':>9} {'GB each':>9}"
    for size, group in itertools.groupby(enumerate(table.block_bytes), key=lambda pair: pair[1]):
        numbers = [number for number, _ in group]
        yield f"{_range(numbers):>9} {_gb(size):>9}"
    yield f"{ELSE:>9} {_gb(table.outside_bytes):>9}"
    for weight in table.weights if each else ():
        split = weight.split
        yield (f"{weight.name}: {'x'.join(map(str, weight.shape)) or 'scalar'} "
               f"{str(weight.dtype).removeprefix('torch.')}, {table.num_bytes(weight):,} bytes, "
               f"{ELSE if weight.block is None else f'block {weight.block}'}, "
               f"{f'{split.how} shard of dim {split.dim}' if split is not None else 'replicated'}, "
               f"from {weight.file_name or 'several tensors or none'}{', mapped' if weight.is_mapped else ''}"
               f"{', streamed' if weight.name in streamed else ''}")


def _gb(num_bytes):
    return f"{num_bytes / 1e9:.3f}"


def _range(numbers):
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first}-{last}"
