"""What torch.compile makes of a U-Net's blocks under displaced patches: kernels that the first rank launches in a stale
call, as its blocks are and as inductor's graphs. A command; a table of its output is in docs/benchmarks.md.

    OMP_NUM_THREADS=1 python -m tests.programs.bench_compiled_rows SDXL "SD 1.5"
"""

import argparse
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch._inductor.output_code import CompiledFxGraph
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from tests.programs.bench_compiled import GENERATED, OTHERS, Counted
from tests.support.model_zoo import UNETS, example
from xdit_backend.autoencoders.vae_family import replaced
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import build_mesh
from xdit_backend.hooks.unet import UNetHooks
from xdit_backend.parallel.displaced import StaleSplit
from xdit_backend.parallel.displaced_exchange import Exchange
from xdit_backend.partition import unet_blocks
from xdit_backend.protocol.op_registration import NAMESPACE
from xdit_backend.protocol.specs import ForwardOptions, Layout


class Launches:
    """Kernels of the call at hand."""

    def __init__(self):
        self.graphs, self.within, self.of_blocks = [], 0, []   # the second: of operators that graphs call

    def install(self, stack):
        """Note what inductor's graphs and operators launch, until the stack ends."""
        of_splits = {name: self._counted(getattr(StaleSplit, name)) for name in ("around", "change")}
        attend = self._counted(UNetHooks.attention_of_graph)
        for place, functions in ((CompiledFxGraph, {"__call__": self._noted(CompiledFxGraph.__call__)}),
                                 (StaleSplit, of_splits), (UNetHooks, {"attention_of_graph": attend})):
            stack.enter_context(replaced(place, **functions))

    def _noted(self, run):
        def noted(graph, *args):
            self.graphs.append(graph.source_code)
            return run(graph, *args)
        return noted

    def _counted(self, function):
        def counted(*args):
            with Counted() as mode:
                output = function(*args)
            self.within += mode.num_kernels
            return output
        return counted

    def of_block(self, name, forward, backend):
        """The forward of a block, which adds (kind, launches) to of_blocks: as numbers in words."""
        def noting(*args, **kwargs):
            self.graphs, self.within = [], 0
            if not backend():
                with Counted() as mode:
                    output = forward(*args, **kwargs)
                self.of_blocks.append((name, (mode.num_kernels,)))
                return output
            with _disable_current_modes():                     # under which nothing is compiled
                output = forward(*args, **kwargs)
            code, = self.graphs
            others = [call for call in OTHERS.findall(code) if f"ops.{NAMESPACE}." not in call]
            self.of_blocks.append((name, (len(GENERATED.findall(code)), len(others), self.within)))
            return output
        return noting


def measure(name, num_ranks, size):
    """Print what there is to say of a family."""
    mesh = build_mesh(Layout(displaced_degree=num_ranks), num_ranks)
    one, launches, backend = example(name, torch.float32, rows=size, columns=size), Launches(), [""]
    hooks = UNetHooks(one.model, one.family.plan)
    loaded = one.loaded(hooks, range(0))
    for path in unet_blocks(one.model):
        block = one.model.get_submodule(path)
        block.forward = launches.of_block(path, block.forward, lambda: backend[0])
    totals, blocks = {}, {}
    with ExitStack() as stack:
        launches.install(stack)
        for backend[0] in ("", "inductor"):
            exchange = Exchange(mesh.displaced_group, num_ranks, 0)
            for is_stale in (False, True, True):
                launches.of_blocks = []
                context = loaded.context(mesh, Traffic(), one.latent, one.timestep, one.conditioning, exchange=exchange,
                                         options=ForwardOptions(compile_backend=backend[0]))
                with Counted() as mode, exchange.call(context.traffic, is_stale, time=float(is_stale)):
                    hooks.run(context)
            blocks[backend[0]] = launches.of_blocks
            in_blocks = sum(sum(count) for _, count in launches.of_blocks)
            outside = mode.num_kernels - (0 if backend[0] else in_blocks)
            totals[backend[0]] = in_blocks + outside, in_blocks
    (eager, eager_in), (compiled, compiled_in) = totals.values()
    print(f"{name}, {len(blocks[''])} blocks, {num_ranks} ranks: a stale call launches {eager} kernels, {eager_in} of "
          f"them in blocks; compiled {compiled}, {compiled_in} in blocks")
    kinds = {}
    for (path, (before,)), (_, after) in zip(blocks[""], blocks["inductor"]):
        kind = "residual" if ".resnets." in path else "transformer"
        kinds.setdefault((kind, before, after), []).append(path)
    for (kind, before, (own, others, within)), paths in kinds.items():
        print(f"  {kind}: {before}; graph {own} + {others} + {within} within operators, "
              f"{(own + others + within) / before:.0%} ({len(paths)} blocks)")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+", choices=UNETS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", type=int, default=32, help="rows and columns of the latent")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch._inductor.config.fx_graph_cache = False
    dist.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
    for name in options.families:
        measure(name, options.ranks, options.size)


if __name__ == "__main__":
    main()
