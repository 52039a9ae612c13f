"""Time displaced patches (DistriFusion) of a U-Net on several workers, and count what they send and keep.

A random U-Net of SD 1.5's structure is written as a file and run by real worker groups, in rounds that run every way once: one worker,
synchronous calls, stale calls, and workers that share nothing, which is more than can be had on this machine.
"""

import os
import re
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import save_file

from ..checkpoints.header import model_spec, read_header, recognise
from ..checkpoints.net import told_bytes
from ..host.client import Call, Client
from ..protocol.errors import ConfigError
from ..protocol.messages import Layout
from .groups import count_cuda, start_clients

TEXT_WIDTH = 768


def add_arguments(parser):
    parser.add_argument("--workers", type=int, default=2, help="that share a picture")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 96], help="rows and columns of the latent")
    parser.add_argument("--width", type=int, default=64, help="channels at full size, a multiple of 32 (SD 1.5 has 320)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA where there is a device")
    parser.add_argument("--threads", type=int, default=1, help="threads of a CPU worker")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and results")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which everything runs once")


def main(options):
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(1)
    num_cuda = count_cuda(options.device)
    if options.width % 32 or options.workers < 2:
        raise ConfigError(f"--width {options.width} must be a multiple of 32, and --workers {options.workers} at least 2.")
    config = unet_config(options.width)
    print(f"U-Net of SD 1.5's structure, width {options.width}, {options.dtype}; "
          + (f"{num_cuda} CUDA devices" if num_cuda else f"CPU workers of {options.threads} thread(s), {os.cpu_count()} cores")
          + f"; torch {torch.__version__}; medians of {options.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as folder:
        model = write_model(config, f"{folder}/unet.safetensors", getattr(torch, options.dtype))
        header = read_header(f"{folder}/unet.safetensors")
        spec = model_spec(header, recognise(header), options.dtype, options.dtype)
        clients = start_clients({1, options.workers}, num_cuda)
        apart = [clients[1], *(Client(clients[1].devices) for _ in range(options.workers - 1))]
        try:
            print(f"{'latent':>9} {'way':<18} {'s/call':>8} {'ratio':>6} {'sent bytes/rank':>16} {'formula':>12} {'kept bytes/rank':>16} "
                  f"{'formula':>12}")
            for size in options.sizes:
                print_size(model, spec, size, clients[options.workers], apart, options)
        finally:
            for client in {*clients.values(), *apart}:
                client.close()
    print("ratio: to one worker. apart: as many workers, each with a call of its own.")


def print_size(model, spec, size, together, apart, options):
    generator = torch.Generator().manual_seed(0)
    call = Call(torch.randn(1, 4, size, size, generator=generator), torch.tensor([500.0]),
                {"context": torch.randn(1, 77, TEXT_WIDTH, generator=generator)})
    layout = Layout(displaced_degree=options.workers)

    def timed(function):
        started_s = time.perf_counter()
        function()
        return time.perf_counter() - started_s

    def displaced(stale):
        together.wait([together.submit(spec, layout, 4, [call], keep=True, run="bench", stale=stale)])

    def all_apart():
        with ThreadPoolExecutor(len(apart)) as pool:
            for future in [pool.submit(client.predict, spec, Layout(), 4, [call]) for client in apart]:
                future.result()

    ways = {"one": lambda: apart[0].predict(spec, Layout(), 4, [call]), "apart": all_apart, "synchronous": lambda: displaced(False),
            "stale": lambda: displaced(True)}
    seconds, sent = {way: [] for way in ways}, {}
    for round_ in range(options.rounds + 1):                   # the first one warms up
        for way, run in ways.items():
            before = together.totals()[0].get("sent_bytes", 0)
            seconds[way].append(timed(run))
            sent[way] = together.totals()[0].get("sent_bytes", 0) - before
        print(f"round {round_} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
    kept = together.report_memory()[0]["exchange_bytes"]
    together.end_run("bench")
    told = told_bytes(model, (size, size), options.workers, getattr(torch, options.dtype))
    median = {way: statistics.median(values[1:]) for way, values in seconds.items()}
    for way in ways:
        work = options.workers if way == "apart" else 1
        row = f"{size:>4} x{size:>3} {way:<18} {median[way]:>8.3f} {work * median['one'] / median[way]:>5.2f}x"
        if way in ("synchronous", "stale"):
            row += f" {int(sent[way]):>16} {told * (options.workers - 1):>12} {int(kept):>16} {told * options.workers:>12}"
        print(row, flush=True)


def unet_config(width):
    return {"sample_size": 64, "in_channels": 4, "out_channels": 4, "block_out_channels": (width, 2 * width, 4 * width, 4 * width),
            "layers_per_block": 2, "cross_attention_dim": TEXT_WIDTH, "attention_head_dim": 8}


def write_model(config, path, dtype):
    """A random U-Net as the publisher's files have it; returns diffusers'."""
    from diffusers import UNet2DConditionModel
    torch.manual_seed(0)
    model = UNet2DConditionModel(**config).eval().requires_grad_(False)
    tensors = {_in_file(name, config["layers_per_block"]): tensor.to(dtype) for name, tensor in model.state_dict().items()}
    save_file(tensors, path)
    return model


PARTS = (("norm1.", "in_layers.0."), ("conv1.", "in_layers.2."), ("time_emb_proj.", "emb_layers.1."), ("norm2.", "out_layers.0."),
         ("conv2.", "out_layers.3."), ("conv_shortcut.", "skip_connection."))
OUTSIDE = (("conv_in.", "input_blocks.0.0."), ("conv_norm_out.", "out.0."), ("conv_out.", "out.2."),
           ("time_embedding.linear_1.", "time_embed.0."), ("time_embedding.linear_2.", "time_embed.2."),
           ("mid_block.resnets.0.", "middle_block.0."), ("mid_block.attentions.0.", "middle_block.1."),
           ("mid_block.resnets.1.", "middle_block.2."))


def _in_file(name, num_layers):
    """diffusers' name -> the publisher's, of a U-Net of SD 1.5's structure."""
    place, rest = next(((new, name.removeprefix(old)) for old, new in OUTSIDE if name.startswith(old)), ("", name))
    match = re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.*)", rest)
    if match is not None:
        side, level, kind, layer, rest = match[1], int(match[2]), match[3], int(match[4]), match[5]
        first = level * (num_layers + 1) + (side == "down")
        place = f"{'in' if side == 'down' else 'out'}put_blocks.{first + (num_layers if kind.endswith('samplers') else layer)}."
        place += {"resnets": "0.", "attentions": "1.", "downsamplers": "0.", "upsamplers": "1." if level == 0 else "2."}[kind]
        rest = rest.replace("conv.", "op.", 1) if kind == "downsamplers" else rest
    if "resnets" in name:
        rest = next((rest.replace(old, new, 1) for old, new in PARTS if rest.startswith(old)), rest)
    return place + rest
