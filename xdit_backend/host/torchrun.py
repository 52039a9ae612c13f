"""torchrun of a group on this machine: the environment it gets, how it is started and ended.
Used by the launcher and by join."""

import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..comfyui.place import FOLDER, find_comfyui
from ..protocol.devices import own_name
from . import logs

ROOT = Path(__file__).resolve().parents[2]         # the folder that holds the package, for the workers' PYTHONPATH
# in a group's folder in memory: what torchrun says of workers that fail
FAILED = "failed"
# CPU workers: activations are allocated anew by every layer, and returned to the system each time they cost page
# faults. In two alternating pairs of runs a Flux forward of 2,432 tokens took 3.59 s with these instead of 3.75 s.
CPU_ALLOCATOR = {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_TRIM_THRESHOLD_": str(2 ** 32),
                 "MALLOC_MMAP_THRESHOLD_": str(2 ** 25), "MALLOC_TOP_PAD_": str(2 ** 26)}

# A worker has more streams than CUDA's default of eight queues: one that waits for a receive would hold up others in
# its queue.
CUDA_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}

# What workers take over from this process: where things are, and the threads that a person has chosen. Nothing else,
# since libraries read variables that change what is computed (DIFFUSERS_ATTN_BACKEND, NVIDIA_TF32_OVERRIDE,
# ATEN_CPU_CAPABILITY).
INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "CONDA_PREFIX",
    "PYTHONHOME",
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_CACHE_PATH", *CUDA_QUEUES, "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE",
    # of what compiles blocks
    "CC", "CXX", "LIBRARY_PATH", "CPATH", "TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH", "TORCHINDUCTOR_CACHE_DIR"})
INHERITED_PREFIXES = ("XDIT_", "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "LC_")

# torch 2.6.0 to 2.7.0 take NCCL's non-blocking communicators where the group is given its device, and these hang at
# random (pytorch issue 153960). Later releases take blocking ones by themselves.
BLOCKING_COMMUNICATORS = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}

# CUDA workers: ComfyUI sets cudaMallocAsync for itself, under which later allocations may wait for receives that are
# posted ahead.
CUDA_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if sys.platform == "linux" else {}


def prepare(forkserver, devices):
    """Have the libraries loaded of workers that will run on these devices; waits for nothing."""
    forkserver.prepare(environment_of(devices), ROOT)


@dataclass(frozen=True)
class Node:
    """A machine's part of a group. devices: of all ranks; num_own of them are here.

    interface: over which the machines exchange tensors; "": there is one machine, and loopback is enough.
    """

    devices: tuple
    num_own: int
    index: int = 0
    num_nodes: int = 1
    interface: str = ""


def start_torchrun(forkserver, segments, node, store_port, log_folder, variables={}, check=lambda: None):
    """Start torchrun with the workers of this machine, a Node; returns (its Torchrun, why it was not forked, or "").

    segments: the SegmentStore whose folder has the workers' door. store_port: of torch's store, on loopback.
    Raises WorkerStartError where it cannot be started.
    """
    # The store ranks machines by this name, as text: the host is the first, and others follow in the order of their
    # devices.
    name = "127.0.0.1" if node.num_nodes == 1 else f"machine-{node.index:06d}"
    arguments = [
        str(segments.folder / FAILED), f"--nnodes={node.num_nodes}", f"--nproc-per-node={node.num_own}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store_port}", "--rdzv-conf=is_host=0", "--max-restarts=0",
        f"--local-addr={name}", f"--log-dir={segments.overflow_folder}", "-m", "xdit_backend.worker",
        str(segments.folder), ",".join(node.devices), str(store_port), str(log_folder)]
    # A path with a colon would be two in PYTHONPATH; Python also looks where it was started.
    folder = ROOT if os.pathsep in str(ROOT) else segments.overflow_folder
    environment = environment_of(node.devices, node.num_own, node.interface) | variables
    with logs.start(log_folder) as output:
        return forkserver.start(arguments, environment, ROOT, folder, output, check)


def first_ended(segments):
    """(place among its machine's ranks, exit code) of the first worker that failed, as torchrun says it;
    None: it says nothing."""
    found = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", read_text(segments.folder / FAILED))
    return None if found is None else (int(found[2]), int(found[1]))


def environment_of(devices, num_own=0, interface=""):
    """The variables of torchrun and its workers; num_own of them are on this machine.
    interface: over which machines exchange tensors."""
    inherited = {name: value for name, value in os.environ.items()
                 if name.upper() in INHERITED or name.upper().startswith(INHERITED_PREFIXES)}
    # packages may be where this process found them by it
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if sys.flags.no_user_site:                                 # of other Pythons' packages
        environment["PYTHONNOUSERSITE"] = "1"
    comfyui = find_comfyui()                                   # for models that run as modules of it
    if comfyui is not None:
        environment[FOLDER] = str(comfyui)
    interface = interface or ("lo0" if sys.platform == "darwin" else "lo")
    # without "=", NCCL takes others that begin so
    environment |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}", **BLOCKING_COMMUNICATORS}
    on_cpu = any(own_name(device) == "cpu" for device in devices)
    environment = environment | CPU_ALLOCATOR if on_cpu else CUDA_QUEUES | environment | CUDA_ALLOCATOR
    if "OMP_NUM_THREADS" not in environment:                   # torchrun would set 1
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (num_own or len(devices))))
    return environment


def end_torchrun(process, workers, timeout_s):
    """Wait for torchrun and its workers to end, then make them: first the workers, which torchrun still waits for.

    timeout_s: None: make them at once, with no time to end in good order.
    """
    for kill in (None, signal.SIGTERM, signal.SIGKILL)[0 if timeout_s is not None else 2:]:
        if kill is not None:
            _kill(children(process.pid))                       # one that hangs or is stopped takes no other signal
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kill)
        if process.wait_ended(timeout_s if kill is None else 5):
            break
    _kill(workers)                                             # those of a torchrun that was killed


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
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
