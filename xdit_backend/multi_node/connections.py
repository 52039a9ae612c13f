"""Encrypted, mutually authenticated connections between two machines, and their messages.

TLS 1.3 with the host's self-signed certificate. The key that the user copies to the other machine consists of the
certificate's fingerprint and a secret. The joining side sends the secret first; the host parses nothing before it.
After the handshake a Link is used in one direction.
"""

import contextlib
import hashlib
import hmac
import math
import re
import socket
import ssl
import struct
import threading
import time
from dataclasses import field
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as message

from ..protocol import timeouts
from ..protocol.channel import MAX_BYTES
from ..protocol.devices import MACHINE_NAME
from ..protocol.errors import ChannelClosedError, ConfigError, XDiTError
from ..protocol.messages import ADAPTERS, decode, encode
from ..protocol.shared_memory import Segment
from ..protocol.validation import STRICT, ByName, Many, Natural, Printable, Rank, Reason
from .tls_keys import SECRET_BYTES

PORT = 29431                               # default port of the host
CHUNK_BYTES = 2 ** 20                      # of a tensor in one message; other messages can be sent in between
# that must be sent within the timeout, so that a slow link does not count as lost
SEND_BYTES = 2 ** 16
CONNECT_S = 10.0                           # timeout of the joining side
AUTHENTICATE_S = 5.0                       # from a new connection until its secret and JoinRequest are received
PINGS = 16                                 # in the time after which a silent connection counts as lost
HEADER = struct.Struct("!iI")              # rank of the receiver or sender, or MACHINE; size of the message in bytes
MACHINE = -1

Name: TypeAlias = Annotated[str, Field(pattern=f"^{MACHINE_NAME}$")]
Token: TypeAlias = Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]         # of a session; "": there is none yet
Content: TypeAlias = Annotated[str, Field(pattern="^[0-9]{1,19}-[0-9a-f]{64}$")]       # file_digest.Contents.of


@message(frozen=True, config=STRICT)
class JoinRequest:
    """The first message of a connection. "machine": joins, and receives commands; "replies": sends replies."""

    purpose: Literal["machine", "replies"]
    session: Token = ""            # of JoinAccepted, for "replies"
    name: Name = "machine"
    versions: ByName[str, str] = field(default_factory=dict)
    gpus: ByName[str, tuple[str, float]] = field(default_factory=dict)  # device -> (name, memory in bytes)

@message(frozen=True, config=STRICT)
class JoinAccepted:
    session: Token
    clock_s: float                 # the host's time.perf_counter


@message(frozen=True, config=STRICT)
class Refused:
    reason: Reason


@message(frozen=True, config=STRICT)
class Start:
    """Start the workers of this machine's devices. devices: of all ranks of the group, in order."""

    devices: Many[str]
    variables: ByName[Literal["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"], Literal["1"]] = field(default_factory=dict)


@message(frozen=True, config=STRICT)
class Find:
    """Find a model file, or diffusers folder, with these contents."""

    path: str                      # on the host; files with the same name are checked first
    content: Content


@message(frozen=True, config=STRICT)
class Found:
    path: str                      # of Find


@message(frozen=True, config=STRICT)
class Missing:
    path: str
    reason: Reason


@message(frozen=True, config=STRICT)
class Searching:
    """Progress of reading a file to compute its digest."""

    done: Natural
    total: Natural


@message(frozen=True, config=STRICT)
class Tensor:
    """Announces an input tensor of a following command. Its non-zero chunks follow, each as a Piece."""

    segment: Segment               # on the host


@message(frozen=True, config=STRICT)
class Piece:
    """A chunk of a tensor, whose bytes follow the message. path: of the segment on the host."""

    path: str
    start: Natural
    num_bytes: Annotated[int, Field(ge=1, le=CHUNK_BYTES)]


@message(frozen=True, config=STRICT)
class Ping:
    pass


@message(frozen=True, config=STRICT)
class Ended:
    """Workers of this machine have ended, or could not start."""

    rank: Rank
    reason: Reason
    lines: Printable = ""          # its last lines of output


BETWEEN_MACHINES = {cls.__name__: TypeAdapter(cls) for cls in (
    JoinRequest, JoinAccepted, Refused, Start, Find, Found, Missing, Searching, Tensor, Piece, Ping, Ended)}


# --- authentication ---

def accepted(connected, context):
    """Link of a connection that the host has accepted, before anything is read from it.

    Raises OSError or ValueError if it is already closed.
    """
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.settimeout(AUTHENTICATE_S)
    return Link(context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False))


def authenticate(link, secret):
    """TLS handshake and check of the secret on the host's side, before anything is parsed.

    From now on, everything until `set_silence_limit` must be complete within AUTHENTICATE_S. Raises ChannelClosedError
    for a peer without the key.
    """
    link.set_deadline(time.monotonic() + AUTHENTICATE_S)
    link.handshake()
    if not hmac.compare_digest(link.read(SECRET_BYTES), secret):
        raise ChannelClosedError("the secret is wrong")


def connect(address, key):
    """Connect the joining side to the host at (address, port), and check its certificate; returns the Link.

    Raises ConfigError if the certificate is not the key's, before anything is sent; OSError if nobody answers.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE         # verified by its fingerprint below
    secure = context.wrap_socket(socket.create_connection(address, CONNECT_S))
    shown = hashlib.sha256(secure.getpeercert(binary_form=True)).digest()
    if not hmac.compare_digest(shown, key.fingerprint):
        secure.close()
        raise ConfigError(f"Copy the key again, which python -m xdit_backend key shows on the host: the certificate of "
                          f"{address[0]}:{address[1]} is not the one of this key.")
    secure.sendall(key.secret)
    return Link(secure)


# --- a connection ---

class Link:
    """One encrypted connection. Several threads may send; one receives.

    It is used in one direction, since a TLS socket must not be used by two threads at once.
    """

    def __init__(self, secure):
        self.raw, self._deadline_s = secure, math.inf
        self._sending, self._receiving = threading.RLock(), threading.RLock()

    def set_silence_limit(self, silence_s):
        """From now on, the other end counts as gone when nothing was received, or could be sent, for silence_s."""
        self._deadline_s = math.inf
        self.raw.settimeout(silence_s)

    def set_deadline(self, deadline_s):
        """Until set_silence_limit, the other end counts as gone at this time.monotonic(), even if bytes arrive."""
        self._deadline_s = deadline_s

    def handshake(self):
        """TLS handshake. Raises ChannelClosedError if it fails."""
        try:
            self._limit_wait()
            self.raw.do_handshake()                            # the timeout covers all of it
        except (OSError, ValueError) as error:
            raise ChannelClosedError(_describe(error)) from error

    def send(self, message, rank=MACHINE, content=b""):
        """Send one of this module's messages, or, to or from a rank, one of protocol.messages. content: a Piece's
        bytes."""
        raw = encode(message, BETWEEN_MACHINES if rank == MACHINE else ADAPTERS)
        if len(raw) > MAX_BYTES:
            raise XDiTError(f"A {type(message).__name__} of {len(raw)} bytes exceeds a connection's limit of "
                            f"{MAX_BYTES} bytes.")
        try:
            with self._sending:
                for part in (HEADER.pack(rank, len(raw)) + raw, content):
                    for start in range(0, len(part), SEND_BYTES):              # the timeout covers each
                        self.raw.sendall(part[start:start + SEND_BYTES])
        except (OSError, ValueError) as error:                 # ValueError: it was closed meanwhile
            raise ChannelClosedError(_describe(error)) from error

    def receive(self):
        """Wait for (rank or MACHINE, message). Raises ChannelClosedError if the other end is gone, or sends something
        that is not a message."""
        rank, size = HEADER.unpack(self.read(HEADER.size))
        if size > MAX_BYTES or rank < MACHINE:
            self.close()
            raise ChannelClosedError(f"invalid header: a message of {size} bytes for rank {rank}")
        try:
            return rank, decode(self.read(size), BETWEEN_MACHINES if rank == MACHINE else ADAPTERS)
        except ChannelClosedError:
            raise
        except XDiTError as error:
            self.close()
            raise ChannelClosedError(str(error)) from error

    def read(self, num_bytes):
        """Read exactly num_bytes."""
        content = bytearray(num_bytes)
        view = memoryview(content)
        try:
            with self._receiving:
                while view:
                    self._limit_wait()
                    count = self.raw.recv_into(view)
                    if not count:
                        raise ChannelClosedError("the connection was closed")
                    view = view[count:]
        except ChannelClosedError:
            raise
        except (OSError, ValueError) as error:
            raise ChannelClosedError(_describe(error)) from error
        return bytes(content)

    def _limit_wait(self):
        if self._deadline_s < math.inf:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self.raw.settimeout(left_s)

    def end(self):
        """Shut down both directions, which wakes threads that wait in it; one of them must close it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.raw, socket.SHUT_RDWR)

    def close(self):
        """Shut down and close; may be called twice, and while other threads send and receive."""
        self.end()
        with self._sending, self._receiving:
            self.raw.close()


def ping(link, is_over):
    """Send Pings until the Event is_over is set, or the link is closed."""
    with contextlib.suppress(ChannelClosedError):
        while not is_over.wait(silence_s() / PINGS):
            link.send(Ping())


def silence_s():
    return timeouts.seconds("XDIT_LINK_TIMEOUT_S")


def is_name(text):
    """Whether this is a valid name of a machine."""
    return re.fullmatch(MACHINE_NAME, text) is not None


def _describe(error):
    if isinstance(error, TimeoutError):
        return "the connection timed out"
    return f"the connection broke ({type(error).__name__}: {error})"
