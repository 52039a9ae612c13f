"""The host's end of the forkserver (worker/forkserver.py): the supervisor that forks a torchrun for every group."""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from ..protocol import timeouts
from ..protocol.errors import WorkerStartError
from . import logs, torchrun
from .startup_watchdog import HELP, StartMonitor, describe_exit

POLL_S = 0.02
TIMEOUT_S = 10                             # for it to end what it has started, and itself
MAX_BYTES = 2 ** 16                        # of an answer
NUM_LINES = 15                             # of its output, where it fails
# What a group sets for itself; the rest of its environment is there before its libraries are imported, which may read
# it then.
OF_A_GROUP = ("XDIT_", "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
FORK = "XDIT_FORK"                         # in the environment; "0": torchrun and each rank are programs of their own
# Of the forkserver alone: no threads, which would make forking unsafe.
OF_THE_SERVER = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass
class _Server:
    process: subprocess.Popen
    channel: socket.socket
    output: IO[bytes]                      # what it prints
    _why_not: str | None = None            # None: it has not said yet

    def why_not(self, check):
        """Why it does not fork, or "", as it says once its libraries are loaded. check() may raise to give up."""
        if self._why_not is None:
            self._why_not = self.answer(check)["why_not"]
        return self._why_not

    def answer(self, check=lambda: None):
        """What it says next. Raises WorkerStartError where it ends, or gives no sign of life."""
        signs, who = StartMonitor(self.process.pid, 1), "The process that workers are forked from"
        what_next = f"Queue the prompt again to start another. {HELP} Its last lines:"
        while not select.select([self.channel], [], [], POLL_S)[0]:
            check()
            if (found := signs.silent((), timeouts.seconds("XDIT_SILENCE_TIMEOUT_S"))) is not None:
                raise WorkerStartError(f"{who} {found[1]}. {what_next}\n{self._last_lines()}")
        with suppress(ConnectionResetError):
            if body := self.channel.recv(MAX_BYTES):
                return json.loads(body)
        code = self.process.wait(TIMEOUT_S)
        raise WorkerStartError(f"{who} ended while loading its libraries{describe_exit(code)}. "
                               f"{what_next}\n{self._last_lines()}")

    def _last_lines(self):
        self.output.seek(0)
        lines = self.output.read()[-MAX_BYTES:].decode(errors="replace").splitlines()[-NUM_LINES:]
        return "\n".join(lines) or "(none)"


class Forkserver:
    """A Supervisor whose process starts with the first group and serves all groups of a host.
    Several threads may call its methods."""

    def __init__(self):
        self._lock = threading.RLock()
        self._servers = {}                                     # environment -> the _Server that has imported all in it

    def prepare(self, environment):
        """Load the libraries of groups with this environment; returns at once the part of it that the server has."""
        early = tuple(sorted((name, value) for name, value in environment.items() if name == FORK
                             or not name.startswith(OF_A_GROUP)))
        with self._lock:
            if early in self._servers and self._servers[early].process.poll() is not None:
                self._end(early)
            if early not in self._servers:
                self._servers[early] = _start_server(early, torchrun.ROOT)
        return early

    def start(self, ranks, environment, check=lambda: None):
        """Start a torchrun for these LocalRanks; returns its Torchrun.

        check() may raise to give up while libraries are loaded. Raises WorkerStartError if it cannot be started.
        """
        with self._lock, logs.start(ranks.log_folder) as output:
            early = self.prepare(environment)
            server = self._servers[early]
            try:
                why_not = server.why_not(check)
                request = {"arguments": torchrun.arguments_of(ranks), "environment": environment,
                           "folder": str(torchrun.working_folder(ranks))}
                with suppress(BrokenPipeError):                # it has ended, as its answer will tell
                    socket.send_fds(server.channel, [json.dumps(request).encode()], [output.fileno()])
                return torchrun.Torchrun(server.answer()["pid"], ranks, why_not)
            except WorkerStartError:
                self._end(early, timeout_s=0)
                raise

    def close(self):
        """End it, and whatever it has started."""
        with self._lock:
            for early in list(self._servers):
                self._end(early)

    def _end(self, early, timeout_s=TIMEOUT_S):
        server = self._servers.pop(early)
        server.channel.close()
        server.output.close()
        try:
            server.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


def _start_server(environment, package_folder):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output = tempfile.TemporaryFile()
    with theirs:
        command = [sys.executable, "-m", "xdit_backend.worker.forkserver", str(theirs.fileno()), str(os.getpid())]
        server = subprocess.Popen(command, cwd=package_folder, env=dict(environment) | OF_THE_SERVER,
                                  stdin=subprocess.DEVNULL,
                                  stdout=output, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()],
                                  start_new_session=True)
    return _Server(server, ours, output)
