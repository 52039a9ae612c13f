"""Time the parallel methods on this machine against one worker, and count their communication.

A random Flux-shaped transformer is written as a diffusers folder and run by real worker groups. Each round runs every
layout once, so that other load on the machine affects all of them equally; figures are medians over rounds.
"""

import importlib.metadata
import math
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from ...checkpoints.checkpoint import open_checkpoint
from ...config import ParallelConfig, validate, validate_layout
from ...host.client import Client
from ...protocol.errors import ConfigError
from ...protocol.specs import Layout, ModelSpec
from . import pipefusion
from .baseline import Peer
from .synthetic_model import HEAD_SIZE, Setting, calls, write_model
from .worker_groups import count_cuda, second_client, start_clients

LAYOUTS = ("one", "cfg2", "ulysses2", "ring2", "tensor2")
AXES = ("cfg", "pipefusion", "ring", "ulysses", "tensor")


def add_arguments(parser):
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS),
                        help="one, or axes with degrees, also combined: cfg2, ulysses2, ring2, ring2-ulysses2, "
                             "tensor2, pipefusion2, pipefusion2-ulysses2")
    add_model_arguments(parser)
    parser.add_argument("--patches", type=int, nargs="+", default=(2, 4, 8), help="num_patches to try with pipefusion")
    parser.add_argument("--forecast", dest="extrapolation", type=float, nargs="+",
                        default=(ParallelConfig.forecast_keys_values,),
                        help="forecast_keys_values to try with pipefusion, interleaved")
    parser.add_argument("--steps", type=int, default=20, help="steps of a pipefusion run")
    parser.add_argument("--warmup-steps", type=int, default=1, help="synchronous steps at its start")
    parser.add_argument("--warmup", choices=("whole", "sequence"), default="whole",
                        help="how pipefusion's warm-up steps run: stage by stage, or by sequence parallelism")


def add_model_arguments(parser):
    """Add the options of the model to time, and of the devices."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: CUDA if available")
    parser.add_argument("--threads", type=int, default=1, help="threads of a CPU worker")
    parser.add_argument("--tokens", type=int, default=4096, help="image tokens, a square number")
    parser.add_argument("--text-tokens", type=int, default=128, help="text tokens")
    parser.add_argument("--width", type=int, default=768, help="hidden width, a multiple of 64")
    parser.add_argument("--blocks", type=int, nargs=2, default=(2, 4), metavar=("DOUBLE", "SINGLE"),
                        help="numbers of double-stream and single-stream blocks")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and results")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each of which runs everything once")
    parser.add_argument("--no-diffusers", action="store_true", help="leave out diffusers' context parallelism")


def setting_of(options):
    return Setting(options.width, *options.blocks, options.tokens, options.text_tokens, options.dtype)


def main(options):
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(1)
    setting = setting_of(options)
    num_cuda = count_cuda(options.device)
    layouts = {name: parse_layout(name) for name in options.layouts}
    staged = {name: layouts.pop(name) for name in list(layouts) if layouts[name]["pipefusion"] > 1}
    with tempfile.TemporaryDirectory(prefix="xdit-bench-") as folder:
        write_model(setting, folder)
        print(describe(setting, options, num_cuda), flush=True)
        sizes = {1, *(math.prod(degrees.values()) for degrees in (*layouts.values(), *staged.values()))}
        clients = start_clients(sizes, num_cuda)
        clients["second"] = second_client(clients[1], num_cuda)
        try:
            print_table(*measure(setting, folder, layouts, clients, num_cuda, options), setting)
            if staged:
                for client in clients.values():                # resident weights of stages are measured
                    for name in client.models.names:
                        client.drop(name)
                pipefusion.print_table(
                    *pipefusion.measure(setting, folder, staged, clients, calls(setting, 1)[0], options), options)
        finally:
            for client in clients.values():
                client.close()
    print("ratio: to one worker doing the same work. cfg2 and two workers apart run two branches, the others one. Two "
          "workers\napart are independent, without a process group: the upper bound on this machine.")


def parse_layout(name):
    """{"cfg": degree, ...} for a name such as ring2-ulysses2. Raises ConfigError for anything else."""
    degrees = dict.fromkeys(AXES, 1)
    for part in [] if name == "one" else name.split("-"):
        axis = part.rstrip("0123456789")
        if axis not in degrees or axis == part:
            raise ConfigError(f'layout "{name}": "{part}" is not an axis and a degree. Use one, or {", ".join(AXES)} '
                              f'with a degree.')
        degrees[axis] = int(part[len(axis):])
    return degrees


def describe(setting, options, num_cuda):
    where = (f"{num_cuda} CUDA devices"
             if num_cuda else f"CPU workers of {options.threads} thread(s), {os.cpu_count()} cores")
    return (f"Flux, width {setting.width}, {setting.num_double_blocks} + {setting.num_single_blocks} blocks, "
            f"{setting.num_image_tokens} image and {setting.num_text_tokens} text tokens, {setting.dtype}; {where}; "
            f"torch {torch.__version__}, diffusers {importlib.metadata.version('diffusers')}; medians of "
            f"{options.rounds} rounds")


@dataclass(frozen=True)
class TimedLayout:
    """A layout to time on its workers, with one call per branch."""

    client: Client
    spec: ModelSpec
    layout: Layout
    calls: list

    def step_s(self):
        started_s = time.perf_counter()
        self.client.predict(self.spec, self.layout, 16, self.calls)
        return time.perf_counter() - started_s

    @property
    def sent_bytes(self):
        """Bytes sent by rank 0 so far."""
        return self.client.totals()[0].get("sent_bytes", 0)

    @property
    def resident_bytes(self):
        """Bytes of rank 0's weights."""
        return self.client.models.memory(self.spec.name).weight_bytes[0]


def measure(setting, folder, layouts, clients, num_cuda, options):
    """[(name, degrees, seconds per step, ratio to one worker, bytes sent by rank 0 per step, bytes of its weights)],
    and the bytes of all weights."""
    step_calls = {num_branches: calls(setting, num_branches) for num_branches in (1, 2)}
    header = open_checkpoint(folder)
    timed = find_timed(setting, header, layouts, clients, step_calls)
    one_spec = header.spec(setting.dtype, setting.dtype)
    alone = {count: TimedLayout(clients[1], one_spec, Layout(), each) for count, each in step_calls.items()}
    apart = [alone[1], replace(alone[1], client=clients["second"])]
    peers, seconds, sent, resident = {}, {}, {}, {}
    try:
        if not options.no_diffusers and not num_cuda:
            peers = start_peers(folder, setting, [name for name in layouts if name in ("ulysses2", "ring2")], options)
        for round_ in range(options.rounds + 1):                       # the first one is a warm-up
            for num_branches, each in alone.items():
                seconds.setdefault(("baseline", num_branches), []).append(each.step_s())
            seconds.setdefault("two apart", []).append(at_once_s(apart))
            for name, each in timed.items():
                before = each.sent_bytes
                seconds.setdefault(name, []).append(each.step_s())
                sent[name], resident[name] = each.sent_bytes - before, each.resident_bytes
            for name, peer in peers.items():
                seconds.setdefault(("diffusers", name), []).append(peer.step())
            print(f"round {round_} of {options.rounds}", end="\r", file=sys.stderr, flush=True)
        all_bytes = alone[1].resident_bytes
    finally:
        for peer in peers.values():
            peer.close()
    median = {key: statistics.median(values[1:]) for key, values in seconds.items()}
    return rows_of(layouts, median, sent, resident, peers), all_bytes


def find_timed(setting, header, layouts, clients, step_calls):
    """{name: TimedLayout} for layouts {name: degrees}. step_calls: {number of branches: calls}."""
    timed = {}
    for name, degrees in layouts.items():
        size = math.prod(degrees.values())
        config = ParallelConfig(mode="manual", **{f"{axis}_degree": degree for axis, degree in degrees.items()})
        validate(config, size)
        validate_layout(config.layout, setting.width // HEAD_SIZE, "this model")
        spec = header.spec(setting.dtype, setting.dtype, tensor_degree=config.tensor_degree)
        timed[name] = TimedLayout(clients[size], spec, config.layout, step_calls[degrees["cfg"]])
    return timed


def at_once_s(timed):
    """Seconds in which independent workers each run a step: the upper bound on this machine."""
    with ThreadPoolExecutor(len(timed)) as pool:
        started_s = time.perf_counter()
        for future in [pool.submit(each.step_s) for each in timed]:
            future.result()
        return time.perf_counter() - started_s


def rows_of(layouts, median, sent, resident, peers):
    """The rows of measure, from medians of seconds."""
    rows = [(name, degrees, median[name], median["baseline", degrees["cfg"]] / median[name], sent[name], resident[name])
            for name, degrees in layouts.items()]
    rows.append(("two workers apart", None, median["two apart"], median["baseline", 2] / median["two apart"], None,
                 None))
    rows += [(f"diffusers {name}", None, median["diffusers", name], median["baseline", 1] / median["diffusers", name],
              None, None)
             for name in peers]
    return rows


def sent_bytes_formula(degrees, setting):
    """Bytes that a rank sends per step (docs/design/layouts.md), for one branch.

    Attention of every block, all-reduces of tensor ranks, and the image tokens once at the end, (S_image/D) h (D-1)
    elements.
    """
    degree = degrees["ring"] * degrees["ulysses"]
    num_blocks = setting.num_double_blocks + setting.num_single_blocks
    join = setting.num_image_tokens / degree * setting.width * (degree - 1)
    elements = num_blocks * setting.exchanged(degrees) + setting.added_up(degrees) + join
    return elements * getattr(torch, setting.dtype).itemsize


def weight_bytes_formula(degrees, setting, all_bytes):
    """Bytes of a rank's weights: 1 / X of the blocks', and everything outside the blocks."""
    return all_bytes - setting.split_elements * (1 - 1 / degrees["tensor"]) * getattr(torch, setting.dtype).itemsize


def print_table(rows, all_bytes, setting):
    print(f"{'layout':<22} {'s/step':>8} {'ratio':>6} {'sent MB/rank':>13} {'formula MB':>11} {'weights MB/rank':>16} "
          f"{'formula MB':>11}")
    for name, degrees, seconds, ratio, sent, resident in rows:
        columns = "" if sent is None else (
            f"{sent / 1e6:>13.2f} {sent_bytes_formula(degrees, setting) / 1e6:>11.2f} {resident / 1e6:>16.1f} "
            f"{weight_bytes_formula(degrees, setting, all_bytes) / 1e6:>11.1f}")
        print(f"{name:<22} {seconds:>8.3f} {ratio:>5.2f}x {columns}")


def start_peers(folder, setting, names, options):
    """{layout: Peer} for the layouts that diffusers can run here; prints the reason for the others."""
    peers = {}
    for name in names:
        job = {"folder": str(folder), "setting": setting.__dict__, "layout": name}
        peer = Peer("baseline_diffusers", job, options.threads)
        try:
            peer.step()
            peers[name] = peer
        except RuntimeError as error:
            peer.close()
            print(f"diffusers' context parallelism cannot run {name} here: {error}", flush=True)
    return peers
