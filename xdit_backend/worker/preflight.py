"""What a worker tries before it takes commands: its device, and a real transfer between all ranks. Called by serve."""

import torch
import torch.distributed as dist

from ..distributed.collectives import Traffic, all_to_all
from ..protocol.errors import LinkError, WorkerStartError

# of a device's memory: libraries and exchanges take that before a model is there
MIN_FREE_BYTES = 2 ** 29
TRANSFER_ELEMENTS = 2 ** 18                # int32, to each other rank


def prepare_device(device):
    """Make this process's context on its device. Raises WorkerStartError where the device cannot be used,
    or has no memory free."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.set_device(device)
        torch.cuda.init()                                      # else DeviceMesh would choose a device by rank
        free, total = torch.cuda.mem_get_info(device)
    except Exception as error:                                 # whatever a driver says
        raise WorkerStartError(f"{device} cannot be used: {type(error).__name__}: {error} Is another program using "
                               f"all of it (nvidia-smi shows), or in exclusive mode?") from error
    check_free(str(device), free, total)


def check_free(device, free, total):
    if free < MIN_FREE_BYTES:
        raise WorkerStartError("Close other programs on it (nvidia-smi shows them), unload ComfyUI's models in its "
                               f"menu, or leave it out in xDiT Parallel Config: {device} has {free / 2 ** 20:.0f} MB "
                               f"of {total / 2 ** 30:.1f} GB free, and a worker needs at least "
                               f"{MIN_FREE_BYTES / 2 ** 20:.0f} MB before it holds a model.")


def try_links(rank, devices, device):
    """Send every other rank a tensor and compare what comes. A collective: every rank of the world calls it.

    Raises LinkError where it fails, or other numbers come than were sent. Broken peer-to-peer copies may also never
    end: the host, which knows when all ranks have begun, counts the seconds.
    """
    count = len(devices)
    ramp = torch.arange(TRANSFER_ELEMENTS, dtype=torch.int32, device=device)

    def message(sender, receiver):
        return ramp + (sender * count + receiver) * TRANSFER_ELEMENTS
    try:
        received = all_to_all([message(rank, other) for other in range(count)], [ramp.shape] * count, dist.group.WORLD,
                              Traffic())
        wrong = [devices[other] for other, piece in enumerate(received) if not torch.equal(piece, message(other, rank))]
    except RuntimeError as error:                              # DistBackendError is one
        raise LinkError(f"a transfer between {', '.join(devices)} failed on rank {rank} with {type(error).__name__}: "
                        f"{error}") from error
    if wrong:
        raise LinkError(f"{', '.join(wrong)} sent {devices[rank]} (rank {rank}) numbers that arrived as others")
