"""Lend this machine's devices to ComfyUI on another one.

ComfyUI prints there what to run here. This stays until it is stopped, and joins again when the other machine was away.
The model files have to be here too, below one of the --models folders; their names may differ, their content may not.
"""

import contextlib
import dataclasses
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from ..checkpoints.header import read_header, state_of
from ..host import logs, preflight
from ..host.forkserver import Forkserver
from ..host.launcher import ROOT, children, end_torchrun, first_ended, read_text, start_torchrun
from ..host.measurements import card_of
from ..host.starting import TORCHRUN, Signs, exit_words
from ..protocol import messages, timeouts
from ..protocol.channel import Door
from ..protocol.devices import machine_of, own_name
from ..protocol.errors import ChannelClosedError, ConfigError, WorkerStartError, XDiTError
from ..protocol.segments import DTYPES, SegmentStore
from . import tensors
from .contents import Contents, same_name
from .links import (
    MACHINE,
    Ended,
    Find,
    Found,
    Hello,
    Missing,
    Piece,
    Ping,
    Refused,
    Searching,
    Start,
    Tensor,
    Welcome,
    connect,
    exchange,
    ping,
    read_key,
    silence_s,
)
from .listener import interface_of, is_name, read_address, versions

RETRY_S = 2.0
POLL_S = 0.2
NUM_LINES = 15                             # of a worker's output that the host is told where it ends


def add_arguments(parser):
    parser.add_argument("address", help="of the host, as it prints it: 192.168.1.10:29431")
    parser.add_argument("name", help="of this machine, as the host's devices call it: other-pc")
    parser.add_argument("key", help="as the host prints it")
    parser.add_argument("--models", nargs="+", type=Path, metavar="FOLDER", default=[],
                        help="folders with the model files; without it, models/ of the ComfyUI in whose custom_nodes this is")


def main(options):
    if sys.platform == "win32":
        raise ConfigError("xDiT's workers run on Linux, and this is Windows: run this inside WSL2.")
    timeouts.check()
    address, key = read_address(options.address), read_key(options.key)
    if not is_name(options.name):
        raise ConfigError(f'"{options.name}" is no name for a machine: small letters, digits, dots and hyphens, as "other-pc".')
    folders = options.models or [folder for folder in (ROOT.parent.parent / "models",) if folder.is_dir()]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing or not folders:
        raise ConfigError(f"There is no folder {', '.join(missing)}." if missing else
                          "Say where the model files are on this machine: add --models and their folder to the command.")
    preflight.check_versions()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    sessions, forkserver = [], Forkserver()
    try:
        _keep_joining(address, key, options.name, folders, sessions, forkserver)
    except KeyboardInterrupt:
        say("stopped.")
    finally:
        for session in sessions:
            session.close()
        forkserver.close()


def _keep_joining(address, key, name, folders, sessions, forkserver):
    """Join, and join again. sessions: where those are put that may have something to end."""
    contents, told = Contents(), ""
    while True:
        session = Joined(address, key, name, folders, contents, forkserver)
        sessions[:] = [*(each for each in sessions if not each.is_over), session]
        try:
            session.join()
            say(f"{name} has joined {address[0]}:{address[1]}, and waits for work. Keep this running.")
            told = ""
            session.wait_until_used()                          # and then joins once more: another group may want devices here too
        except (OSError, ChannelClosedError) as error:
            session.close()
            words = f"{address[0]}:{address[1]} cannot be reached ({error}). Is ComfyUI running there? Trying again until it can."
            if words != told:
                say(words)
            told = words
            time.sleep(RETRY_S)


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Joined:
    """This machine's end of one session: from joining until the host is gone, or its group has ended."""

    def __init__(self, address, key, name, folders, contents, forkserver):
        self._address, self._key, self._name, self._folders, self._contents = address, key, name, folders, contents
        self.forkserver = forkserver
        self._links, self._over, self._used = [], threading.Event(), threading.Event()
        self._found = {}                                       # path on the host -> (path here, state of its files)
        self._ahead_s = 0.0                                    # the host's clock before this machine's
        self._workers: Workers | None = None
        self._ending = threading.Lock()

    @property
    def is_over(self):
        return self._over.is_set() and self._workers is None

    def join(self):
        """Connect. Raises OSError or ChannelClosedError where nobody answers, ConfigError where the host refuses."""
        cards = {f"cuda:{index}": card_of(f"cuda:{index}") for index in range(preflight.num_cuda_devices())} | {"cpu": card_of("cpu")}
        asked_s = time.perf_counter()
        self._commands, welcome = self._connect(Hello("machine", "", self._name, versions(), cards))
        self._ahead_s = welcome.clock_s - (asked_s + time.perf_counter()) / 2
        self.replies, _ = self._connect(Hello("replies", welcome.session))
        self._session = welcome.session
        for link in (self._commands, self.replies):
            link.expect_signs(silence_s())
        threading.Thread(target=ping, args=(self.replies, self._over), daemon=True).start()
        threading.Thread(target=self._serve, daemon=True).start()

    def wait_until_used(self):
        """Wait until the host has started workers here. Raises ChannelClosedError when it is gone before."""
        while not self._used.wait(POLL_S):
            if self._over.is_set():
                raise ChannelClosedError("the connection was closed")

    def close(self):
        """End the connection and the workers. May be called by several threads."""
        self._over.set()
        for link in self._links:
            link.close()
        with self._ending:
            if self._workers is not None:
                self._workers.close()
                self._workers = None

    def _connect(self, hello):
        """(Link, Welcome)"""
        link = connect(self._address, self._key)
        link.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.append(link)
        link.send(hello)
        _, answer = link.receive()
        if isinstance(answer, Refused):
            raise (ConfigError if hello.purpose == "machine" else ChannelClosedError)(f"The host refuses this machine: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise ChannelClosedError(f"{type(answer).__name__} is no welcome")
        return link, answer

    def _serve(self):
        """Heed the host until it is gone."""
        try:
            while True:
                rank, message = self._commands.receive()
                if rank != MACHINE:
                    self._workers.give(rank, self._of_here(message))
                elif isinstance(message, Start):
                    self._start(message)
                elif isinstance(message, Find):
                    threading.Thread(target=self._find, args=(message,), daemon=True).start()
                elif isinstance(message, Tensor):
                    self._workers.make(message.segment)
                elif isinstance(message, Piece):
                    self._workers.fill(self._commands, message)
                elif not isinstance(message, Ping):
                    raise XDiTError(f"{type(message).__name__} is nothing that a host asks for")
        except ChannelClosedError as error:
            if self._used.is_set():
                say(f"the host's group has ended ({error}).")
        except (XDiTError, KeyError, AttributeError, OSError) as error:        # out of its order, or of a rank that is not here
            say(f"what the host asked for cannot be done: {type(error).__name__}: {error}")
        finally:
            self.close()

    def _start(self, start):
        own = [rank for rank, device in enumerate(start.devices) if machine_of(device) == self._name]
        say(f"starting workers on {', '.join(own_name(start.devices[rank]) for rank in own)}.")
        try:
            self._workers = Workers(start, own, self)
        except (XDiTError, OSError) as error:
            self.tell_ended(own[0] if own else 0, str(error), "")
        self._used.set()

    def tell_ended(self, rank, reason, lines):
        """Tell the host why there will be no workers here, or no more, and end the session."""
        if not self._over.is_set():
            say(f"rank {rank}: {reason}")
            with contextlib.suppress(ChannelClosedError):
                self.replies.send(Ended(rank, reason, lines))
        self.close()

    def interface(self):
        return interface_of(self._commands.raw.getsockname()[0])

    def carry_store(self, accepted):
        """Connect one of the processes here with torch's store on the host."""
        try:
            link, _ = self._connect(Hello("store", self._session))
        except (ChannelClosedError, OSError):
            accepted.close()
            return
        exchange(link, accepted)

    # --- files ---

    def _find(self, find):
        """Look for the file that the host has, and tell it."""
        name = Path(find.path.rstrip("/")).name
        last_s = 0.0

        def told(done, total):
            nonlocal last_s
            if time.monotonic() - last_s > 1:
                last_s = time.monotonic()
                self.replies.send(Searching(done, total))
        with contextlib.suppress(ChannelClosedError):
            try:
                path = self._contents.find(name, find.content, self._folders, told)
                if path is None:
                    raise XDiTError(self._why_missing(name))
                self._found[find.path] = path, state_of(read_header(path).files)
            except (XDiTError, OSError) as error:
                self.replies.send(Missing(find.path, str(error)))
            else:
                self.replies.send(Found(find.path))

    def _why_missing(self, name):
        places = ", ".join(map(str, self._folders))
        others = same_name(name, self._folders)
        if others:
            return (f"{others[0]} has another content than {name} on the machine with ComfyUI. Copy that file to this machine, or "
                    f"delete the one that is not the same.")
        return f"no file here has the content of {name}. Copy it to this machine, into {places}, or name its folder with --models."

    def _of_here(self, command):
        """A command as it is meant on this machine: with the paths of its files here, and times of its clock."""
        if isinstance(command, messages.LoadModel):
            path, state = self._found[command.spec.path]
            return dataclasses.replace(command, spec=dataclasses.replace(command.spec, path=path, state=state))
        if isinstance(command, messages.ReportMemory) and command.since_s >= 0:
            return dataclasses.replace(command, since_s=max(0.0, command.since_s - self._ahead_s))
        return command

    def of_host(self, done):
        """A Done with the times of the host's clock."""
        spans = [dataclasses.replace(span, start_s=span.start_s + self._ahead_s, end_s=span.end_s + self._ahead_s) for span in done.spans]
        return dataclasses.replace(done, spans=spans)


class Workers:
    """The workers of this machine for one group, and the tensors of commands that they have not answered."""

    def __init__(self, start, ranks, session):
        self._ranks, self._session, self._is_over = ranks, session, threading.Event()
        self._is_stopping = False                              # has the host told a worker here to stop?
        self._channels, self._twins, self._open = {}, {}, {}   # _twins: path on the host -> the Segment here; _open: request -> Open
        self._lock = threading.Lock()
        self.segments = SegmentStore()
        self._process = self._door = self._store = None
        try:
            self._log_folder = logs.make(self.segments.folder.name, self.segments.overflow_folder / "logs")
            devices = [own_name(start.devices[rank]) for rank in ranks]
            if not devices:
                raise WorkerStartError("none of the devices is of this machine")
            for remark in preflight.check(devices, (self.segments.folder, self.segments.overflow_folder)):
                say(remark)
            self._door = Door(self.segments.folder)
            self._store = socket.create_server(("127.0.0.1", 0))
            threading.Thread(target=self._carry_stores, daemon=True).start()
            self._process, _ = start_torchrun(
                session.forkserver, self.segments, start.devices, len(ranks), self._store.getsockname()[1], self._log_folder,
                dict(start.variables), start.node, start.num_nodes, interface=session.interface())
            threading.Thread(target=self._watch, daemon=True).start()
        except BaseException:
            self.close()
            raise

    def close(self):
        self._is_over.set()
        if self._store is not None:
            with contextlib.suppress(OSError):
                self._store.shutdown(socket.SHUT_RDWR)
            self._store.close()
        if self._process is not None:
            workers = children(self._process.pid)
            end_torchrun(self._process, workers, patience_s=3)
        for channel in list(self._channels.values()):
            channel.end()
        if self._door is not None:
            self._door.close()
        self.segments.close()

    # --- from the host ---

    def give(self, rank, command):
        """Pass a command on to a rank, with the tensors here in the place of those of the host."""
        if isinstance(command, (messages.Abandon, messages.Stop)):
            self._is_stopping |= isinstance(command, messages.Stop)
            self._channels[rank].send(command)
            return
        with self._lock:
            if command.request not in self._open:
                self._open[command.request] = tensors.opened(command, self._ranks, self._twin)
            here = tensors.replaced(command, self._twin)
        self._channels[rank].send(here)

    def fill(self, link, piece):
        """Take in bytes of a tensor that a command to come reads."""
        with self._lock:
            twin = self._twins[piece.path]
        tensors.receive(link, piece, twin)

    def make(self, segment):
        """Make room for a tensor of a command to come."""
        with self._lock:
            self._twin(segment)

    def _twin(self, segment):
        if segment.path not in self._twins:
            self._twins[segment.path], _ = self.segments.create(segment.shape, DTYPES[segment.dtype])
        return self._twins[segment.path]

    # --- from the workers ---

    def _watch(self):
        """Let the workers in, and see that torchrun runs."""
        num_greeted, signs = 0, Signs(self._process.pid, len(self._ranks))
        while not self._is_over.is_set():
            if num_greeted == len(self._ranks):
                self._is_over.wait(POLL_S)
            elif (channel := self._door.accept(POLL_S)) is not None:
                num_greeted += 1
                threading.Thread(target=self._listen, args=(channel,), daemon=True).start()
            if self._process.has_ended and not self._is_over.is_set():
                self._failed(self._ranks[0])
                return
            unheard = [rank for rank in self._ranks if rank not in self._channels]         # the host hears the others
            if unheard and (found := signs.silent(unheard, timeouts.seconds("XDIT_SILENCE_TIMEOUT_S"))) is not None:
                rank, who = (unheard[0], "torchrun") if found[0] == TORCHRUN else (found[0], f"the worker of rank {found[0]}")
                self._session.tell_ended(rank, f"there, {who} {found[1]}", self._last_lines(rank))
                return

    def _failed(self, rank):
        """A worker here has ended: say which one was the first, and how. One that was told to stop needs no word."""
        if self._is_stopping:
            return
        found = first_ended(self.segments)
        place, code = found if found is not None and found[0] < len(self._ranks) else (self._ranks.index(rank), None)
        rank = self._ranks[place]
        self._session.tell_ended(rank, f"the worker of rank {rank} ended there{exit_words(code)}", self._last_lines(rank))

    def _last_lines(self, rank):
        text = read_text(self._log_folder / f"rank-{rank}.log") or read_text(self._log_folder / logs.TORCHRUN)
        return "\n".join(text.splitlines()[-NUM_LINES:])

    def _listen(self, channel):
        """Pass on what one worker says."""
        rank = None
        try:
            while True:
                message = channel.receive()
                if message.rank not in self._ranks or rank not in (None, message.rank):
                    raise XDiTError(f"a worker says that it is rank {message.rank}")
                rank = message.rank
                self._channels[rank] = channel
                if isinstance(message, (messages.Done, messages.Failed)):
                    self._answer(rank, message)
                else:
                    self._session.replies.send(message, rank)
        except ChannelClosedError:
            for _ in range(20):                                # torchrun notices within a tenth of a second
                if self._is_over.is_set() or self._process.has_ended:
                    break
                time.sleep(0.1)
            if not self._is_over.is_set():
                self._failed(rank if rank is not None else self._ranks[0])
        except (XDiTError, OSError) as error:
            self._session.tell_ended(rank if rank is not None else self._ranks[0], str(error), "")

    def _answer(self, rank, message):
        """Pass an answer on, and before it what is there by now of the command's results: what this rank has written, is."""
        replies = self._session.replies
        with self._lock:
            waiting = self._open.get(message.request)
            results = [] if waiting is None else [(path, waiting.segments[path]) for path in waiting.results]
        if isinstance(message, messages.Done):
            message = self._session.of_host(message)
            for path, twin in results:
                tensors.send(replies, path, twin)
        replies.send(message, rank)
        with self._lock:
            if waiting is not None:
                waiting.unanswered.discard(rank)
                if not waiting.unanswered:
                    for path in waiting.segments:
                        self.segments.remove(self._twins.pop(path))
                    del self._open[message.request]

    def _carry_stores(self):
        """Connect the processes here that come with torch's store on the host."""
        while not self._is_over.is_set():
            try:
                accepted, _ = self._store.accept()
            except OSError:
                return
            threading.Thread(target=self._session.carry_store, args=(accepted,), daemon=True).start()
