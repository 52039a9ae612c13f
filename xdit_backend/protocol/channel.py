"""Authenticated connection between the host and one worker, which carries messages.

It is a Unix domain socket in the group's private folder, or on Windows a loopback socket. Both ends prove that they
have the group's key, a file in that folder (HMAC challenge of multiprocessing.connection); nothing is pickled.
"""

import logging
import multiprocessing
import multiprocessing.connection as connection
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import system
from .errors import ChannelClosedError, XDiTError
from .messages import decode, encode

log = logging.getLogger(__name__)

# of a message; the largest ones list the tensors of a VAE
MAX_BYTES = 2 ** 24
KEY_FILE, ADDRESS_FILE = "key", "address"
STORE_FILE = "store"                               # of torch's FileStore, in the same folder
HANDSHAKE_S, TIMEOUT_S = 5.0, 60.0


@dataclass
class Channel:
    """Bidirectional stream of messages. `send` is thread-safe."""

    raw: connection.Connection

    def __post_init__(self):
        self._lock, self._ended_with = threading.Lock(), ()    # Connections that `end` shuts down too

    def send(self, message):
        raw = encode(message)
        if len(raw) > MAX_BYTES:
            raise XDiTError(f"A {type(message).__name__} of {len(raw)} bytes exceeds a connection's limit of "
                            f"{MAX_BYTES} bytes.")
        try:
            with self._lock:
                self.raw.send_bytes(raw)
        except (BlockingIOError, TimeoutError) as error:
            raise ChannelClosedError("the other end accepts no data") from error
        except OSError as error:
            raise ChannelClosedError("the other end is gone") from error

    def receive(self):
        """Wait for the next message; the time limit starts with its first byte.

        Raises ChannelClosedError when the other end is gone, sends an incomplete message, or sends something that is
        not a message. The connection is then closed, since nothing that follows could be trusted.
        """
        try:
            self.raw.poll(None)                                # ChannelListener's limit is for one message
            return decode(self.raw.recv_bytes(MAX_BYTES))
        except (OSError, EOFError) as error:
            raise ChannelClosedError("the other end is gone") from error
        except XDiTError as error:
            self.close()
            log.error("%s", error)
            raise ChannelClosedError(str(error)) from error

    @property
    def has_capacity(self):
        """Whether a short message can be sent without blocking."""
        return system.can_send(self.raw)

    def end(self):
        """Shut the connection down, from any thread: pending calls at both ends raise ChannelClosedError."""
        for raw in (self.raw, *self._ended_with):
            with suppress(OSError), _socket_of(raw) as connected:
                connected.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.raw.close()


class ChannelListener:
    """The host's listening socket in the group's private folder, which accepts workers that have the group's key.

    timeout_s: how long a Channel waits for the rest of a message, or for buffer space to send one, before the other end
    counts as gone.
    """

    def __init__(self, folder, timeout_s=TIMEOUT_S):
        folder = Path(folder)
        self._timeout_s = timeout_s
        self._key = secrets.token_bytes(32)
        key_file = folder / KEY_FILE
        key_file.touch(mode=0o600)
        key_file.write_bytes(self._key)
        self._socket, address = system.listen(folder)
        (folder / ADDRESS_FILE).write_text(address, encoding="utf-8")

    def accept(self, timeout_s):
        """Return the next authenticated Channel, or None after timeout_s."""
        self._socket.settimeout(timeout_s)
        try:
            accepted, _ = self._socket.accept()
        except TimeoutError:
            return None
        accepted.settimeout(None)
        system.limit_waits(accepted, HANDSHAKE_S)
        raw = connection.Connection(accepted.detach())
        try:
            connection.deliver_challenge(raw, self._key)
            connection.answer_challenge(raw, self._key)
            with _socket_of(raw) as accepted:
                system.limit_waits(accepted, self._timeout_s)
        except (multiprocessing.AuthenticationError, EOFError, OSError):
            raw.close()
            return None
        return Channel(raw)

    def close(self):
        self._socket.close()


def pair():
    """Return two connected Channels of this process, without time limits; `end` wakes both."""
    first, second = (Channel(connection.Connection(end.detach())) for end in system.socket_pair())
    # a full TCP socket does not notice that its peer was shut down
    first._ended_with, second._ended_with = (second.raw,), (first.raw,)
    return first, second


def _socket_of(raw):
    """A socket object for a Connection's socket; closing it does not close the Connection."""
    return socket.socket(fileno=socket.dup(raw.fileno()))


def connect(folder):
    """Connect to the host through its group's private folder."""
    folder = Path(folder)
    address = (folder / ADDRESS_FILE).read_text(encoding="utf-8")
    return Channel(system.connect(address, (folder / KEY_FILE).read_bytes()))
