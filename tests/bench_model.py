"""Time our MODEL with one worker, and with two in layouts, against the native KSampler, in a real ComfyUI, each with
one thread.

    XDIT_COMFYUI=FOLDER OMP_NUM_THREADS=1 python -m tests.bench_model [--steps 20] [--rounds 5] [--layouts cfg ulysses
    ring pipefusion]

Runs alternate; prints seconds of each, the medians and their ratios. The model is the demo's SD3 (depth 8, 44 M
parameters).
"""

import argparse
import statistics
import sys
import tempfile
import time

import torch

from tests.comfyui_server import ROOT, comfyui_folder
from tests.nodes.conftest import ComfyUI


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=48, help="rows and columns of the latent")
    parser.add_argument("--layouts", nargs="*", default=(), choices=("cfg", "ulysses", "ring", "pipefusion", "tensor"),
                        help="of two workers; PipeFusion with four patches and a step of warm-up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # our nodes/ would shadow ComfyUI's nodes.py
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as base:
        comfyui = ComfyUI(comfyui_folder(), base)
        native = comfyui.native("sd3", size="demo")
        ours = comfyui.ours("sd3", comfyui.config("cpu"), size="demo")
        models = {"native KSampler": native, "one worker": ours}
        for method in options.layouts:
            config = comfyui.config("cpu,cpu", **{method: 2}, **({"num_patches": 4} if method == "pipefusion" else {}))
            models[f"{method} 2"] = comfyui.ours("sd3", config, size="demo")
        seconds = {name: [] for name in models}
        for _ in range(options.rounds + 1):                            # the first round warms up
            for name, model in models.items():
                started_s = time.perf_counter()
                comfyui.sample(model, "sd3", steps=options.steps,
                               latent=comfyui.latent("sd3", size=(options.size, options.size)))
                seconds[name].append(time.perf_counter() - started_s)
        comfyui.groups.close()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:<16} {medians[name]:7.3f} s for {options.steps} steps   "
              f"{' '.join(f'{value:.3f}' for value in values[1:])}")
    print(f"one worker takes {medians['one worker'] / medians['native KSampler']:.3f} of the native time")
    for method in options.layouts:
        print(f"{method} 2 is {medians['one worker'] / medians[f'{method} 2']:.2f} times as fast as one worker")


if __name__ == "__main__":
    main()
