"""Time of block-sparse attention, as a fraction of dense attention: `python -m tests.programs.bench_sparse`.

CPU workers joined by gloo, one thread each. Dense and sparse calls alternate; the times are the least CPU time of the
process over the repetitions, so that other processes count little. docs/benchmarks.md has the results.
"""

import argparse
import statistics
import time

import torch

from tests.support.ranks import run_ranks
from xdit_backend.attention.block_sparse import BlockLayout, SparseAttention
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import build_mesh
from xdit_backend.parallel.sequence_parallel import Attention, usp_attention
from xdit_backend.protocol.specs import Layout

LAYOUTS = {"one": Layout(), "ulysses2": Layout(ulysses_degree=2), "ring2": Layout(ring_degree=2)}


def times(rank, world_size, layout, options):
    """[(CPU seconds of dense attention, of sparse attention)] of each repetition; fraction of selected blocks."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(rank)
    mesh, size = build_mesh(layout, world_size), options.tokens // world_size
    # neighbouring tokens resemble each other, as those of videos do
    q, k, v = (torch.randn(1, options.heads, size, options.head_size, generator=generator)
               + torch.randn(1, options.heads, size // 64, options.head_size, generator=generator).repeat_interleave(
                   64, 2) for _ in range(3))
    of_ring = options.tokens // layout.ring_degree
    layouts = tuple(BlockLayout(((start, of_ring),)) for start in range(0, options.tokens, of_ring))
    # a block of queries also selects itself and its neighbours
    kept, neighbours = 1 - options.sparsity / 100, 3 * 64 / options.tokens
    sparse = SparseAttention(options.method, options.tau, (kept - neighbours) / (1 - neighbours), layouts, layouts)
    selected = []
    select = SparseAttention.select
    SparseAttention.select = lambda self, *arguments: noted(select(self, *arguments), selected)
    found = []
    for _ in range(options.repetitions):
        seconds = []
        for of in (None, sparse):
            torch.distributed.barrier()
            start = time.process_time()
            usp_attention(q, k, v, Attention([size] * world_size, sparse=of), mesh, Traffic())
            seconds.append(time.process_time() - start)
        found.append(seconds)
    return found, statistics.mean(selected)


def noted(result, selected):
    selected.append(result[1].float().mean().item())
    return result


def main():
    from tests.programs import bench_sparse  # ranks import it by this name
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--method", default="sla", choices=("sla", "sol-attn"))
    parser.add_argument("--sparsity", type=float, default=75.0, help="percentage of blocks that sla leaves out")
    parser.add_argument("--tau", type=float, default=0.7, help="threshold of sol-attn")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    options = parser.parse_args()
    print("| layout | dense, CPU s | sparse, CPU s | fraction | blocks selected |\n| --- | --- | --- | --- | --- |")
    for name in options.layouts:
        layout = LAYOUTS[name]
        ranks = run_ranks(bench_sparse.times, layout.ring_degree * layout.ulysses_degree, layout, options)
        dense, sparse = (statistics.mean(min(seconds[index] for seconds in found) for found, _ in ranks)
                         for index in (0, 1))
        selected = statistics.mean(fraction for _, fraction in ranks)
        print(f"| {name} | {dense:.2f} | {sparse:.2f} | {sparse / dense:.2f} | {selected:.0%} |", flush=True)


if __name__ == "__main__":
    main()
