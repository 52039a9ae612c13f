"""Start, watch and end a worker group: one torchrun, one worker a device. Used by the client.

Everything a group opens is on this machine only: a socket file in a private folder, and torch's store on 127.0.0.1.
"""

import atexit
import functools
import logging
import multiprocessing.connection as connection
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from ..protocol import errors
from ..protocol.channel import Door
from ..protocol.errors import ChannelClosedError, WorkerDiedError, WorkerFailedError, WorkerStartError
from ..protocol.messages import Beat, Done, Phase, Ready, Stop
from ..protocol.segments import SegmentStore

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]         # the folder that holds the package, for the workers' PYTHONPATH
# CPU workers: activations are allocated anew by every layer, and returned to the system each time they cost page faults.
# In two alternating pairs of runs a Flux forward of 2,432 tokens took 3.59 s with these instead of 3.75 s.
CPU_ALLOCATOR = {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_TRIM_THRESHOLD_": str(2 ** 32), "MALLOC_MMAP_THRESHOLD_": str(2 ** 25),
                 "MALLOC_TOP_PAD_": str(2 ** 26)}

# What workers take over from this process: where things are, and the threads that a person has chosen. Nothing else, since libraries
# read variables that change what is computed (DIFFUSERS_ATTN_BACKEND, NVIDIA_TF32_OVERRIDE, ATEN_CPU_CAPABILITY).
INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME",
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH",
    "CUDA_CACHE_PATH", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS"})
INHERITED_PREFIXES = ("XDIT_", "NCCL_", "LC_")

# CUDA workers: ComfyUI sets cudaMallocAsync for itself, under which later allocations may wait for receives that are posted ahead.
CUDA_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if sys.platform == "linux" else {}

START_TIMEOUT_S = 300
HELP = "What to try stands in docs/troubleshooting.md, in the folder of the xDiT nodes."
STRAGGLER_S = 10                                   # how long the others may take to answer after one rank has failed
POLL_S = 0.05
SILENCE_S = 60.0                                   # after which a worker that owes an answer and gives no sign of life is ended
AWAY_S = 5.0                                       # for so long nobody listened, or this process itself was stopped

# What workers do, for a person
DOING = {"LoadModel": "loading a model", "Predict": "computing a step", "ParkModel": "moving weights to host memory",
         "RestoreModel": "bringing weights back", "LoadAutoencoder": "loading a VAE", "Decode": "decoding",
         "Encode": "encoding", "Probe": "measuring"}


@dataclass
class _Open:
    """A request that some rank has not answered, or whose answers nobody has taken yet."""

    unanswered: set
    answering: set
    segments: list
    claimed: bool
    doing: str = ""                                # with a space before it, for a sentence
    done: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)
    failed_s: float = 0.0

    @property
    def first_failure(self):
        return min(self.failed.values(), key=lambda failure: failure.rank)


def _alone(method):
    """A thread that is in one of these methods of a group keeps other threads out of them: ranks get commands in one order."""
    @functools.wraps(method)
    def locked(self, *args, **kwargs):
        with self._lock:
            return method(self, *args, **kwargs)
    return locked


class WorkerGroup:
    """A running worker group. Its methods may be called by several threads; one that waits keeps the others waiting.

    Construction blocks until every worker is ready. on_phase(Phase) tells what workers do meanwhile; check() is called
    often while waiting and may raise to give up, as ComfyUI's cancel does.
    Raises WorkerStartError, with the workers' last lines of output, when a worker does not come up.
    """

    def __init__(self, devices, on_phase=lambda phase: None, check=lambda: None):
        if sys.platform == "win32":
            raise WorkerStartError("xDiT's workers run on Linux, and this is Windows: start ComfyUI inside WSL2 to use its nodes. "
                                   f"{HELP}")
        self.devices = tuple(devices)
        self.segments = SegmentStore()
        self._lock = threading.RLock()
        self._log_folder = self.segments.overflow_folder / "logs"
        self._channels, self._open, self._last_request, self._pids = {}, {}, 0, []
        self.totals = {}                                       # rank -> sums of the measurements in its answers, by name
        self.memory = {}                                       # rank -> what it last said of its memory, by name
        self._process = self._door = self._store = None
        self._ended_by = ""                                    # what ended the group, where it was not the host
        self._heard_s, self._listened_s = {}, 0.0              # when each rank last gave a sign of life; when anyone listened
        self._finalizer = weakref.finalize(self, self.segments.close)
        self._close_at_exit = _closer(weakref.ref(self))
        atexit.register(self._close_at_exit)
        started_s = time.monotonic()
        try:
            self._launch()
            self._greet(on_phase, check)
        except BaseException:
            self.close()
            raise
        log.info("worker group ready: %s in %.1f s", ",".join(self.devices), time.monotonic() - started_s)

    @property
    def is_working(self):
        """Does a rank owe an answer?"""
        return any(waiting.unanswered for waiting in list(self._open.values()))

    @property
    def alive(self):
        return self._process is not None and self._process.poll() is None and len(self._channels) == len(self.devices)

    def ask_if_idle(self, make_command):
        """As `request`, where nothing else is under way; else None."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return None if self.is_working or not self.alive else self.request(make_command)
        finally:
            self._lock.release()

    @_alone
    def request(self, make_command, on_phase=lambda phase: None, check=lambda: None, segments=()):
        """Send make_command(request number) to every rank, wait for every answer; returns {rank: Done}. Raises as `wait`."""
        return self.wait([self.post(make_command, segments)], on_phase, check)[1]

    @_alone
    def post(self, make_command, segments=(), answering=None):
        """Send make_command(request number) to every rank and wait for nothing; returns the request number.

        `segments` belong to the command and are removed when every rank has answered it. answering: the ranks whose
        answers complete it for `wait`; None: all, (): nobody will wait.
        """
        self._last_request += 1
        request = self._last_request
        self._heard_s |= {rank: time.monotonic() for rank in self._channels if self._doing(rank) is None}      # idle until now
        answering = set(self._channels if answering is None else answering)
        self._open[request] = _Open(set(self._channels), answering, list(segments), claimed=not answering)
        command = make_command(request)
        doing = DOING.get(type(command).__name__)
        self._open[request].doing = f" while {doing}" if doing else ""
        for rank, channel in list(self._channels.items()):
            try:
                channel.send(command)
            except ChannelClosedError:
                self._lost(rank)
        return request

    @_alone
    def wait(self, requests, on_phase=lambda phase: None, check=lambda: None):
        """Wait until one of these requests is complete; returns (its number, {rank: Done}).

        Raises what a worker raised (an error of this project keeps its class; others become WorkerFailedError), or
        WorkerDiedError, also when the group has ended. When check() raises, the answers are abandoned: workers finish the
        commands and take the next.
        """
        try:
            while True:
                self._end_if_lost()
                self._end_if_silent()
                for request in requests:
                    waiting = self._open[request]
                    if waiting.failed and (not waiting.unanswered or not self._channels):
                        raise _raised(waiting.first_failure)
                if not self._channels:                         # also where answers are there: they may come of a broken exchange
                    raise WorkerDiedError(f"The workers have ended{self._ended_by}. Queue the prompt again to start a new group.")
                for request in requests:
                    waiting = self._open[request]
                    if not waiting.failed and waiting.answering <= waiting.done.keys():
                        requests = [request]
                        return request, waiting.done
                check()
                self._receive(on_phase)
        finally:
            for request in requests:                           # the complete one; all, when nobody will come back for them
                self._open[request].claimed = True
            self._settle()

    @_alone
    def close(self):
        """End the workers and remove every file of the group. May be called twice, and from atexit."""
        atexit.unregister(self._close_at_exit)
        for channel in self._channels.values():
            try:
                channel.send(Stop())
            except ChannelClosedError:
                pass
        if self._process is not None:
            _end(self._process, self._pids, patience_s=3 if self._channels else 0)
            self._process.stdin.close()
        for channel in self._channels.values():
            channel.close()
        self._channels = {}
        if self._door is not None:
            self._door.close()
        self._process = self._door = self._store = None
        self._finalizer()

    # --- start ---

    def _launch(self):
        self._door = Door(self.segments.folder)
        # torchrun's own stores would listen on every interface. This one is bound to loopback; torchrun and the workers
        # are its clients (TORCH_DISABLE_SHARE_RDZV_TCP_STORE keeps torchrun from opening one for the workers).
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        self._store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                                    master_listen_fd=listening.detach(), use_libuv=False)   # libuv's takes no socket before 2.7
        command = [
            sys.executable, "-m", "xdit_backend.host.torchrun", "--nnodes=1", f"--nproc-per-node={len(self.devices)}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=is_host=0", "--max-restarts=0",
            "--local-addr=127.0.0.1", f"--log-dir={self._log_folder}", "--redirects=3", "-m", "xdit_backend.worker",
            str(self.segments.folder), ",".join(self.devices), str(port)]
        self._log_folder.mkdir(parents=True)
        with open(self._log_folder / "torchrun.log", "wb") as output:
            self._process = subprocess.Popen(
                command, cwd=self.segments.overflow_folder, env=_environment(self.devices), stdin=subprocess.PIPE,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    def _greet(self, on_phase, check):
        on_phase(Phase(0, "starting workers", 0, len(self.devices)))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        ready, greeted = set(), []
        while len(ready) < len(self.devices):
            check()
            if self._process.poll() is not None:
                raise WorkerStartError(f"The workers for {', '.join(self.devices)} ended while starting. {HELP} Their last lines of "
                                       f"output:\n{self._last_lines()}")
            if time.monotonic() > deadline_s:
                raise WorkerStartError(f"Only {len(ready)} of {len(self.devices)} workers were ready after {START_TIMEOUT_S} s. {HELP} "
                                       f"Their last lines of output:\n{self._last_lines()}")
            if len(greeted) < len(self.devices):
                channel = self._door.accept(POLL_S)
                if channel is not None:
                    greeted.append(channel)
            for raw in connection.wait([channel.raw for channel in greeted], timeout=POLL_S) if greeted else []:
                channel = next(c for c in greeted if c.raw is raw)
                try:
                    message = channel.receive()
                except ChannelClosedError:
                    time.sleep(1)                              # let torchrun notice, so that the output is complete
                    raise WorkerStartError(f"A worker for {', '.join(self.devices)} ended while starting. {HELP} Its last lines of "
                                           f"output:\n{self._last_lines()}") from None
                if isinstance(message, Ready):
                    self._channels[message.rank] = channel
                    self._pids.append(message.pid)
                    ready.add(message.rank)
                    on_phase(Phase(message.rank, "starting workers", len(ready), len(self.devices)))

    # --- wait ---

    def _receive(self, on_phase):
        """Take in what workers have said, waiting a moment for it."""
        if time.monotonic() - self._listened_s > AWAY_S:
            self._heard_s = dict.fromkeys(self._channels, time.monotonic())
        ranks = {channel.raw: rank for rank, channel in self._channels.items()}
        for raw in connection.wait(list(ranks), timeout=POLL_S):
            rank = ranks[raw]
            self._heard_s[rank] = time.monotonic()
            try:
                self._take(rank, self._channels[rank].receive(), on_phase)
                while raw.poll():                              # all that is there: a failure may stand behind other answers
                    self._take(rank, self._channels[rank].receive(), on_phase)
            except ChannelClosedError:
                self._lost(rank)
        self._listened_s = time.monotonic()

    def _take(self, rank, message, on_phase):
        if isinstance(message, Beat):
            self.memory[rank] = self.memory.get(rank, {}) | message.numbers
            return
        if isinstance(message, Phase):
            on_phase(message)
            return
        answered = self._open.get(message.request)
        if answered is None:
            return
        answered.unanswered.discard(rank)
        if isinstance(message, Done):
            answered.done[rank] = message
            if "reserved_bytes" in message.numbers:
                self.memory[rank] = message.numbers
            for name, number in message.numbers.items():
                totals = self.totals.setdefault(rank, {})
                totals[name] = totals.get(name, 0) + number
        else:
            answered.failed[rank] = message
            answered.failed_s = answered.failed_s or time.monotonic()

    def _end_if_lost(self):
        """End the group where a failed command, whoever waits for it, has left ranks in an exchange that will not end."""
        for waiting in self._open.values():
            if not waiting.failed or not self._channels:
                continue
            # Over gloo the others wait inside a collective, or for a stage's hidden states, for the one that failed, and do not answer.
            stuck = waiting.unanswered and time.monotonic() - waiting.failed_s > STRAGGLER_S
            if stuck or (not waiting.unanswered and not outlives(self.devices, waiting.failed.values())):
                failure = waiting.first_failure
                self._ended_by = f" because rank {failure.rank} ({failure.device}) failed with {failure.kind}: {failure.message}"
                self.close()

    def _end_if_silent(self):
        """End the group where a rank that is at a command has given no sign of life for long: it is stopped, or hangs."""
        limit_s = float(os.environ.get("XDIT_SILENCE_TIMEOUT_S", SILENCE_S))
        for rank in self._channels:
            silent_s = self._listened_s - self._heard_s.get(rank, self._listened_s)
            if silent_s > limit_s and (doing := self._doing(rank)) is not None:
                self._give_up(rank, f"has given no sign of life for {silent_s:.0f} s{doing}: it was stopped, or hung, and is ended")

    def _doing(self, rank):
        """What a rank does for the first request that it owes an answer to, "" where that has no name; None where it owes none."""
        return next((waiting.doing for waiting in self._open.values() if rank in waiting.unanswered), None)

    def _settle(self):
        """Remove the segments of requests that every rank has answered, and forget those whose answers were taken."""
        for request, waiting in list(self._open.items()):
            if not waiting.unanswered:
                while waiting.segments:
                    self.segments.remove(waiting.segments.pop())
                if waiting.claimed:
                    del self._open[request]

    def _lost(self, rank):
        """A worker's connection is gone: end the group and say what is known."""
        process = self._process
        for _ in range(20):                                    # torchrun notices within a tenth of a second
            if process is None or process.poll() is not None:
                break
            time.sleep(0.1)
        self._give_up(rank, f"died{self._exit_code(rank)}{self._doing(rank) or ''}")

    def _give_up(self, rank, what):
        """End the group for what became of a rank."""
        lines = self._last_lines(rank)
        self.close()
        raise WorkerDiedError(f"Worker rank {rank} ({self.devices[rank]}) {what}. Queue the prompt again to start a new group. {HELP} "
                              f"Its last lines of output:\n{lines or '(none)'}")

    def _exit_code(self, rank):
        """How torchrun says that a rank ended, e.g. " (exit code -9)"."""
        text = _read(self._log_folder / "torchrun.log")
        for line in reversed(text.splitlines()):
            if "exitcode" in line and ":" in line:
                code = "".join(c for c in line.rpartition(":")[2].split("(")[0] if c in "-0123456789")
                if code:
                    return f" (exit code {code}{', killed' if code == '-9' else ''})"
        return ""

    def _last_lines(self, rank=None, num_lines=15):
        """The end of what the workers, or one of them, printed."""
        pattern = "**/std*.log" if rank is None else f"**/{rank}/std*.log"
        texts = [_read(path) for path in sorted(self._log_folder.glob(pattern))]
        if not any(texts):
            texts = [_read(self._log_folder / "torchrun.log")]
        return "\n".join("\n".join(text.splitlines()[-num_lines:]) for text in texts if text.strip())


def outlives(devices, failures):
    """May a group go on after a command that these failures (messages.Failed), of some or all of its ranks, are the answers to?

    Over gloo a rank that answers has left its exchanges. With CUDA they are only put in order: one that another rank never joined
    still runs, and would be joined by that rank's next command, which gives a hang or a wrong picture. So a group of several CUDA
    devices goes on only when every rank failed before its first exchange, as when all refuse a command alike. And a device
    whose context is lost, which "CUDA error" says, computes nothing more.
    """
    if any(failure.kind == "AcceleratorError" or failure.message.startswith("CUDA error") for failure in failures):
        return False
    if "cpu" in devices or len(set(devices)) == 1:
        return True
    return len(failures) == len(devices) and not any(failure.exchanged for failure in failures)


def _environment(devices):
    inherited = {name: value for name, value in os.environ.items()
                 if name.upper() in INHERITED or name.upper().startswith(INHERITED_PREFIXES)}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    environment |= CPU_ALLOCATOR if "cpu" in devices else CUDA_ALLOCATOR
    if "OMP_NUM_THREADS" not in environment:                   # torchrun would set 1
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(devices)))
    return environment


def _end(process, pids, patience_s):
    """Wait for torchrun and its workers to end, then make them: first the workers, which torchrun still waits for."""
    try:
        process.wait(patience_s)
        return
    except subprocess.TimeoutExpired:
        pass
    for pid in pids:                                           # one that hangs or is stopped takes no other signal
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for kill in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kill)
            process.wait(5)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            process.wait(5)
            return


def _closer(reference):
    def close_group():
        group = reference()
        if group is not None:
            group.close()
    return close_group


def _raised(failure):
    """The exception that stands for a worker's failure on the host."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.XDiTError):
        return kind(failure.message)
    log.error("worker rank %d failed:\n%s", failure.rank, failure.traceback)
    advice = f" Use a smaller latent, weight_dtype fp8_e4m3fn, or more devices. {HELP}" if "OutOfMemory" in failure.kind else ""
    return WorkerFailedError(f"Worker rank {failure.rank} ({failure.device}) failed with {failure.kind}: "
                             f"{failure.message}{advice}")


def _read(path):
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
