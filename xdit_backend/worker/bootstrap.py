"""One rank's process, whichever way it came to be: a program of its own (__main__),
or forked with its libraries (forkserver.py)."""

import ctypes
import gc
import logging
import os
import signal
import sys

from ..protocol.devices import own_name
from .log_rotation import take_over

# diffusers imports these where they are installed, and does without them. A worker runs no text encoder, and
# transformers takes it a second to import; the others want transformers, and are not needed either.
LEFT_OUT = "transformers", "peft", "optimum", "auto_round", "sdnq", "modelopt"
# Some of these look at the GPU when they are imported, and remember what they see. Weights and kernels import what they
# need when they need it.
LATER = ("bitsandbytes", "torchao", "xformers", "flash_attn", "flash_attn_interface", "flash_attn_3", "sageattention",
         "flashinfer", "kernels")
TORCHRUN_HANDLES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PR_SET_NAME = 15                           # linux/prctl.h


def run(folder, devices, first_rank, log_folder):
    """Serve the host until it says stop or is gone. The arguments are texts.

    first_rank: of this machine, whose torchrun counts its own ranks from 0 (LOCAL_RANK).
    """
    rank = rank_of(first_rank)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(1 + devices.count(","))}
    log_file = os.path.join(log_folder, f"rank-{rank}.log")
    take_over(log_file)
    import_libraries()
    from .command_loop import serve as command_loop
    logging.basicConfig(level=os.environ.get("XDIT_LOG", "WARNING").upper(),
                        format=f"%(asctime)s [rank {rank}] %(name)s: %(message)s")
    command_loop(folder, rank, devices.split(","), log_file)


def run_forked(folder, devices, first_rank, log_folder):
    """As `run`, in a process that was forked from torchrun's: puts back what that has set for itself."""
    name_process(f"xdit rank {rank_of(first_rank)}")
    for number in TORCHRUN_HANDLES:
        signal.signal(number, signal.SIG_DFL)
    import tempfile

    import torch
    if torch.cuda._is_in_bad_fork() and any(own_name(device) != "cpu" for device in devices.split(",")):
        # something has asked for GPUs before, and CUDA works in no process that was forked then
        os.execv(sys.executable, [sys.executable, "-m", "xdit_backend.worker", folder, devices, first_rank,
                                  log_folder])
    tempfile.tempdir = None
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # which its libraries read when they were imported
    run(folder, devices, first_rank, log_folder)


def rank_of(first_rank):
    return int(first_rank) + int(os.environ["LOCAL_RANK"])


def name_process(name):
    """Have the system show this process by a name of at most 15 letters:
    what was forked has the arguments of what it is forked from."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def import_libraries():
    """Import what every worker needs. Takes seconds, and may fail."""
    later = [name for name in LATER if name not in sys.modules]
    sys.modules.update(dict.fromkeys((*LEFT_OUT, *later)))
    # Collecting garbage meanwhile would be a fifth of the time, and what is imported stays.
    gc.disable()
    import diffusers.utils.import_utils  # noqa: F401          # looks once what there is

    from . import command_loop  # noqa: F401
    for name in later:
        del sys.modules[name]
    gc.freeze()
    gc.enable()
