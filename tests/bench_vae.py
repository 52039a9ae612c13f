"""Time Distributed VAE Decode against ComfyUI's VAE Decode and VAE Decode (Tiled), in a real ComfyUI, each with one thread.

    XDIT_COMFYUI=FOLDER OMP_NUM_THREADS=1 python -m tests.bench_vae [--size 512] [--workers 1 2] [--rounds 3]

Runs alternate; prints the median seconds of each, and how far its picture is from VAE Decode's in parts of 255.
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
    parser.add_argument("--size", type=int, default=512, help="pixels a side (default 512)")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]     # our nodes/ would shadow ComfyUI's nodes.py
    samples = {"samples": torch.randn(1, 4, options.size // 8, options.size // 8, generator=torch.Generator().manual_seed(0))}
    for count in options.workers:                                      # one group of workers runs at a time
        with tempfile.TemporaryDirectory(prefix="xdit-bench-") as base:
            comfyui = ComfyUI(comfyui_folder(), base)
            vae = comfyui.nodes.VAELoader().load_vae(comfyui.file("vae-sd", "vae"))[0]
            config = comfyui.config(",".join(["cpu"] * count))
            ways = {
                "VAE Decode": lambda: comfyui.nodes.VAEDecode().decode(vae, samples)[0],
                "VAE Decode (Tiled)": lambda: comfyui.nodes.VAEDecodeTiled().decode(vae, samples, 256, 64)[0],
                f"{count} workers": lambda: comfyui.vae_decode.execute(samples, vae, config).args[0],
            }
            print_medians(*measure(ways, options.rounds))
            comfyui.groups.close()


def measure(ways, rounds):
    seconds, pictures = {name: [] for name in ways}, {}
    for _ in range(rounds + 1):                                        # the first round warms up
        for name, decode in ways.items():
            started_s = time.perf_counter()
            with torch.inference_mode():
                pictures[name] = decode()
            seconds[name].append(time.perf_counter() - started_s)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}, pictures


def print_medians(medians, pictures):
    exact = pictures["VAE Decode"]
    for name, median_s in medians.items():
        difference = (pictures[name] - exact).abs().max() * 255
        print(f"{name:<20} {median_s:7.3f} s   {medians['VAE Decode'] / median_s:5.2f}x   off by {difference:6.2f} of 255 at most", flush=True)


if __name__ == "__main__":
    main()
