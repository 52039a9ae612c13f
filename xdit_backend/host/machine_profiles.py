"""Stored machine profiles: measurements of a worker group's devices by a probe, and calibrations by runs.

A measurement is valid for these devices in this order, their peer-to-peer access, this driver, torch and packages; when
any of that changes, the devices are measured again. planner/machine_profile.py reads the files; deleting one causes a
new measurement.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
from pathlib import Path

import torch

from ..memory.system_memory import available_memory
from ..planner.calibration import MIN_FACTOR, Calibration, after
from ..planner.layout_search import Machine
from ..planner.machine_from_probe import machine_of_probe
from ..planner.machine_profile import read_machine, to_json
from ..protocol.devices import devices_per_machine, machine_of, own_name
from ..protocol.errors import ConfigError
from ..system import accelerator

# packages whose attention and matrix products the probe times
PACKAGES = "comfy-kitchen", "flash-attn", "flash-attn-3", "sageattention", "xformers", "triton"
PROBE = 2                      # changes when worker/device_probe.py measures more
RUNS = "runs.json"             # one factor for each family and GPU

log = logging.getLogger(__name__)


def gpu_of(device):
    """(name, memory in bytes) of a device of this machine; for a CPU worker, the system RAM or container limit."""
    if own_name(device) != "cpu":
        properties = accelerator.module(torch.device(device)).get_device_properties(torch.device(device))
        return properties.name, float(properties.total_memory)
    return f"CPU {platform.machine()}, {os.cpu_count()} cores", float(available_memory()[1])


def memory_of(device):
    """Total memory in bytes of a GPU of this machine. Creates no context on it."""
    device = torch.device(device)
    return accelerator.module(device).get_device_properties(device).total_memory


def capability_of(device):
    """Compute capability of an NVIDIA or AMD GPU; (0, 0) for a CPU; None if unknown, as for another machine's
    device."""
    if own_name(device) == "cpu":
        return 0, 0
    if machine_of(device) or not accelerator.num_devices():
        return None
    return accelerator.capability(torch.device(device))


def measure(client, dtype, gpu=gpu_of):
    """Measure a Client's devices, which takes a few seconds; returns the Machine.

    dtype: compute dtype of models. gpu(device): as gpu_of.
    """
    numbers, gpus = client.probe(dtype), list(map(gpu, client.devices))
    return machine_of_probe([numbers[rank] for rank in sorted(numbers)], [name for name, _ in gpus],
                            [size for _, size in gpus], devices_per_machine(client.devices))


def stored_machine(folder, devices, dtype, gpu=gpu_of) -> Machine | None:
    """Read the stored Machine of these devices; None if none is stored or it cannot be read."""
    path = _path(folder, devices, dtype, gpu)
    if not path.is_file():
        return None
    try:
        return read_machine(path)
    except ConfigError as error:
        log.warning("the stored measurement of the devices is ignored, and they will be measured again: %s", error)
        return None


def store_machine(folder, devices, dtype, machine, gpu=gpu_of):
    """Store a Machine for stored_machine. Only logs a warning if the folder cannot be written to."""
    write_json(_path(folder, devices, dtype, gpu), to_json(machine, topology(devices, dtype, gpu)))


def calibrations(folder):
    """{(family, GPU): Calibration}, the ratio of measured to estimated time of runs on one device; {} if none are
    stored."""
    try:
        stored = json.loads((Path(folder) / RUNS).read_text(encoding="utf-8"))
        made = {tuple(key.split(" | ")): Calibration(float(factor), int(count)) for key,
                (factor, count) in stored.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("the stored calibrations are ignored: %s: %s", Path(folder) / RUNS, error)
        return {}
    return {key: each for key, each in made.items() if len(key) == 2 and MIN_FACTOR <= each.factor <= 1 / MIN_FACTOR
            and each.count > 0}


def record_run(folder, family, gpu, ratio):
    """Record that a run on one device took `ratio` times its uncalibrated estimate; returns the Calibration."""
    known = calibrations(folder)
    known[family, gpu] = after(known.get((family, gpu)), ratio)
    write_json(Path(folder) / RUNS, {" | ".join(key): [each.factor, each.count] for key, each in known.items()})
    return known[family, gpu]


def topology(devices, dtype, gpu):
    """Key of a measurement: everything that it depends on. Creates no CUDA context."""
    gpus = [torch.device(device) for device in devices if not machine_of(device) and own_name(device) != "cpu"]
    reach = [[one == other or accelerator.can_access_peer(one, other) for other in gpus] for one in gpus]
    return {"devices": list(devices), "cards": [gpu(device)[0] for device in devices], "direct": reach,
            "dtype": dtype, "probe": PROBE, **software(devices)}


def software(devices):
    """Versions and settings on which the speed of these devices depends. Creates no CUDA context."""
    has_gpus = any(own_name(device) != "cpu" for device in devices)
    return {"torch": torch.__version__, "driver": accelerator.driver_version() if has_gpus else 0,
            "threads": os.environ.get("OMP_NUM_THREADS", ""), "packages": _versions()}


def _versions():
    """{installed package of PACKAGES: its version}"""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def write_json(path, stored):
    """Write a JSON file at once. Only logs a warning if the folder cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(stored, indent=1), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        log.warning("the measurement cannot be stored in %s: %s", path.parent, error)


def _path(folder, devices, dtype, gpu):
    digest = hashlib.sha256(json.dumps(topology(devices, dtype, gpu), sort_keys=True).encode()).hexdigest()[:12]
    return Path(folder) / f"devices-{digest}.json"
