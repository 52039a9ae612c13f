"""Shared memory segments between the host and the workers of one machine: files that both sides map, or on Windows
sections of the page file.

The host creates, fills and removes segments; workers only map them. A mapping stays valid after its segment is removed,
so a cancelled run can be cleaned up while a worker still writes to its mapping.
"""

import math
import os
import secrets
import shutil
import tempfile
import time
import weakref
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic.dataclasses import dataclass

from .. import system
from .errors import XDiTError
from .open_files import out_of_files
from .validation import STRICT, Many, Natural

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2)}


MAX_DIMS, MAX_ELEMENTS = 16, 2 ** 52                           # of a segment; more is a mistake, or overflows
ATTEMPTS, PAUSE_S = 3, 0.05                                    # to remove a folder that others still write to


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
        flat = system.map_shared(segment.path, segment.num_elements, DTYPES[segment.dtype])
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
        system.lock(lock)
        if _is_there(lock):
            system.make_private(folder)
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
    system.after_fork_in_child(close)


def sweep(base):
    """Remove the folders below `base` whose hosts exited without removing them: their locks are free."""
    for path in base.glob("xdit-*.lock"):
        try:
            lock = system.open_unlocked(path)
        except OSError:                                        # another user's, or already removed
            continue
        if lock is not None:
            with lock:
                if _is_there(lock):
                    discard(path.with_suffix(""), lock)


def discard(folder, lock=None):
    """Remove a folder that `claim` created, and its lock file, which may be open here as `lock`.

    A process of the group that is ending may still write there, as torch does for a failed worker, which prevents the
    removal. After ATTEMPTS the lock file stays too, so that a later `sweep` finds the folder.
    """
    for attempt in range(ATTEMPTS):
        time.sleep(attempt * PAUSE_S)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            system.remove_locked(_lock_of(folder), lock)
            return


def folders_of(name):
    """Folders of a group: in memory (/dev/shm) where available, and on disk."""
    return system.memory_folder() / name, Path(tempfile.gettempdir()) / name


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
        self._owner, self._locks, self._count = os.getpid(), {}, 0
        self._memory = system.SharedMemory()
        try:
            for folder in sorted({self.folder, self.overflow_folder}):
                sweep(folder.parent)
                self._locks[folder] = claim(folder)
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
            if self._reserve(candidate.path, num_bytes):
                segment = candidate
                break
        if segment is None:
            raise XDiTError(
                f"Free some space in {self.folder.parent} or {self.overflow_folder.parent}, or on Windows enlarge the "
                f"page file, and queue the prompt again: "
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
        """Remove a segment. Mappings stay valid. Removing it twice is not an error."""
        self._memory.remove(segment.path)

    def names(self):
        """Names of the existing segments."""
        return sorted(name for folder in {self.folder, self.overflow_folder} for name in self._memory.names(folder))

    def close(self):
        """Remove the folders and everything in them. May be called twice; does nothing in forked processes."""
        if os.getpid() != self._owner:
            return
        self._memory.close()
        for folder in {self.folder, self.overflow_folder}:
            lock = self._locks.pop(folder, None)
            discard(folder, lock)
            if lock is not None:
                lock.close()

    def _reserve(self, path, num_bytes):
        try:
            return self._memory.create(path, num_bytes)
        except OSError as error:
            raise out_of_files(error) or error from error
