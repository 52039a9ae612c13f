"""How much host memory there is, for the host and for workers: the machine's, or what a container may take of it. And
how fast files are read that it has no room for."""

import math
import mmap
import os
import time
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
READ_BYTES, PIECE_BYTES = 2 ** 27, 2 ** 24
AMPLE = math.inf, 0.0                      # of pages_of: nothing is read from the disk again


def available_memory(cgroups=CGROUPS):
    """(bytes of host memory that may still be taken, bytes in all). A container's limit, where it is less than the
    machine's.

    What a container has of files it has read can be given up, and counts as free.
    """
    memory = psutil.virtual_memory()
    available, limit = memory.available, memory.total
    for most, used, statistics, field in (("memory.max", "memory.current", "memory.stat", "inactive_file"),
                                          ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes",
                                           "memory/memory.stat", "total_inactive_file")):
        try:
            own_limit = int((cgroups / most).read_text())      # "max": ValueError
            fields = dict(line.split() for line in (cgroups / statistics).read_text().splitlines())
            own_available = own_limit - int((cgroups / used).read_text()) + int(fields.get(field, 0))
        except (OSError, ValueError):
            continue
        if own_limit < limit:
            available, limit = min(available, max(0, own_available)), own_limit
    return available, limit


def pages_of(files, available=available_memory):
    """(bytes of these files that host memory has room for, bytes a second at which the others come from the disk);
    AMPLE where it has room for all of them."""
    free_bytes = available()[0]
    if sum(map(os.path.getsize, files)) <= free_bytes:
        return AMPLE
    return free_bytes, disk_bytes_s(max(files, key=os.path.getsize))


def disk_bytes_s(path, read_bytes=READ_BYTES):
    """Bytes a second at which a map of a file is read whose pages are not in memory, as weights of blocks are that come
    from it. Of a part of the file, which the system is asked to forget first."""
    size = os.stat(path).st_size
    start = max(0, size - read_bytes) // 2 // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    count = min(read_bytes, size - start)
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), count, access=mmap.ACCESS_READ, offset=start) as pages:
            started_s = time.perf_counter()
            for place in range(0, count, PIECE_BYTES):
                pages[place:place + PIECE_BYTES]
            return count / (time.perf_counter() - started_s)
