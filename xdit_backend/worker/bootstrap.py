"""Start of a rank's process, as a separate program (__main__) or forked with its libraries (forkserver.py)."""

import gc
import logging
import os
import signal
import sys

from .. import system
from ..protocol.devices import own_name
from ..system import accelerator
from .log_rotation import take_over

# Optional dependencies that diffusers would import. A worker runs no text encoder, transformers takes a second to
# import, and the others need transformers.
LEFT_OUT = "transformers", "peft", "optimum", "auto_round", "sdnq", "modelopt"
# Imported by weights and attention backends when they are needed. Some query the GPU when they are imported, and cache
# the result.
LATER = ("bitsandbytes", "torchao", "xformers", "flash_attn", "flash_attn_interface", "flash_attn_3", "sageattention",
         "flashinfer", "kernels")


def run(folder, devices, first_rank, log_folder):
    """Serve the host until it sends Stop or is gone. All arguments are strings.

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
    """Call `run` in a process forked from torchrun's, after resetting torchrun's signal handlers and settings."""
    system.name_process(f"xdit rank {rank_of(first_rank)}")
    for number in system.TERMINATION_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    import tempfile

    import torch
    has_gpu = any(own_name(device) != "cpu" for device in devices.split(","))
    if has_gpu and accelerator.module()._is_in_bad_fork():
        # the GPU was initialised before the fork, and does not work in forked processes then
        os.execv(sys.executable, [sys.executable, "-m", "xdit_backend.worker", folder, devices, first_rank,
                                  log_folder])
    tempfile.tempdir = None
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # libraries read the variable when they are imported
    run(folder, devices, first_rank, log_folder)


def rank_of(first_rank):
    return int(first_rank) + int(os.environ["LOCAL_RANK"])


def import_libraries():
    """Import the libraries of every worker. Takes seconds, and may fail."""
    later = [name for name in LATER if name not in sys.modules]
    sys.modules.update(dict.fromkeys((*LEFT_OUT, *later)))
    # garbage collection would take a fifth of the time, and imported modules stay
    gc.disable()
    import diffusers.utils.import_utils  # noqa: F401          # detects installed packages once

    from . import command_loop  # noqa: F401
    for name in later:
        del sys.modules[name]
    gc.freeze()
    gc.enable()
