"""What faults.py does to files, memory and copies while weights come from them. Each returns what undoes it."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

# In a worker: while a file of its rank is there, each copy that the thread makes fails.
FAILING_COPIES = """
import os
import threading
import torch
copy = torch.Tensor.copy_

def failing(self, *args, **kwargs):
    if (threading.current_thread().name == "xdit-copies"
            and os.path.exists(os.path.join({folder!r}, "fails-" + os.environ["RANK"]))):
        raise OSError("no page-locked memory is left")
    return copy(self, *args, **kwargs)
torch.Tensor.copy_ = failing
"""


def can_fail_copies(folder):
    """Have workers that start from now on look for files in this folder, that fail_copies makes; returns what undoes
    it."""
    Path(folder, "sitecustomize.py").write_text(FAILING_COPIES.format(folder=str(folder)))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))

    def undo():
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return undo


def fail_copies(folder, rank):
    """Fail each copy of weights in this rank."""
    path = Path(folder, f"fails-{rank}")
    path.touch()
    return path.unlink


def written_to(path):
    """Overwrite a part of a file."""
    was, content = os.stat(path), Path(path).read_bytes()
    with open(path, "r+b") as file:
        file.seek(was.st_size // 2)
        file.write(bytes(min(4096, was.st_size // 2)))
    return partial(_put_back, path, was, content)


def cut_short(path):
    """Cut off the second half of a file."""
    was, content = os.stat(path), Path(path).read_bytes()
    os.truncate(path, was.st_size // 2)
    return partial(_put_back, path, was, content)


def _put_back(path, was, content):
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def removed(path):
    """Remove a file."""
    elsewhere = f"{path}.removed"
    os.rename(path, elsewhere)
    return lambda: os.rename(elsewhere, path)


def without_memory(process):
    """Let a process take next to no more memory."""
    limits = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + 2 ** 16, limits[1]))

    def undo():
        with suppress(psutil.Error):                           # it has ended of it
            process.rlimit(psutil.RLIMIT_AS, limits)
    return undo
