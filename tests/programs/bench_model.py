"""Time our MODEL with one worker, and with two in layouts, against the native KSampler, in a real ComfyUI, each with
one thread.

    XDIT_COMFYUI=FOLDER OMP_NUM_THREADS=1 python -m tests.programs.bench_model [--steps 20] [--rounds 5] [--layouts cfg
    ulysses ring pipefusion "pipefusion whole"]

Runs alternate; prints seconds a step, times as fast as one worker, the first step beside the others
(not of PipeFusion, whose first step is whole), and processor seconds a step of all processes. The model is the demo's
SD3 (depth 8, 44 M parameters).
"""

import argparse
import statistics
import sys
import tempfile
import time

import torch

from tests.integration.conftest import ComfyUI
from tests.support.comfyui_server import ROOT, comfyui_folder
from xdit_backend.tools.bench.worker_groups import ProcessorTime

# PipeFusion with four patches and a step of warm-up, as the node has it and with the stages one after the other
LAYOUTS = {"cfg": {"cfg": 2}, "ulysses": {"ulysses": 2}, "ring": {"ring": 2}, "tensor": {"tensor": 2},
           "pipefusion": {"pipefusion": 2, "num_patches": 4, "warmup": "auto"},
           "pipefusion whole": {"pipefusion": 2, "num_patches": 4, "warmup": "whole"}}


def timed(comfyui, model, options):
    """(seconds a step, the first step over the median of the others or None, processor seconds a step) of a run."""
    processors, own_s, started_s = ProcessorTime(), time.process_time(), time.perf_counter()
    comfyui.sample(model, "sd3", steps=options.steps, latent=comfyui.latent("sd3", size=(options.size, options.size)))
    seconds, first = time.perf_counter() - started_s, None
    processor_s = processors.so_far_s() + time.process_time() - own_s
    run = comfyui.groups.runs.last
    if isinstance(model, comfyui.proxy.ProxyPatcher) and options.steps > 2 and not model.model.remote.uses_cache:
        ends_s = [run.began_s, *run.stepped_s]
        steps_s = [end_s - start_s for start_s, end_s in zip(ends_s, ends_s[1:])]
        first = steps_s[0] / statistics.median(steps_s[1:])
    return seconds / options.steps, first, processor_s / options.steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=48, help="rows and columns of the latent")
    parser.add_argument("--layouts", nargs="*", default=(), choices=LAYOUTS, help="of two workers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # our nodes/ would shadow ComfyUI's nodes.py
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as base:
        comfyui = ComfyUI(comfyui_folder(), base)
        models = {"native KSampler": comfyui.native("sd3", size="demo"),
                  "one worker": comfyui.ours("sd3", comfyui.config("cpu"), size="demo")}
        for name in options.layouts:
            models[name] = comfyui.ours("sd3", comfyui.config("cpu,cpu", **LAYOUTS[name]), size="demo")
        runs = {name: [] for name in models}
        for round_ in range(options.rounds + 1):                       # the first round warms up
            for name, model in models.items():
                runs[name].append(timed(comfyui, model, options))
            print(f"round {round_} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
        comfyui.groups.close()
    print(f"{'':<18} {'s/step: min':>12} {'median':>7} {'max':>7} {'times as fast':>14} {'first':>6} "
          f"{'processor s/step':>17}")
    alone_s = statistics.median(seconds for seconds, *_ in runs["one worker"][1:])
    for name, measured in runs.items():
        seconds, firsts, processors_s = zip(*measured[1:])
        first = "" if None in firsts else f"{statistics.median(firsts):.2f}"
        print(f"{name:<18} {min(seconds):>12.3f} {statistics.median(seconds):>7.3f} {max(seconds):>7.3f} "
              f"{alone_s / statistics.median(seconds):>14.2f} {first:>6} {statistics.median(processors_s):>17.3f}")


if __name__ == "__main__":
    main()
