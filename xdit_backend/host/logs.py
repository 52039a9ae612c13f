"""Workers' output, and how their groups failed: a private folder for each group, of which the last few stay. Used by
the launcher.

In a folder are torchrun.log, rank-N.log and errors.log. The size of a file is bounded (worker/log_rotation.py), and so
is the number of folders. Beside them is a file of each ComfyUI that runs about other machines.
"""

import getpass
import logging
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

try:
    import fcntl
except ImportError:                                            # Windows, where no worker group is started
    fcntl = None

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
MAX_FOLDERS = 8                            # folders of groups, those that run included
MAX_BYTES = 2 ** 20                        # of errors.log
MIN_BYTES = 2 ** 12                        # below this a disk takes no line more
TORCHRUN, ERRORS = "torchrun.log", "errors.log"
NAME = re.compile(r"\d{8}-\d{6}-xdit-\d+-[0-9a-f]+")
MAX_ERRORS, MAX_LINES = 5, 20              # errors that the doctor prints, and lines of each
# of a process, by its number, and while it is written by its thread's too
MACHINES = "machines-{}.txt"
QUOTED = re.compile(r"""(["'])~?/(?:[^"'\n]*/)?([^"'/\n]*)\1""")
PATH = re.compile(r"(?<![\w.])~?(?:/[\w.+@=-]+)+/([\w.+@=-]*)")


def place():
    """The folder of all logs: one that a person has chosen, or this user's among temporary files."""
    own = f"xdit-logs-{os.getuid() if hasattr(os, 'getuid') else getpass.getuser()}"
    return Path(os.environ.get("XDIT_LOG_FOLDER") or Path(tempfile.gettempdir()) / own).expanduser().absolute()


def make(name, otherwise):
    """Make the folder for the group of this name; `otherwise`, which ends with the group,
    where the place for it is not ours alone."""
    try:
        folder = _own_place() / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}"
        folder.mkdir(mode=0o700)
    except OSError as error:
        log.warning("the workers' output is not kept: %s", error)
        otherwise.mkdir(mode=0o700, parents=True)
        return otherwise
    _forget_old(folder)
    return folder


def note_machines(lines):
    """Have the doctor know this of other machines, for as long as this process runs;
    no lines: there is nothing more to say. Who reads meanwhile finds what was said before, or this, whole."""
    try:
        path = _own_place() / MACHINES.format(os.getpid())
        if not lines:
            path.unlink(missing_ok=True)
            return
        written = path.with_name(MACHINES.format(f"{os.getpid()}.{threading.get_native_id()}"))
        with open(written, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write("\n".join(lines))
        os.replace(written, path)
    except OSError as error:
        log.warning("the doctor will not know what is new of other machines: %s", error)


def machines():
    """Lines that tell of the other machines of each process that runs, with nothing private."""
    lines = []
    for path in sorted(place().glob(MACHINES.format("*"))) if _is_ours() else ():
        pid, _, thread = path.stem.partition("-")[2].partition(".")
        with suppress(OSError):                                # it ends at this moment
            if pid.isdigit() and psutil.pid_exists(int(pid)):
                if not thread:
                    lines += without_private(path.read_text(encoding="utf-8", errors="replace")).splitlines()
            else:
                path.unlink()
    return lines


def start(folder):
    """The open file for what torchrun prints, locked for as long as torchrun runs, which shows that the group does."""
    file = open(folder / TORCHRUN, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))
    # file systems without locks, where no folder is taken for an old one
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def is_full(folder):
    """Has its disk no room for a line?"""
    with suppress(OSError):
        return shutil.disk_usage(folder).free < MIN_BYTES
    return False


def note(folder, error):
    """Write down how a group failed."""
    with suppress(OSError), open(folder / ERRORS, "a", encoding="utf-8",
                                 opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        if file.tell() > MAX_BYTES:
            file.truncate(0)
        text = re.sub(r"\n\n+", "\n", str(error))
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {type(error).__name__}: {text}\n\n")


def last_errors():
    """Lines that tell of the last errors of the groups whose folders are there, the newest first,
    with nothing private."""
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
    """The text without folders, and without this user's and this machine's names."""
    names = {socket.gethostname() or "localhost"}
    with suppress(KeyError, OSError):                          # a container's user may have no name
        names.add(getpass.getuser())
    for folder in (ROOT, place(), Path(tempfile.gettempdir()), Path(sys.prefix)):          # whose names may have spaces
        text = text.replace(f"{folder}/", "/.../")
    text = PATH.sub(r".../\1", QUOTED.sub(r"\1.../\2\1", text))
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", "...", text)


def _own_place():
    """place(), made where it is not there. Raises OSError where it is not ours alone."""
    place().mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours():
        raise PermissionError(f"{place()} is a link, another user's, or others can write there. Name a folder that is "
                              f"yours alone in XDIT_LOG_FOLDER")
    return place()


def _is_ours():
    """Is place() there, and no other user's, who may have put links there to what is private?"""
    with suppress(OSError):
        about = place().lstat()
        return (stat.S_ISDIR(about.st_mode) and (not hasattr(os, "getuid") or about.st_uid == os.getuid())
                and not about.st_mode & 0o022)
    return False


def _folders():
    """From the oldest on."""
    return sorted(path for path in place().iterdir() if NAME.fullmatch(path.name)) if _is_ours() else []


def _forget_old(new):
    """new: not old, whatever the clock says."""
    for folder in _folders()[:-MAX_FOLDERS]:
        if folder == new:
            continue
        try:
            with open(folder / TORCHRUN, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:                              # nothing was started
            pass
        except OSError:                                        # it runs
            continue
        shutil.rmtree(folder, ignore_errors=True)
