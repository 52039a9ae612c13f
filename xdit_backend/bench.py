"""Time the parallel methods against one worker on this machine, and count what they send.

A random Flux-shaped transformer is written as a diffusers folder and run by real worker groups. Each round runs every
layout once, so that whatever else the machine does falls on all alike; figures are medians over rounds.
"""

import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from . import bench_pipefusion
from .checkpoints.header import model_spec, read_header, recognise
from .config import ParallelConfig, resolve_devices, validate, validate_layout
from .host.client import Call, Client
from .host.launcher import ROOT
from .protocol.errors import ConfigError

LAYOUTS = ("one", "cfg2", "ulysses2", "ring2")
AXES = ("cfg", "pipefusion", "ring", "ulysses")
HEAD_SIZE = 64


@dataclass(frozen=True)
class Setting:
    """The model and the shapes: a Flux of this width and depth, on a latent of this many tokens."""

    width: int
    num_double_blocks: int
    num_single_blocks: int
    num_image_tokens: int
    num_text_tokens: int
    dtype: str

    @property
    def rows(self):
        """Latent rows and columns: two a token along each side."""
        side = 2 * round(self.num_image_tokens ** 0.5)
        if (side // 2) ** 2 != self.num_image_tokens:
            raise ConfigError(f"tokens={self.num_image_tokens} is not a square number. Use {(side // 2) ** 2}.")
        return side

    def exchanged(self, degrees):
        """Elements a rank sends in the attention of one block: Ulysses 4 (S/D) h (U-1)/U, Ring 2 (S/R) (h/U) (R-1).

        S with text, since text is sharded too (docs/algorithms.md section 8).
        """
        ring, ulysses = degrees["ring"], degrees["ulysses"]
        tokens = self.num_image_tokens + self.num_text_tokens
        return (4 * tokens / (ring * ulysses) * self.width * (ulysses - 1) / ulysses
                + 2 * tokens / ring * self.width / ulysses * (ring - 1))


def add_arguments(parser):
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS),
                        help="one, or axis and degree, also joined: cfg2, ulysses2, ring2, ring2-ulysses2, pipefusion2, "
                             f"pipefusion2-ulysses2 (default: {' '.join(LAYOUTS)})")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="threads of a CPU worker (default 1)")
    parser.add_argument("--tokens", type=int, default=4096, help="image tokens, a square number (default 4096)")
    parser.add_argument("--text-tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=768, help="hidden width, a multiple of 64 (default 768)")
    parser.add_argument("--blocks", type=int, nargs=2, default=(2, 4), metavar=("DOUBLE", "SINGLE"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patches", type=int, nargs="+", default=(2, 4, 8), help="num_patches to try with pipefusion")
    parser.add_argument("--steps", type=int, default=20, help="steps of a pipefusion run (default 20)")
    parser.add_argument("--warmup-steps", type=int, default=1)
    parser.add_argument("--warmup", choices=("whole", "sequence"), default="whole", help="how pipefusion's warm-up steps run")
    parser.add_argument("--no-diffusers", action="store_true", help="leave out diffusers' own context parallelism")


def main(options):
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(1)
    setting = Setting(options.width, *options.blocks, options.tokens, options.text_tokens, options.dtype)
    num_cuda = count_cuda(options.device)
    layouts = {name: parse_layout(name) for name in options.layouts}
    staged = {name: layouts.pop(name) for name in list(layouts) if layouts[name]["pipefusion"] > 1}
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as folder:
        write_model(setting, folder)
        print(describe(setting, options, num_cuda), flush=True)
        rows = measure(setting, folder, layouts, num_cuda, options)
        print_table(rows, setting)
        if staged:
            clients = start_clients({1, *(math.prod(degrees.values()) for degrees in staged.values())}, num_cuda)
            clients["second"] = second_client(clients[1], num_cuda)
            try:
                bench_pipefusion.print_table(
                    *bench_pipefusion.measure(setting, folder, staged, clients, calls(setting, 1)[0], options), options)
            finally:
                for client in clients.values():
                    client.close()
    print("ratio: to one worker doing the same work. cfg2 and two workers apart run two branches, the others one. Two workers\n"
          "apart share nothing, not even a process group: more than that is not to be had on this machine.")


def count_cuda(device):
    """CUDA devices to run on; 0 where --device says cpu or there are none."""
    return torch.cuda.device_count() if torch.cuda.is_available() and device != "cpu" else 0


def start_clients(sizes, num_cuda):
    """{number of devices: Client}; ranks share a CUDA device, over gloo, where there are too few."""
    return {size: Client(resolve_devices(",".join(f"cuda:{index % num_cuda}" if num_cuda else "cpu" for index in range(size)),
                                         num_cuda)) for size in sizes}


def second_client(first, num_cuda):
    """A client of one device beside the first one's."""
    return Client(resolve_devices("cuda:1" if num_cuda > 1 else first.devices[0], num_cuda))


def parse_layout(name):
    """{"cfg": degree, ...} from a name such as ring2-ulysses2. Raises ConfigError for anything else."""
    degrees = dict.fromkeys(AXES, 1)
    for part in [] if name == "one" else name.split("-"):
        axis = part.rstrip("0123456789")
        if axis not in degrees or axis == part:
            raise ConfigError(f'layout "{name}": "{part}" is not an axis and a degree. Use one, or {", ".join(AXES)} with a degree.')
        degrees[axis] = int(part[len(axis):])
    return degrees


def write_model(setting, folder):
    """A random transformer as diffusers saves it."""
    from diffusers import FluxTransformer2DModel
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**model_config(setting))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, setting.dtype))
    model.save_pretrained(Path(folder) / "transformer")


def model_config(setting):
    return {"patch_size": 1, "in_channels": 64, "num_layers": setting.num_double_blocks,
            "num_single_layers": setting.num_single_blocks, "attention_head_dim": HEAD_SIZE,
            "num_attention_heads": setting.width // HEAD_SIZE, "joint_attention_dim": 256, "pooled_projection_dim": 64,
            "guidance_embeds": False, "axes_dims_rope": (8, 28, 28)}


def describe(setting, options, num_cuda):
    place = f"{num_cuda} CUDA devices" if num_cuda else f"CPU workers of {options.threads} thread(s), {os.cpu_count()} cores"
    return (f"Flux, width {setting.width}, {setting.num_double_blocks} + {setting.num_single_blocks} blocks, "
            f"{setting.num_image_tokens} image and {setting.num_text_tokens} text tokens, {setting.dtype}; {place}; "
            f"torch {torch.__version__}, diffusers {importlib.metadata.version('diffusers')}; medians of {options.rounds} rounds")


def calls(setting, num_branches):
    """One call a branch, as a step of a sampler makes them."""
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(1, 16, setting.rows, setting.rows, generator=generator)
    return [Call(latent, torch.tensor([0.7]), {
        "context": torch.randn(1, setting.num_text_tokens, 256, generator=generator),
        "y": torch.randn(1, 64, generator=generator)}) for _ in range(num_branches)]


def measure(setting, folder, layouts, num_cuda, options):
    """[(name, degrees, seconds a step, ratio to one worker, bytes sent by rank 0 a step)]"""
    header = read_header(folder)
    spec = model_spec(header, recognise(header), setting.dtype, setting.dtype)
    num_heads = setting.width // HEAD_SIZE
    sizes = {name: math.prod(degrees.values()) for name, degrees in layouts.items()}
    clients, peers = {}, {}
    try:
        clients |= start_clients({1, *sizes.values()}, num_cuda)
        clients["second"] = second_client(clients[1], num_cuda)
        configs = {}
        for name, degrees in layouts.items():
            manual = ParallelConfig(mode="manual", **{f"{axis}_degree": degree for axis, degree in degrees.items()})
            validate(manual, sizes[name])
            validate_layout(manual.layout, num_heads, "this model")
            configs[name] = manual

        def step(client, config, num_branches):
            started_s = time.perf_counter()
            client.predict(spec, config.layout, 16, step_calls[num_branches])
            return time.perf_counter() - started_s

        def two_at_once():
            """Seconds in which two workers that share nothing each run one branch: what this machine can do at best."""
            with ThreadPoolExecutor(2) as pool:
                started_s = time.perf_counter()
                for future in [pool.submit(step, clients[key], one, 1) for key in (1, "second")]:
                    future.result()
                return time.perf_counter() - started_s

        step_calls = {1: calls(setting, 1), 2: calls(setting, 2)}
        branches = {name: degrees["cfg"] for name, degrees in layouts.items()}
        one = ParallelConfig(mode="manual")
        seconds, sent = {}, {}
        if not options.no_diffusers and not num_cuda:
            peers = start_peers(folder, setting, [name for name in layouts if name in ("ulysses2", "ring2")], options)
        for round_ in range(options.rounds + 1):                       # the first one warms up
            for num_branches in (1, 2):
                seconds.setdefault(("baseline", num_branches), []).append(step(clients[1], one, num_branches))
            seconds.setdefault("two apart", []).append(two_at_once())
            for name in layouts:
                before = clients[sizes[name]].totals()[0].get("sent_bytes", 0)
                seconds.setdefault(name, []).append(step(clients[sizes[name]], configs[name], branches[name]))
                sent[name] = clients[sizes[name]].totals()[0]["sent_bytes"] - before
            for name, peer in peers.items():
                seconds.setdefault(("diffusers", name), []).append(peer.step())
            print(f"round {round_} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
    finally:
        for client in clients.values():
            client.close()
        for peer in peers.values():
            peer.close()
    median = {key: statistics.median(values[1:]) for key, values in seconds.items()}
    rows = [(name, layouts[name], median[name], median["baseline", branches[name]] / median[name], sent[name]) for name in layouts]
    rows.append(("two workers apart", None, median["two apart"], median["baseline", 2] / median["two apart"], None))
    rows += [(f"diffusers {name}", None, median["diffusers", name], median["baseline", 1] / median["diffusers", name], None)
             for name in peers]
    return rows


def sent_bytes_formula(degrees, setting):
    """Bytes a rank sends a step (docs/algorithms.md section 8), for one branch.

    Attention of every block, and the image tokens once at the end, (S_image/D) h (D-1) elements.
    """
    degree = degrees["ring"] * degrees["ulysses"]
    num_blocks = setting.num_double_blocks + setting.num_single_blocks
    join = setting.num_image_tokens / degree * setting.width * (degree - 1)
    return (num_blocks * setting.exchanged(degrees) + join) * getattr(torch, setting.dtype).itemsize


def print_table(rows, setting):
    print(f"{'layout':<22} {'s/step':>8} {'ratio':>6} {'sent MB/rank':>13} {'formula MB':>11}")
    for name, degrees, seconds, ratio, sent in rows:
        traffic = "" if sent is None else f"{sent / 1e6:>13.2f} {sent_bytes_formula(degrees, setting) / 1e6:>11.2f}"
        print(f"{name:<22} {seconds:>8.3f} {ratio:>5.2f}x {traffic}")


# --- others to compare with, in processes of their own ---

class Peer:
    """A module of this package, run with a job, that does one step for each line it gets and prints its seconds."""

    def __init__(self, module, job, threads):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen([sys.executable, "-m", f"xdit_backend.{module}", json.dumps(job)], env=environment,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True)

    def step(self, line="step"):
        """Seconds of one step. Raises RuntimeError, with its last error, when it has ended."""
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except OSError:
            pass
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(next((text for text in reversed(lines) if "Error" in text), "no output"))
        return float(answer)

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def start_peers(folder, setting, names, options):
    """{layout: Peer} for the layouts that diffusers can run here; says why for the others."""
    peers = {}
    for name in names:
        job = {"folder": str(folder), "setting": setting.__dict__, "layout": name}
        peer = Peer("bench_diffusers", job, options.threads)
        try:
            peer.step()
            peers[name] = peer
        except RuntimeError as error:
            peer.close()
            print(f"diffusers' context parallelism cannot run {name} here: {error}", flush=True)
    return peers
