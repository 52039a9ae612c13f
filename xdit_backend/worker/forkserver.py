"""Forkserver: imports the libraries of torchrun and workers once, and forks a torchrun for each group, which forks its
ranks in turn.

    python -m xdit_backend.worker.forkserver SOCKET HOST

SOCKET: file descriptor for the host's requests (host/forkserver.py). HOST: the host's pid. Forked processes share the
imported pages: a rank starts in a tenth of a second, and libraries take memory once. That is safe only while this
process has one thread and has not opened a GPU. Otherwise, and on systems where forking is not known to be safe,
torchrun and each rank are separate programs.
"""

import json
import os
import select
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from .. import system
from ..autoencoders import FAMILIES as VAES
from ..models import FAMILIES
from ..system import accelerator
from . import bootstrap, torchrun

MAX_BYTES = 2 ** 20                        # of one request


def main():
    channel, host = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    channel.set_inheritable(False)
    why_not = _prepare()
    channel.send(json.dumps({"why_not": why_not}).encode())
    started = {}                                               # pid -> Popen, or None if forked
    while os.getppid() == host:
        if not select.select([channel], [], [], torchrun.POLL_S)[0]:
            _forget_ended(started)
            continue
        body, files, _, _ = socket.recv_fds(channel, MAX_BYTES, 1)
        if not body:                                           # the host has closed its end
            break
        request, [output] = json.loads(body), files
        if why_not:
            process = _start(request["arguments"], request["environment"], request["folder"], output)
            started[pid := process.pid] = process
        else:
            started[pid := _fork(request["arguments"], request["environment"], request["folder"], output,
                                 channel)] = None
        os.close(output)
        channel.send(json.dumps({"pid": pid}).encode())
    torchrun.end_children(torchrun.WORKERS_S)
    os._exit(0)


def _prepare():
    """Import all libraries; returns the reason why forking is not possible, or ""."""
    if os.environ.get("XDIT_FORK") == "0":
        return "XDIT_FORK is 0"
    if why_not := system.why_not_fork():
        return why_not
    with torchrun.no_gpu():
        bootstrap.import_libraries()
        _import_models()
        import torch.distributed.launcher.api
        import torch.distributed.run  # noqa: F401
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return f"the imported libraries have started {num_threads - 1} threads"
    files = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    opened = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
    if accelerator.module().is_initialized() or any(_target(file).startswith(opened) for file in files):
        return "the imported libraries have opened a GPU"
    return ""


def _import_models():
    """Import diffusers' class of every family, which each rank would otherwise import for its first model."""
    import diffusers
    for name in {*(family.transformer for family in FAMILIES.values() if not family.is_comfyuis),
                 *(family.autoencoder for family in VAES.values())}:
        getattr(diffusers, name, None)                         # missing in older releases


def _target(link):
    with suppress(OSError):                                    # the descriptor of /proc/self/fd, closed by now
        return os.readlink(link)
    return ""


def _fork(arguments, environment, folder, output, channel):
    """Fork a torchrun, which ends with this process; returns its pid."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        channel.close()
        os.setsid()
        system.name_process("xdit torchrun")
        system.end_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for ours, theirs in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(ours, theirs)
        os.close(output)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torchrun.run_forked(arguments, bootstrap.run_forked)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _start(arguments, environment, folder, output):
    """Start torchrun as a separate program, which runs until its standard input is closed; returns its Popen."""
    return subprocess.Popen([sys.executable, "-m", "xdit_backend.worker.torchrun", *arguments], cwd=folder,
                            env=environment,
                            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def _forget_ended(started):
    for pid in list(started):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del started[pid]


if __name__ == "__main__":
    main()
