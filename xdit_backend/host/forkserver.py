"""Host side of the forkserver (worker/forkserver.py): a supervisor that forks a torchrun for every group."""

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
TIMEOUT_S = 10                             # for the server to end its children and itself
MAX_BYTES = 2 ** 16                        # of an answer
NUM_LINES = 15                             # of its output, shown when it fails
# Variables set per group; all others must be set before libraries are imported, which may read them then.
OF_A_GROUP = ("XDIT_", "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
FORK = "XDIT_FORK"                         # in the environment; "0": torchrun and each rank are separate programs
# Of the forkserver only: no threads, which would make forking unsafe.
OF_THE_SERVER = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass
class _Server:
    process: subprocess.Popen
    channel: socket.socket
    output: IO[bytes]                      # its stdout and stderr
    _why_not: str | None = None            # None: not reported yet

    def why_not(self, check):
        """Reason for not forking, or "", reported once its libraries are loaded. check() may raise to give up."""
        if self._why_not is None:
            self._why_not = self.answer(check)["why_not"]
        return self._why_not

    def answer(self, check=lambda: None):
        """Receive its next answer. Raises WorkerStartError if it ends, or gives no sign of life."""
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
    """A Supervisor whose server process starts with the first group and serves all groups of a host. Thread-safe."""

    def __init__(self):
        self._lock = threading.RLock()
        self._servers = {}                                     # environment -> _Server with its libraries imported

    def prepare(self, environment):
        """Start loading libraries for groups with this environment; returns the server's part of it at once."""
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
                with suppress(BrokenPipeError):                # it has ended: the answer reports that
                    socket.send_fds(server.channel, [json.dumps(request).encode()], [output.fileno()])
                return torchrun.Torchrun(server.answer()["pid"], ranks, why_not)
            except WorkerStartError:
                self._end(early, timeout_s=0)
                raise

    def close(self):
        """End the server and all processes that it started."""
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
