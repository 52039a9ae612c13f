"""Memory of this rank's runs, without weights: peak use, and when freed memory is returned to the system.

For a CPU worker it is the process's anonymous memory: mapped files and shared memory are not counted.
"""

import math
import time
from pathlib import Path

from .. import system
from ..memory.system_memory import available_memory
from ..system import accelerator

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"                           # proc(5): resets the peak of the resident set
IDLE_S = 60.0                              # without a run, until a worker frees memory cached by the last one
CACHE_SHARE = 0.25                         # fraction of unused memory that a worker may cache until then


class Memory:
    """Memory of runs.

    Freed memory stays cached for the next prompt of a queue, until it is requested or no run has started for a while.
    It is cached only while it is small compared with the unused memory, since ComfyUI's own models use the same GPU and
    check its free memory.
    """

    def __init__(self, device):
        self._device, self._start = device, {}
        self._module = accelerator.module(device) if device.type != "cpu" else None
        # memory was freed since the last run began; time at which it will be
        self._is_emptied, self._until_s = True, math.inf

    def begin_run(self):
        """Reset the peak for another run. On a CPU, the peak covers all runs that used the same cached memory."""
        if self._module is not None:
            self._start = {"allocated": self._module.memory_allocated(self._device)}
            self._module.reset_peak_memory_stats(self._device)
        elif self._is_emptied and STATUS.exists():
            self._start, self._is_emptied = _status(), False
            try:
                CLEAR.write_text(RESET_PEAK)
            except OSError:                                    # not permitted: the peak covers all runs
                pass
        self._until_s = math.inf

    def end_run(self, unused_bytes):
        """Cache a finished run's (or decode's or encode's) memory for a while, or free it.

        unused_bytes: see Predictions.
        """
        if not self._is_worth_caching(unused_bytes):
            self.give_back()
        else:
            self._until_s = time.monotonic() + IDLE_S

    def _is_worth_caching(self, unused_bytes):
        if self._module is not None:
            cached = self._module.memory_reserved(self._device) - self._module.memory_allocated(self._device)
            return 0 < cached <= CACHE_SHARE * unused_bytes
        return not self._is_emptied and _status()["RssAnon"] - self._start["RssAnon"] <= CACHE_SHARE * unused_bytes

    @property
    def idle_timeout_s(self):
        """Seconds after which cached memory is to be freed if no run starts; None: there is none."""
        return None if self._until_s == math.inf else max(0.0, self._until_s - time.monotonic())

    def give_back(self):
        """Return unused memory to the device and the system; "given_bytes" of the result: bytes of VRAM freed."""
        freed_bytes = 0
        if self._module is not None:
            before = self._module.memory_reserved(self._device)
            self._module.empty_cache()
            freed_bytes = before - self._module.memory_reserved(self._device)
        system.trim_heap()
        self._is_emptied, self._until_s = True, math.inf
        return {"given_bytes": freed_bytes}

    def report(self):
        """Bytes: total_bytes and unused_bytes of the device; reserved_bytes of this process on the device; host_bytes
        of its anonymous memory in system RAM; activation_bytes, the last run's peak including its caches. For a CPU
        worker, the peak of all runs since memory was freed."""
        if self._module is not None:
            peak = (self._module.max_memory_allocated(self._device) - self._start.get("allocated", 0) if self._start
                    else 0)
            unused, total = self._module.mem_get_info(self._device)
            return {"total_bytes": total, "unused_bytes": unused,
                    "reserved_bytes": self._module.memory_reserved(self._device),
                    "host_bytes": _status()["RssAnon"], "activation_bytes": max(0, peak)}
        now, (available, limit) = _status(), available_memory()
        peak = 0
        # without pages of files and shared memory that were mapped since then
        if self._start and "VmHWM" in now:
            mapped = sum(max(0, now[name] - self._start[name]) for name in ("RssFile", "RssShmem"))
            peak = now["VmHWM"] - self._start["VmRSS"] - mapped
        return {"total_bytes": limit, "unused_bytes": available, "reserved_bytes": now["RssAnon"], "host_bytes": 0,
                "activation_bytes": max(0, peak)}


def _status():
    """Bytes of this process's memory by kind; RssAnon is its anonymous memory."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines()) if STATUS.exists() else {}
    if "RssAnon" not in fields:                                # not Linux, or gVisor, which reports less
        return {"RssAnon": system.private_bytes()}
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")}
