"""Start, watch and end a worker group: one torchrun, one worker a device. Used by the client.

Everything a group opens is on this machine only: a socket file in a private folder, and torch's store on 127.0.0.1. Where devices are on
other machines, these have joined over connections of their own (machines/), and a session of each stands for its ranks here.
"""

import atexit
import functools
import logging
import math
import multiprocessing.connection as connection
import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch.distributed as dist

from ..protocol import errors, timeouts
from ..protocol.channel import Door
from ..protocol.devices import machine_of, machines_of, own_name
from ..protocol.errors import ChannelClosedError, LinkError, WorkerDiedError, WorkerFailedError, WorkerStartError, XDiTError
from ..protocol.messages import JOINING, TRYING_LINKS, Abandon, Beat, Decode, Done, Encode, LoadModel, Phase, Ready, Stop, Unready
from ..protocol.segments import SegmentStore, folders_of
from . import logs, preflight
from .forkserver import Forkserver
from .shortage import shortage_words
from .starting import HELP, TORCHRUN, Signs, exit_words

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]         # the folder that holds the package, for the workers' PYTHONPATH
FAILED = "failed"                                  # in a group's folder in memory: what torchrun says of workers that fail
# CPU workers: activations are allocated anew by every layer, and returned to the system each time they cost page faults.
# In two alternating pairs of runs a Flux forward of 2,432 tokens took 3.59 s with these instead of 3.75 s.
CPU_ALLOCATOR = {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_TRIM_THRESHOLD_": str(2 ** 32), "MALLOC_MMAP_THRESHOLD_": str(2 ** 25),
                 "MALLOC_TOP_PAD_": str(2 ** 26)}

# A worker has more streams than CUDA's default of eight queues: one that waits for a receive would hold up others in its queue.
CUDA_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}

# What workers take over from this process: where things are, and the threads that a person has chosen. Nothing else, since libraries
# read variables that change what is computed (DIFFUSERS_ATTN_BACKEND, NVIDIA_TF32_OVERRIDE, ATEN_CPU_CAPABILITY).
INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME",
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH",
    "CUDA_CACHE_PATH", *CUDA_QUEUES, "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS"})
INHERITED_PREFIXES = ("XDIT_", "NCCL_", "LC_")

# CUDA workers: ComfyUI sets cudaMallocAsync for itself, under which later allocations may wait for receives that are posted ahead.
CUDA_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if sys.platform == "linux" else {}

START_TIMEOUT_S = 1800                             # of workers that get on, however slowly; who does not is noticed sooner
SETTLE_S = 8                                       # from the first worker that cannot start until all have said or shown why, at most
LINK_TIMEOUT_S = 60                                # of a short transfer, once all have begun
JOIN_TIMEOUT_S = 600                               # of joining all ranks, for which NCCL reads a gigabyte of libraries
QUIET_S = 20                                       # a worker that says nothing for so long then is what fails, not its links
STRAGGLER_S = 10                                   # how long the others may take to answer after one rank has failed
POLL_S = 0.05
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
    can_stop: bool = False                         # do ranks leave it when nobody waits for it any more?
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
    often while waiting and may raise to give up, as ComfyUI's cancel does. num_detours: how many ways to join the workers are known not
    to work (preflight.detours); what the group came to is in the field of that name.
    machines: the machines.listener.Listener where other machines join; None: nothing listens, and all devices are here.
    forkserver: the host's Forkserver; None: one of its own, which ends with the group.
    Raises WorkerStartError when a worker cannot come up, with what is missing, or the workers' last lines of output.
    """

    def __init__(self, devices, on_phase=lambda phase: None, check=lambda: None, num_detours=0, machines=None, forkserver=None):
        if sys.platform == "win32":
            raise WorkerStartError("xDiT's workers run on Linux, and this is Windows: start ComfyUI inside WSL2 to use its nodes. "
                                   f"{HELP}")
        timeouts.check()
        self.devices = tuple(devices)
        self._own = [rank for rank, device in enumerate(self.devices) if not machine_of(device)]           # ranks of this machine
        self._forkserver = forkserver or Forkserver()
        self._owns_forkserver = forkserver is None
        self.why_not_forked = ""                               # why its processes are programs of their own, where they are
        self._machines, self._sessions = machines, {}          # name of another machine -> its Session
        self._at_once = []                                     # Channels to ranks of other machines, which come to no door here
        self._lock = threading.RLock()
        self._channels, self._workers, self._open, self._last_request = {}, {}, {}, 0
        self.totals = {}                                       # rank -> sums of the measurements in its answers, by name
        self.memory = {}                                       # rank -> what it last said of its memory, by name
        self._process = self._door = self._store = self._finalizer = None
        self._used_s = time.monotonic()                        # when it was last given or did work, other than telling of itself
        self._ended_by = ""                                    # what ended the group, where it was not the host
        self._heard_s, self._listened_s = {}, 0.0              # when each rank last gave a sign of life; when anyone listened
        self._phases, self._beats = {}, {}                     # of each rank at a command: its last Phase; (how far it is, since when)
        self._close_at_exit = _closer(weakref.ref(self), os.getpid())
        self.remarks, self.num_detours = [], 0                 # what a person should know of how it runs; ways around links that failed
        started_s, failed = time.monotonic(), []
        self._ways = ways = preflight.detours(self.devices)
        for self.num_detours in range(min(num_detours, len(ways) - 1), len(ways)):
            try:
                self._start(*ways[self.num_detours], failed, on_phase, check)
                break
            except LinkError as error:
                logs.note(self._log_folder, error)
                self.close()
                failed.append(str(error))
            except BaseException as error:
                if isinstance(error, XDiTError):
                    logs.note(self._log_folder, error)
                self.close()
                if isinstance(error, OSError) and not isinstance(error, XDiTError):
                    places = " and ".join(dict.fromkeys(str(folder.parent) for folder in folders_of("of a group")))
                    raise WorkerStartError(f"The workers cannot be started: {error}. They need a little room in {places}, where this user "
                                           f"may write, and which have short names. {HELP}") from error
                raise
        else:
            raise WorkerStartError(f"{', '.join(self.devices)} cannot exchange tensors: {failed[-1]} {preflight.advice(ways)}{HELP}")
        for remark in self.remarks:
            log.warning("%s", remark)
            on_phase(Phase(0, remark))
        log.info("worker group ready: %s in %.1f s%s", ",".join(self.devices), time.monotonic() - started_s,
                 self.why_not_forked and f", not forked: {self.why_not_forked}")

    @property
    def is_working(self):
        """Does a rank owe an answer?"""
        return any(waiting.unanswered for waiting in list(self._open.values()))

    def hear(self):
        """Take in what the ranks have said where nobody will wait for it, as of a model that was dropped. Keeps nobody waiting."""
        if not all(waiting.claimed for waiting in list(self._open.values())) or not self._lock.acquire(blocking=False):
            return
        try:
            for rank, channel in self._channels.items():
                with suppress(ChannelClosedError):             # it is noticed by who needs the workers next
                    while channel.raw.poll():
                        self._take(rank, channel.receive(), lambda phase: None)
            self._settle()
        finally:
            self._lock.release()

    @property
    def idle_s(self):
        """Seconds since it had work to do; 0 while it has."""
        return 0.0 if self.is_working else time.monotonic() - self._used_s

    @property
    def alive(self):
        is_whole = len(self._channels) == len(self.devices) and all(session.is_open for session in self._sessions.values())
        return self._process is not None and not self._process.has_ended and is_whole

    def find_file(self, path, on_phase, check):
        """See that every other machine has the model file of this path, by its content.

        Raises CheckpointError where one has not, WorkerDiedError where one is lost.
        """
        if not self._sessions:
            return
        def told(whose):
            return lambda done, total: (check(), on_phase(Phase(0, f"comparing model files{whose}", done, total, True)))
        content = self._machines.contents.of(path, told(""))
        for name, session in self._sessions.items():
            try:
                session.find(path, content, check, told(f" on {name}"))
            except ChannelClosedError:
                self._lost(self._rank_of(name), f" while looking for {os.path.basename(path)}")

    def ask_if_idle(self, make_command):
        """As `request`, where nothing else is under way; else None."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self.hear()
            return None if self.is_working or not self.alive else self.request(make_command)
        finally:
            self._lock.release()

    @_alone
    def request(self, make_command, on_phase=lambda phase: None, check=lambda: None, segments=()):
        """Send make_command(request number) to every rank, wait for every answer; returns {rank: Done}. Raises as `wait`."""
        return self.wait([self.post(make_command, segments)], on_phase, check)[1]

    @_alone
    def post(self, make_command, segments=(), answering=None, doing=""):
        """Send make_command(request number) to every rank and wait for nothing; returns the request number.

        `segments` belong to the command and are removed when every rank has answered it. answering: the ranks whose
        answers complete it for `wait`; None: all, (): nobody will wait. doing: "step 7 of 20", for a person.
        """
        self._last_request += 1
        request = self._last_request
        with self.segments.removed_on_failure() as unsent:
            unsent += segments
            command = make_command(request)
        self._heard_s |= {rank: time.monotonic() for rank in self._channels if self._doing(rank) is None}      # idle until now
        answering = set(self._channels if answering is None else answering)
        self._open[request] = _Open(set(self._channels), answering, list(segments), claimed=not answering)
        doing = DOING.get(type(command).__name__, "") + (doing and f" ({doing})")
        self._open[request].can_stop = isinstance(command, (LoadModel, Decode, Encode))
        self._open[request].doing = f" while {doing}" if doing else ""
        self._used_s = time.monotonic() if doing else self._used_s
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
        commands, but leave loading, decoding and encoding soon, and take the next.
        """
        try:
            while True:
                self._end_if_lost()
                self._end_if_silent()
                for request in requests:
                    waiting = self._open[request]
                    if waiting.failed and (not waiting.unanswered or not self._channels):
                        error = _raised(waiting.first_failure, waiting.doing, len(self.devices), self._where())
                        logs.note(self._log_folder, error)
                        raise error
                if not self._channels:                         # also where answers are there: they may come of a broken exchange
                    raise WorkerDiedError(f"The workers have ended{self._ended_by}. Queue the prompt again to start a new group.")
                for request in requests:
                    waiting = self._open[request]
                    if not waiting.failed and waiting.answering <= waiting.done.keys():
                        requests = [request]
                        return request, waiting.done
                try:
                    check()
                except BaseException:
                    self._abandon(requests)
                    raise
                self._receive(on_phase)
        finally:
            for request in requests:                           # the complete one; all, when nobody will come back for them
                self._open[request].claimed = True
            self._settle()

    def _abandon(self, requests):
        for request in requests:
            for rank in self._open[request].unanswered if self._open[request].can_stop else ():
                with suppress(ChannelClosedError):             # it is noticed by who needs the workers next
                    self._channels[rank].send(Abandon(request))

    @_alone
    def close(self, is_broken=False):
        """End the workers and remove every file of the group. May be called twice, and from atexit.

        is_broken: some wait for what will never come, so that they are ended at once.
        """
        atexit.unregister(self._close_at_exit)
        for channel in self._channels.values():
            try:
                channel.send(Stop())
            except ChannelClosedError:
                pass
        if self._process is not None:
            patience_s = 3 if len(self._channels) == len(self.devices) else 0
            end_torchrun(self._process, self._workers.values(), None if is_broken else patience_s)
        for channel in self._channels.values():
            channel.close()
        for session in self._sessions.values():
            session.close()
        self._channels, self._workers, self._sessions = {}, {}, {}
        if self._door is not None:
            self._door.close()
        self._process = self._door = self._store = None
        if self._owns_forkserver:
            self._forkserver.close()
        if self._finalizer is not None:
            self._finalizer()

    # --- start ---

    def _start(self, off, variables, failed, on_phase, check):
        """Try to start, with something switched off by environment variables. failed: how the ways before went."""
        self.segments = SegmentStore()
        self._log_folder = logs.make(self.segments.folder.name, self.segments.overflow_folder / "logs")
        self._finalizer = weakref.finalize(self, self.segments.close)
        atexit.register(self._close_at_exit)
        self.remarks = [preflight.remark(self.devices, off, variables, failed)] if off else []
        self._at_once = []
        for name in machines_of(self.devices):
            if self._machines is None:
                raise WorkerStartError(f"No address is set at which {name} could join: only ComfyUI's nodes use devices of other machines.")
            self._sessions[name] = self._machines.take(name, lambda words: on_phase(Phase(0, words)), check)
        self._launch(variables, check)
        self._greet(on_phase, check)

    def _launch(self, variables, check):
        own = [self.devices[rank] for rank in self._own]
        self.remarks += preflight.check(own, (self.segments.folder, self.segments.overflow_folder))
        self._door = Door(self.segments.folder, _silence_s())
        # torchrun's own stores would listen on every interface. This one is bound to loopback; torchrun and the workers
        # are its clients (TORCH_DISABLE_SHARE_RDZV_TCP_STORE keeps torchrun from opening one for the workers).
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        self._store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                                    master_listen_fd=listening.detach(), use_libuv=False)   # libuv's takes no socket before 2.7
        num_nodes, interface = 1 + len(self._sessions), ""
        if self._sessions:
            interface = self._machines.interface
        self._process, self.why_not_forked = start_torchrun(
            self._forkserver, self.segments, self.devices, len(own), port, self._log_folder, variables, 0, num_nodes, interface, check)
        for node, session in enumerate(self._sessions.values(), 1):
            self._at_once += session.start(self.devices, node, num_nodes, port, _silence_s(), variables).values()

    def _greet(self, on_phase, check):
        on_phase(Phase(0, "starting workers", 0, len(self.devices)))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        greeted = [*self._at_once]
        begun = {JOINING: {}, TRYING_LINKS: {}}                # what ranks do to reach each other -> rank -> since when
        told, silent, failed_s = [], [], math.inf              # Unready of ranks; channels that nothing more comes from; since when one
        signs = Signs(self._process.pid, len(self._own))
        while len(self._channels) < len(self.devices):
            check()
            for name, session in self._sessions.items():
                if not session.is_open:
                    rank = self._rank_of(name)
                    error = WorkerStartError(f"Worker rank {rank} ({self.devices[rank]}): {name} was lost while the workers started: "
                                             f"{session.ended}\n{self._last_lines(rank)}".rstrip())
                    self.close(is_broken=True)                 # those here wait for it
                    raise error
            late = [rank for rank in range(len(self.devices)) if rank not in self._channels]
            if time.monotonic() > deadline_s:
                raise WorkerStartError(f"{', '.join(map(self._called, late))}: not ready after {START_TIMEOUT_S} s. "
                                       f"{HELP} {self._where()}Their last lines:\n{self._last_lines()}")
            over = [doing for doing, limit_s in ((JOINING, JOIN_TIMEOUT_S), (TRYING_LINKS, LINK_TIMEOUT_S))
                    if len(begun[doing]) == len(self.devices) and time.monotonic() - max(begun[doing].values()) > limit_s]
            has_tried = TRYING_LINKS in over or (bool(over) and not begun[TRYING_LINKS])
            found = signs.silent(late, min(QUIET_S, _silence_s()) if has_tried else _silence_s())
            if found is not None and not silent:               # they wait to be ended who have said that they cannot start
                who = "torchrun, which starts the workers," if found[0] == TORCHRUN else f"Worker {self._called(found[0])}"
                lines = self._last_lines(None if found[0] == TORCHRUN else found[0])
                raise WorkerStartError(f"{who} {found[1]}. Queue the prompt again to start a new group. {HELP} {self._where()}"
                                       f"Its last lines:\n{lines or '(none)'}")
            if has_tried:
                what = f"a transfer between them was not over after {LINK_TIMEOUT_S}" if begun[TRYING_LINKS] else \
                    f"they had not joined after {JOIN_TIMEOUT_S}"
                raise LinkError(f"{what} s on {', '.join(map(self._called, late))}.")
            has_ended = self._process.has_ended       # asked before what workers have said until then is read
            if len(greeted) < len(self.devices):
                channel = self._door.accept(POLL_S)
                if channel is not None:
                    greeted.append(channel)
            listening = [channel.raw for channel in greeted if channel not in silent]
            for raw in connection.wait(listening, timeout=POLL_S) if listening else []:
                channel = next(c for c in greeted if c.raw is raw)
                try:
                    message = channel.receive()
                except ChannelClosedError:
                    silent.append(channel)
                    continue
                signs.hear(message.rank, getattr(message, "text", None))
                if isinstance(message, Unready):
                    silent.append(channel)
                    told.append(message)
                if isinstance(message, Phase) and message.text in begun:
                    begun[message.text][message.rank] = time.monotonic()
                    on_phase(message)
                if isinstance(message, Ready):
                    self._channels[message.rank] = channel
                    if message.rank in self._own:              # another machine's number would be another process here
                        with suppress(psutil.NoSuchProcess):
                            self._workers[message.rank] = psutil.Process(message.pid)
                    on_phase(Phase(message.rank, "starting workers", len(self._channels), len(self.devices)))
            if silent or has_ended:
                failed_s = min(failed_s, time.monotonic())
                others = [channel for channel in greeted if channel not in silent and channel not in self._channels.values()]
                is_known = has_ended or (len(greeted) == len(self.devices) and (len(silent) == len(told) or self._first_ended()))
                if (is_known and not others) or any(not message.by_links for message in told) or time.monotonic() - failed_s > SETTLE_S:
                    raise self._failed_start(told, begun[JOINING])

    def _failed_start(self, told, joining):
        """What to raise where workers have said that they cannot start (told), or have ended without a word. joining: who began to join."""
        rank, code = self._first_ended() or (None, None)
        cause = cause_of(told, code)
        if cause is not None:
            return (LinkError if cause.by_links else WorkerStartError)(f"{cause.message}.".replace("..", "."))
        lines = self._last_lines()
        if len(joining) == len(self.devices) and len(self._ways) > 1:
            return LinkError(f"a worker ended in a transfer between them, with these last lines of output:\n{lines}\n")
        which = f"A worker for {', '.join(self.devices)}" if rank is None else f"Worker rank {rank} ({self.devices[rank]})"
        return WorkerStartError(f"{which} ended while starting{exit_words(code)}. {HELP} {self._where()}Its last lines:\n{lines}")

    # --- wait ---

    def _receive(self, on_phase):
        """Take in what workers have said, waiting a moment for it."""
        if time.monotonic() - self._listened_s > AWAY_S:
            self._heard_s, self._beats = dict.fromkeys(self._channels, time.monotonic()), {}
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
            where = message.request, message.num_passed, message.waits
            before, since_s = self._beats.get(rank, (None, 0.0))
            self._beats[rank] = where, since_s if where == before else time.monotonic()
            return
        self._beats.clear()                                    # something moved, of which the others may have told nothing yet
        if isinstance(message, Phase):
            self._phases[rank] = message
            on_phase(message)
            return
        self._phases.pop(rank, None)
        answered = self._open.get(message.request)
        if answered is None:
            return
        answered.unanswered.discard(rank)
        self._used_s = time.monotonic() if answered.doing else self._used_s
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
        limit_s = _silence_s()
        for rank in self._channels:
            silent_s = self._listened_s - self._heard_s.get(rank, self._listened_s)
            if silent_s > limit_s and (doing := self._doing(rank)) is not None:
                self._give_up(rank, f"has given no sign of life for {silent_s:.0f} s{doing}: it was stopped, or hung, and is ended")
        self._end_if_stuck(limit_s)

    def _end_if_stuck(self, limit_s):
        """End the group where every rank that is at a command waits for others, and none has got on for long: no answer will come.

        A rank that computes, however slowly, says that it does not wait; those that wait for it are not stuck.
        """
        busy = [rank for rank in self._channels if self._doing(rank) is not None]
        beats = [self._beats[rank] for rank in busy if rank in self._beats and self._beats[rank][0][-1]]
        stuck_s = min((self._listened_s - since_s for _, since_s in beats), default=0.0)
        if len(beats) == len(busy) and stuck_s > limit_s:
            ranks = " and ".join(f"rank {rank} ({self.devices[rank]})" for rank in busy)
            self._give_up(busy[0], f"hangs{self._doing(busy[0])}: {ranks} waited for other ranks, and nothing has come for "
                                   f"{stuck_s:.0f} s. An exchange was lost, and the group is ended")

    def _doing(self, rank):
        """What a rank does for the first request that it owes an answer to, "" where that has no name; None where it owes none."""
        doing = next((waiting.doing for waiting in self._open.values() if rank in waiting.unanswered), None)
        phase = self._phases.get(rank) if doing else None
        return doing if phase is None or not phase.total else f"{doing}, {phase.text} {phase.done} of {phase.total}"

    def _settle(self):
        """Remove the segments of requests that every rank has answered, and forget those whose answers were taken."""
        for request, waiting in list(self._open.items()):
            if not waiting.unanswered:
                while waiting.segments:
                    self.segments.remove(waiting.segments.pop())
                if waiting.claimed:
                    del self._open[request]

    def _lost(self, rank, doing=""):
        """A worker's connection is gone: end the group and say what is known. doing: beside what it owes an answer to."""
        session = self._sessions.get(machine_of(self.devices[rank]))
        if session is not None:
            name, ended = session.name, session.ended or "it closed the connection"
            ranks = ", ".join(str(other) for other, device in enumerate(self.devices) if machine_of(device) == name)
            doing = doing or self._doing(rank) or ""
            self._give_up(self._rank_of(name), f"was lost with its machine, {name} (all of rank {ranks}){doing}: "
                                               f"{ended.rstrip('. ')}. {name} joins again by itself when it can")
        process, worker = self._process, self._workers.get(rank)
        for _ in range(50):                                    # torchrun notices within a tenth of a second, then ends the others
            if process is None or process.has_ended:
                break
            time.sleep(0.1)
        else:
            if worker is not None and worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
                self._give_up(rank, f"takes or sends half a message{self._doing(rank) or ''}: it was stopped, or hung, and is ended")
        rank, code = self._first_ended() or (rank, None)       # torchrun has ended the others then, whose connections may close before
        self._give_up(rank, f"died{exit_words(code)}{self._doing(rank) or ''}")

    def _give_up(self, rank, what):
        """End the group for what became of a rank."""
        lines = self._last_lines(rank)
        self.close(is_broken=True)
        error = WorkerDiedError(f"Worker rank {rank} ({self.devices[rank]}) {what}. Queue the prompt again to start a new group. {HELP} "
                                f"{self._where()}Its last lines:\n{lines or '(none)'}")
        logs.note(self._log_folder, error)
        raise error

    def _called(self, rank):
        return f"rank {rank} ({self.devices[rank]})"

    def _first_ended(self):
        """(rank, exit code) of the first that failed, as torchrun says it. None where it says nothing."""
        found = first_ended(self.segments)
        return None if found is None or found[0] >= len(self.devices) else found

    def _rank_of(self, name):
        """The rank on another machine that ended first, as that told, or its first one."""
        ranks = [rank for rank, device in enumerate(self.devices) if machine_of(device) == name]
        return next((rank for rank in ranks if self._sessions[name].last_lines(rank)), ranks[0])

    def _where(self):
        """Where all output is, for a person; "" where it is not kept."""
        return f"All output of the workers is in {self._log_folder}. " if self._log_folder.parent == logs.place() else ""

    def _last_lines(self, rank=None, num_lines=15):
        """The end of what the workers, or one of them, printed."""
        ranks = range(len(self.devices)) if rank is None else [rank]
        session = self._sessions.get(machine_of(self.devices[rank])) if rank is not None else None
        if session is not None:
            return session.last_lines(rank)
        texts = [read_text(self._log_folder / f"rank-{rank}.log") for rank in ranks]
        if not any(texts):
            texts = [read_text(self._log_folder / logs.TORCHRUN)]
        lines = ["\n".join(text.splitlines()[-num_lines:]) for text in texts if text.strip()]
        if logs.is_full(self._log_folder):
            lines.append(f"(What came last could not be written: the disk of {self._log_folder} is full.)")
        return "\n".join(lines)


def cause_of(told, exit_code):
    """The one of these Unready that says why workers could not start; None: that one ended with this exit code does.

    A rank that says so stays until it is ended, so nobody ends for its words. What it says of its links may come of another rank that has
    ended; but gloo aborts a process whose exchange another has broken off. exit_code: of the first that ended; None: none has, or unknown.
    """
    own = [message for message in told if not message.by_links]
    by_links = told if exit_code in (None, -signal.SIGABRT) else []
    return min(own or by_links, key=lambda message: message.rank, default=None)


def outlives(devices, failures):
    """May a group go on after a command that these failures (messages.Failed), of some or all of its ranks, are the answers to?

    Over gloo a rank that answers has left its exchanges. With CUDA they are only put in order: one that another rank never joined
    still runs, and would be joined by that rank's next command, which gives a hang or a wrong picture. So a group of several CUDA
    devices goes on only when every rank failed before its first exchange, as when all refuse a command alike. And a device
    whose context is lost, which "CUDA error" says, computes nothing more.
    """
    if any(failure.kind == "AcceleratorError" or failure.message.startswith("CUDA error") for failure in failures):
        return False
    if any(own_name(device) == "cpu" for device in devices) or len(set(devices)) == 1:
        return True
    return len(failures) == len(devices) and not any(failure.exchanged for failure in failures)


def prepare(forkserver, devices):
    """Have the libraries loaded of workers that will run on these devices; waits for nothing."""
    forkserver.prepare(_environment(devices), ROOT)


def start_torchrun(forkserver, segments, devices, num_own, store_port, log_folder, variables={}, node=0, num_nodes=1, interface="",
                   check=lambda: None):
    """Start torchrun with the workers of this machine, one of num_nodes; returns (its Torchrun, why it was not forked, or "").

    devices: of all ranks; num_own of them are here. segments: the SegmentStore whose folder has the workers' door. store_port: of torch's
    store, on loopback. interface: over which the machines exchange tensors; "": there is one machine, and loopback is enough.
    Raises WorkerStartError where it cannot be started.
    """
    # The store ranks machines by this name, as text: the host is the first, and others follow in the order of their devices.
    name = "127.0.0.1" if num_nodes == 1 else f"machine-{node:06d}"
    arguments = [
        str(segments.folder / FAILED), f"--nnodes={num_nodes}", f"--nproc-per-node={num_own}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store_port}", "--rdzv-conf=is_host=0", "--max-restarts=0",
        f"--local-addr={name}", f"--log-dir={segments.overflow_folder}", "-m", "xdit_backend.worker",
        str(segments.folder), ",".join(devices), str(store_port), str(log_folder)]
    # A path with a colon would be two in PYTHONPATH; Python also looks where it was started.
    folder = ROOT if os.pathsep in str(ROOT) else segments.overflow_folder
    with logs.start(log_folder) as output:
        return forkserver.start(arguments, _environment(devices, num_own, interface) | variables, ROOT, folder, output, check)


def first_ended(segments):
    """(place among its machine's ranks, exit code) of the first worker that failed, as torchrun says it; None: it says nothing."""
    found = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", read_text(segments.folder / FAILED))
    return None if found is None else (int(found[2]), int(found[1]))


def _silence_s():
    return timeouts.seconds("XDIT_SILENCE_TIMEOUT_S")


def _environment(devices, num_own=0, interface=""):
    inherited = {name: value for name, value in os.environ.items()
                 if name.upper() in INHERITED or name.upper().startswith(INHERITED_PREFIXES)}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    interface = interface or ("lo0" if sys.platform == "darwin" else "lo")
    environment |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}   # without "=", NCCL takes others that begin so
    on_cpu = any(own_name(device) == "cpu" for device in devices)
    environment = environment | CPU_ALLOCATOR if on_cpu else CUDA_QUEUES | environment | CUDA_ALLOCATOR
    if "OMP_NUM_THREADS" not in environment:                   # torchrun would set 1
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (num_own or len(devices))))
    return environment


def end_torchrun(process, workers, patience_s):
    """Wait for torchrun and its workers to end, then make them: first the workers, which torchrun still waits for.

    patience_s: None: make them at once, with no time to end in good order.
    """
    for kill in (None, signal.SIGTERM, signal.SIGKILL)[0 if patience_s is not None else 2:]:
        if kill is not None:
            _kill(children(process.pid))                       # one that hangs or is stopped takes no other signal
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kill)
        if process.wait_ended(patience_s if kill is None else 5):
            break
    _kill(workers)                                             # those of a torchrun that was killed


def _kill(processes):
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def children(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _closer(reference, owner):
    """What closes a group as its host ends, but not as a process does that the host has forked. owner: the host's number."""
    def close_group():
        group = reference()
        if group is not None and os.getpid() == owner:
            group.close()
    return close_group


def _raised(failure, doing, num_ranks, where):
    """The exception that stands for a worker's failure on the host. where: all output is, a sentence; the traceback is there."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.XDiTError):
        return kind(failure.message)
    words = f"{failure.message.rstrip('. ')}."
    if failure.numbers:                                        # torch's own words, which say less, are in the log
        words = f"memory ran out: {shortage_words(failure.numbers, num_ranks)} {HELP}"
    return WorkerFailedError(f"Worker rank {failure.rank} ({failure.device}) failed with {failure.kind}{doing}: {words} {where}".rstrip())


def read_text(path):
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
