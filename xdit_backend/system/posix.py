"""Linux and other POSIX systems."""

import ctypes
import errno
import fcntl
import mmap
import multiprocessing.connection as connection
import os
import platform
import select
import shlex
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import psutil

assert sys.platform != "win32"             # for mypy

__all__ = ["ABORTED", "CUDA_ALLOCATOR", "EXIT_CODES", "FAMILY", "HAS_TORCHRUN", "INHERITED", "TERMINATION_SIGNALS",
           "TORCH_WITHOUT_GLOO", "Job", "SharedMemory", "after_fork_in_child", "can_send", "connect", "description",
           "drop_from_cache", "end_with_parent", "facts", "free_commit_bytes", "has_exchange_segments",
           "interrupt_main_thread", "is_private",
           "limit_waits", "listen", "lock", "loopback", "make_private", "map_file", "map_shared", "memory_folder",
           "name_process", "num_cores",
           "open_output", "open_unlocked", "private_bytes", "python_program", "quoted", "remove_locked", "restrict",
           "rotate", "socket_pair", "store_path", "trim_heap", "user_id", "why_not_fork"]

FAMILY = "POSIX"                           # gloo connects ranks on systems of the same family only
HAS_TORCHRUN = True                        # whether torchrun can supervise workers
INHERITED: frozenset[str] = frozenset()    # environment variables that workers inherit on this system only
# releases of torch from the first to before the second cannot create gloo's process group
TORCH_WITHOUT_GLOO: tuple[tuple[int, int], tuple[int, int]] | None = None
# variable of CUDA workers (host/torchrun.py)
CUDA_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if sys.platform == "linux" else {}
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ABORTED = -signal.SIGABRT                  # exit code after abort(), which gloo calls when a peer breaks off a transfer
# exit code -> its meaning
EXIT_CODES = {-number.value: number.name for number in signal.Signals} | {
    -signal.SIGKILL: "killed",
    -signal.SIGBUS: "SIGBUS: a file that it reads was truncated, or shared memory is full"}

NORESERVE = 0x4000                         # Linux's MAP_NORESERVE, which Python's mmap does not define
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15      # linux/prctl.h


def description():
    """Name and version of the system, for reports."""
    wsl = " (WSL)" if "microsoft" in platform.release().lower() else ""
    return f"{platform.system()} {platform.release()}{wsl}"


def facts(devices):
    """Lines of the doctor's report about limits that only this system has. devices: number of GPUs."""
    return []


# Sockets between the host and its workers.

def listen(folder):
    """(listening socket, its address as text), which only processes that can read the folder can connect to."""
    address, listening = str(folder / "socket"), socket.socket(socket.AF_UNIX)
    try:
        listening.bind(address)
        listening.listen(64)
    except OSError:
        listening.close()
        raise
    return listening, address


def connect(address, key):
    """A Connection to the address of `listen`, after both ends have proved that they have the key."""
    return connection.Client(address, authkey=key)


def limit_waits(connected, seconds):
    """Set a socket's kernel time limit for reads and writes, which then raise BlockingIOError or TimeoutError."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))            # a timeval
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, limit)


def can_send(raw):
    """Whether a short message can be written to a Connection without blocking."""
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLOUT)
    return bool(poll.poll(0))


def socket_pair():
    """Two sockets of this process, connected to each other."""
    return socket.socketpair()


def loopback():
    """Name of the network interface through which gloo's and NCCL's ranks of one machine connect."""
    return "lo0" if sys.platform == "darwin" else "lo"


# Private folders, and files that are locked for as long as a process lives.

def make_private(folder, parents=False):
    """Create a folder that only this user can read or write; parents: its parents too, and it may exist already."""
    folder.mkdir(mode=0o700, parents=parents, exist_ok=parents)


def is_private(folder):
    """Whether this is a folder, not a link, that no other user owns or can write to. Raises OSError if missing."""
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022


def restrict(folder):
    """Remove other users' access to an existing folder of this user."""
    folder.chmod(0o700)


def user_id():
    """Identifies the user in the names of folders."""
    return str(os.getuid())


def lock(file):
    """Lock an open file until this process, and others that have inherited it, end for whatever reason.

    A file system without locks is ignored: `open_unlocked` then finds all files locked.
    """
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


def open_unlocked(path):
    """Open and lock a file of this user; returns None if it is locked, or another user's. Raises OSError if it cannot
    be opened."""
    file = open(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW))
    try:
        if os.fstat(file.fileno()).st_uid == os.getuid():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
    except OSError:
        pass
    file.close()
    return None


def remove_locked(path, file):
    """Remove a locked file, which may be open in this process as `file` or None, without unlocking it first."""
    path.unlink(missing_ok=True)


# Shared memory: each segment has a path in a folder of `memory_folder` or on disk.

def memory_folder():
    """Folder in which the groups' folders in memory are created."""
    return (Path("/dev/shm") if sys.platform == "linux" and os.access("/dev/shm", os.W_OK)
            else Path(tempfile.gettempdir()))


class SharedMemory:
    """The segments that this process has created."""

    def create(self, path, num_bytes):
        """Reserve a segment, so that a later write cannot fail; returns False if there is not enough space.

        Raises OSError if no more files can be opened.
        """
        try:
            # after days, a cleaner of /tmp or the end of a login session may have removed the folder
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
            file = open(path, "wb")
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return False
        with file:
            try:
                if num_bytes and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                else:
                    file.truncate(num_bytes)
            except OSError:
                file.close()
                os.unlink(path)
                return False
        return True

    def remove(self, path):
        """Remove a segment. Mappings stay valid. Removing it twice is not an error."""
        Path(path).unlink(missing_ok=True)

    def names(self, folder):
        """Names of the segments in a folder."""
        return [path.name for path in folder.iterdir() if path.name.isdecimal()] if folder.exists() else []

    def close(self):
        """Release what is not removed with the folders."""


def map_shared(path, count, dtype):
    """Map a segment as a flat tensor. Raises OSError or RuntimeError if it is gone or too small."""
    import torch
    num_bytes = count * dtype.itemsize
    if os.path.getsize(path) < num_bytes:                      # from_file would create or grow the file
        raise OSError(f"it has fewer than {num_bytes} bytes")
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype)


def free_commit_bytes():
    """Memory that programs can still allocate; None on systems without such a limit."""
    return None


# Files.

def map_file(file):
    """Map an open, non-empty file. Writes stay in this process. No memory is reserved for them.

    Raises OSError, or ValueError if the file is empty.
    """
    return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def drop_from_cache(file, start, count):
    """Drop a range of an open file from the page cache, if the system can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)


def store_path(path, change_folder=True):
    """The path of torch's FileStore as C++ can open it. change_folder: this process may change its working directory,
    and does not change it again. Raises OSError if there is no such path."""
    return str(path)


def open_output(path):
    """File descriptor that appends to a log file, which only this user can read."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def rotate(path, before):
    """Move the contents of this process's log file to the file `before`; returns whether to open `path` again."""
    os.replace(path, before)
    return True


# Processes.

def num_cores():
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_exchange_segments():
    """Whether ranks can exchange tensors through shared memory, see exchange_segments.py."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def python_program(module, *arguments):
    """(command, environment variables) that run a module of a package in PYTHONPATH with this Python."""
    return [sys.executable, "-m", module, *map(str, arguments)], {}


def interrupt_main_thread():
    """Raise KeyboardInterrupt in the main thread, in its system call too."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def quoted(argument):
    """An argument of a command that the user copies into a shell."""
    return shlex.quote(str(argument))


class Job:
    """Child processes that end together."""

    def __init__(self):
        self._processes = []

    def start(self, command, **options):
        """Start a program; returns its Popen. options: of Popen."""
        self._processes.append(subprocess.Popen(command, start_new_session=True, **options))
        return self._processes[-1]

    def end(self):
        """Kill all processes, and their children; returns at once."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def why_not_fork():
    """Reason why processes that have imported the workers' libraries cannot be forked, or ""."""
    return "" if sys.platform == "linux" else f"forking is not known to be safe on {sys.platform}"


def after_fork_in_child(function):
    """Have a function called in processes forked from this one."""
    os.register_at_fork(after_in_child=function)


def name_process(name):
    """Set the process name that the system shows (at most 15 bytes); a forked process has its parent's arguments."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def end_with_parent():
    """Have the system kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def private_bytes():
    """Memory of this process that no other process shares, where /proc/self/status does not report it."""
    return psutil.Process().memory_info().rss


def trim_heap():
    """Return freed memory from the C library to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:                                       # glibc's
        trim(0)
