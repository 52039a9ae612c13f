"""Baseline for bench vae: ComfyUI's VAE Decode, full or tiled, in its own process, with one decode per line on stdin.

It imports all of ComfyUI, and so runs neither in the host nor in a worker.
"""

import json
import sys
import time

import torch
from safetensors.torch import load_file, save_file


def main(job):
    """Read lines {"latent": file, "tile": pixels or None, "image": file} and print the seconds of each decode."""
    sys.path[:] = [job["comfyui"], *(path for path in sys.path if path)]
    sys.argv = [sys.argv[0], *([] if job["cuda"] else ["--cpu"])]
    import comfy.options
    comfy.options.enable_args_parsing()
    import comfy.sd
    torch.set_grad_enabled(False)
    vae = comfy.sd.VAE(sd=load_file(job["weights"]), dtype=getattr(torch, job["dtype"]))
    for line in sys.stdin:
        requested = json.loads(line)
        latent, tile = load_file(requested["latent"])["latent"], requested["tile"]
        started_s = time.perf_counter()
        if tile is None:
            image = vae.decode(latent)
        else:
            image = vae.decode_tiled(latent, tile_x=tile // 8, tile_y=tile // 8, overlap=tile // 32)
        elapsed_s = time.perf_counter() - started_s
        save_file({"image": image.float().cpu().contiguous()}, requested["image"])
        print(elapsed_s, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
