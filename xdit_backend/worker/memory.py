"""What memory this rank's process takes beside weights, and how much more a run took at its peak. Used by the engine.

Of a CPU worker it is the process's own memory: what it maps of files and of shared memory is counted where that belongs.
"""

from pathlib import Path

import psutil
import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"                           # proc(5): the peak of the resident set starts anew


class Memory:
    def __init__(self, device):
        self._device, self._start, self._peak_bytes = device, {}, 0

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

    def report(self):
        """Bytes: total_bytes of the device (0: not known), reserved_bytes by this process, activation_bytes a run took at its peak."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - self._start.get("allocated", 0) if self._start else 0
            return {"total_bytes": torch.cuda.get_device_properties(self._device).total_memory,
                    "reserved_bytes": torch.cuda.memory_reserved(self._device), "activation_bytes": max(0, peak)}
        now = _status()
        peak = 0
        if self._start and "VmHWM" in now:                     # but for pages of files and of shared memory that came meanwhile
            mapped = sum(max(0, now[name] - self._start[name]) for name in ("RssFile", "RssShmem"))
            peak = now["VmHWM"] - self._start["VmRSS"] - mapped
        return {"total_bytes": psutil.virtual_memory().total, "reserved_bytes": now["RssAnon"], "activation_bytes": max(0, peak)}


def _status():
    """Bytes of this process's memory by kind. RssAnon is its own."""
    if not STATUS.exists():
        return {"RssAnon": psutil.Process().memory_info().rss}
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")}
