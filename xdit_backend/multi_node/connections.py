"""Encrypted connections between two machines, authenticated both ways, and what is said over them.

TLS 1.3. The host shows a certificate of its own making, whose fingerprint is half of the key that a person carries to
the other machine. The other half is a secret, which the joining side sends first, and before which the host parses
nothing. After the greeting a Link goes one way.
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

PORT = 29431                               # where the host listens, unless another is given
PIECE_BYTES = 2 ** 20                      # of a tensor that travels at a time; between two, other messages pass
# that have to be on their way within the time of silence: a slow link is no lost one
SEND_BYTES = 2 ** 16
HANDSHAKE_S = 10.0                         # for which the joining side waits for the host
WELCOME_S = 5.0                            # from a new connection until it has shown the key and said its Hello
PINGS = 16                                 # in the time after which silence counts as the end
HEADER = struct.Struct("!iI")              # the rank that a message is for, or comes from, or MACHINE; its bytes
MACHINE = -1

Name: TypeAlias = Annotated[str, Field(pattern=f"^{MACHINE_NAME}$")]
Token: TypeAlias = Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]         # of a session; "": there is none yet
Content: TypeAlias = Annotated[str, Field(pattern="^[0-9]{1,19}-[0-9a-f]{64}$")]       # file_digest.Contents.of


@message(frozen=True, config=STRICT)
class JoinRequest:
    """The first message of a connection: what it is for. "machine": it joins, and will take commands here."""

    purpose: Literal["machine", "replies"]
    session: Token = ""            # of Welcome, for the others
    name: Name = "machine"
    versions: ByName[str, str] = field(default_factory=dict)
    gpus: ByName[str, tuple[str, float]] = field(default_factory=dict)  # device -> (what it is, bytes of memory)


@message(frozen=True, config=STRICT)
class JoinAccepted:
    session: Token
    clock_s: float                 # the host's time.perf_counter


@message(frozen=True, config=STRICT)
class Refused:
    reason: Reason


@message(frozen=True, config=STRICT)
class Start:
    """Start the workers of this machine's devices, which are some of these; the order is that of ranks."""

    devices: Many[str]
    variables: ByName[Literal["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"], Literal["1"]] = field(default_factory=dict)


@message(frozen=True, config=STRICT)
class Find:
    """Look for a model file, or diffusers folder, of this content."""

    path: str                      # on the host's machine: its last part is the name to look for first
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
    """How much of a file has been read to know its content."""

    done: Natural
    total: Natural


@message(frozen=True, config=STRICT)
class Tensor:
    """A tensor that a command to come reads. Pieces of it follow, where it is not zero."""

    segment: Segment               # on the host's machine


@message(frozen=True, config=STRICT)
class Piece:
    """Bytes of a tensor follow, which are to be there too. path: of the segment on the host's machine."""

    path: str
    start: Natural
    num_bytes: Annotated[int, Field(ge=1, le=PIECE_BYTES)]


@message(frozen=True, config=STRICT)
class Ping:
    pass


@message(frozen=True, config=STRICT)
class Ended:
    """Workers of this machine have ended, or could not start."""

    rank: Rank
    reason: Reason
    lines: Printable = ""          # the last that it printed


BETWEEN_MACHINES = {cls.__name__: TypeAdapter(cls) for cls in (
    JoinRequest, JoinAccepted, Refused, Start, Find, Found, Missing, Searching, Tensor, Piece, Ping, Ended)}


# --- who is let in ---

def accepted(connected, context):
    """The Link of a connection that the host has accepted, of which nothing has been read yet.
    Raises OSError or ValueError where it has ended already."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.settimeout(WELCOME_S)
    link = Link(context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False))
    return link


def welcome(link, secret):
    """The host's side of the TLS handshake and of the key's secret, before which nothing is parsed. From now on,
    everything until `set_silence_limit` has to be over in WELCOME_S.
    Raises ChannelClosedError for all who do not hold the key."""
    link.set_deadline(time.monotonic() + WELCOME_S)
    link.handshake()
    if not hmac.compare_digest(link.read(SECRET_BYTES), secret):
        raise ChannelClosedError("the secret is another")


def connect(address, key):
    """The joining side's: a Link to the host at (address, port), which has shown the certificate of the key.

    Raises ConfigError where another answers, before anything is sent to it; OSError where none does.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE         # by its fingerprint instead, here below
    secure = context.wrap_socket(socket.create_connection(address, HANDSHAKE_S))
    shown = hashlib.sha256(secure.getpeercert(binary_form=True)).digest()
    if not hmac.compare_digest(shown, key.fingerprint):
        secure.close()
        raise ConfigError(f"What answers at {address[0]}:{address[1]} is not the host that this key is of. Copy the "
                          f"key again: python -m xdit_backend key shows it there.")
    secure.sendall(key.secret)
    return Link(secure)


# --- a connection ---

class Link:
    """One encrypted connection. Several threads may send; one receives.
    In use it goes one way, since TLS takes no two threads at once."""

    def __init__(self, secure):
        self.raw, self._deadline_s = secure, math.inf
        self._sending, self._receiving = threading.RLock(), threading.RLock()

    def set_silence_limit(self, silence_s):
        """From now on the other end counts as gone when nothing has come, or could be sent, for so long."""
        self._deadline_s = math.inf
        self.raw.settimeout(silence_s)

    def set_deadline(self, deadline_s):
        """Until set_silence_limit, the other end counts as gone at this time.monotonic(), even if bytes arrive."""
        self._deadline_s = deadline_s

    def handshake(self):
        """TLS's. Raises ChannelClosedError where it fails."""
        try:
            self._limit_wait()
            self.raw.do_handshake()                            # the time-out is of all of it
        except (OSError, ValueError) as error:
            raise ChannelClosedError(_words(error)) from error

    def send(self, message, rank=MACHINE, content=b""):
        """Send one of this module's messages, or, for a rank or from one, of protocol.messages;
        and after a Piece its bytes."""
        raw = encode(message, BETWEEN_MACHINES if rank == MACHINE else ADAPTERS)
        if len(raw) > MAX_BYTES:
            raise XDiTError(f"A {type(message).__name__} of {len(raw)} bytes is more than a connection takes "
                            f"({MAX_BYTES}).")
        try:
            with self._sending:
                for part in (HEADER.pack(rank, len(raw)) + raw, content):
                    for start in range(0, len(part), SEND_BYTES):              # the time-out is of each
                        self.raw.sendall(part[start:start + SEND_BYTES])
        except (OSError, ValueError) as error:                 # ValueError: it was closed meanwhile
            raise ChannelClosedError(_words(error)) from error

    def receive(self):
        """Wait for (rank or MACHINE, message). Raises ChannelClosedError when the other end is gone,
        or talks what is no message."""
        rank, size = HEADER.unpack(self.read(HEADER.size))
        if size > MAX_BYTES or rank < MACHINE:
            self.close()
            raise ChannelClosedError(f"a message of {size} bytes for rank {rank} came, which is none")
        try:
            return rank, decode(self.read(size), BETWEEN_MACHINES if rank == MACHINE else ADAPTERS)
        except ChannelClosedError:
            raise
        except XDiTError as error:
            self.close()
            raise ChannelClosedError(str(error)) from error

    def read(self, num_bytes):
        """So many bytes, all of them."""
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
            raise ChannelClosedError(_words(error)) from error
        return bytes(content)

    def _limit_wait(self):
        if self._deadline_s < math.inf:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self.raw.settimeout(left_s)

    def end(self):
        """End both directions, so that threads that wait in it wake up; one of them has to close it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.raw, socket.SHUT_RDWR)

    def close(self):
        """End both directions; may be called twice, and while others send and receive."""
        self.end()
        with self._sending, self._receiving:
            self.raw.close()


def ping(link, is_over):
    """Give signs of life until the Event is_over, or the link ends."""
    with contextlib.suppress(ChannelClosedError):
        while not is_over.wait(silence_s() / PINGS):
            link.send(Ping())


def silence_s():
    return timeouts.seconds("XDIT_LINK_TIMEOUT_S")


def is_name(text):
    """May a machine have this name?"""
    return re.fullmatch(MACHINE_NAME, text) is not None


def _words(error):
    if isinstance(error, TimeoutError):
        return "nothing came over the connection any more"
    return f"the connection broke ({type(error).__name__}: {error})"
