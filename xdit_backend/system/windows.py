"""Windows. posix.py documents the names.

Programs are started, never forked. Shared memory is a named section of the page file, which exists while a process has
it open: files that are mapped or open cannot be removed here. Sockets are on the loopback address; another user can
connect to them, but is rejected without the key, which is in a folder that only this user can read.
"""

import ctypes
import getpass
import mmap
import multiprocessing.connection as connection
import os
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from ctypes import wintypes
from pathlib import Path

import psutil

assert sys.platform == "win32"             # for mypy

import _winapi  # noqa: E402

from . import windows_security as security  # noqa: E402
from .windows_facts import facts, free_commit_bytes  # noqa: E402

__all__ = ["ABORTED", "CUDA_ALLOCATOR", "EXIT_CODES", "FAMILY", "HAS_TORCHRUN", "INHERITED", "TERMINATION_SIGNALS",
           "TORCH_WITHOUT_GLOO", "Job", "SharedMemory", "after_fork_in_child", "can_send", "connect", "description",
           "drop_from_cache", "end_with_parent", "facts", "free_commit_bytes", "has_exchange_segments",
           "interrupt_main_thread", "is_private",
           "limit_waits", "listen", "lock", "loopback", "make_private", "map_file", "map_shared", "memory_folder",
           "name_process", "num_cores",
           "open_output", "open_unlocked", "private_bytes", "python_program", "quoted", "remove_locked", "restrict",
           "rotate", "socket_pair", "store_path", "trim_heap", "user_id", "why_not_fork"]

FAMILY = "Windows"                         # whose gloo has another wire format (libuv transport)
HAS_TORCHRUN = False                       # its store needs libuv, which torch's wheels for Windows lack
# by which DLLs, caches, temporary files and the network stack are found
INHERITED = frozenset({
    "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "USERPROFILE", "USERNAME", "USERDOMAIN", "HOMEDRIVE",
    "HOMEPATH", "APPDATA", "LOCALAPPDATA", "PROGRAMDATA", "ALLUSERSPROFILE", "PROGRAMFILES", "PROGRAMFILES(X86)",
    "PROGRAMW6432", "COMMONPROGRAMFILES", "COMMONPROGRAMFILES(X86)", "NUMBER_OF_PROCESSORS", "PROCESSOR_ARCHITECTURE",
    "PROCESSOR_IDENTIFIER", "PROCESSOR_LEVEL", "PROCESSOR_REVISION", "OS", "CUDA_MODULE_LOADING",
    # for compiled blocks
    "INCLUDE", "LIB", "LIBPATH", "VSINSTALLDIR", "VCINSTALLDIR", "VCTOOLSINSTALLDIR", "WINDOWSSDKDIR",
    "WINDOWSSDKVERSION"})
# "unsupported gloo device" (pytorch issue 150381) with 2.8.0, 2.9.1 and 2.10.0; 2.6.0, 2.7.1, 2.11.0 and 2.14.1 work
TORCH_WITHOUT_GLOO = (2, 8), (2, 11)
CUDA_ALLOCATOR: dict[str, str] = {}
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGBREAK)
ABORTED = 3
KILLED = 15                                # exit code of processes that a Job ends, as psutil's kill sets it
# of TerminateProcess by Python, psutil and Task Manager, of the C runtime, and NTSTATUS
EXIT_CODES = {1: "killed, or ended by an error", ABORTED: "it called abort()", KILLED: "killed",
              0xC0000005: "access violation", 0xC0000006: "a mapped file could not be read",
              0xC0000017: "out of memory", 0xC000001D: "illegal instruction", 0xC00000FD: "stack overflow",
              0xC000012D: "the commit limit is reached: enlarge the page file", 0xC0000135: "a DLL is missing",
              0xC0000139: "a DLL has another version", 0xC000013A: "interrupted", 0xC0000142: "a DLL could not start",
              0xC0000409: "it aborted, or its stack was overwritten"}

LOOPBACK = "Loopback Pseudo-Interface 1"   # Windows' own name of the interface
ERROR_SHARING_VIOLATION, ERROR_ALREADY_EXISTS = 32, 183        # winerror.h
FILE_MAP_READ, PAGE_READWRITE = 4, 4                           # winnt.h
INVALID_HANDLE = ctypes.c_void_p(-1)
KILL_ON_CLOSE, EXTENDED_LIMITS = 0x2000, 9                     # winnt.h, JOBOBJECT_EXTENDED_LIMIT_INFORMATION
CREATE_SUSPENDED = 4
# Python ignores PYTHONPATH where its folder has a python3*._pth file, as in ComfyUI's portable package.
RUN = ("import os, runpy, sys; sys.path[:0] = os.environ['PYTHONPATH'].split(os.pathsep); sys.argv = sys.argv[1:]; "
       "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)")


def description():
    return f"{platform.system()} {platform.release()} ({platform.version()})"


# Sockets. They bind 127.0.0.1 only, so that the firewall does not ask.

def listen(folder):
    return _listening()


def _listening():
    listening = socket.socket()
    try:
        # without it, another program could bind the same port and receive connections
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
    except OSError:
        listening.close()
        raise
    return listening, str(listening.getsockname()[1])


def connect(address, key):
    raw = connection.Client(("127.0.0.1", int(address)), authkey=key)
    with socket.socket(fileno=socket.dup(raw.fileno())) as connected:
        _send_at_once(connected)
    return raw


def limit_waits(connected, seconds):
    _send_at_once(connected)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("L", max(1, int(seconds * 1000))))


def _send_at_once(connected):
    """Disable Nagle's algorithm: a Connection writes a message's length and body separately."""
    if connected.family == socket.AF_INET:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def can_send(raw):
    with socket.socket(fileno=socket.dup(raw.fileno())) as connected:
        return bool(select.select([], [connected], [], 0)[1])


def socket_pair():
    """As socket.socketpair, which before Python 3.12.5 accepts the connection of any process."""
    listening, address = _listening()
    with listening:
        first = socket.create_connection(("127.0.0.1", int(address)))
        while True:
            second, peer = listening.accept()
            if peer == first.getsockname():
                break
            second.close()
    for connected in (first, second):
        _send_at_once(connected)
    return first, second


def loopback():
    """gloo's default interface is that of the machine's name: the local network, for which the firewall asks."""
    return next((name for name, addresses in psutil.net_if_addrs().items()
                 if any(each.address == "127.0.0.1" for each in addresses)), LOOPBACK)


# Private folders and locked files. A file that is open counts as locked: without sharing it cannot be opened again.

def make_private(folder, parents=False):
    if parents:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            return
    security.make_folder(folder)


def is_private(folder):
    if _is_link(folder) or not folder.is_dir():
        return False
    return security.is_owned(folder)


def restrict(folder):
    security.restrict_folder(folder)


def _is_link(path):
    """Whether this is a symbolic link or a junction. Raises OSError if it is missing."""
    return bool(os.lstat(path).st_reparse_tag)


def user_id():
    return getpass.getuser()


def lock(file):
    pass


def open_unlocked(path):
    path = Path(path)
    if _is_link(path) or not security.is_owned(path):
        return None
    try:
        handle = _winapi.CreateFile(str(path), _winapi.GENERIC_READ, 0, _winapi.NULL, _winapi.OPEN_EXISTING, 0,
                                    _winapi.NULL)
    except OSError as error:
        if error.winerror == ERROR_SHARING_VIOLATION:
            return None
        raise
    _winapi.CloseHandle(handle)
    return open(path, "r+b")


def remove_locked(path, file):
    if file is not None:
        file.close()
    with suppress(OSError):                                    # another process is about to remove it
        path.unlink(missing_ok=True)


# Shared memory: sections of the page file, named after their paths. Their pages count against the commit limit.

def memory_folder():
    return Path(tempfile.gettempdir())


def _name(path):
    path = Path(path)
    return f"Local\\{path.parent.name}-{path.name}"


class SharedMemory:
    def __init__(self):
        self._sections = {}                                    # path -> handle, by which the section exists
        self._kernel = security.kernel32()
        self._kernel.CreateFileMappingW.restype = wintypes.HANDLE
        self._kernel.CreateFileMappingW.argtypes = (wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD, wintypes.DWORD,
                                                    wintypes.DWORD, wintypes.LPCWSTR)

    def create(self, path, num_bytes):
        num_bytes = max(1, num_bytes)
        with security.attributes(security.OBJECT_LIST) as access:
            ctypes.set_last_error(0)
            handle = self._kernel.CreateFileMappingW(INVALID_HANDLE, ctypes.byref(access), PAGE_READWRITE,
                                                     num_bytes >> 32, num_bytes & 0xFFFFFFFF, _name(path))
        if not handle:
            return False
        if ctypes.get_last_error() == ERROR_ALREADY_EXISTS:    # another process has guessed its name
            self._kernel.CloseHandle(handle)
            return False
        self._sections[Path(path)] = handle
        return True

    def remove(self, path):
        handle = self._sections.pop(Path(path), None)
        if handle is not None:                                 # its memory is freed when no process maps it
            self._kernel.CloseHandle(handle)

    def names(self, folder):
        return [path.name for path in self._sections if path.parent == folder]

    def close(self):
        for path in list(self._sections):
            self.remove(path)


def map_shared(path, count, dtype):
    import torch
    # mmap would create a section that is gone
    handle = _winapi.OpenFileMapping(FILE_MAP_READ, False, _name(path))
    try:
        return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, tagname=_name(path)), dtype=dtype, count=count)
    finally:
        _winapi.CloseHandle(handle)


# Files.

def map_file(file):
    """Read-only: the pages of a writable map would all count against the commit limit (error 1455). Nothing writes to
    the tensors in it, which torch cannot know."""
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def drop_from_cache(file, start, count):
    pass


def store_path(path, change_folder=True):
    """C++ opens paths in the system's code page: a path with other characters is shortened (8.3 names), or made
    relative to the working directory."""
    folder = str(Path(path).parent)
    if not folder.isascii():
        short = ctypes.create_unicode_buffer(32768)
        if security.kernel32().GetShortPathNameW(folder, short, len(short)):
            folder = short.value
    if folder.isascii():
        return os.path.join(folder, Path(path).name)
    if not change_folder:
        raise OSError(f"{folder} has no short name")
    os.chdir(folder)
    return Path(path).name


def open_output(path):
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_BINARY, 0o600)


def rotate(path, before):
    """An open file cannot be renamed: it is copied and emptied."""
    shutil.copyfile(path, before)
    os.truncate(path, 0)
    return False


# Processes.

def num_cores():
    return os.cpu_count() or 1


def has_exchange_segments():
    return False


def python_program(module, *arguments):
    python, variables = sys.executable, {}
    base = getattr(sys, "_base_executable", python)
    if base != python:                                         # a virtual environment's python.exe only starts this one
        python, variables = base, {"__PYVENV_LAUNCHER__": python}
    return [python, "-X", "utf8", "-u", "-c", RUN, module, *map(str, arguments)], variables


def interrupt_main_thread():
    signal.raise_signal(signal.SIGINT)


def quoted(argument):
    return subprocess.list2cmdline([str(argument)])


class _Limits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION"""
    _fields_ = [("times", ctypes.c_int64 * 2), ("flags", wintypes.DWORD), ("working_sets", ctypes.c_size_t * 2),
                ("num_processes", wintypes.DWORD), ("affinity", ctypes.c_size_t), ("classes", wintypes.DWORD * 2),
                ("counters", ctypes.c_uint64 * 6), ("memory", ctypes.c_size_t * 4)]


class Job:
    """A job object: the system ends its processes, and those that they start, when this process ends."""

    def __init__(self):
        self._kernel = security.kernel32()
        self._kernel.CreateJobObjectW.restype = wintypes.HANDLE
        self._kernel.SetInformationJobObject.argtypes = (wintypes.HANDLE, ctypes.c_int, ctypes.c_void_p, wintypes.DWORD)
        self._kernel.AssignProcessToJobObject.argtypes = wintypes.HANDLE, wintypes.HANDLE
        self._kernel.TerminateJobObject.argtypes = wintypes.HANDLE, wintypes.UINT
        self._handle = security.check(self._kernel.CreateJobObjectW(None, None))
        limits = _Limits(flags=KILL_ON_CLOSE)
        security.check(self._kernel.SetInformationJobObject(self._handle, EXTENDED_LIMITS, ctypes.byref(limits),
                                                            ctypes.sizeof(limits)))

    def start(self, command, **options):
        process = subprocess.Popen(command, creationflags=subprocess.CREATE_NO_WINDOW | CREATE_SUSPENDED, **options)
        try:
            security.check(self._kernel.AssignProcessToJobObject(self._handle, int(process._handle)))  # type: ignore[attr-defined]
            psutil.Process(process.pid).resume()
        except BaseException:
            process.kill()
            raise
        return process

    def end(self):
        self._kernel.TerminateJobObject(self._handle, KILLED)

    def __del__(self):
        if getattr(self, "_handle", None):
            self._kernel.CloseHandle(self._handle)


def why_not_fork():
    return "Windows cannot fork"


def after_fork_in_child(function):
    pass


def name_process(name):
    pass


def end_with_parent():
    pass


def private_bytes():
    return psutil.Process().memory_info().private


def trim_heap():
    pass
