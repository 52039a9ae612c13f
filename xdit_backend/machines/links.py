"""Encrypted connections between two machines, authenticated both ways, and what is said over them.

TLS 1.3. The host shows a certificate of its own making, whose fingerprint is half of the key that a person carries to
the other machine. The other half is a secret, which the joining side sends first, and before which the host parses
nothing. After the greeting a Link goes one way.
"""

import contextlib
import hashlib
import hmac
import select
import socket
import ssl
import struct
import threading
from dataclasses import field
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as message

from ..protocol import timeouts
from ..protocol.channel import MAX_BYTES
from ..protocol.devices import MACHINE_NAME
from ..protocol.errors import ChannelClosedError, ConfigError, XDiTError
from ..protocol.messages import ADAPTERS, decode, encode
from ..protocol.segments import Segment
from ..protocol.strict import STRICT, ByName, Degree, Many, Natural, Printable, Rank, Reason
from .keys import SECRET_BYTES

PORT = 29431                               # where the host listens, unless another is given
PIECE_BYTES = 2 ** 20                      # of a tensor that travels at a time; between two, other messages pass
# that have to be on their way within the time of silence: a slow link is no lost one
SEND_BYTES = 2 ** 16
HANDSHAKE_S = 10.0
PINGS = 16                                 # in the time after which silence counts as the end
HEADER = struct.Struct("!iI")              # the rank that a message is for, or comes from, or MACHINE; its bytes
MACHINE = -1

Name: TypeAlias = Annotated[str, Field(pattern=f"^{MACHINE_NAME}$")]
Token: TypeAlias = Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]         # of a session; "": there is none yet
Content: TypeAlias = Annotated[str, Field(pattern="^[0-9]{1,19}-[0-9a-f]{64}$")]       # contents.Contents.of


@message(frozen=True, config=STRICT)
class Hello:
    """The first message of a connection: what it is for. "machine": it joins, and will take commands here."""

    purpose: Literal["machine", "replies", "store"]
    session: Token = ""            # of Welcome, for the others
    name: Name = "machine"
    versions: ByName[str, str] = field(default_factory=dict)
    cards: ByName[str, tuple[str, float]] = field(default_factory=dict)  # device -> (what it is, bytes of memory)


@message(frozen=True, config=STRICT)
class Welcome:
    session: Token
    clock_s: float                 # the host's time.perf_counter


@message(frozen=True, config=STRICT)
class Refused:
    reason: Reason


@message(frozen=True, config=STRICT)
class Start:
    """Start the workers of this machine's devices, which are some of these; the order is that of ranks."""

    devices: Many[str]
    node: Natural
    num_nodes: Degree
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
    Hello, Welcome, Refused, Start, Find, Found, Missing, Searching, Tensor, Piece, Ping, Ended)}


# --- who is let in ---

def welcome(connected, context, secret):
    """The host's side of a new connection: a Link to who holds the key;
    None, and the connection is closed, for all others."""
    connected.settimeout(HANDSHAKE_S)
    try:
        secure = context.wrap_socket(connected, server_side=True)
    except (OSError, ValueError):
        connected.close()
        return None
    link = Link(secure)
    try:
        if hmac.compare_digest(link.read(SECRET_BYTES), secret):
            return link
    except ChannelClosedError:
        pass
    link.close()
    return None


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
                          f"line that ComfyUI prints there now.")
    secure.sendall(key.secret)
    return Link(secure)


# --- a connection ---

class Link:
    """One encrypted connection. Several threads may send; one receives.
    In use it goes one way, since TLS takes no two threads at once."""

    def __init__(self, secure):
        self.raw = secure
        self._sending, self._receiving = threading.RLock(), threading.RLock()

    def set_silence_limit(self, silence_s):
        """From now on the other end counts as gone when nothing has come, or could be sent, for so long."""
        self.raw.settimeout(silence_s)

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
                    count = self.raw.recv_into(view)
                    if not count:
                        raise ChannelClosedError("the connection was closed")
                    view = view[count:]
        except ChannelClosedError:
            raise
        except (OSError, ValueError) as error:
            raise ChannelClosedError(_words(error)) from error
        return bytes(content)

    def close(self):
        """End both directions; may be called twice, and while others send and receive."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.raw, socket.SHUT_RDWR)                 # who waits in it wakes up
        with self._sending, self._receiving:
            self.raw.close()


def ping(link, is_over):
    """Give signs of life until the Event is_over, or the link ends."""
    with contextlib.suppress(ChannelClosedError):
        while not is_over.wait(silence_s() / PINGS):
            link.send(Ping())


def exchange(link, plain):
    """Pass bytes between a Link and a socket of this machine, both ways, until one of them ends.
    One thread: TLS takes no two at once."""
    secure = link.raw
    secure.settimeout(silence_s())                             # of one send, or of the rest of a record
    try:
        while True:
            if not secure.pending():
                ready, _, _ = select.select([secure, plain], [], [])
            if secure.pending() or secure in ready:
                content = secure.recv(2 ** 16)
                if not content:
                    return
                plain.sendall(content)
            elif plain in ready:
                content = plain.recv(2 ** 16)
                if not content:
                    return
                secure.sendall(content)
    except (OSError, ValueError):
        pass
    finally:
        plain.close()
        link.close()


def silence_s():
    return timeouts.seconds("XDIT_LINK_TIMEOUT_S")


def _words(error):
    if isinstance(error, TimeoutError):
        return "nothing came over the connection any more"
    return f"the connection broke ({type(error).__name__}: {error})"
