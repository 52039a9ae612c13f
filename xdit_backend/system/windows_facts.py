"""Limits of Windows that affect workers, for the doctor's report: driver model, TDR delay, commit limit, C++ runtime
and long paths."""

import ctypes
import subprocess
import sys
from ctypes import wintypes

assert sys.platform == "win32"             # for mypy

import winreg  # noqa: E402

GRAPHICS = r"SYSTEM\CurrentControlSet\Control\GraphicsDrivers"
FILE_SYSTEM = r"SYSTEM\CurrentControlSet\Control\FileSystem"
TDR_DELAY_S = 2                            # Windows' default
RUNTIME = "msvcp140.dll"
# PyTorch's wheels are built with Visual Studio 2022 17.10 or newer, whose std::mutex hangs with an older runtime.
MIN_RUNTIME = (14, 40)
GIB = 2 ** 30


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX"""
    _fields_ = [("length", wintypes.DWORD), ("load", wintypes.DWORD), ("total_physical", ctypes.c_uint64),
                ("free_physical", ctypes.c_uint64), ("commit_limit", ctypes.c_uint64),
                ("free_commit", ctypes.c_uint64), ("total_virtual", ctypes.c_uint64), ("free_virtual", ctypes.c_uint64),
                ("free_extended_virtual", ctypes.c_uint64)]


def _memory():
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not ctypes.WinDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(status)):
        raise ctypes.WinError()
    return status


def free_commit_bytes():
    """Memory that programs can still allocate: system RAM and page file."""
    return _memory().free_commit


def facts(devices):
    memory = _memory()
    used = memory.commit_limit - memory.free_commit
    delay_s = registry_number(GRAPHICS, "TdrDelay")
    lines = [f"commit limit {memory.commit_limit / GIB:.1f} GiB (system RAM and page file), {used / GIB:.1f} GiB used",
             f"longest run of a GPU kernel (TdrDelay): {TDR_DELAY_S if delay_s is None else delay_s} s"
             f"{' (default)' if delay_s is None else ''}",
             runtime(), f"LongPathsEnabled: {registry_number(FILE_SYSTEM, 'LongPathsEnabled') or 0}"]
    return [f"driver model: {text}" for text in driver_models()] + lines if devices else lines


def driver_models():
    """One text per GPU: "cuda:0 WDDM"; or the reason why they are unknown."""
    command = ["nvidia-smi", "--query-gpu=driver_model.current", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30,
                                creationflags=subprocess.CREATE_NO_WINDOW).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [f"unknown ({type(error).__name__} of nvidia-smi)"]
    return [f"GPU {index} of nvidia-smi {model.strip()}" for index, model in enumerate(output.split("\n")) if model]


def registry_number(key, name):
    """A number of HKEY_LOCAL_MACHINE; None if it is not set."""
    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as opened:
            return int(winreg.QueryValueEx(opened, name)[0])
    except (OSError, ValueError):
        return None


def runtime():
    version = runtime_version()
    if version is None:
        return f"{RUNTIME}: not loaded"
    text = f"{RUNTIME} {'.'.join(map(str, version))}"
    return text if version >= MIN_RUNTIME else (f"{text} (older than PyTorch's: install the latest Visual C++ "
                                                f"Redistributable)")


def runtime_version():
    """Version of the C++ runtime that this process has loaded; None if it has loaded none."""
    kernel, library = ctypes.WinDLL("kernel32"), ctypes.WinDLL("version")
    kernel.GetModuleHandleW.restype = wintypes.HMODULE
    kernel.GetModuleFileNameW.argtypes = wintypes.HMODULE, wintypes.LPWSTR, wintypes.DWORD
    library.VerQueryValueW.argtypes = (ctypes.c_void_p, wintypes.LPCWSTR, ctypes.POINTER(ctypes.c_void_p),
                                       ctypes.POINTER(wintypes.UINT))
    module, path = kernel.GetModuleHandleW(RUNTIME), ctypes.create_unicode_buffer(32768)
    if not module or not kernel.GetModuleFileNameW(module, path, len(path)):
        return None
    num_bytes = library.GetFileVersionInfoSizeW(path, None)
    memory, found, count = ctypes.create_string_buffer(max(1, num_bytes)), ctypes.c_void_p(), wintypes.UINT()
    if (not num_bytes or not library.GetFileVersionInfoW(path, 0, num_bytes, memory)
            or not library.VerQueryValueW(memory, "\\", ctypes.byref(found), ctypes.byref(count))):
        return None
    # VS_FIXEDFILEINFO: signature, structure version, file version as two numbers of 32 bits
    high, low = (ctypes.c_uint32 * 4).from_address(found.value)[2:]
    return high >> 16, high & 0xFFFF, low >> 16, low & 0xFFFF
