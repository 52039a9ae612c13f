"""The host's end of the forkserver (worker/forkserver.py), which starts the torchrun of every group.
Used by the launcher."""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import psutil

from ..protocol import timeouts
from ..protocol.errors import WorkerStartError
from .starting import HELP, StartMonitor, exit_words

POLL_S = 0.02
TIMEOUT_S = 10                             # for it to end what it has started, and itself
MAX_BYTES = 2 ** 16                        # of an answer
NUM_LINES = 15                             # of its output, where it fails
# What a group sets for itself; the rest of its environment is there before its libraries are imported, which may read
# it then.
OF_A_GROUP = ("XDIT_", "NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS",
              "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
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
        raise WorkerStartError(f"{who} ended while loading its libraries{exit_words(code)}. "
                               f"{what_next}\n{self._last_lines()}")

    def _last_lines(self):
        self.output.seek(0)
        lines = self.output.read()[-MAX_BYTES:].decode(errors="replace").splitlines()[-NUM_LINES:]
        return "\n".join(lines) or "(none)"


class Forkserver:
    """Starts torchruns; its process starts with the first, and serves all groups of a host.
    Several threads may call its methods."""

    def __init__(self):
        self._lock = threading.RLock()
        self._servers = {}                                     # environment -> the _Server that has imported all in it

    def prepare(self, environment, package_folder):
        """Have the libraries of groups with this environment loaded; waits for nothing.
        package_folder: that holds xdit_backend."""
        early = tuple(sorted((name, value) for name, value in environment.items() if name == FORK
                             or not name.startswith(OF_A_GROUP)))
        with self._lock:
            if early in self._servers and self._servers[early].process.poll() is not None:
                self._end(early)
            if early not in self._servers:
                self._servers[early] = _start_server(early, package_folder)
        return early

    def start(self, arguments, environment, package_folder, folder, output, check=lambda: None):
        """Start a torchrun with these arguments; returns (its Torchrun, why it was not forked, or "").

        folder: torchrun's own. output: the open file for what it prints. check() may raise to give up while libraries
        are loaded. Raises WorkerStartError where it cannot be started.
        """
        with self._lock:
            early = self.prepare(environment, package_folder)
            server = self._servers[early]
            try:
                why_not = server.why_not(check)
                request = {"arguments": arguments, "environment": environment, "folder": str(folder)}
                with suppress(BrokenPipeError):                # it has ended, as its answer will tell
                    socket.send_fds(server.channel, [json.dumps(request).encode()], [output.fileno()])
                return Torchrun(server.answer()["pid"]), why_not
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


class Torchrun(psutil.Process):
    """A group's torchrun, which is the forkserver's child."""

    @property
    def has_ended(self):
        try:
            return not self.is_running() or self.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def wait_ended(self, timeout_s):
        """Wait for so many seconds at most; has it ended?"""
        deadline_s = time.monotonic() + timeout_s
        while not self.has_ended and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return self.has_ended
