"""Keeps a thread near its card: on a machine of several NUMA nodes, what copies between host memory and a card runs on
the processors of the node that the card is attached to. Page-locked memory that such a thread touches first is there
too. Used by memory/copy_thread.py.
"""

import logging
import os
from pathlib import Path

import torch

log = logging.getLogger(__name__)
SYSFS = "/sys"


def pci_address(device):
    """Of a CUDA device, as sysfs names it: "0000:3b:00.0"; "" where torch does not tell it, as older ones do not."""
    gpu = torch.cuda.get_device_properties(device)
    if not hasattr(gpu, "pci_bus_id"):
        return ""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def stay_near(address, sysfs=SYSFS):
    """Have the calling thread, and threads that it begins, run on processors of the NUMA node of the card with this PCI
    address. Returns those processors; none where the thread stays as it is: on a machine of one node, where the system
    does not say which node it is (told in the log), and where this process may not use its processors (told too).

    sysfs: the folder that Linux has at /sys.
    """
    folder = Path(sysfs)
    if len(list(folder.glob("devices/system/node/node[0-9]*"))) < 2:
        return set()
    try:
        if not address:
            raise OSError("this PyTorch does not tell its address")
        node = int((folder / "bus/pci/devices" / address / "numa_node").read_text())
        if node < 0:
            raise OSError("the system does not know its NUMA node")
        of_node = numbers_of((folder / f"devices/system/node/node{node}/cpulist").read_text())
        processors = of_node & os.sched_getaffinity(0)
        if not processors:
            raise OSError(f"none of the processors of its NUMA node {node} is among those of this process")
        os.sched_setaffinity(0, processors)
    except (OSError, ValueError) as error:
        log.info("weights for the card at %s are copied by any processor: %s", address, error)
        return set()
    log.info("weights for the card at %s are copied by processors of its NUMA node %d", address, node)
    return processors


def numbers_of(text):
    """{0, 1, 2, 3, 8} of "0-3,8", as sysfs lists processors. Raises ValueError on anything else."""
    numbers = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
