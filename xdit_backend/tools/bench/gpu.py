"""Time a full-size model with random weights on this machine's GPU, and compare with the count of bench size.

MODEL is the name of a published model, as in bench size. The workers' own code predicts on one GPU, without worker
processes or ComfyUI: seconds per step, achieved FLOP/s and memory bandwidth, and the measured and the counted peak.
"""

import argparse
import statistics
from pathlib import Path

import torch

from ...planner.machine_profile import read_machine
from ...protocol.errors import ConfigError
from ...protocol.specs import Layout
from ..dry_run.real_gpu import FIRST_STEPS, measure
from ..dry_run.simulated_rank import count
from . import size
from .size import GIB


def add_arguments(parser):
    parser.add_argument("model", metavar="MODEL", help="a published model's name")
    parser.add_argument("--weight-dtypes", nargs="+", default=["bf16"], metavar="TYPE",
                        help="types of the weights, tried one after the other, as in bench size")
    parser.add_argument("--compile", action="store_true", help="also with blocks compiled by inductor")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    size.add_run_arguments(parser)
    parser.add_argument("--weights-memory", type=float, default=0.0, metavar="GB",
                        help="resident weights; the others are offloaded to system RAM (default: all are resident)")
    parser.add_argument("--machine", type=Path, metavar="FILE",
                        help="JSON description of devices, for the lower bound of a step (default: an RTX 4090's data "
                             "sheet)")


def main(options):
    if not torch.cuda.is_available():
        raise ConfigError("Use bench size, which needs no GPU: there is no CUDA device here.")
    machine = size.usual_machine() if options.machine is None else read_machine(options.machine)
    print(f"{options.model} on {torch.cuda.get_device_name()}, torch {torch.__version__}; {options.steps} steps after "
          f"the first {FIRST_STEPS}")
    print(f"{'weights':<18} {'blocks':<9} {'first':>7} {'least':>8} {'median':>8} {'most':>8} s {'bound':>7} "
          f"{'TFLOP/s':>8} {'GB/s':>6} {'weights':>8} {'counted':>8} {'peak':>7} {'counted':>8} GiB")
    for weight_dtype in options.weight_dtypes:
        for backend in ("", "inductor") if options.compile else ("",):
            print(line(options, weight_dtype, backend, machine), flush=True)


def line(options, weight_dtype, backend, machine):
    """A row of the table."""
    chosen = {"weight_dtype": weight_dtype, "weights_memory": "auto", "patches": 0}
    subject = size.subject_of(argparse.Namespace(**vars(options) | chosen))
    spec = subject.spec(num_bytes=int(options.weights_memory * 1e9))
    counted = count(subject.checkpoint, spec, Layout(), 0, subject.run)
    seconds, weight_bytes, peak_bytes = measure(subject.checkpoint, spec, subject.run, backend, options.steps)
    least, median, most = (each(seconds[FIRST_STEPS:]) for each in (min, statistics.median, max))
    bound_s = max(size.bounds(counted, Layout(), machine, subject.dims).values())
    return (f"{weight_dtype:<18} {backend or 'as is':<9} {seconds[0]:>7.2f} {least:>8.4f} {median:>8.4f} "
            f"{most:>8.4f}   {bound_s:>7.4f} {counted.flops / median / 1e12:>8.1f} "
            f"{counted.moved_bytes / median / 1e9:>6.0f} {weight_bytes / GIB:>8.2f} {counted.weight_bytes / GIB:>8.2f} "
            f"{peak_bytes / GIB:>7.2f} {counted.peak_bytes / GIB:>8.2f}")
