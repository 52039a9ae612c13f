"""The c10d store of a group: a file on the host, or access to that file over a remote rank's connection."""

import itertools
import queue
import threading
import time
from pathlib import Path

import torch.distributed as dist

from .. import system
from ..protocol.channel import STORE_FILE
from ..protocol.devices import machine_of
from ..protocol.messages import StoreRequest

POLL_S = 0.02                              # between polls for a key that another rank will set
REPLY_S = 60.0                             # for the host's reply, which it sends at once


def open_store(folder, rank, devices, send):
    """Open the group's store: torch's FileStore in its private folder, or a HostStore on another machine.

    send: sends a message to the host. devices: of all ranks.
    """
    if machine_of(devices[rank]):
        return HostStore(rank, send)
    # -1: the host removes the file with its folder
    return dist.FileStore(system.store_path(Path(folder) / STORE_FILE), -1)


class HostStore(dist.Store):
    """A c10d store whose operations the host executes on its FileStore (multi_node/store_access.py).

    send: sends a StoreRequest to the host; `take` receives each StoreReply from the receiving thread. Methods have the
    names under which torch's C++ code looks them up in a subclass. Keep a reference: torch holds only the C++ half.
    """

    def __init__(self, rank, send):
        super().__init__()
        self._rank, self._send = rank, send
        self._numbers, self._replies, self._lock = itertools.count(1), queue.SimpleQueue(), threading.Lock()

    def take(self, reply):
        self._replies.put(reply)

    def set(self, key, value):
        self._ask("set", key, value=_as_bytes(value).hex())

    def get(self, key):
        self.wait([key])
        reply = self._ask("get", key)
        if not reply.count:
            raise dist.DistStoreError(f"the key {key} was deleted from the store")
        return bytes.fromhex(reply.value)

    def add(self, key, amount):
        return self._ask("add", key, amount=amount).count

    def compare_set(self, key, expected, desired):
        return bytes.fromhex(self._ask("compare_set", key, value=_as_bytes(desired).hex(),
                                       expected=_as_bytes(expected).hex()).value)

    def check(self, keys):
        return bool(self._ask("check", *keys).count)

    def wait(self, keys, timeout=None):
        timeout = self.timeout if timeout is None else timeout
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline_s:
                raise dist.DistStoreError(f"no other rank set {', '.join(keys)} within {timeout.total_seconds():.0f} s")
            time.sleep(POLL_S)

    def delete_key(self, key):
        return bool(self._ask("delete", key).count)

    deleteKey = delete_key

    def num_keys(self):
        return self._ask("num_keys").count

    getNumKeys = num_keys

    def has_extended_api(self):
        return False

    def clone(self):
        return self

    def _ask(self, operation, *keys, **fields):
        with self._lock:
            number = next(self._numbers)
            self._send(StoreRequest(self._rank, number, operation, tuple(keys), **fields))
            while True:
                try:
                    reply = self._replies.get(timeout=REPLY_S)
                except queue.Empty:
                    raise dist.DistStoreError(f"the host did not answer within {REPLY_S:.0f} s") from None
                if reply.number == number:
                    break
        if reply.error:
            raise dist.DistStoreError(reply.error)
        return reply


def _as_bytes(value):
    return value.encode() if isinstance(value, str) else bytes(value)
