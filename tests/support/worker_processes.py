"""Which processes of worker groups run: forkservers, the torchruns that these fork, and workers.
Used by tests that end them."""

import re

import psutil

FOLDER = re.compile(r"xdit-(\d+)-[0-9a-f]{8}")                 # of a group, named after its host


def line_of(process):
    """The process's arguments as one line; "" where it has ended."""
    try:
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""


def kind_of(process):
    """"forkserver", "torchrun", a worker's rank, or None. What is not forked has its rank in its environment."""
    line = line_of(process)
    try:
        if "xdit_backend.worker.forkserver" in line:
            words = process.name().split()
            return "forkserver" if words[0] != "xdit" else "torchrun" if words[1] == "torchrun" else int(words[2])
        if "xdit_backend.worker.torchrun" in line:
            return "torchrun"
        return int(process.environ()["RANK"]) if "xdit_backend.worker" in line else None
    except (psutil.Error, KeyError):
        return None


def host_of(process):
    """The number of the process that a forkserver, torchrun or worker is for."""
    line = line_of(process)
    found = FOLDER.search(line)
    return int(found[1]) if found else int(line.split()[-1])


def below(pid, but=()):
    """{kind_of: psutil.Process} of what runs below a process, without those in `but`. Of several of a kind one."""
    processes = (process for process in psutil.Process(pid).children(recursive=True) if process not in but)
    return {kind: process for process in processes if (kind := kind_of(process)) is not None}


def workers_below(pid, but=()):
    """The workers below a process, by rank."""
    found = below(pid, but)
    return [found[rank] for rank in sorted(kind for kind in found if isinstance(kind, int))]
