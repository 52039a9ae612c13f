"""Time Distributed VAE Decode on 1, 2 and 4 workers at several sizes, and measure what memory a rank needs.

A random autoencoder of Stable Diffusion's structure is decoded by real worker groups, in rounds that run every group once.
Peaks are measured in a decode of their own, since counting takes time.
"""

import os
import statistics
import sys
import time

import torch

from .checkpoints.vae_families import autoencoder_kl_config
from .config import resolve_devices
from .host.client import Client
from .parallel.vae_memory import need_of
from .protocol.errors import ConfigError

LEVELS = (1, 2, 4, 4)                      # SD's widths, as multiples
RESNETS = 3                                # of a decoder's level
MB = 2 ** 20


def add_arguments(parser):
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 512], help="pixels a side, multiples of 8 (default 256 512)")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=64, help="channels at full size, a multiple of 32 (default 64; SD has 128)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="threads of a CPU worker (default 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)


def main(options):
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(1)
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() and options.device != "cpu" else 0
    if any(size % 8 for size in options.sizes) or options.width % 32:
        raise ConfigError(f"--sizes {options.sizes} must be multiples of 8 and --width {options.width} of 32.")
    tensors = random_decoder(options.width)
    place = f"{num_cuda} CUDA devices" if num_cuda else f"CPU workers of {options.threads} thread(s), {os.cpu_count()} cores"
    print(f"AutoencoderKL of Stable Diffusion's structure, width {options.width}, {options.dtype}; {place}; torch "
          f"{torch.__version__}; medians of {options.rounds} rounds", flush=True)
    print(f"{'pixels':>12} {'workers':>8} {'s':>8} {'ratio':>7} {'CPU s/rank':>11} {'peak MB/rank':>13} {'formula MB':>11} {'of one':>7} {'sent MB/rank':>13}")
    clients = {}
    try:
        for count in options.workers:
            names = ",".join(f"cuda:{index % num_cuda}" if num_cuda else "cpu" for index in range(count))
            clients[count] = Client(resolve_devices(names, num_cuda))
        for size in options.sizes:
            print_size(size, measure(tensors, size, clients, options), outline(tensors, options.dtype))
    finally:
        for client in clients.values():
            client.close()
    print("ratio and of one: to the first number of workers. formula: the same decode on the meta device, for the busiest rank.\n"
          "CPU s/rank: what a worker's processor did, whatever else the machine did at the time.")


def measure(tensors, size, clients, options):
    """{number of workers: (seconds, processor seconds and peak bytes of the busiest rank, bytes it sent, the picture)}"""
    latent = torch.randn(1, 4, size // 8, size // 8, generator=torch.Generator().manual_seed(0))
    seconds, cpu_seconds, results = {count: [] for count in clients}, {count: [] for count in clients}, {}

    def decode(client, **more):
        return client.decode("bench", options.dtype, lambda: tensors, latent, (1, size, size, 3), **more)

    for round_ in range(options.rounds + 1):                           # the first one warms up
        for count, client in clients.items():
            started_s = time.perf_counter()
            decode(client)
            seconds[count].append(time.perf_counter() - started_s)
            cpu_seconds[count].append(max(numbers["cpu_s"] for numbers in client.last_numbers.values()))
        print(f"{size} px: round {round_} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
    for count, client in clients.items():
        picture = decode(client, measure_memory=True)
        ranks = client.last_numbers.values()
        results[count] = (statistics.median(seconds[count][1:]), statistics.median(cpu_seconds[count][1:]),
                          max(numbers["peak_bytes"] for numbers in ranks), max(numbers["sent_bytes"] for numbers in ranks), picture)
    return results


def print_size(size, results, outline):
    first_s, _, first_bytes, _, first_picture = next(iter(results.values()))
    for count, (seconds, cpu_s, peak_bytes, sent_bytes, picture) in results.items():
        formula = need_of(outline, (1, 4, size // 8, size // 8), 1, count, whole=count == 1).peak_bytes
        print(f"{f'{size} x {size}':>12} {count:>8} {seconds:>8.3f} {first_s / seconds:>6.2f}x {cpu_s:>11.3f} {peak_bytes / MB:>13.1f} "
              f"{formula / MB:>11.1f} {peak_bytes / first_bytes:>7.2f} {sent_bytes / MB:>13.2f}", flush=True)
        assert (picture - first_picture).abs().max() <= 1 / 255, f"{count} workers give another picture"


def outline(tensors, dtype):
    """The autoencoder without bytes, in the dtype of the decode."""
    from diffusers import AutoencoderKL
    with torch.device("meta"):
        vae = AutoencoderKL(**autoencoder_kl_config({name: tuple(tensor.shape) for name, tensor in tensors.items()}))
    return torch.nn.Module.to(vae, getattr(torch, dtype)).eval()


def random_decoder(width):
    """A decoder's tensors under LDM's names, as ComfyUI's VAE object has them."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}

    def add(name, *shape):
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * torch.Size(shape[1:]).numel() ** -0.5
        tensors[f"{name}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)

    def add_norm(name, channels):
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = torch.ones(channels), torch.zeros(channels)

    def add_resnet(name, given, channels):
        add_norm(f"{name}.norm1", given), add(f"{name}.conv1", channels, given, 3, 3)
        add_norm(f"{name}.norm2", channels), add(f"{name}.conv2", channels, channels, 3, 3)
        if given != channels:
            add(f"{name}.nin_shortcut", channels, given, 1, 1)

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
