"""Lend this machine's devices to ComfyUI on another machine.

`python -m xdit_backend key` shows the command to run here. It runs until it is stopped, and joins again after the other
machine was unavailable. The model files must be on this machine too, below one of the --models folders, with the same
contents; their names may differ.
"""

import contextlib
import dataclasses
import getpass
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from ..checkpoints.checkpoint import open_checkpoint, state_of
from ..host import preflight
from ..host.local_supervisor import local_supervisor
from ..host.machine_profiles import gpu_of
from ..host.torchrun import ROOT
from ..protocol import messages, timeouts
from ..protocol.devices import machine_of, own_name
from ..protocol.errors import ChannelClosedError, ConfigError, XDiTError
from ..system import accelerator
from .connections import (
    MACHINE,
    Ended,
    Find,
    Found,
    JoinAccepted,
    JoinRequest,
    Missing,
    Piece,
    Ping,
    Refused,
    Searching,
    Start,
    Tensor,
    connect,
    is_name,
    ping,
    silence_s,
)
from .file_digest import Contents, same_name
from .listener import interface_of, read_address, versions
from .remote_workers import POLL_S, Workers, say
from .tls_keys import read_key

RETRY_S = 2.0


def add_arguments(parser):
    parser.add_argument("address", help="address of the host: 192.168.1.10:29431")
    parser.add_argument("name", help="name of this machine in the devices setting: other-pc")
    parser.add_argument("key", nargs="?", help="key that python -m xdit_backend key shows on the host; if omitted, it "
                                               "is read from the terminal or standard input, which keeps it out of "
                                               "the shell's history and the process list")
    parser.add_argument("--models", nargs="+", type=Path, metavar="FOLDER", default=[],
                        help="folders with the model files; default: models/ of the ComfyUI in whose custom_nodes "
                             "this is installed")


def main(options):
    timeouts.check()
    address = read_address(options.address)
    if not is_name(options.name):
        raise ConfigError(f'Use small letters, digits, dots and hyphens, such as "other-pc": "{options.name}" is not a '
                          f"name of a machine.")
    folders = options.models or [folder for folder in (ROOT.parent.parent / "models",) if folder.is_dir()]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing or not folders:
        raise ConfigError(f"Set --models to existing folders: there is no folder {', '.join(missing)}." if missing else
                          "Add --models and the folder of the model files on this machine to the command.")
    preflight.check_versions()
    key = read_key(_requested_key() if options.key is None else options.key)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    sessions, supervisor = [], local_supervisor()
    try:
        _keep_joining(address, key, options.name, folders, sessions, supervisor)
    except KeyboardInterrupt:
        say("stopped.")
    finally:
        for session in sessions:
            session.close()
        supervisor.close()


def _requested_key():
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()
    try:
        return getpass.getpass("Key (shown on the host by python -m xdit_backend key): ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _keep_joining(address, key, name, folders, sessions, supervisor):
    """Join repeatedly. sessions: list of the sessions to close at exit."""
    contents, last_output = Contents(), ""
    while True:
        session = Joined(address, key, name, folders, contents, supervisor)
        sessions[:] = [*(each for each in sessions if not each.is_over), session]
        try:
            session.join()
            say(f"{name} has joined {address[0]}:{address[1]}, and waits for work. Keep this running.")
            last_output = ""
            # then joins once more: another group may use devices of this machine too
            session.wait_until_used()
        except (OSError, ChannelClosedError) as error:
            session.close()
            text = (f"{address[0]}:{address[1]} cannot be reached ({error}). Check that ComfyUI is running there. "
                    f"Retrying.")
            if text != last_output:
                say(text)
            last_output = text
            time.sleep(RETRY_S)


class Joined:
    """This machine's side of one session, from joining until the host is gone or its group has ended."""

    def __init__(self, address, key, name, folders, contents, supervisor):
        self._address, self._key, self._name, self._folders, self._contents = address, key, name, folders, contents
        self.supervisor = supervisor
        self._links, self._over, self._used = [], threading.Event(), threading.Event()
        self._found = {}                                       # path on the host -> (local path, state of its files)
        self._ahead_s = 0.0                                    # the host's clock minus this machine's
        self._workers: Workers | None = None
        self._ending = threading.Lock()

    @property
    def is_over(self):
        return self._over.is_set() and self._workers is None

    def join(self):
        """Connect. Raises OSError or ChannelClosedError if nobody answers, ConfigError if the host rejects it."""
        names = [*map(accelerator.name_of, range(preflight.num_cuda_devices())), "cpu"]
        gpus = {name: gpu_of(name) for name in names}
        requested_s = time.perf_counter()
        self._commands, accepted = self._connect(JoinRequest("machine", "", self._name, versions(), gpus))
        self._ahead_s = accepted.clock_s - (requested_s + time.perf_counter()) / 2
        self.replies, _ = self._connect(JoinRequest("replies", accepted.session))
        for link in (self._commands, self.replies):
            link.set_silence_limit(silence_s())
        threading.Thread(target=ping, args=(self.replies, self._over), daemon=True).start()
        threading.Thread(target=self._serve, daemon=True).start()

    def wait_until_used(self):
        """Wait until the host has started workers here. Raises ChannelClosedError if it is gone before that."""
        while not self._used.wait(POLL_S):
            if self._over.is_set():
                raise ChannelClosedError("the connection was closed")

    def close(self):
        """Close the connection and end the workers. Thread-safe."""
        self._over.set()
        for link in self._links:
            link.close()
        with self._ending:
            if self._workers is not None:
                self._workers.close()
                self._workers = None

    def _connect(self, join_request):
        """(Link, JoinAccepted)"""
        link = connect(self._address, self._key)
        link.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.append(link)
        link.send(join_request)
        _, answer = link.receive()
        if isinstance(answer, Refused):
            raise (ConfigError if join_request.purpose == "machine"
                   else ChannelClosedError)(f"The host rejected this machine: {answer.reason}")
        if not isinstance(answer, JoinAccepted):
            raise ChannelClosedError(f"unexpected answer {type(answer).__name__} to a JoinRequest")
        return link, answer

    def _serve(self):
        """Execute the host's messages until it is gone."""
        try:
            while True:
                rank, message = self._commands.receive()
                if rank != MACHINE:
                    self._workers.give(rank, self._localised(message))
                elif isinstance(message, Start):
                    self._start(message)
                elif isinstance(message, Find):
                    threading.Thread(target=self._find, args=(message,), daemon=True).start()
                elif isinstance(message, Tensor):
                    self._workers.make(message.segment)
                elif isinstance(message, Piece):
                    self._workers.fill(self._commands, message)
                elif not isinstance(message, Ping):
                    raise XDiTError(f"unexpected message {type(message).__name__}")
        except ChannelClosedError as error:
            if self._used.is_set():
                say(f"the host's group has ended ({error}).")
        except (XDiTError, KeyError, AttributeError, OSError) as error:
            # a message out of order, or for a rank of another machine
            say(f"the host's request failed: {type(error).__name__}: {error}")
        finally:
            self.close()

    def _start(self, start):
        own = [rank for rank, device in enumerate(start.devices) if machine_of(device) == self._name]
        say(f"starting workers on {', '.join(own_name(start.devices[rank]) for rank in own)}.")
        try:
            self._workers = Workers(start, own, self)
        except (XDiTError, OSError) as error:
            self.report_end(own[0] if own else 0, str(error), "")
        self._used.set()

    def report_end(self, rank, reason, lines):
        """Report to the host why the workers could not start, or have ended, and close the session."""
        if not self._over.is_set():
            say(f"rank {rank}: {reason}")
            with contextlib.suppress(ChannelClosedError):
                self.replies.send(Ended(rank, reason, lines))
        self.close()

    def interface(self):
        return interface_of(self._commands.raw.getsockname()[0])

    # --- files ---

    def _find(self, find):
        """Find the host's file on this machine, and reply."""
        name = Path(find.path.rstrip("/")).name
        last_s = 0.0

        def on_progress(done, total):
            nonlocal last_s
            if time.monotonic() - last_s > 1:
                last_s = time.monotonic()
                self.replies.send(Searching(done, total))
        with contextlib.suppress(ChannelClosedError):
            try:
                path = self._contents.find(name, find.content, self._folders, on_progress)
                if path is None:
                    raise XDiTError(self._why_missing(name))
                self._found[find.path] = path, state_of(open_checkpoint(path).files)
            except (XDiTError, OSError) as error:
                self.replies.send(Missing(find.path, str(error)))
            else:
                self.replies.send(Found(find.path))

    def _why_missing(self, name):
        folders = ", ".join(map(str, self._folders))
        others = same_name(name, self._folders)
        if others:
            return (f"copy {name} from the machine with ComfyUI to this machine, or delete the outdated one: "
                    f"{others[0]} has other contents.")
        return (f"copy {name} to this machine, into {folders}, or add its folder to --models: no file here has its "
                f"contents.")

    def _localised(self, command):
        """A command with the paths of its files on this machine, and times of this machine's clock."""
        if isinstance(command, messages.LoadModel):
            path, state = self._found[command.spec.path]
            return dataclasses.replace(command, spec=dataclasses.replace(command.spec, path=path, state=state))
        if isinstance(command, messages.ReportMemory) and command.since_s >= 0:
            return dataclasses.replace(command, since_s=max(0.0, command.since_s - self._ahead_s))
        return command

    def of_host(self, done):
        """A Done with times of the host's clock."""
        spans = [dataclasses.replace(span, start_s=span.start_s + self._ahead_s, end_s=span.end_s + self._ahead_s)
                 for span in done.spans]
        return dataclasses.replace(done, spans=spans)
