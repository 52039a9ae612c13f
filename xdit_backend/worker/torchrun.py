"""torchrun of one group, which ends when its host does: a program of its own, or forked from the forkserver with all
that it imports.

Its first argument names a file, for what it says of workers that fail: in memory, since the disk that its output goes
to may be full.

Workers notice the end of their host by their own connection. One that is stopped, or hangs, does not, nor does any
while a process lives that the host has forked, which holds the host's end of all.
"""

import logging
import os
import select
import sys
import tempfile
import threading
from contextlib import contextmanager

import psutil

POLL_S = 0.5
WORKERS_S = 2.0                # which workers have to notice, and to remove the files of the group


def main():
    threading.Thread(target=end_with_the_parent, args=(os.getppid(),), daemon=True).start()
    _keep_failures(sys.argv.pop(1))
    from torch.distributed.run import main as torchrun  # takes seconds, in which the host may end

    from . import rendezvous
    rendezvous.register()
    torchrun()


def run_forked(arguments, rank_main):
    """Be torchrun in a process that was forked, and fork its ranks, which call rank_main with the arguments of
    `xdit_backend.worker`.

    arguments: those of `main`. The ranks inherit what this process has imported. Returns when all have ended; raises
    where one failed.
    """
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from . import rendezvous
    rendezvous.register()
    _keep_failures(arguments[0])
    parsed = parse_args(["--start-method=fork", *arguments[1:]])
    # what torch writes for each rank goes with the group's folder
    tempfile.tempdir = parsed.log_dir
    with no_gpu():
        config, _, _ = config_from_args(parsed)
    elastic_launch(config, rank_main)(*parsed.training_script_args)


@contextmanager
def no_gpu():
    """Under this, PyTorch answers who asks for GPUs that there are none, and asks nobody: CUDA opens them for that, and
    cannot be used afterwards in what is forked. diffusers asks when it is imported, and torchrun when it starts."""
    hiding = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    before = {name: os.environ.get(name) for name in hiding}
    os.environ.update(hiding)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _keep_failures(path):
    logging.getLogger("torch.distributed.elastic").addHandler(logging.FileHandler(path))


def end_with_the_parent(parent):
    """End this process and all below it when its parent is gone, or has closed its standard input.
    parent: its process number."""
    while os.getppid() == parent:
        # not sys.stdin, whose lock a process that ends would wait for
        if select.select([0], [], [], POLL_S)[0] and not os.read(0, 1):
            break
    end_children(WORKERS_S)
    os._exit(1)


def end_children(timeout_s):
    """Kill every process below this one that does not end by itself in so long."""
    _, running = psutil.wait_procs(psutil.Process().children(recursive=True), timeout_s)
    for process in running:
        process.kill()


if __name__ == "__main__":
    main()
