"""What torch.compile makes of blocks: kernels of each kind of block as it is and as inductor's graph, and processor
seconds of a step, in turns on one CPU thread. A command; tables of its output are in docs/benchmarks.md.

    OMP_NUM_THREADS=1 python -m tests.programs.bench_compiled Flux.1 Wan --rounds 10
"""

import argparse
import re
import statistics
import time

import torch
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.model_zoo import CONFIGS, example
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.protocol.specs import ForwardOptions

# wide enough for products to count: what tiny models are made with
WIDER = {"Flux.1": {"num_attention_heads": 24, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}}
# calls in what inductor writes: of its own kernels, and of others'
GENERATED = re.compile(r"^\s+(?:cpp_fused\w*|kernel_cpp_\w+)\(", re.MULTILINE)
OTHERS = re.compile(r"extern_kernels\.\w+\(|torch\.ops\.\w+\.\w+(?:\.\w+)?\(|aten\.\w+\.\w+\(")
# operators that launch nothing
VIEWS = {"view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "split", "split_with_sizes",
         "chunk", "t", "unbind", "select", "as_strided", "detach", "_unsafe_view", "alias", "unflatten", "narrow"}


class Counted(TorchDispatchMode):
    """Counts operators that are no views."""

    num_kernels = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_kernels += function._schema.name.split("::")[1] not in VIEWS
        return function(*args, **(kwargs or {}))


def counted(kernels, forward):
    """The forward of a block, which notes how many kernels it launches."""
    def noting(*args, **kwargs):
        with Counted() as mode:
            output = forward(*args, **kwargs)
        kernels.append(mode.num_kernels)
        return output
    return noting


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+", choices=CONFIGS)
    parser.add_argument("--rounds", type=int, default=0, help="of steps that are timed")
    parser.add_argument("--size", type=int, default=48, help="rows and columns of the latent")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch._inductor.config.fx_graph_cache = False
    for name in options.families:
        measure(name, options)


def measure(name, options):
    """Print what there is to say of a family."""
    made = {"rows": options.size, "columns": options.size, "more": WIDER.get(name, {})}
    one, kernels = example(name, torch.float32, **made), []
    for list_ in one.family.plan.lists:
        for block in one.model.get_submodule(list_.name):
            block.forward = counted(kernels, block.forward)
    one.run()
    one = example(name, torch.float32, **made)
    loaded, seconds = one.loaded(Hooks(one.model, one.family.plan)), {"": [], "inductor": []}

    def step(backend):
        context = loaded.context(SINGLE, Traffic(), one.latent, one.timestep, one.conditioning,
                                 options=ForwardOptions(compile_backend=backend))
        started_s = time.process_time()
        output = loaded.hooks.run(context)[0]
        seconds[backend].append(time.process_time() - started_s)
        return output
    eager, started_s = step(""), time.perf_counter()
    compiled, graphs = run_and_get_code(step, "inductor")
    error, first_s = ((compiled - eager).norm() / eager.norm()).item(), time.perf_counter() - started_s
    in_graphs = [f"{len(GENERATED.findall(code))} + {len(OTHERS.findall(code))}" for code in graphs]
    print(f"{name}: blocks launch {', '.join(map(str, dict.fromkeys(kernels)))} kernels; graphs {', '.join(in_graphs)} "
          f"(their own + others'); first step {first_s:.0f} s; relative difference {error:.1e}")
    for times in seconds.values():
        times.clear()
    for _ in range(options.rounds):
        for backend in seconds:
            step(backend)
    for backend, times in seconds.items() if options.rounds else ():
        least, median, most = min(times), statistics.median(times), max(times)
        print(f"  {backend or 'as it is':10} {least:.3f} {median:.3f} {most:.3f} processor "
              f"seconds a step (least, median, most)")


if __name__ == "__main__":
    main()
