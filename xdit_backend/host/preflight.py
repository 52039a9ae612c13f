"""What is looked at before a worker group starts, and which ways around broken links there are. Used by the launcher.

The rest of the preflight is the workers' own (worker/preflight.py): whether a device can be used, and a real transfer
between all ranks.
"""

import importlib.metadata
import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from ..memory.system_memory import available_memory
from ..protocol.devices import own_name
from ..protocol.errors import WorkerStartError
from .oom_report import gigabytes

MIN_VERSIONS = {"torch": (2, 6), "diffusers": (0, 35)}
WORKER_BYTES = 2 ** 28                     # of host memory that a worker takes before it holds a model: its libraries
LISTENER_BYTES = 2 ** 16                   # in shared memory, for what is there beside tensors
# without room for so many bytes of tensors between host and workers, nothing can run
SEGMENT_BYTES = 2 ** 26
MIN_FREE_BYTES = 2 ** 28                   # below this in shared memory, tensors will go through files on disk

# What is switched off for the next attempt where a transfer between ranks fails, and the variables by which.
# NCCL's documentation, "Troubleshooting": PCI access control services and IOMMUs redirect peer-to-peer traffic, which
# may then hang or arrive wrong; and containers have too little shared memory.
FALLBACKS = (("", {}),
           ("peer-to-peer copies", {"NCCL_P2P_DISABLE": "1"}),
           ("peer-to-peer copies and shared memory between the devices",
            {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}))
HINT = ("Broken peer-to-peer copies come of PCI access control (ACS) or an IOMMU: switch them off in the BIOS, or, "
          "in a virtual machine, ask its host to. In a container give /dev/shm room (--shm-size=2g) and memory that "
          "may be locked (--ulimit memlock=-1).")


def check(devices, folders):
    """Refuse to start workers that could not run: WorkerStartError says what is missing. Returns warnings on what is
    only slow.

    folders: (in shared memory, on disk), where tensors between the host and its workers will be.
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
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < least:
            raise WorkerStartError(f"Update {package} with ComfyUI's Python (python -m pip install --upgrade "
                                   f"{package}), then restart ComfyUI: the workers need {needed} or newer, and "
                                   f"{version} is installed.")


def check_devices(devices):
    cuda = [device for device in devices if device.startswith("cuda")]
    if not cuda:
        return
    names = ", ".join(dict.fromkeys(cuda))
    if torch.version.cuda is None and torch.version.hip is None:
        raise WorkerStartError('Install a PyTorch for your GPUs, as pytorch.org says, or set devices to "cpu": '
                               f"{names} cannot be used, as this PyTorch ({torch.__version__}) is built for CPUs.")
    count = num_cuda_devices()
    missing = [device for device in dict.fromkeys(cuda) if int(device.partition(":")[2] or 0) >= count]
    if missing:
        there = (", ".join(f"cuda:{index}" for index in range(count))
                 or "none: is the driver there, and CUDA_VISIBLE_DEVICES right?")
        raise WorkerStartError('Set devices in xDiT Parallel Config to "auto", or to what is here: '
                               f"there is no {', '.join(missing)}. PyTorch finds {there}.")


def num_cuda_devices():
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_memory(num_workers):
    """Is there host memory for the workers' own libraries? In a container its limit counts."""
    available, limit = available_memory()
    needed = num_workers * WORKER_BYTES
    if available < needed:
        raise WorkerStartError("Close other programs, unload ComfyUI's models in its menu, or give the container or "
                               f"WSL2 more memory: {num_workers} workers need at least {gigabytes(needed)} of host "
                               f"memory before they hold a model, and {gigabytes(available)} of {gigabytes(limit)} "
                               "are free.")


def check_shared_memory(memory_folder, disk_folder):
    free, disk_free = (shutil.disk_usage(folder).free for folder in (memory_folder, disk_folder))
    if free < LISTENER_BYTES:
        raise WorkerStartError(f"Remove what is not needed from {Path(memory_folder).parent}: it is full, and the "
                               "workers find ComfyUI by files there. In Docker, --shm-size=2g gives /dev/shm more.")
    if max(free, disk_free) < SEGMENT_BYTES:
        raise WorkerStartError("Free some space: tensors travel between ComfyUI and the workers through "
                               f"{Path(memory_folder).parent}, which has {gigabytes(free)} free, or "
                               f"{Path(disk_folder).parent}, which has {gigabytes(disk_free)}; at least "
                               f"{gigabytes(SEGMENT_BYTES)} are needed. In Docker, --shm-size=2g gives /dev/shm more.")
    if free < MIN_FREE_BYTES and str(memory_folder).startswith("/dev/shm"):
        return [f"/dev/shm has {gigabytes(free)} free: what does not fit goes through files on disk, which is slower. "
                f"In Docker, --shm-size=2g gives it more."]
    return []


def fallbacks(devices, environment=os.environ):
    """The ways to start workers on these devices, the first one first: [(what is off, the variables by which)].

    Where NCCL joins the workers, what a person has switched off already is no other way.
    """
    apart = len(set(devices)) == len(devices) > 1 and all(own_name(device).startswith("cuda") for device in devices)
    if not apart or not dist.is_nccl_available():
        return [("", {})]
    return [(off, variables) for off, variables in FALLBACKS
            if not variables or any(environment.get(name) != value for name, value in variables.items())]


def warning(devices, off, variables, failed):
    """What to tell a person of workers that run with something switched off. failed: how the attempts with it went."""
    why = f" With them, {' '.join(failed)}" if failed else ""
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    return (f"{off[0].upper()}{off[1:]} are off between {', '.join(devices)}, which may be slower.{why} {HINT} To "
            f"have ComfyUI start so without trying them, set {settings} in its environment.")


def hint(ways):
    """What to try where no way worked."""
    if len(ways) == 1:
        return ""
    return f"It was tried with {' and with '.join(f'{off} off' for off, _ in ways if off)} too. {HINT} "
