"""NUMA placement of threads: on a machine with several NUMA nodes, a thread that copies between system RAM and a GPU
runs on the CPUs of the GPU's node. Pinned memory that such a thread touches first is there too."""

import logging
import os
from pathlib import Path

from ..system import accelerator

log = logging.getLogger(__name__)
SYSFS = "/sys"


def pci_address(device):
    """PCI address of a GPU as in sysfs: "0000:3b:00.0"; "" if this version of torch does not provide it."""
    gpu = accelerator.module(device).get_device_properties(device)
    if not hasattr(gpu, "pci_bus_id"):
        return ""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def stay_near(address, sysfs=SYSFS):
    """Pin the calling thread, and threads that it starts, to the CPUs of the NUMA node of the GPU with this PCI
    address. Returns those CPUs; an empty set if the thread is not pinned: on a machine with one node, if the node is
    unknown (logged), or if this process may not use its CPUs (logged).

    sysfs: the folder that Linux has at /sys.
    """
    folder = Path(sysfs)
    if len(list(folder.glob("devices/system/node/node[0-9]*"))) < 2:
        return set()
    try:
        if not address:
            raise OSError("this PyTorch does not provide its PCI address")
        node = int((folder / "bus/pci/devices" / address / "numa_node").read_text())
        if node < 0:
            raise OSError("the system does not know its NUMA node")
        of_node = numbers_of((folder / f"devices/system/node/node{node}/cpulist").read_text())
        processors = of_node & os.sched_getaffinity(0)
        if not processors:
            raise OSError(f"this process may use none of the CPUs of its NUMA node {node}")
        os.sched_setaffinity(0, processors)
    except (OSError, ValueError) as error:
        log.info("weights for the GPU at %s are copied by any CPU: %s", address, error)
        return set()
    log.info("weights for the GPU at %s are copied by CPUs of its NUMA node %d", address, node)
    return processors


def numbers_of(text):
    """The set {0, 1, 2, 3, 8} for "0-3,8", as sysfs lists CPUs. Raises ValueError on anything else."""
    numbers = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
