"""Free system RAM of the machine or container, and the read rate of files that do not fit in the page cache."""

import math
import mmap
import os
import time
from pathlib import Path

import psutil

from .. import system

CGROUPS = Path("/sys/fs/cgroup")
READ_BYTES, CHUNK_BYTES = 2 ** 27, 2 ** 24
AMPLE = math.inf, 0.0                      # result of pages_of: nothing is read from disk again


def available_memory(cgroups=CGROUPS):
    """(free bytes of system RAM, total bytes). A container's limits, if lower than the machine's.

    A container's page cache can be reclaimed, and counts as free.
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
    """(bytes of these files that fit in the page cache, read rate of the others from disk in bytes/s); AMPLE if all of
    them fit."""
    free_bytes = available()[0]
    if sum(map(os.path.getsize, files)) <= free_bytes:
        return AMPLE
    return free_bytes, disk_bytes_s(max(files, key=os.path.getsize))


def disk_bytes_s(path, read_bytes=READ_BYTES):
    """Read rate in bytes/s of a mapped file whose pages are not in memory, as when weights are streamed from it.
    Measured on a section of the file, which is dropped from the page cache first."""
    size = os.stat(path).st_size
    start = max(0, size - read_bytes) // 2 // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    count = min(read_bytes, size - start)
    with open(path, "rb") as file:
        system.drop_from_cache(file, start, count)
        with mmap.mmap(file.fileno(), count, access=mmap.ACCESS_READ, offset=start) as pages:
            started_s = time.perf_counter()
            for start_byte in range(0, count, CHUNK_BYTES):
                pages[start_byte:start_byte + CHUNK_BYTES]
            return count / (time.perf_counter() - started_s)
