"""What memory this rank's process takes beside weights, and how much more a run took at its peak. Used by the engine.

Of a CPU worker it is the process's own memory: what it maps of files and of shared memory is counted where that belongs.
"""

import ctypes
import sys
from pathlib import Path

import psutil
import torch

from ..host_memory import memory_room

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"                           # proc(5): the peak of the resident set starts anew
SPARE_BYTES = 2 ** 26                      # that the C library may keep of what runs have freed: the next one has it without page faults


class Memory:
    def __init__(self, device):
        self._device, self._start = device, {}
        self._settled_bytes = _status()["RssAnon"]             # of this process's own, when memory was given back last

    def begin_run(self):
        """From now on the peak is that of another run."""
        if self._device.type == "cuda":
            self._start = {"allocated": torch.cuda.memory_allocated(self._device)}
            torch.cuda.reset_peak_memory_stats(self._device)
        elif STATUS.exists():
            self._start = _status()
            try:
                CLEAR.write_text(RESET_PEAK)
            except OSError:                                    # not allowed here: the peak is that of all runs
                pass

    def give_back(self, spare_bytes=0):
        """Give memory that nothing uses back to the device, and to the system where this process has grown by more than that."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if not spare_bytes or _status()["RssAnon"] > self._settled_bytes + spare_bytes:
            return_freed_memory()
            self._settled_bytes = _status()["RssAnon"]

    def report(self):
        """Bytes: total_bytes and unused_bytes of the device, reserved_bytes there by this process, host_bytes of its own elsewhere, and
        activation_bytes that the last run took at its peak, with what it kept."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - self._start.get("allocated", 0) if self._start else 0
            unused, total = torch.cuda.mem_get_info(self._device)
            return {"total_bytes": total, "unused_bytes": unused, "reserved_bytes": torch.cuda.memory_reserved(self._device),
                    "host_bytes": _status()["RssAnon"], "activation_bytes": max(0, peak)}
        now, (room, limit) = _status(), memory_room()
        peak = 0
        if self._start and "VmHWM" in now:                     # but for pages of files and of shared memory that came meanwhile
            mapped = sum(max(0, now[name] - self._start[name]) for name in ("RssFile", "RssShmem"))
            peak = now["VmHWM"] - self._start["VmRSS"] - mapped
        return {"total_bytes": limit, "unused_bytes": room, "reserved_bytes": now["RssAnon"], "host_bytes": 0,
                "activation_bytes": max(0, peak)}


def return_freed_memory():
    """Have the C library give the system back what was freed, which CPU workers are set up to keep for activations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:                                       # glibc's
        trim(0)


def _status():
    """Bytes of this process's memory by kind. RssAnon is its own."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines()) if STATUS.exists() else {}
    if "RssAnon" not in fields:                                # not Linux, or gVisor's, which says less
        return {"RssAnon": psutil.Process().memory_info().rss}
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")}
