"""torchrun as the supervisor of a machine's workers: arguments, environment, process monitoring and termination."""

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from .. import system
from ..comfyui.install_location import FOLDER, find_comfyui
from ..protocol.devices import on_one_gpu, own_name
from .supervisor import ROOT, poll_ended

# file in a group's folder in memory: torchrun's log of workers that failed
FAILED = "failed"
# process name of a forked worker (worker/bootstrap.py); others have LOCAL_RANK in their environment
FORKED = re.compile(r"xdit rank (\d+)")
# CPU workers: every layer allocates its activations, and returning them to the system each time causes page faults. In
# two alternating pairs of runs a Flux forward of 2,432 tokens took 3.59 s with these settings instead of 3.75 s.
CPU_ALLOCATOR = {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_TRIM_THRESHOLD_": str(2 ** 32),
                 "MALLOC_MMAP_THRESHOLD_": str(2 ** 25), "MALLOC_TOP_PAD_": str(2 ** 26)}

# A worker has more streams than CUDA's default of eight queues: a stream that waits for a receive would block others in
# its queue.
CUDA_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}

# Variables that workers inherit: locations, and the user's thread counts. Nothing else, since libraries read variables
# that change results (DIFFUSERS_ATTN_BACKEND, ATEN_CPU_CAPABILITY).
INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "CONDA_PREFIX",
    "PYTHONHOME",
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_CACHE_PATH", *CUDA_QUEUES, "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION", "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ONEAPI_DEVICE_SELECTOR",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE",
    # for compiled blocks
    "CC", "CXX", "LIBRARY_PATH", "CPATH", "TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH", "TORCHINDUCTOR_CACHE_DIR"})
INHERITED_PREFIXES = ("XDIT_", "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "LC_")

# torch 2.6.0 to 2.7.0 use NCCL's non-blocking communicators if the group is created with a device_id, and these hang at
# random (pytorch issue 153960). Later releases default to blocking ones.
BLOCKING_COMMUNICATORS = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}

# Ranks that share a GPU (protocol/devices.on_one_gpu): NCCL's experimental switch; few thread blocks per kernel, so
# that those of all ranks fit; and no NVLink SHARP, with which NCCL rejects such ranks.
NCCL_ON_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}

# CUDA workers: ComfyUI sets cudaMallocAsync for itself, with which later allocations may wait for receives that are
# posted ahead of time.
CUDA_ALLOCATOR = system.CUDA_ALLOCATOR


def arguments_of(ranks):
    """Arguments of torchrun for these LocalRanks; the first one is the log file of failures (worker/torchrun.py).

    Each machine has its own torchrun with an in-process store (worker/rendezvous.py), so that torchrun opens no port
    and reads nothing that another process wrote.
    """
    return [
        str(ranks.folder / FAILED), "--nnodes=1", f"--nproc-per-node={ranks.num_ranks}", "--rdzv-backend=xdit",
        "--max-restarts=0", "--local-addr=127.0.0.1", f"--log-dir={ranks.scratch_folder}", "-m", "xdit_backend.worker",
        str(ranks.folder), ",".join(ranks.devices), str(ranks.first_rank), str(ranks.log_folder)]


def working_folder(ranks):
    """Working directory of torchrun. Python also imports from it, so it is ROOT if that contains a colon, with which it
    would be two entries of PYTHONPATH."""
    return ROOT if os.pathsep in str(ROOT) else ranks.scratch_folder


class Torchrun(psutil.Process):
    """A running torchrun: the WorkerProcesses of these LocalRanks."""

    def __init__(self, pid, ranks, why_not_forked=""):
        super().__init__(pid)
        self._ranks, self.why_not_forked = ranks, why_not_forked

    @property
    def has_ended(self):
        try:
            return not self.is_running() or self.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def wait_ended(self, timeout_s):
        return poll_ended(self, timeout_s)

    def workers(self):
        ranks = {}
        for child in self.children():
            with suppress(psutil.Error, KeyError, ValueError):     # it has ended, or is not a worker yet
                forked = FORKED.fullmatch(child.name())
                ranks[int(forked[1]) if forked else self._ranks.first_rank + int(child.environ()["LOCAL_RANK"])] = child
        return ranks

    def first_failure(self):
        found = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", read_text(self._ranks.folder / FAILED))
        if found is None or int(found[2]) >= self._ranks.num_ranks:
            return None
        return self._ranks.first_rank + int(found[2]), int(found[1])

    def end(self, workers, timeout_s):
        workers = [*workers, *children(self.pid)]
        for kill in (None, signal.SIGTERM, signal.SIGKILL)[0 if timeout_s is not None else 2:]:
            if kill is not None:
                _kill(children(self.pid))                      # a stopped or hung worker ignores other signals
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, kill)
            if self.wait_ended(timeout_s if kill is None else 5):
                break
        _kill(workers)                                         # workers outlive a torchrun that was killed


def environment_of(devices, num_own=0, interface=""):
    """Environment variables of torchrun and its workers.

    num_own: number of workers on this machine. interface: network interface to other machines.
    """
    inherited = {name: value for name, value in os.environ.items()
                 if name.upper() in INHERITED | system.INHERITED or name.upper().startswith(INHERITED_PREFIXES)}
    # this process may have found packages through its PYTHONPATH
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if sys.flags.no_user_site:                                 # packages of another Python
        environment["PYTHONNOUSERSITE"] = "1"
    comfyui = find_comfyui()                                   # for models that run as ComfyUI's modules
    if comfyui is not None:
        environment[FOLDER] = str(comfyui)
    interface = interface or system.loopback()
    # without "=", NCCL treats the name as a prefix
    environment |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}", **BLOCKING_COMMUNICATORS}
    on_cpu = any(own_name(device) == "cpu" for device in devices)
    environment = environment | CPU_ALLOCATOR if on_cpu else CUDA_QUEUES | environment | CUDA_ALLOCATOR
    if on_one_gpu(devices):                                    # a newer NCCL than torch's may be preloaded
        preloaded = {name: value for name, value in os.environ.items() if name == "LD_PRELOAD"}
        environment = NCCL_ON_ONE_GPU | preloaded | environment
    if "OMP_NUM_THREADS" not in environment:                   # torchrun would set 1
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (num_own or len(devices))))
    return environment


def _kill(processes):
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def children(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def read_text(path):
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
