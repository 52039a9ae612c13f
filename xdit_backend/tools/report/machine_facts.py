"""Facts about this machine for a report: GPUs, links between them, driver, libraries, processors and memory.

Nothing identifies the machine or its user: no serial numbers, bus ids, host or user names, and no paths.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ... import system
from ...host.doctor import PACKAGES, package_versions
from ...host.preflight import num_cuda_devices

TIMEOUT_S = 20
SLOWER = 0.85                  # of the fastest device's rate, below which a device is noted
# column of a GPU in the report -> query of nvidia-smi
QUERIES = {"driver": "driver_version", "pcie_generation": "pcie.link.gen.max", "pcie_width": "pcie.link.width.max",
           "power_limit_w": "power.limit", "driver_model": "driver_model.current",
           "performance_state": "pstate", "ecc": "ecc.mode.current"}
UNKNOWN = ("", "[N/A]", "[Not Supported]", "N/A", "[Unknown Error]")


def machine_facts():
    """{name: value} of everything that can be read here."""
    queried = _queried()
    return {"system": system.description(), "architecture": platform.machine(),
            "processor": _processor(), "cores": os.cpu_count(), "numa_nodes": _num_numa_nodes(),
            "system_ram_bytes": psutil.virtual_memory().total, "python": platform.python_version(),
            "packages": {name: version for name, version in package_versions(PACKAGES).items()
                         if version != "not installed"},
            "cuda": torch.version.cuda, "rocm": torch.version.hip,
            "cudnn": torch.backends.cudnn.version() if num_cuda_devices() else None,
            "nccl": _nccl(), "gpus": gpus(queried), "listed_gpus": len(queried), "peer_access": peer_access(),
            "topology": topology()}


def notes_of(facts, devices, rates=()):
    """Limits of this machine, a sentence each: GPUs that PyTorch does not find, pairs without peer access, and slower
    devices. facts: machine_facts(). devices: of the report. rates: FLOP/s of each device's matrix multiplications; ():
    not measured."""
    notes, used = [], sorted({int(device.partition(":")[2] or 0) for device in devices if device.startswith("cuda")})
    listed, found = facts["listed_gpus"], len(facts["gpus"])
    if listed > found:
        notes.append(f"The driver lists {listed} GPUs, and PyTorch finds {found}: check CUDA_VISIBLE_DEVICES and the "
                     f"PyTorch build.")
    if len(set(devices)) < len(devices) and used:
        notes.append(f"{len(devices)} workers share {len(set(devices))} GPU: methods are checked, and cannot be faster "
                     f"than one device.")
    apart = [(one, other) for one in used for other in used if one < other and not facts["peer_access"][one][other]]
    if apart:
        pairs = ", ".join(f"cuda:{one} and cuda:{other}" for one, other in apart)
        notes.append(f"No peer access between {pairs}: they exchange through system RAM.")
    fastest = max(rates, default=0.0)
    for rank, rate in enumerate(rates):
        if rate < SLOWER * fastest:
            notes.append(f"Rank {rank} ({devices[rank]}) multiplies matrices {rate / fastest:.2f} times as fast as the "
                         f"fastest device.")
    return notes


def gpus(queried):
    """[{name: value}] of each CUDA device. queried: columns of each by nvidia-smi, as far as it lists them."""
    found = []
    for index in range(num_cuda_devices()):
        properties = torch.cuda.get_device_properties(index)
        found.append({"name": properties.name, "memory_bytes": properties.total_memory,
                      "capability": f"{properties.major}.{properties.minor}",
                      "multiprocessors": properties.multi_processor_count,
                      **(queried[index] if index < len(queried) else {})})
    return found


def peer_access():
    """[[whether one device reads the memory of another directly]] by index."""
    count = num_cuda_devices()
    return [[one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
            for one in range(count)]


def topology():
    """{"GPU0 GPU1": link} between GPUs as nvidia-smi names it: NV4 is four NVLinks, PHB a PCIe host bridge, SYS another
    processor's."""
    lines = [line.split() for line in _run(["nvidia-smi", "topo", "-m"]).splitlines() if line.strip()]
    names = [name for name in (lines[0] if lines else []) if name.startswith("GPU") and name[3:].isdigit()]
    links = {}
    for row in lines[1:]:
        if row[0] in names:
            links |= {f"{row[0]} {name}": link for name, link in zip(names, row[1:]) if name > row[0]}
    return links


def _queried():
    """[{column: value}] of each GPU by nvidia-smi; [] without it."""
    text = _run(["nvidia-smi", f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader,nounits"])
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines() if line.strip()]
    return [{name: value for name, value in zip(QUERIES, row) if value not in UNKNOWN} for row in rows
            if len(row) == len(QUERIES)]


def _run(command):
    """A command's output; "" if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _num_numa_nodes():
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def _nccl():
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))
