"""Preflight checks of the host before a worker group starts, and fallback transports for broken links.

The workers check the rest (worker/preflight.py): whether their devices work, with a transfer between all ranks.
"""

import importlib.metadata
import os
import re
import shutil
from pathlib import Path

import torch

from .. import system
from ..memory.system_memory import available_memory
from ..planner.descriptions import gigabytes
from ..protocol.devices import can_use_nccl, machine_of, own_name
from ..protocol.errors import WorkerStartError
from ..system import accelerator

MIN_VERSIONS = {"torch": (2, 6), "diffusers": (0, 35)}
WORKER_BYTES = 2 ** 28                     # system RAM that a worker needs for its libraries, before it loads a model
LISTENER_BYTES = 2 ** 16                   # shared memory for files other than tensors
# least space for tensors between host and workers
SEGMENT_BYTES = 2 ** 26
MIN_FREE_BYTES = 2 ** 28                   # with less shared memory, tensors will go through files on disk

# (transport that is disabled if a transfer between ranks fails, environment variables that disable it), in order of
# attempts. NCCL's documentation, "Troubleshooting": PCI access control services and IOMMUs redirect peer-to-peer
# traffic, which may then hang or arrive corrupted; and containers have too little shared memory.
FALLBACKS = (("", {}),
             ("peer-to-peer copies", {"NCCL_P2P_DISABLE": "1"}),
             ("peer-to-peer copies and shared memory between the devices",
              {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}))
HINT = ("Broken peer-to-peer copies are caused by PCI access control (ACS) or an IOMMU: disable them in the BIOS, or "
        "on the host of a virtual machine. In a container, allow more shared memory (--shm-size=2g) and locked memory "
        "(--ulimit memlock=-1).")


def check(devices, folders):
    """Check the requirements of workers on these devices; returns warnings. Raises WorkerStartError.

    folders: (in shared memory, on disk), for tensors between the host and its workers.
    """
    check_versions()
    check_devices(devices)
    check_memory(len(devices))
    return check_shared_memory(*folders)


def check_versions():
    for package, least in MIN_VERSIONS.items():
        needed = ".".join(map(str, least))
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise WorkerStartError("Install with ComfyUI's Python, in the folder of the xDiT nodes (python -m pip "
                                   f"install -r requirements.txt): the workers need {package} {needed} or newer, and "
                                   "this Python does not have it.") from None
        release = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if package == "torch":
            check_gloo(release, version)
        if release < least:
            raise WorkerStartError(f"Update {package} with ComfyUI's Python (python -m pip install --upgrade "
                                   f"{package}), then restart ComfyUI: the workers need {needed} or newer, and "
                                   f"{version} is installed.")


def check_gloo(release, version, without_gloo=system.TORCH_WITHOUT_GLOO):
    """Reject a release of torch, such as (2, 9), without a working gloo on this system."""
    if without_gloo is not None and without_gloo[0] <= release < without_gloo[1]:
        first, fixed = (".".join(map(str, each)) for each in without_gloo)
        raise WorkerStartError(f"Install PyTorch {fixed} or newer with ComfyUI's Python, as pytorch.org says, then "
                               f"restart ComfyUI: on Windows, PyTorch {first} to before {fixed} cannot connect workers "
                               f"(unsupported gloo device), and {version} is installed.")


def check_devices(devices):
    gpus = [device for device in devices if not machine_of(device) and own_name(device) != "cpu"]
    if not gpus:
        return
    names = ", ".join(dict.fromkeys(gpus))
    if not accelerator.is_built_in():
        raise WorkerStartError('Install a PyTorch for your GPUs, as pytorch.org says, or set devices to "cpu": '
                               f"{names} cannot be used, as this PyTorch ({torch.__version__}) is built for CPUs.")
    count = num_cuda_devices()
    missing = [device for device in dict.fromkeys(gpus)
               if device not in map(accelerator.name_of, range(count))]
    if missing:
        there = (", ".join(map(accelerator.name_of, range(count)))
                 or "none: check that the driver is installed and that CUDA_VISIBLE_DEVICES is right")
        raise WorkerStartError('Set devices in xDiT Parallel Config to "auto", or to devices of this machine: '
                               f"there is no {', '.join(missing)}. PyTorch finds {there}.")


def num_cuda_devices():
    """Number of GPUs of this machine, of whatever type."""
    return accelerator.num_devices()


def check_memory(num_workers):
    """Check the system RAM for the workers' libraries, within a container's limit."""
    available, limit = available_memory()
    needed = num_workers * WORKER_BYTES
    if available < needed:
        raise WorkerStartError("Close other programs, unload ComfyUI's models in its menu, or give the container or "
                               f"WSL2 more memory: {num_workers} workers need at least {gigabytes(needed)} of "
                               f"system RAM before they load a model, and {gigabytes(available)} of "
                               f"{gigabytes(limit)} are free.")


def check_shared_memory(memory_folder, disk_folder):
    commit = system.free_commit_bytes()
    if commit is not None and commit < SEGMENT_BYTES:
        raise WorkerStartError(f"Close other programs, or enlarge the page file: Windows can give programs "
                               f"{gigabytes(commit)} more memory, and at least {gigabytes(SEGMENT_BYTES)} are needed "
                               f"for tensors that travel between ComfyUI and the workers.")
    free, disk_free = (shutil.disk_usage(folder).free for folder in (memory_folder, disk_folder))
    if free < LISTENER_BYTES:
        raise WorkerStartError(f"Delete unneeded files in {Path(memory_folder).parent}: it is full, and the workers "
                               "connect to ComfyUI through files there. In Docker, --shm-size=2g enlarges /dev/shm.")
    if max(free, disk_free) < SEGMENT_BYTES:
        raise WorkerStartError("Free some space: tensors travel between ComfyUI and the workers through "
                               f"{Path(memory_folder).parent}, which has {gigabytes(free)} free, or "
                               f"{Path(disk_folder).parent}, which has {gigabytes(disk_free)}; at least "
                               f"{gigabytes(SEGMENT_BYTES)} are needed. In Docker, --shm-size=2g enlarges /dev/shm.")
    if free < MIN_FREE_BYTES and str(memory_folder).startswith("/dev/shm"):
        return [f"/dev/shm has {gigabytes(free)} free: tensors that do not fit go through files on disk, which is "
                f"slower. In Docker, --shm-size=2g enlarges it."]
    return []


def fallbacks(devices, environment=os.environ):
    """Return the transports to try for these devices, in order: [(what is disabled, environment variables)].

    Only groups that use NCCL have more than one; those that the user's environment already selects are left out.
    """
    if not can_use_nccl(devices) or not accelerator.has_nccl():
        return [("", {})]
    return [(off, variables) for off, variables in FALLBACKS
            if not variables or any(environment.get(name) != value for name, value in variables.items())]


def warning(devices, off, variables, failed):
    """Return the warning about workers that run with a transport disabled. failed: errors of the attempts with it."""
    why = f" With them, {' '.join(failed)}" if failed else ""
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    return (f"{off[0].upper()}{off[1:]} are disabled between {', '.join(devices)}, which may be slower.{why} {HINT} To "
            f"disable them without trying, set {settings} in ComfyUI's environment.")


def hint(ways):
    """Return advice for when no transport worked."""
    if len(ways) == 1:
        return ""
    return f"It was also tried with {' and with '.join(f'{off} disabled' for off, _ in ways if off)}. {HINT} "
