"""Measurements of a worker group's devices by a probe, and calibrations by runs, stored in a folder. Used by the bridge
and by `plan`.

A measurement is of these cards in this order, this driver, torch and packages, and which cards reach each other
directly. Where any of that changes, the devices are measured again. Files are as planner/machine_profile.py reads them;
deleting one has it measured again.
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

# whose attention and products the probe times
PACKAGES = "comfy-kitchen", "flash-attn", "flash-attn-3", "sageattention", "xformers", "triton"
RUNS = "runs.json"             # one factor a family and card

log = logging.getLogger(__name__)


def gpu_of(device):
    """(name, bytes of memory) of a device of this machine. Of a CPU worker, the machine's, or its container's."""
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(torch.device(device))
        return properties.name, float(properties.total_memory)
    return f"CPU {platform.machine()}, {os.cpu_count()} cores", float(available_memory()[1])


def capability_of(device):
    """Compute capability of a CUDA device; (0, 0) of a CPU. None: not known, as of another machine's device."""
    if own_name(device) == "cpu":
        return 0, 0
    if machine_of(device) or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.device(device))
    return properties.major, properties.minor


def measure(client, dtype, gpu=gpu_of):
    """The Machine of a Client's devices, measured now; a few seconds. dtype: that models compute in.
    card(device): as gpu_of."""
    numbers, gpus = client.probe(dtype), list(map(gpu, client.devices))
    return machine_of_probe([numbers[rank] for rank in sorted(numbers)], [name for name, _ in gpus],
                            [size for _, size in gpus], devices_per_machine(client.devices))


def stored_machine(folder, devices, dtype, gpu=gpu_of) -> Machine | None:
    """The Machine that was measured of these devices; None where none is stored, or it cannot be read."""
    path = _path(folder, devices, dtype, gpu)
    if not path.is_file():
        return None
    try:
        return read_machine(path)
    except ConfigError as error:
        log.warning("the measurement of the devices is ignored and will be made again: %s", error)
        return None


def store_machine(folder, devices, dtype, machine, gpu=gpu_of):
    """Write a Machine where `kept` finds it. A folder that cannot be written to costs a measurement, and no more."""
    _write(_path(folder, devices, dtype, gpu), to_json(machine, topology(devices, dtype, gpu)))


def calibrations(folder):
    """{(family, card): Calibration}: how much longer runs of one device took than was forecast. {} where none are
    stored."""
    try:
        stored = json.loads((Path(folder) / RUNS).read_text(encoding="utf-8"))
        made = {tuple(key.split(" | ")): Calibration(float(factor), int(count)) for key,
                (factor, count) in stored.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("what was learnt of runs is ignored: %s: %s", Path(folder) / RUNS, error)
        return {}
    return {key: each for key, each in made.items() if len(key) == 2 and MIN_FACTOR <= each.factor <= 1 / MIN_FACTOR
            and each.count > 0}


def record_run(folder, family, gpu, ratio):
    """Record that a run of one device took `ratio` times the forecast without calibration. Returns the Calibration."""
    known = calibrations(folder)
    known[family, gpu] = after(known.get((family, gpu)), ratio)
    _write(Path(folder) / RUNS, {" | ".join(key): [each.factor, each.count] for key, each in known.items()})
    return known[family, gpu]


def topology(devices, dtype, gpu):
    """What a measurement is of. Makes no CUDA context."""
    cuda = [torch.device(device) for device in devices if device.startswith("cuda")]
    reach = [[one == other or torch.cuda.can_device_access_peer(one, other) for other in cuda] for one in cuda]
    return {"devices": list(devices), "cards": [gpu(device)[0] for device in devices], "direct": reach,
            "torch": torch.__version__, "driver": torch._C._cuda_getDriverVersion() if cuda else 0, "dtype": dtype,
            "threads": os.environ.get("OMP_NUM_THREADS", ""), "packages": _versions()}


def _versions():
    """{package that the probe times: its version}, of those that are installed."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _write(path, stored):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(stored, indent=1), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        log.warning("what was measured cannot be kept in %s: %s", path.parent, error)


def _path(folder, devices, dtype, gpu):
    digest = hashlib.sha256(json.dumps(topology(devices, dtype, gpu), sort_keys=True).encode()).hexdigest()[:12]
    return Path(folder) / f"devices-{digest}.json"
