"""Log folders: workers' output and errors in a private folder for each of the last few groups.

A folder has torchrun.log, rank-N.log and errors.log. The size of a file is bounded (worker/log_rotation.py), and so is
the number of folders. Next to them, each running ComfyUI has a file with the state of other machines.
"""

import getpass
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from .. import system

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
MAX_FOLDERS = 8                            # folders of groups, including running ones
MAX_BYTES = 2 ** 20                        # of errors.log
MIN_BYTES = 2 ** 12                        # free space below which a disk counts as full
TORCHRUN, ERRORS = "torchrun.log", "errors.log"
NAME = re.compile(r"\d{8}-\d{6}-xdit-\d+-[0-9a-f]+")
MAX_ERRORS, MAX_LINES = 5, 20              # number of errors that the doctor prints, and lines of each
# of a process, by its pid; while being written, also by its thread's id
MACHINES = "machines-{}.txt"
QUOTED = re.compile(r"""(["'])~?/(?:[^"'\n]*/)?([^"'/\n]*)\1""")
PATH = re.compile(r"(?<![\w.])~?(?:/[\w.+@=-]+)+/([\w.+@=-]*)")
# of Windows: with a drive's letter or a computer's name
QUOTED_DRIVE = re.compile(r"""(["'])(?:[A-Za-z]:|\\\\)[^"'\n]*[\\/]([^"'\\/\n]*)\1""")
DRIVE_PATH = re.compile(r"(?:\b[A-Za-z]:[\\/]+|\\\\)(?:[^\s\\/:*?\"<>|]+[\\/]+)*([^\s\\/:*?\"<>|]*)")


def base_folder():
    """Folder of all logs: XDIT_LOG_FOLDER, or this user's folder among the temporary files."""
    own = f"xdit-logs-{system.user_id()}"
    return Path(os.environ.get("XDIT_LOG_FOLDER") or Path(tempfile.gettempdir()) / own).expanduser().absolute()


def make(name, otherwise):
    """Create the log folder of a group; returns `otherwise`, a folder that is removed with the group, if base_folder()
    is not private to this user."""
    try:
        folder = _private_base_folder() / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}"
        system.make_private(folder)
    except OSError as error:
        log.warning("the workers' output will be lost when they end: %s", error)
        system.make_private(otherwise, parents=True)
        return otherwise
    _forget_old(folder)
    return folder


def note_machines(lines):
    """Write the state of other machines for the doctor, atomically; it is valid while this process runs. No lines:
    remove it."""
    try:
        path = _private_base_folder() / MACHINES.format(os.getpid())
        if not lines:
            path.unlink(missing_ok=True)
            return
        written = path.with_name(MACHINES.format(f"{os.getpid()}.{threading.get_native_id()}"))
        with open(written, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write("\n".join(lines))
        os.replace(written, path)
    except OSError as error:
        log.warning("the doctor's information about other machines cannot be updated: %s", error)


def machines():
    """State of other machines, from all running processes, without private information."""
    lines = []
    for path in sorted(base_folder().glob(MACHINES.format("*"))) if _is_ours() else ():
        pid, _, thread = path.stem.partition("-")[2].partition(".")
        with suppress(OSError):                                # the process ends at this moment
            if pid.isdigit() and psutil.pid_exists(int(pid)):
                if not thread:
                    lines += without_private(path.read_text(encoding="utf-8", errors="replace")).splitlines()
            else:
                path.unlink()
    return lines


def start(folder):
    """Open torchrun's log, locked for as long as torchrun runs to mark the group as running."""
    file = open(folder / TORCHRUN, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))
    system.lock(file)
    return file


def is_full(folder):
    """Whether the folder's disk is full."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free < MIN_BYTES
    return False


def note(folder, error):
    """Log how a group failed."""
    with suppress(OSError), open(folder / ERRORS, "a", encoding="utf-8",
                                 opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        if file.tell() > MAX_BYTES:
            file.truncate(0)
        text = re.sub(r"\n\n+", "\n", str(error))
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {type(error).__name__}: {text}\n\n")


def last_errors():
    """Last errors of the groups in existing folders, newest first, without private information."""
    errors = []
    for folder in reversed(_folders()):
        with suppress(OSError):
            errors += reversed((folder / ERRORS).read_text(encoding="utf-8", errors="replace").strip().split("\n\n"))
    lines = []
    for error in errors[:MAX_ERRORS]:
        first, *others = without_private(error).splitlines() or [""]
        lines += [first, *(f"  {line}" for line in others[-MAX_LINES:])]
    return lines


def without_private(text):
    """Remove folder names and the names of this user and this machine from a text."""
    names = {socket.gethostname() or "localhost"}
    with suppress(KeyError, OSError):                          # a container's user may have no name
        names.add(getpass.getuser())
    for folder in (ROOT, base_folder(), Path(tempfile.gettempdir()), Path(sys.prefix)):    # whose names may have spaces
        for separator in {"/", os.sep}:
            text = text.replace(f"{folder}{separator}", "/.../")
    text = DRIVE_PATH.sub(r".../\1", QUOTED_DRIVE.sub(r"\1.../\2\1", text))
    text = PATH.sub(r".../\1", QUOTED.sub(r"\1.../\2\1", text))
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", "...", text)


def _private_base_folder():
    """Create base_folder() if it is missing. Raises OSError if it is not private to this user."""
    system.make_private(base_folder(), parents=True)
    if not _is_ours():
        raise PermissionError(f"Set XDIT_LOG_FOLDER to a folder that only you can write to: {base_folder()} is a link, "
                              f"another user's, or writable by others")
    return base_folder()


def _is_ours():
    """Whether base_folder() exists and belongs to this user; another user's may contain links to private files."""
    with suppress(OSError):
        return system.is_private(base_folder())
    return False


def _folders():
    """Folders of groups, oldest first."""
    return sorted(path for path in base_folder().iterdir() if NAME.fullmatch(path.name)) if _is_ours() else []


def _forget_old(new):
    """Remove the oldest folders, except running groups' and `new`, which may sort first if the clock was changed."""
    for folder in _folders()[:-MAX_FOLDERS]:
        if folder == new:
            continue
        try:
            file = system.open_unlocked(folder / TORCHRUN)
            if file is None:                                   # it runs
                continue
            file.close()
        except FileNotFoundError:                              # nothing was started
            pass
        except OSError:
            continue
        shutil.rmtree(folder, ignore_errors=True)
