"""Diagnostic report for bug reports: versions, devices, links, memory, last errors, and a test start of workers.

Nothing private is printed: no user or host names, no paths, and of the environment only the names of variables that
workers inherit and that affect devices and links.
"""

import importlib.metadata
import mmap
import os
import platform
import shutil
import time
from contextlib import suppress

import torch

from .. import system
from ..memory.system_memory import available_memory
from ..protocol.devices import own_name, resolve_devices
from ..protocol.errors import XDiTError
from ..protocol.messages import JOINING, Probe, ReportMemory
from ..system import accelerator
from . import logs
from .launcher import WorkerGroup
from .preflight import num_cuda_devices
from .torchrun import INHERITED, INHERITED_PREFIXES

PACKAGES = ("torch", "diffusers", "accelerate", "safetensors", "transformers", "pydantic", "greenlet", "gguf",
            "comfy-kitchen", "comfyui-frontend-package", "flash-attn", "flash-attn-3", "sageattention", "xformers")
TELLING = ("CUDA", "NVIDIA", "HIP", "ROCR", "HSA", "NCCL", "OMP", "MKL", "XDIT")       # prefixes of the names
SMALL_SHARED_MEMORY = 2 ** 30
EXCHANGE_BYTES = 2 ** 24                   # of worker/device_probe.py's large messages
LOCK_STEP_BYTES = 2 ** 28


def add_arguments(parser):
    parser.add_argument("--devices", default="auto", help='as in xDiT Parallel Config: "auto", or names such as '
                                                          '"cuda:0,cuda:1"')
    parser.add_argument("--no-workers", action="store_true", help="do not start workers")


def main(options):
    sections = {"Versions": versions(), "Machine": machine(), "Devices": devices(), "Links": links(),
                "Environment": environment(), "Other machines": logs.machines(), "Last errors": logs.last_errors()}
    if not options.no_workers:
        names = resolve_devices(options.devices, num_cuda_devices())
        if any(own_name(name) != "cpu" for name in names):
            sections["Machine"] += page_lock_limit()
        sections["Workers"] = workers(names)
    for title, lines in sections.items():
        print(f"{title}\n" + "\n".join(f"  {line}" for line in lines or ["none"]))


def package_versions(packages):
    """{package: its version, or "not installed"}"""
    def of(package):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"
    return {package: of(package) for package in packages}


def versions():
    return [f"Python {platform.python_version()} on {system.description()}, {platform.machine()}",
            *(f"{name} {version}" for name, version in package_versions(PACKAGES).items())]


def machine():
    import psutil
    available, limit = available_memory()
    total = psutil.virtual_memory().total
    of = f" of the machine's {gigabytes(total)}" if limit < total else ""
    lines = [f"{os.cpu_count()} CPU cores", f"memory {gigabytes(limit)}{of}, {gigabytes(available)} available"]
    with suppress(RuntimeError):                               # Windows without performance counters
        lines.append(f"swap {gigabytes(psutil.swap_memory().total)}")
    if os.path.isdir("/dev/shm"):
        total, _, free = shutil.disk_usage("/dev/shm")
        small = " (small: in Docker, --shm-size=2g)" if total < SMALL_SHARED_MEMORY else ""
        lines.append(f"shared memory {gigabytes(total)}, {gigabytes(free)} free{small}")
    return lines + system.facts(num_cuda_devices())


def devices():
    if not accelerator.num_devices():
        return [f"no CUDA device; this PyTorch is built for "
                f"{'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPUs'}"]
    lines = [accelerator.description() + ("" if accelerator.is_tried() else
                                          ": the pack has not been tried on GPUs of this kind; please report")]
    for name in map(accelerator.name_of, range(num_cuda_devices())):
        device, own = torch.device(name), accelerator.module()
        free, total = own.mem_get_info(device)
        capability = accelerator.capability(device)
        of_kind = "" if capability is None else f"capability {capability[0]}.{capability[1]}, "
        lines.append(f"{name} {own.get_device_properties(device).name}, {of_kind}"
                     f"{gigabytes(total)}, {gigabytes(free)} free")
    return lines


def links():
    """Pairs of GPUs, and whether they have peer-to-peer access or copy through system RAM."""
    names = list(map(accelerator.name_of, range(num_cuda_devices())))
    return [f"{one} to {other}: "
            f"{'direct' if accelerator.can_access_peer(*map(torch.device, (one, other))) else 'through system RAM'}"
            for one in names for other in names if one != other]


def environment():
    """Names of set variables, without values, which may contain user names and paths."""
    taken_over = {name for name in os.environ if name in INHERITED or name.startswith(INHERITED_PREFIXES)}
    return [f"{name} is set" for name in sorted(taken_over) if name.startswith(TELLING)]


def page_lock_limit(lock=None, unlock=None, max_bytes=None):
    """Page-lock system RAM in steps until that fails, or half of the free RAM is locked, and release it.

    lock(address, num_bytes) returns CUDA's error code.
    """
    own = accelerator.module()
    if lock is None and not hasattr(own, "cudart"):
        return []
    cuda = own.cudart() if lock is None else None
    lock = lock or (lambda address, num_bytes: int(cuda.cudaHostRegister(address, num_bytes, 0)))
    unlock = unlock or (lambda address: cuda.cudaHostUnregister(address))
    max_bytes = available_memory()[0] // 2 if max_bytes is None else max_bytes
    locked, code = [], 0
    try:
        while (len(locked) + 1) * LOCK_STEP_BYTES <= max_bytes:
            memory = torch.frombuffer(mmap.mmap(-1, LOCK_STEP_BYTES), dtype=torch.uint8)   # begins at a page
            code = lock(memory.data_ptr(), LOCK_STEP_BYTES)
            if code:
                break
            locked.append(memory)
    finally:
        for memory in locked:
            unlock(memory.data_ptr())
        if cuda is not None:
            with suppress(RuntimeError):                       # clears the error that the next CUDA call would raise
                torch.zeros(1, device=accelerator.device_type())
    found = gigabytes(len(locked) * LOCK_STEP_BYTES)
    return [f"page-locked memory: stops at {found} (CUDA error {code})" if code else
            f"page-locked memory: {found} can be locked, half of what is free"]


def workers(names):
    started_s, joined_s = time.monotonic(), []

    def note(phase):
        if phase.text == JOINING:
            joined_s.append(time.monotonic() - started_s)
    try:
        group = WorkerGroup(names, note)
        try:
            memory, exchange = group.request(ReportMemory), exchanged(group)
        finally:
            group.close()
    except XDiTError as error:
        return [f"do not start on {', '.join(names)}:", *logs.without_private(str(error)).splitlines()]
    return [f"start on {', '.join(names)} in {time.monotonic() - started_s:.1f} s, and answer",
            f"are separate programs, not forked: {group.why_not_forked}" if group.why_not_forked
            else "are forked from one process",
            *([f"import their libraries in {max(joined_s):.1f} s (longer with an antivirus that scans them)"]
              if joined_s else []),
            *exchange,
            *group.warnings,
            *(f"rank {rank} ({names[rank]}): {gigabytes(done.numbers['free_bytes'])} free"
              for rank, done in sorted(memory.items()))]


def exchanged(group):
    """Measure how fast all ranks send to their neighbours at once; [] for one rank."""
    count = len(group.devices)
    if count == 1:
        return []
    measured = group.request(lambda request: Probe(request, "float32"))
    seconds = max(done.numbers[f"hop {count} large_s"] for done in measured.values())
    return [f"exchange {EXCHANGE_BYTES / 2 ** 20:.0f} MiB with a neighbour at {EXCHANGE_BYTES / seconds / 1e9:.2f} "
            f"GB/s each way"]


def gigabytes(num_bytes):
    return f"{num_bytes / 2 ** 30:.1f} GiB" if num_bytes != float("inf") else "unlimited"
