"""Access of a joined machine's ranks to the group's c10d store, which is a FileStore on the host.

gloo and NCCL exchange addresses and communicator ids through it: raw bytes, which nothing here interprets.
"""

from datetime import timedelta

import torch.distributed as dist

from .. import system
from ..protocol.errors import XDiTError
from ..protocol.messages import StoreReply

MAX_BYTES = 2 ** 26                        # limit of one machine's writes to a group's file, which only grows
TIMEOUT_S = 5                              # of one access to the file, none of which waits for a key


class StoreAccess:
    """Executes StoreRequests on a FileStore. Not thread-safe: one thread serves a machine."""

    def __init__(self, path):
        # -1: it never removes the file
        self._store = dist.FileStore(system.store_path(path, change_folder=False), -1)
        self._store.set_timeout(timedelta(seconds=TIMEOUT_S))
        self._written_bytes = 0

    def answer(self, request):
        """Execute a request; returns the StoreReply. Raises XDiTError for invalid requests, and beyond MAX_BYTES."""
        keys = [*request.keys]
        if request.operation not in ("check", "num_keys") and len(keys) != 1:
            raise XDiTError(f'the store operation "{request.operation}" came with {len(keys)} keys instead of one')
        if request.operation in ("set", "add", "compare_set"):
            self._written_bytes += len(keys[0]) + len(request.value) // 2 + len(request.expected) // 2
            if self._written_bytes > MAX_BYTES:
                raise XDiTError(f"it wrote more than {MAX_BYTES // 2 ** 20} MB into the store of the group")
        try:
            value, count = self._execute(request, keys)
        except (RuntimeError, ValueError) as error:            # the group ends, or "add" to a non-number
            return StoreReply(request.number, error=str(error))
        return StoreReply(request.number, value.hex(), count)

    def _execute(self, request, keys):
        """(value, count)"""
        value, expected = bytes.fromhex(request.value), bytes.fromhex(request.expected)
        match request.operation:
            case "set":
                self._store.set(keys[0], value)
            case "get":
                return (self._store.get(keys[0]), 1) if self._store.check(keys) else (b"", 0)
            case "add":
                return b"", self._store.add(keys[0], request.amount)
            case "compare_set":
                return self._store.compare_set(keys[0], expected, value), 0
            case "check":
                return b"", int(self._store.check(keys))
            case "delete":
                return b"", int(self._store.delete_key(keys[0]))
            case "num_keys":
                return b"", self._store.num_keys()
        return b"", 0
