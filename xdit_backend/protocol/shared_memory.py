"""Shared memory segments between the host and the workers of one machine: a segment is a file that both sides map.

The host creates, fills and removes segments; workers only map them. A mapping stays valid after its file is removed, so
a cancelled run can be cleaned up while a worker still writes to its mapping.
"""

import math
import os
import secrets
import shutil
import sys
import tempfile
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:                                            # Windows, where no worker group is started
    fcntl = None
import torch
from pydantic.dataclasses import dataclass

from .errors import XDiTError
from .open_files import out_of_files
from .validation import STRICT, Many, Natural

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2)}


MAX_DIMS, MAX_ELEMENTS = 16, 2 ** 52                           # of a segment; more is a mistake, or overflows
ATTEMPTS = 3                                                   # to remove a folder that others still write to


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, config=STRICT)
class Segment:
    """A tensor in shared memory: the information that a process needs to map it."""

    path: str
    dtype: str                     # a key of DTYPES
    shape: Many[Natural]

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.dtype!r} is not a segment's dtype. Use one of {', '.join(DTYPES)}")
        if len(self.shape) > MAX_DIMS or math.prod(max(1, size) for size in self.shape) > MAX_ELEMENTS:
            raise ValueError(f"the shape {self.shape} is too large for a segment")

    @property
    def num_elements(self):
        return math.prod(self.shape)


def map_segment(segment):
    """Map a segment; returns a view of the shared file, not a copy.

    Raises XDiTError if the file is gone, which means that the host abandoned the request.
    """
    if segment.num_elements == 0:
        return torch.empty(segment.shape, dtype=DTYPES[segment.dtype])
    try:
        num_bytes = segment.num_elements * DTYPES[segment.dtype].itemsize
        if os.path.getsize(segment.path) < num_bytes:          # from_file would create or grow the file
            raise OSError(f"it has fewer than {num_bytes} bytes")
        flat = torch.from_file(segment.path, shared=True, size=segment.num_elements, dtype=DTYPES[segment.dtype])
    except (RuntimeError, OSError) as error:
        raise XDiTError(f"Shared memory {segment.path} cannot be opened: {error}. Queue the prompt again.") from error
    return flat.view(segment.shape)


def claim(folder):
    """Create a private folder that belongs to this process for as long as it lives; returns its lock, an open file.

    The lock file lies next to the folder. The kernel releases a lock when its process ends for whatever reason, and
    enforces it across all containers that share the file system, where two processes may have the same name and pid.
    """
    while True:
        lock = open(_lock_of(folder), "x", opener=lambda path, flags: os.open(path, flags, 0o600))
        # a file system without locks, where `sweep` removes nothing either
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_there(lock):
            folder.mkdir(mode=0o700)
            _close_in_forks(weakref.ref(lock))
            return lock
        # another host swept it as abandoned, before it was locked
        lock.close()


def _close_in_forks(reference):
    """Close the lock in forked processes, which would otherwise keep it locked for as long as they live."""
    def close():
        lock = reference()
        if lock is not None:
            lock.close()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close)


def sweep(base):
    """Remove the folders below `base` whose hosts exited without removing them: their locks are free."""
    for path in base.glob("xdit-*.lock"):
        try:
            lock = open(path, "r+", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW))
        except OSError:                                        # another user's, or already removed
            continue
        with lock:
            if os.fstat(lock.fileno()).st_uid != os.getuid():
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            if _is_there(lock):
                discard(path.with_suffix(""))


def discard(folder):
    """Remove a folder that `claim` created, and its lock file.

    A process of the group that is ending may still write there, as torch does for a failed worker, which prevents the
    removal. After ATTEMPTS the lock file stays too, so that a later `sweep` finds the folder.
    """
    for _ in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            _lock_of(folder).unlink(missing_ok=True)
            return


def folders_of(name):
    """Folders of a group: in memory (/dev/shm) where available, and on disk."""
    memory = (Path("/dev/shm") if sys.platform == "linux" and os.access("/dev/shm", os.W_OK)
              else Path(tempfile.gettempdir()))
    return memory / name, Path(tempfile.gettempdir()) / name


def _lock_of(folder):
    return folder.with_name(f"{folder.name}.lock")


def _is_there(lock):
    """Whether an open file still has its name in the file system."""
    try:
        return os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


class SegmentStore:
    """The private folder of one worker group, and the segments in it.

    `folder` is in memory where available, and readable by this user only. `overflow_folder` is on disk, for segments
    that do not fit, as in containers with 64 MB of /dev/shm. Both belong to this process; folders abandoned by hosts
    that exited are removed first.
    """

    def __init__(self):
        self.folder, self.overflow_folder = folders_of(f"xdit-{os.getpid()}-{secrets.token_hex(8)}")
        self._owner, self._locks, self._count = os.getpid(), [], 0
        try:
            for folder in sorted({self.folder, self.overflow_folder}):
                sweep(folder.parent)
                self._locks.append(claim(folder))
        except OSError:
            self.close()
            raise

    def create(self, shape, dtype, in_memory=False):
        """Create a segment; returns (segment, its tensor). Its memory is reserved, so that a later write cannot fail.

        in_memory: do not fall back to the temporary folder. Raises XDiTError if there is not enough free space.
        """
        self._count += 1
        segment = None
        for folder in (self.folder,) if in_memory else (self.folder, self.overflow_folder):
            candidate = Segment(str(folder / f"{self._count}"), dtype_name(dtype), tuple(shape))
            num_bytes = candidate.num_elements * dtype.itemsize
            if _reserve(candidate.path, num_bytes):
                segment = candidate
                break
        if segment is None:
            raise XDiTError(
                f"Free some space in {self.folder.parent} or {self.overflow_folder.parent} and queue the prompt again: "
                f"{num_bytes / 2**20:.0f} MB of shared memory are needed, and neither has that much.")
        return segment, map_segment(segment)

    def share(self, tensor):
        """Copy a tensor of any device into a new segment and return the segment."""
        with self.removed_on_failure() as made:
            segment, view = self.create(tensor.shape, tensor.dtype)
            made.append(segment)
            view.copy_(tensor)
        return segment

    def share_all(self, tensors):
        """Copy {key: tensor} into new segments; returns {key: segment}. If one fails, all are removed."""
        with self.removed_on_failure() as made:
            for tensor in tensors.values():
                made.append(self.share(tensor))
        return dict(zip(tensors, made))

    @contextmanager
    def removed_on_failure(self):
        """Context of a list whose segments are removed if the block raises."""
        made = []
        try:
            yield made
        except BaseException:
            for segment in made:
                self.remove(segment)
            raise

    def remove(self, segment):
        """Remove a segment's file. Mappings stay valid. Removing it twice is not an error."""
        Path(segment.path).unlink(missing_ok=True)

    def names(self):
        """File names of the existing segments."""
        return sorted(p.name for folder in {self.folder, self.overflow_folder} if folder.exists()
                      for p in folder.iterdir() if p.name.isdecimal())

    def close(self):
        """Remove the folders and everything in them. May be called twice; does nothing in forked processes."""
        if os.getpid() != self._owner:
            return
        for folder in (self.folder, self.overflow_folder):
            discard(folder)
        while self._locks:
            self._locks.pop().close()


def _reserve(path, num_bytes):
    try:
        # after days, a cleaner of /tmp or the end of a login session may have removed the folder
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o700)
        file = open(path, "wb")
    except OSError as error:
        if (out := out_of_files(error)) is not None:
            raise out from error
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
