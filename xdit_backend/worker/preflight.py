"""Preflight checks of a worker: initialises its device, and tests a transfer between all ranks."""

import torch
import torch.distributed as dist

from ..distributed.collectives import Traffic, all_to_all
from ..protocol.errors import LinkError, WorkerStartError
from ..system import accelerator

# VRAM that libraries and communication take before a model is loaded
MIN_FREE_BYTES = 2 ** 29
TRANSFER_ELEMENTS = 2 ** 18                # int32, to each other rank


def prepare_device(device):
    """Create this process's context on its GPU. Raises WorkerStartError if the device cannot be used or is full."""
    if device.type == "cpu":
        return
    own = accelerator.module(device)
    try:
        own.set_device(device)
        own.init()                                             # else DeviceMesh would choose a device by rank
        free, total = own.mem_get_info(device)
    except Exception as error:                                 # whatever a driver says
        raise WorkerStartError(f"Check whether another program uses all of {device} (nvidia-smi shows them), or has it "
                               f"in exclusive mode: it cannot be used ({type(error).__name__}: {error})") from error
    check_free(str(device), free, total)


def check_free(device, free, total):
    if free < MIN_FREE_BYTES:
        raise WorkerStartError("Close other programs on it (nvidia-smi shows them), unload ComfyUI's models in its "
                               f"menu, or leave it out in xDiT Parallel Config: {device} has {free / 2 ** 20:.0f} MB "
                               f"of {total / 2 ** 30:.1f} GB free, and a worker needs at least "
                               f"{MIN_FREE_BYTES / 2 ** 20:.0f} MB before it loads a model.")


def try_links(rank, devices, device):
    """Exchange tensors with all other ranks and compare them. A collective: every rank of the world calls it.

    Raises LinkError if a transfer fails or corrupts data. Broken peer-to-peer copies may also hang: the host, which
    knows when all ranks have begun, has a timeout.
    """
    count = len(devices)
    ramp = torch.arange(TRANSFER_ELEMENTS, dtype=torch.int32, device=device)

    def message(sender, receiver):
        return ramp + (sender * count + receiver) * TRANSFER_ELEMENTS
    try:
        received = all_to_all([message(rank, other) for other in range(count)], [ramp.shape] * count, dist.group.WORLD,
                              Traffic())
        wrong = [devices[other] for other, tensor in enumerate(received)
                 if not torch.equal(tensor, message(other, rank))]
    except RuntimeError as error:                              # DistBackendError is one
        raise LinkError(f"a transfer between {', '.join(devices)} failed on rank {rank} with {type(error).__name__}: "
                        f"{error}") from error
    if wrong:
        raise LinkError(f"data from {', '.join(wrong)} arrived corrupted on {devices[rank]} (rank {rank})")
