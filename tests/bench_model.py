"""Time our MODEL with one worker against the native KSampler, in a real ComfyUI, each with one thread.

    XDIT_COMFYUI=FOLDER OMP_NUM_THREADS=1 python -m tests.bench_model [--steps 20] [--rounds 5]

Runs alternate; prints seconds of each, the medians and their ratio. The model is the demo's SD3 (depth 8, 44 M parameters).
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]     # our nodes/ would shadow ComfyUI's nodes.py
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as base:
        comfyui = ComfyUI(comfyui_folder(), base)
        native = comfyui.native("sd3", size="demo")
        ours = comfyui.ours("sd3", comfyui.config("cpu"), size="demo")
        seconds = {"native KSampler": [], "one worker": []}
        for _ in range(options.rounds + 1):                            # the first round warms up
            for name, model in (("native KSampler", native), ("one worker", ours)):
                started_s = time.perf_counter()
                comfyui.sample(model, "sd3", steps=options.steps, latent=comfyui.latent("sd3", size=(options.size, options.size)))
                seconds[name].append(time.perf_counter() - started_s)
        comfyui.groups.close()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:<16} {medians[name]:7.3f} s for {options.steps} steps   {' '.join(f'{value:.3f}' for value in values[1:])}")
    print(f"one worker takes {medians['one worker'] / medians['native KSampler']:.3f} of the native time")


if __name__ == "__main__":
    main()
