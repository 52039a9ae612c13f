"""The memory of this rank's process beside weights: how much a run took at its peak, and when freed memory is given
back. Used by the engine, and by serve while it is idle.

Of a CPU worker it is the process's own memory: maps of files and of shared memory are counted where those belong.
"""

import ctypes
import math
import sys
import time
from pathlib import Path

import psutil
import torch

from ..memory.system_memory import available_memory

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"                           # proc(5): the peak of the resident set starts anew
IDLE_S = 60.0                              # without a run, until a worker gives back what the last one has freed
CACHE_SHARE = 0.25                         # of the memory that is unused, that a worker may keep until then


class Memory:
    """Memory of runs. It is kept for the next prompt of a queue, which finds it mapped, until it is asked for or
    nothing has come for a while; as long as it is small beside what is unused, so that nobody else misses it: ComfyUI's
    own models use the same card, and look at what is free.
    """

    def __init__(self, device):
        self._device, self._start = device, {}
        # was memory given back since the last run began? when it is to be
        self._is_emptied, self._until_s = True, math.inf

    def begin_run(self):
        """From now on the peak is that of another run; where memory was kept for it,
        the peak is that of all that have used it."""
        if self._device.type == "cuda":
            self._start = {"allocated": torch.cuda.memory_allocated(self._device)}
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._is_emptied and STATUS.exists():
            self._start, self._is_emptied = _status(), False
            try:
                CLEAR.write_text(RESET_PEAK)
            except OSError:                                    # not allowed here: the peak is that of all runs
                pass
        self._until_s = math.inf

    def end_run(self, unused_bytes):
        """A run has ended, or a decode or encode: its memory is kept for a while, or given back.
        unused_bytes: see Predictions."""
        if not self._is_worth_caching(unused_bytes):
            self.give_back()
        else:
            self._until_s = time.monotonic() + IDLE_S

    def _is_worth_caching(self, unused_bytes):
        if self._device.type == "cuda":
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return 0 < cached <= CACHE_SHARE * unused_bytes
        return not self._is_emptied and _status()["RssAnon"] - self._start["RssAnon"] <= CACHE_SHARE * unused_bytes

    @property
    def idle_timeout_s(self):
        """Seconds after which memory is to be given back if nothing but questions comes until then;
        None: there is none to give."""
        return None if self._until_s == math.inf else max(0.0, self._until_s - time.monotonic())

    def give_back(self):
        """Give memory that nothing uses back to the device, and to the system.
        Returns "given_bytes" of the device, of a GPU."""
        given_bytes = 0
        if self._device.type == "cuda":
            before = torch.cuda.memory_reserved(self._device)
            torch.cuda.empty_cache()
            given_bytes = before - torch.cuda.memory_reserved(self._device)
        return_freed_memory()
        self._is_emptied, self._until_s = True, math.inf
        return {"given_bytes": given_bytes}

    def report(self):
        """Bytes: total_bytes and unused_bytes of the device, reserved_bytes there by this process, host_bytes of its
        own elsewhere, and activation_bytes that the last run took at its peak, with what it kept: of a CPU worker, the
        most that runs have taken since memory was given back."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - self._start.get("allocated", 0) if self._start else 0
            unused, total = torch.cuda.mem_get_info(self._device)
            return {"total_bytes": total, "unused_bytes": unused,
                    "reserved_bytes": torch.cuda.memory_reserved(self._device),
                    "host_bytes": _status()["RssAnon"], "activation_bytes": max(0, peak)}
        now, (available, limit) = _status(), available_memory()
        peak = 0
        # but for pages of files and of shared memory that came meanwhile
        if self._start and "VmHWM" in now:
            mapped = sum(max(0, now[name] - self._start[name]) for name in ("RssFile", "RssShmem"))
            peak = now["VmHWM"] - self._start["VmRSS"] - mapped
        return {"total_bytes": limit, "unused_bytes": available, "reserved_bytes": now["RssAnon"], "host_bytes": 0,
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
