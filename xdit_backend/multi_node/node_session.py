"""The host's side of the session of a joined machine, from joining until its workers end."""

import contextlib
import logging
import queue
import threading
import time

from ..protocol.channel import pair
from ..protocol.devices import machine_of
from ..protocol.errors import ChannelClosedError, CheckpointError, XDiTError
from ..protocol.messages import Abort, Done, Failed, Heartbeat, Stop, StoreRequest
from . import segment_transfer
from .connections import (
    MACHINE,
    Ended,
    Find,
    Found,
    Link,
    Missing,
    Piece,
    Ping,
    Searching,
    Start,
    Tensor,
    ping,
    silence_s,
)
from .store_access import StoreAccess

log = logging.getLogger(__name__)

POLL_S = 0.1
COMPLETE_S = 30.0                          # from a machine's first connection until the second, which may be queued
MAX_ANSWERS = 16                           # unread answers about a file


class Session:
    """One machine, which receives commands over one link and replies over another.

    name: in the devices setting. gpus: {device: (name, memory in bytes)}. on_end(): called when the session has ended.
    """

    def __init__(self, name, token, gpus, commands, on_end=lambda: None):
        self.name, self.token, self.gpus = name, token, gpus
        self.is_used = False                                   # a group has reserved it
        self._store: StoreAccess | None = None                 # of that group, once it starts
        self.address = commands.raw.getsockname()[0]           # of the host, as seen by that machine
        self.ended = ""                                        # reason of the end
        self._on_end = on_end
        self._commands: Link = commands
        self._replies: Link | None = None
        self._is_over, self._began_s = threading.Event(), time.monotonic()
        self._inner, self._open, self._lines = {}, {}, {}
        self._lock = threading.Lock()                          # for _open, and for the order of messages
        self._wanted, self._answers = "", queue.Queue(MAX_ANSWERS)         # path of the pending Find; its answers

    @property
    def is_open(self):
        return self._replies is not None and not self._is_over.is_set()

    @property
    def is_late(self):
        """Whether the second connection is overdue."""
        return self._replies is None and not self._is_over.is_set() and time.monotonic() - self._began_s > COMPLETE_S

    def answer_over(self, replies):
        """Add the link for replies, which completes the session."""
        for link in (self._commands, replies):
            link.set_silence_limit(silence_s())
        self._replies = replies
        threading.Thread(target=ping, args=(self._commands, self._is_over), daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()

    def reserve(self):
        """Reserve the session for one group."""
        self.is_used = True

    def start(self, devices, store_path, variables):
        """Start the machine's workers; returns {rank: Channel to it}. A lost machine closes the session.

        devices: of all ranks of the group; this machine's begin with its name. store_path: of the group's FileStore.
        variables: of preflight.fallbacks.
        """
        self._store = StoreAccess(store_path)
        ranks = [rank for rank, device in enumerate(devices) if machine_of(device) == self.name]
        channels = {}
        for rank in ranks:
            channels[rank], self._inner[rank] = pair()
        try:
            self._commands.send(Start(tuple(devices), dict(variables)))
        except ChannelClosedError as error:
            self.close(str(error))
        for rank in ranks:
            threading.Thread(target=self._pass_on, args=(rank,), daemon=True).start()
        return channels

    def find(self, path, content, check, on_read):
        """Verify that the machine has a model file with these contents. path: on the host.

        Raises CheckpointError if it has none, ChannelClosedError if the machine is lost.
        """
        self._wanted, self._answers = path, queue.Queue(MAX_ANSWERS)
        self._commands.send(Find(path, content))
        while True:
            check()
            try:
                answer = self._answers.get(timeout=POLL_S)
            except queue.Empty:
                if not self.is_open:
                    raise ChannelClosedError(self.ended) from None
                continue
            if isinstance(answer, Searching):
                on_read(answer.done, answer.total)
            elif isinstance(answer, Missing):
                raise CheckpointError(f"{self.name}: {answer.reason}")
            else:
                return

    def last_lines(self, rank):
        """Last lines of output of a rank of it that ended; "" if there are none."""
        return self._lines.get(rank, "")

    def close(self, why="the group was ended"):
        """Close the connection, upon which the machine ends its workers and joins again. May be called twice."""
        self.ended = self.ended or why
        if not self._is_over.is_set():
            self._is_over.set()
            self._on_end()
        for link in (self._commands, self._replies):
            if link is not None:
                link.close()
        for channel in self._inner.values():
            channel.end()

    # --- to the machine ---

    def _pass_on(self, rank):
        """Forward the launcher's commands to a rank."""
        try:
            while True:
                command = self._inner[rank].receive()
                with self._lock:
                    if not isinstance(command, (Abort, Stop)) and command.request not in self._open:
                        self._fill(command)
                    self._commands.send(command, rank)
        except ChannelClosedError as error:
            self.close(str(error))
        except XDiTError as error:                             # a segment was removed because the group ends
            self.close(str(error))

    def _fill(self, command):
        """Send the input tensors of a command before the command."""
        pending_command = self._open[command.request] = segment_transfer.pending_command(command, self._inner)
        for path, segment in pending_command.segments.items():
            if path not in pending_command.results:
                self._commands.send(Tensor(segment))
                segment_transfer.send(self._commands, path, segment)

    # --- from the machine ---

    def _listen(self):
        try:
            while True:
                rank, message = self._replies.receive()
                if rank == MACHINE:
                    self._handle(message)
                elif rank not in self._inner or getattr(message, "rank", None) != rank:
                    raise XDiTError(f"{type(message).__name__} from rank {rank}, which is not on that machine")
                elif isinstance(message, StoreRequest):
                    self._commands.send(self._store.answer(message), rank)
                elif not isinstance(message, Heartbeat) or self._inner[rank].has_capacity:
                    # unread heartbeats would fill the channel and block this thread
                    self._inner[rank].send(message)
                    if isinstance(message, (Done, Failed)):
                        self._answered(rank, message.request)
        except (ChannelClosedError, XDiTError, OSError) as error:
            if not self._is_over.is_set():
                log.warning("%s is lost: %s", self.name, error)
            self.close(str(error))

    def _handle(self, message):
        if isinstance(message, Piece):
            with self._lock:
                segment = next((each.segments[message.path] for each in self._open.values()
                                if message.path in each.results), None)
            if segment is None:
                raise XDiTError(f"data for {message.path}, which is not a result")
            segment_transfer.receive(self._replies, message, segment)
        elif isinstance(message, (Searching, Found, Missing)):
            self._note_answer(message)
        elif isinstance(message, Ended):
            self._lines[message.rank] = message.lines
            self.ended = self.ended or message.reason
            raise XDiTError(message.reason)
        elif not isinstance(message, Ping):
            raise XDiTError(f"unexpected message {type(message).__name__}")

    def _note_answer(self, answer):
        """Queue an answer that find() waits for; drop others, which nobody would read."""
        if not self._wanted or isinstance(answer, Searching) and self._answers.qsize() >= MAX_ANSWERS - 1:
            return
        if not isinstance(answer, Searching):
            if answer.path != self._wanted:
                return
            self._wanted = ""
        with contextlib.suppress(queue.Full):
            self._answers.put_nowait(answer)

    def _answered(self, rank, request):
        with self._lock:
            waiting = self._open.get(request)
            if waiting is not None:
                waiting.unanswered.discard(rank)
                if not waiting.unanswered:
                    del self._open[request]


def wait_for(found, deadline_s, check):
    """Poll found() until it returns something other than None; None at the deadline (of time.monotonic)."""
    while (made := found()) is None:
        check()
        if time.monotonic() > deadline_s:
            return None
        time.sleep(POLL_S)
    return made
