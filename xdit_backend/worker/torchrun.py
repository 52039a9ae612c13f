"""torchrun process of one group, which ends with its host: a separate program, or forked from the forkserver with its
imports.

Its first argument names a file for reports of failed workers. It is in memory, since the disk that the output goes to
may be full.

Workers notice the end of their host through their connection. A worker that is stopped or hangs does not, nor does any
worker while a process forked by the host lives, which has copies of the host's sockets.
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
WORKERS_S = 2.0                # for workers to notice, and to remove the files of the group


def main():
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    _keep_failures(sys.argv.pop(1))
    from torch.distributed.run import main as torchrun  # takes seconds, during which the host may end

    from . import rendezvous
    rendezvous.register()
    torchrun()


def run_forked(arguments, rank_main):
    """Run torchrun in a forked process, and fork its ranks, which call rank_main with the arguments of
    `xdit_backend.worker`.

    arguments: those of `main`. The ranks inherit this process's imports. Returns when all have ended; raises if one
    failed.
    """
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from . import rendezvous
    rendezvous.register()
    _keep_failures(arguments[0])
    parsed = parse_args(["--start-method=fork", *arguments[1:]])
    # torch's files for each rank are removed with the group's folder
    tempfile.tempdir = parsed.log_dir
    with no_gpu():
        config, _, _ = config_from_args(parsed)
    elastic_launch(config, rank_main)(*parsed.training_script_args)


@contextmanager
def no_gpu():
    """Hide GPUs from PyTorch, so that it does not open them: CUDA cannot be used in processes forked after that.

    diffusers queries GPUs when it is imported, and torchrun when it starts.
    """
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


def end_with_parent(parent):
    """End this process and its children when its parent is gone, or has closed this process's standard input.

    parent: its pid.
    """
    while os.getppid() == parent:
        # not sys.stdin, whose lock would block the end of the process
        if select.select([0], [], [], POLL_S)[0] and not os.read(0, 1):
            break
    end_children(WORKERS_S)
    os._exit(1)


def end_children(timeout_s):
    """Wait for the child processes, recursively, and kill those that still run after timeout_s."""
    _, running = psutil.wait_procs(psutil.Process().children(recursive=True), timeout_s)
    for process in running:
        process.kill()


if __name__ == "__main__":
    main()
