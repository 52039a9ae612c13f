"""How much host memory there is, for the host and for workers: the machine's, or what a container may take of it."""

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


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
