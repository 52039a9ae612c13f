"""Estimate how a model would run on this machine's devices, or on those in a file: time, memory and the bottleneck of
each layout.

MODEL is a safetensors file of a supported family, or a diffusers folder; only its header is read. Without --machine
this machine's devices are measured, which takes a few seconds. A machine in a file needs no GPU.
"""

import collections
import functools
import re
import sys
import time
from pathlib import Path

import torch

from ...checkpoints.checkpoint import open_checkpoint
from ...checkpoints.model_dims import dims_of, job_of
from ...checkpoints.quantisation.quantise_on_load import TYPES
from ...checkpoints.tensor_sharding import possible_splits
from ...config import ParallelConfig
from ...host import machine_profiles
from ...host.client import Client
from ...host.preflight import num_cuda_devices
from ...planner.descriptions import describe_plan, table, why
from ...planner.layout_search import candidates, estimates, extra_candidates
from ...planner.machine_profile import read_machine
from ...planner.planner import Devices, choose_placement, memory_settings, placement_for_speed, plan_run, usual_branches
from ...protocol.devices import resolve_devices
from ...protocol.errors import ConfigError

WEIGHT_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8_e4m3fn": "float8_e4m3fn",
                "fp8_e4m3fn_fast": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
IN_FILES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
MAX_PIXELS, MAX_STEPS = 2 ** 17, 10000


def add_arguments(parser):
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--size", default="1024x1024", metavar="WxH", help="image or video size in pixels")
    parser.add_argument("--frames", type=int, default=1, help="frames of the video")
    parser.add_argument("--steps", type=int, default=20, help="sampling steps")
    parser.add_argument("--branches", type=int, default=2, help="2 with classifier-free guidance (cfg above 1), else 1")
    parser.add_argument("--batch", type=int, default=1, help="images at once")
    parser.add_argument("--text", type=int, default=256, help="text tokens")
    parser.add_argument("--weight-dtype", choices=[*WEIGHT_TYPES, *TYPES],
                        help="type of the weights (default: as in the file)")
    parser.add_argument("--machine", type=Path, metavar="FILE",
                        help="JSON description of devices and links, see docs/benchmarks.md")
    parser.add_argument("--devices", default="auto",
                        help='devices to measure, as in xDiT Parallel Config: "auto", or "cuda:0,cuda:1", "cpu,cpu"')
    parser.add_argument("--measurements", type=Path, metavar="FOLDER",
                        help="ComfyUI's folder of measurements (user/xdit), to read from and to store in")
    quality = parser.add_mutually_exclusive_group()
    quality.add_argument("--exact", action="store_true",
                         help='exact methods only, as approximate = "not allowed" in xDiT Parallel Config: the layers '
                              'of a model that is too large for one device are sharded')
    quality.add_argument("--for-speed", action="store_true",
                         help='PipeFusion if its estimate is much faster, as approximate = "for speed"')
    parser.add_argument("--measure", action="store_true", help="measure again even if stored measurements exist")


def main(options):
    job_shape = _checked(options)
    header = open_checkpoint(options.model)
    family = header.family
    if not family.blocks:
        raise ConfigError(f"Name a diffusion transformer: {family.title} are U-Nets, for which auto splits only "
                          f"guidance branches and the images of a batch, without estimates.")
    if options.for_speed and "pipefusion" in family.refused:
        raise ConfigError(f"Leave out --for-speed: xDiT does not run {family.name} by PipeFusion, because "
                          f"{family.refused['pipefusion']}.")
    quantisation = options.weight_dtype if options.weight_dtype in TYPES else ""
    model = header.meta_model(quantisation)
    config = header.config
    storage = "bfloat16" if quantisation else WEIGHT_TYPES.get(options.weight_dtype) or most_common(header)
    compute = "bfloat16" if storage.startswith("float8") else storage
    dims = dims_of(family, model, header.weight_table(header.spec(storage, compute, quantisation=quantisation)))
    job = job_of(family, dims, _latent_shape(family, config, *job_shape, options),
                 {"context": torch.empty(1, options.text, 1, device="meta")}, options.steps, options.branches)
    machine = read_machine(options.machine) if options.machine else measured(options, compute)
    settings = ParallelConfig(approximate="not allowed" if options.exact else "for speed" if options.for_speed
                              else "allowed")
    what = f"{family.name}, {options.size}" + (f", {options.frames} frames" if options.frames > 1 else "")
    print_plan(dims, job, machine, what, settings, functools.partial(possible_splits, model, family.plan),
               usual_branches(config))


def print_plan(dims, job, machine, what, config, can_split, branches):
    """Print the table of all layouts, the choice of auto mode under this ParallelConfig, and the reason. can_split,
    branches: of choose_placement."""
    count = len(machine.devices)
    names = collections.Counter(device.name or "a device" for device in machine.devices)
    print(f"{what}: {job.tokens} tokens, {job.text} of text, {job.steps} steps, {job.branches} "
          f"branch{'es' if job.branches > 1 else ''}, {job.images} image{'s' if job.images > 1 else ''}; {dims.blocks} "
          f"blocks of width {dims.width}, {dims.resident_bytes / 1e9:.2f} GB of weights")
    per_machine = machine.links.per_machine
    print("on " + ", ".join(f"{number} x {name}" for name, number in names.items())
          + (f", {per_machine} a machine" if per_machine else ""))
    devices = Devices([device.memory_bytes for device in machine.devices], per_machine, machine)
    faster = placement_for_speed(config, dims, devices, branches)
    placement = faster.placement if faster else choose_placement(
        config, dims, devices, can_split, branches=branches,
        has_own_memory=all(device.host_bytes_s for device in machine.devices))
    started_s = time.perf_counter()
    plan = plan_run(config, machine, dims, job, *placement)
    elapsed_s = time.perf_counter() - started_s
    some = [*candidates(dims, job, count, per_machine), *extra_candidates(dims, job, machine)]
    every = estimates(dims, job, machine, some, memory_settings(config))
    chosen = next((one for one in every if one.degrees == plan.chosen.degrees), plan.chosen)
    if chosen not in every:
        every.append(chosen)
    print("\n".join(table(every, chosen, plan.one)))
    print(describe_plan(plan.chosen, plan.one if plan.one.fits else None, plan.ordered)
          + f". Chosen in {1000 * elapsed_s:.0f} ms.")
    print(f"Why: {why(plan.chosen)}. " + (
        f"{faster.words}." if faster else
        "Each machine is a stage, whose devices shard tokens." if per_machine and placement[0] is not None else
        "The weights do not fit on one device, so its blocks are split into stages."
        if placement[0] is not None else
        "The weights do not fit on one device, so its layers are sharded, and the image equals one device's."
        if placement[1] > 1 else
        "If the weights fit on each device, auto uses only layouts whose image equals one device's."))
    if not plan.chosen.fits:
        print("Use smaller weights (fp8, GGUF), a smaller image or more devices: no layout fits in the available "
              "memory.")


def measured(options, dtype):
    """The Machine of this machine's devices: stored, or measured now."""
    devices = resolve_devices(options.devices, num_cuda_devices())
    machine = (None if options.measure or options.measurements is None
               else machine_profiles.stored_machine(options.measurements, devices, dtype))
    if machine is not None:
        return machine

    def show(phase):
        text = f"{phase.text} {phase.done} of {phase.total}" if phase.total else phase.text
        print("\r" + text.ljust(70), end="", file=sys.stderr)

    client = Client(devices, on_phase=show)
    try:
        machine = machine_profiles.measure(client, dtype)
    finally:
        client.close()
        print(file=sys.stderr)
    if options.measurements is not None:
        machine_profiles.store_machine(options.measurements, devices, dtype, machine)
    return machine


def _checked(options):
    """(columns, rows) of the image. Raises ConfigError for invalid options."""
    size = image_size(options.size)
    for name, most in (("frames", 10000), ("steps", MAX_STEPS), ("branches", 2), ("batch", 4096), ("text", 10 ** 6)):
        value = getattr(options, name)
        if not 1 <= value <= most:
            raise ConfigError(f"--{name} {value}: give a number from 1 to {most}.")
    if not options.model.exists():
        raise ConfigError(f"{options.model}: there is no such file or folder. Give a safetensors file, or a diffusers "
                          f"folder.")
    return size


def image_size(text):
    """(columns, rows) of --size. Raises ConfigError if it is invalid."""
    found = re.fullmatch(r"(\d+)x(\d+)", text.strip().lower())
    if not found or not all(8 <= int(side) <= MAX_PIXELS for side in found.groups()):
        raise ConfigError(f"--size {text}: give width and height in pixels, such as 1024x1024, from 8 to "
                          f"{MAX_PIXELS}.")
    return tuple(map(int, found.groups()))


def most_common(header):
    """The most common type of the weights, as named by torch."""
    counts = collections.Counter(IN_FILES[dtype] for dtype in header.dtypes.values() if dtype in IN_FILES)
    if not counts:
        raise ConfigError(f"{header.path}: choose a --weight-dtype, because its weights are "
                          f"{', '.join(sorted(set(header.dtypes.values())))}.")
    return counts.most_common(1)[0][0]


def _latent_shape(family, config, columns, rows, options):
    """(B, C, T), (B, C, H, W) or (B, C, F, H, W) of the latents."""
    frames, row, column = family.pixels(config)
    if options.frames > 1 and frames == 1:
        raise ConfigError(f"Leave out --frames: {family.name} generates images, and it is {options.frames}.")
    sizes = [-(-rows // row), -(-columns // column)]
    if len(family.patch_size(config)) == 3:
        sizes.insert(0, (options.frames - 1) // frames + 1)
    if len(family.patch_size(config)) == 1:                    # audio, with as many latents as an image has tokens
        sizes = [sizes[0] * sizes[1]]
    return (options.batch, family.num_channels(config), *sizes)
