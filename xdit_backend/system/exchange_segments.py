"""Segments and sockets that connect each pair of ranks on Linux (has_exchange_segments), and Linux's way of waiting for
the sockets.

A segment is an unnamed memory file (memfd_create), which one rank of the pair creates and passes to the other
through their Unix socket. It has no path that another user could open or that a killed process would leave behind, its
size is sealed, and a container's limit on /dev/shm does not apply to it.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import time
from pathlib import Path

SEALS = (getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0))
PEER_CREDENTIALS = "3i"                    # pid, uid, gid
RANK = struct.Struct("<I")
ITIMERSPEC = struct.Struct("4l")            # interval and first expiry, each in seconds and nanoseconds


def create_segment(num_bytes):
    """Create a segment; returns its file descriptor. Its memory is reserved, so that a later write cannot fail.

    Raises OSError if there is not enough free memory.
    """
    descriptor = os.memfd_create("xdit exchange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_segment(descriptor, num_bytes):
    """Map a segment of exactly num_bytes, and close its descriptor. Raises OSError if its size is another one, or may
    change."""
    try:
        size, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if size != num_bytes or seals & SEALS != SEALS:
            raise OSError(f"a segment of {num_bytes} bytes is needed, and the other rank sent one of {size} bytes "
                          f"with seals {seals:#x}")
        return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


def connect_pairs(store, rank, size, folder, num_bytes, timeout_s):
    """Connect this rank with all others of its group; returns {other rank: (socket, mapped segment)}.

    A collective. Each rank listens in `folder`, which only this user can enter, and connects to those of lower rank.
    store: c10d store of the group. Raises OSError.
    """
    connected = {}
    listening, path = socket.socket(socket.AF_UNIX), Path(folder) / f"exchange-{secrets.token_hex(8)}"
    with listening:
        listening.bind(str(path))
        try:
            listening.listen(size)
            listening.settimeout(timeout_s)
            store.set(f"exchange {rank}", path.name)
            for other in range(rank):
                name = store.get(f"exchange {other}").decode()
                connected[other] = _join(Path(folder) / name, rank, num_bytes, timeout_s)
            for _ in range(size - 1 - rank):
                other, pair = _accept(listening, num_bytes, timeout_s)
                if not rank < other < size or other in connected:
                    raise OSError(f"rank {other} connected to rank {rank} of {size} twice, or should not have")
                connected[other] = pair
        finally:
            path.unlink(missing_ok=True)
    for joined, _ in connected.values():
        joined.setblocking(False)
    return connected


def _join(path, rank, num_bytes, timeout_s):
    joined = socket.socket(socket.AF_UNIX)
    joined.settimeout(timeout_s)
    joined.connect(str(path))
    joined.sendall(RANK.pack(rank))
    _, descriptors, _, _ = socket.recv_fds(joined, 1, 1)
    if not descriptors:
        raise OSError("the other rank closed the connection before it sent a segment")
    return joined, map_segment(descriptors[0], num_bytes)


def _accept(listening, num_bytes, timeout_s):
    accepted, _ = listening.accept()
    accepted.settimeout(timeout_s)
    _, uid, _ = struct.unpack(PEER_CREDENTIALS, accepted.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(PEER_CREDENTIALS)))
    if uid != os.getuid():
        raise OSError(f"a process of user {uid} connected to the exchange of user {os.getuid()}")
    other, = RANK.unpack(accepted.recv(RANK.size, socket.MSG_WAITALL))
    descriptor = create_segment(num_bytes)
    socket.send_fds(accepted, [b"\0"], [descriptor])
    return other, (accepted, map_segment(descriptor, num_bytes))


class Watcher:
    """Waits for sockets to become readable: `wait` for any of them, and `wait_armed`, in another thread, for armed ones
    or the timer, once each."""

    def __init__(self, sockets):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._readable, self._armed = select.epoll(), select.epoll()
        self._armed.register(self._timer, select.EPOLLIN)
        for each in sockets:
            self._readable.register(each.fileno(), select.EPOLLIN)
            self._armed.register(each.fileno(), select.EPOLLONESHOT)

    def wait(self, timeout_s):
        self._readable.poll(timeout_s)

    def wait_armed(self):
        self._armed.poll()

    def arm(self, watched, is_armed):
        self._armed.modify(watched.fileno(), select.EPOLLONESHOT | (select.EPOLLIN if is_armed else 0))

    def set_timer(self, seconds):
        """Have `wait_armed` return after so many seconds, below one; 0: not at all."""
        setting = ITIMERSPEC.pack(0, 0, 0, int(seconds * 1e9))
        self._libc.timerfd_settime(self._timer, 0, setting, None)

    def remove(self, watched):
        for each in (self._readable, self._armed):
            each.unregister(watched.fileno())

    def close(self):
        self._readable.close()
        self._armed.close()
        os.close(self._timer)
