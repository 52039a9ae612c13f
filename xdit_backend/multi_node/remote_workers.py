"""Workers on a machine that has joined a remote host's group: their start, commands, replies and end."""

import threading
import time

from ..host import logs, preflight, torchrun
from ..host.startup_watchdog import TORCHRUN, StartMonitor, describe_exit
from ..host.supervisor import LocalRanks
from ..protocol import messages, timeouts
from ..protocol.channel import ChannelListener
from ..protocol.devices import check_counts, own_name
from ..protocol.errors import ChannelClosedError, WorkerStartError, XDiTError
from ..protocol.shared_memory import DTYPES, SegmentStore
from . import segment_transfer

POLL_S = 0.2
NUM_LINES = 15                             # of an ended worker's output that are sent to the host


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Workers:
    """The workers of this machine for one group, and the tensors of commands that they have not answered."""

    def __init__(self, start, ranks, session):
        self._ranks, self._session, self._is_over = ranks, session, threading.Event()
        self._is_stopping = False                              # the host has sent Stop
        # _local_segments: path on the host -> local Segment; _open: request -> PendingCommand
        self._channels, self._local_segments, self._open = {}, {}, {}
        self._lock = threading.Lock()
        self.segments = SegmentStore()
        self._processes = self._channel_listener = None        # WorkerProcesses, ChannelListener
        try:
            self._log_folder = logs.make(self.segments.folder.name, self.segments.overflow_folder / "logs")
            devices = [own_name(start.devices[rank]) for rank in ranks]
            if not devices:
                raise WorkerStartError("none of the devices is on this machine")
            check_counts(devices, ",".join(devices))
            for warning in preflight.check(devices, (self.segments.folder, self.segments.overflow_folder)):
                say(warning)
            self._channel_listener = ChannelListener(self.segments.folder,
                                                     timeouts.seconds("XDIT_SILENCE_TIMEOUT_S"))
            local = LocalRanks(start.devices, ranks[0], len(ranks), self.segments.folder, self.segments.overflow_folder,
                               self._log_folder)
            environment = torchrun.environment_of(start.devices, len(ranks), session.interface())
            self._processes = session.supervisor.start(local, environment | start.variables)
            threading.Thread(target=self._watch, daemon=True).start()
        except BaseException:
            self.close()
            raise

    def close(self):
        self._is_over.set()
        if self._processes is not None:
            self._processes.end((), timeout_s=3)
        for channel in list(self._channels.values()):
            channel.end()
        if self._channel_listener is not None:
            self._channel_listener.close()
        self.segments.close()

    # --- from the host ---

    def give(self, rank, command):
        """Forward a command to a rank, with local segments instead of the host's."""
        if isinstance(command, (messages.Abort, messages.Stop, messages.StoreReply)):
            self._is_stopping |= isinstance(command, messages.Stop)
            self._channels[rank].send(command)
            return
        with self._lock:
            if command.request not in self._open:
                self._open[command.request] = segment_transfer.pending_command(command, self._ranks,
                                                                               self._local_segment)
            localised = segment_transfer.replaced(command, self._local_segment)
        self._channels[rank].send(localised)

    def fill(self, link, chunk):
        """Receive a chunk (connections.Piece) of an input tensor of a following command."""
        with self._lock:
            copy = self._local_segments[chunk.path]
        segment_transfer.receive(link, chunk, copy)

    def make(self, segment):
        """Create the local segment for an input tensor of a following command."""
        with self._lock:
            self._local_segment(segment)

    def _local_segment(self, segment):
        if segment.path not in self._local_segments:
            self._local_segments[segment.path], _ = self.segments.create(segment.shape, DTYPES[segment.dtype])
        return self._local_segments[segment.path]

    # --- from the workers ---

    def _watch(self):
        """Accept the workers' connections, and monitor torchrun."""
        num_connected, signs = 0, StartMonitor(self._processes.pid, len(self._ranks), self._processes.workers)
        while not self._is_over.is_set():
            if num_connected == len(self._ranks):
                self._is_over.wait(POLL_S)
            elif (channel := self._channel_listener.accept(POLL_S)) is not None:
                num_connected += 1
                threading.Thread(target=self._listen, args=(channel,), daemon=True).start()
            if self._processes.has_ended and not self._is_over.is_set():
                self._failed(self._ranks[0])
                return
            unheard = [rank for rank in self._ranks if rank not in self._channels]     # the host monitors the others
            if unheard and (found := signs.silent(unheard, timeouts.seconds("XDIT_SILENCE_TIMEOUT_S"))) is not None:
                rank, who = ((unheard[0], "torchrun") if found[0] == TORCHRUN
                             else (found[0], f"the worker of rank {found[0]}"))
                self._session.report_end(rank, f"there, {who} {found[1]}", self._last_lines(rank))
                return

    def _failed(self, rank):
        """Report the first worker that ended, and how, unless the host has stopped the workers."""
        if self._is_stopping:
            return
        rank, code = self._processes.first_failure() or (rank, None)
        self._session.report_end(rank, f"the worker of rank {rank} ended there{describe_exit(code)}",
                                 self._last_lines(rank))

    def _last_lines(self, rank):
        texts = (torchrun.read_text(self._log_folder / name) for name in (f"rank-{rank}.log", logs.TORCHRUN))
        return "\n".join(next(filter(None, texts), "").splitlines()[-NUM_LINES:])

    def _listen(self, channel):
        """Forward a worker's messages to the host."""
        rank = None
        try:
            while True:
                message = channel.receive()
                if message.rank not in self._ranks or rank not in (None, message.rank):
                    raise XDiTError(f"a worker claims to be rank {message.rank}")
                rank = message.rank
                self._channels[rank] = channel
                if isinstance(message, (messages.Done, messages.Failed)):
                    self._answer(rank, message)
                else:
                    self._session.replies.send(message, rank)
        except ChannelClosedError:
            for _ in range(20):                                # torchrun notices within a tenth of a second
                if self._is_over.is_set() or self._processes.has_ended:
                    break
                time.sleep(0.1)
            if not self._is_over.is_set():
                self._failed(rank if rank is not None else self._ranks[0])
        except (XDiTError, OSError) as error:
            self._session.report_end(rank if rank is not None else self._ranks[0], str(error), "")

    def _answer(self, rank, message):
        """Forward a reply, after the available results of its command, which include all that this rank has written."""
        replies = self._session.replies
        with self._lock:
            waiting = self._open.get(message.request)
            results = [] if waiting is None else [(path, waiting.segments[path]) for path in waiting.results]
        if isinstance(message, messages.Done):
            message = self._session.of_host(message)
            for path, copy in results:
                segment_transfer.send(replies, path, copy)
        replies.send(message, rank)
        with self._lock:
            if waiting is not None:
                waiting.unanswered.discard(rank)
                if not waiting.unanswered:
                    for path in waiting.segments:
                        self.segments.remove(self._local_segments.pop(path))
                    del self._open[message.request]
