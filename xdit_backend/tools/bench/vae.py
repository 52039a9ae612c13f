"""Time Distributed VAE Decode on 1, 2 and 4 workers at several sizes, and measure the memory of a rank.

A random autoencoder with Stable Diffusion's structure is decoded by real worker groups, in rounds that run every group
once, and by ComfyUI's VAE Decode and VAE Decode (Tiled) if ComfyUI is found. Peaks are measured in a separate decode,
since counting takes time.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...autoencoders.kl import kl_config
from ...host.autoencoders import Autoencoder
from ...host.torchrun import ROOT
from ...parallel.vae_memory import need_of
from ...protocol.errors import ConfigError
from .baseline import Peer
from .worker_groups import count_cuda, start_clients

LEVELS = (1, 2, 4, 4)                      # SD's channel multipliers
RESNETS = 3                                # per level of a decoder
MB = 2 ** 20


def add_arguments(parser):
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 512],
                        help="width and height in pixels, multiples of 8")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4], help="numbers of workers")
    parser.add_argument("--width", type=int, default=64, help="channels at full size, a multiple of 32 (SD has 128)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: CUDA if available")
    parser.add_argument("--threads", type=int, default=1, help="threads of a CPU worker")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and results")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each of which runs everything once")
    parser.add_argument("--tile", type=int, default=256, help="tile size of VAE Decode (Tiled) in pixels")
    parser.add_argument("--comfyui", metavar="FOLDER", default=find_comfyui(),
                        help="the ComfyUI to compare with: XDIT_COMFYUI, the one that start.py fetched, or the one "
                             "around this pack")


def find_comfyui():
    """The folder of a ComfyUI's main.py, or None."""
    inputs = os.environ.get("XDIT_COMFYUI")
    folders = [Path(inputs).absolute()] if inputs else [ROOT / ".host" / "ComfyUI", ROOT.parent.parent]
    return next((str(folder) for folder in folders if (folder / "main.py").is_file()), None)


def main(options):
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(1)
    num_cuda = count_cuda(options.device)
    if any(size % 8 for size in options.sizes) or options.width % 32:
        raise ConfigError(f"Use multiples of 8 for --sizes and of 32 for --width: they are {options.sizes} and "
                          f"{options.width}.")
    tensors = random_decoder(options.width)
    where = (f"{num_cuda} CUDA devices"
             if num_cuda else f"CPU workers of {options.threads} thread(s), {os.cpu_count()} cores")
    print(f"AutoencoderKL of Stable Diffusion's structure, width {options.width}, {options.dtype}; {where}; torch "
          f"{torch.__version__}; medians of {options.rounds} rounds", flush=True)
    print(f"{'pixels':>12} {'workers':>11} {'s':>8} {'ratio':>7} {'CPU s/rank':>11} {'peak MB/rank':>13} "
          f"{'formula MB':>11} {'of one':>7} {'sent MB/rank':>13} {'off':>8}")
    clients, peer = {}, None
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as folder:
        try:
            clients = start_clients(options.workers, num_cuda)
            if options.comfyui:
                save_file(tensors, f"{folder}/vae.safetensors")
                job = {"comfyui": options.comfyui, "cuda": bool(num_cuda), "weights": f"{folder}/vae.safetensors",
                       "dtype": options.dtype}
                peer = Peer("baseline_comfyui", job, options.threads)
            for size in options.sizes:
                print_size(size, *measure(tensors, size, clients, peer, folder, options),
                           meta_vae(tensors, options.dtype))
        finally:
            for other in (*clients.values(), *([peer] if peer else [])):
                other.close()
    print("ratio and of one: relative to the first number of workers. formula: the same decode on the meta device, for "
          "the busiest\nrank. CPU s/rank: CPU time of a worker, unaffected by other load. off: largest difference from "
          "ComfyUI's VAE Decode, in\nunits of 1/255; without ComfyUI, from the first row.")


def measure(tensors, size, clients, peer, folder, options):
    """({number of workers: (seconds; CPU seconds and peak bytes of the busiest rank; bytes it sent; the image)}, {node
    of ComfyUI: (seconds, the image)})."""
    latent = torch.randn(1, 4, size // 8, size // 8, generator=torch.Generator().manual_seed(0))
    seconds, cpu_seconds, results = {count: [] for count in clients}, {count: [] for count in clients}, {}
    ways = {"VAE Decode": None, f"tiled {options.tile}": options.tile} if peer else {}
    save_file({"latent": latent}, f"{folder}/latent.safetensors")

    def decode(client, **more):
        vae = Autoencoder("bench", options.dtype, lambda: tensors)
        return client.autoencoders.decode(vae, latent, (1, size, size, 3), **more)

    for round_ in range(options.rounds + 1):                           # the first one warms up
        for count, client in clients.items():
            started_s = time.perf_counter()
            decode(client)
            seconds[count].append(time.perf_counter() - started_s)
            cpu_seconds[count].append(max(numbers["cpu_s"] for numbers in client.autoencoders.last_numbers.values()))
        for way, tile in ways.items():
            requested = {"latent": f"{folder}/latent.safetensors", "tile": tile, "image": f"{folder}/{way}.safetensors"}
            seconds.setdefault(way, []).append(peer.step(json.dumps(requested)))
        print(f"{size} px: round {round_} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
    median = {key: statistics.median(values[1:]) for key, values in seconds.items()}
    for count, client in clients.items():
        image = decode(client, measure_memory=True)
        ranks = client.autoencoders.last_numbers.values()
        results[count] = (median[count], statistics.median(cpu_seconds[count][1:]),
                          max(numbers["peak_bytes"] for numbers in ranks),
                          max(numbers["sent_bytes"] for numbers in ranks), image)
    return results, {way: (median[way], load_file(f"{folder}/{way}.safetensors")["image"]) for way in ways}


def print_size(size, results, theirs, meta_vae):
    first_s, _, first_bytes, _, first_image = next(iter(results.values()))
    exact = theirs["VAE Decode"][1] if theirs else first_image

    def off(image):
        return f"{255 * (image - exact).abs().max().item():>8.4f}"

    for count, (seconds, cpu_s, peak_bytes, sent_bytes, image) in results.items():
        formula = need_of(meta_vae, (1, 4, size // 8, size // 8), 1, count, unblocked=count == 1).peak_bytes
        print(f"{f'{size} x {size}':>12} {count:>11} {seconds:>8.3f} {first_s / seconds:>6.2f}x {cpu_s:>11.3f} "
              f"{peak_bytes / MB:>13.1f} {formula / MB:>11.1f} {peak_bytes / first_bytes:>7.2f} "
              f"{sent_bytes / MB:>13.2f} {off(image)}", flush=True)
        assert (image - first_image).abs().max() <= 1 / 255, f"{count} workers give a different image"
    for way, (seconds, image) in theirs.items():
        print(f"{f'{size} x {size}':>12} {way:>11} {seconds:>8.3f} {first_s / seconds:>6.2f}x {'':>47} {off(image)}",
              flush=True)


def meta_vae(tensors, dtype):
    """The autoencoder on the meta device, in the dtype of the decode."""
    from diffusers import AutoencoderKL
    with torch.device("meta"):
        vae = AutoencoderKL(**kl_config({name: tuple(tensor.shape) for name, tensor in tensors.items()}))
    return torch.nn.Module.to(vae, getattr(torch, dtype)).eval()


def random_decoder(width):
    """A decoder's tensors under LDM's names, as in ComfyUI's VAE object."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}

    def add(name, *shape):
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * torch.Size(shape[1:]).numel() ** -0.5
        tensors[f"{name}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)

    def add_norm(name, channels):
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = torch.ones(channels), torch.zeros(channels)

    def add_resnet(name, inputs, channels):
        add_norm(f"{name}.norm1", inputs), add(f"{name}.conv1", channels, inputs, 3, 3)
        add_norm(f"{name}.norm2", channels), add(f"{name}.conv2", channels, channels, 3, 3)
        if inputs != channels:
            add(f"{name}.nin_shortcut", channels, inputs, 1, 1)

    channels = width * LEVELS[-1]
    add("post_quant_conv", 4, 4, 1, 1)
    add("decoder.conv_in", channels, 4, 3, 3)
    for block in (1, 2):
        add_resnet(f"decoder.mid.block_{block}", channels, channels)
    add_norm("decoder.mid.attn_1.norm", channels)
    for name in ("q", "k", "v", "proj_out"):
        add(f"decoder.mid.attn_1.{name}", channels, channels, 1, 1)
    for level in reversed(range(len(LEVELS))):
        for block in range(RESNETS):
            add_resnet(f"decoder.up.{level}.block.{block}", channels, width * LEVELS[level])
            channels = width * LEVELS[level]
        if level:
            add(f"decoder.up.{level}.upsample.conv", channels, channels, 3, 3)
    add_norm("decoder.norm_out", channels)
    add("decoder.conv_out", 3, channels, 3, 3)
    return tensors
