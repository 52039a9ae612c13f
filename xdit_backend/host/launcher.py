"""Worker group: start, requests and end of one worker per device.

group_resources.py starts and ends the processes, handshake.py waits until they are ready, pending_requests.py tracks
requests, hang_watchdog.py detects hangs, and exit_report.py describes ended workers.
"""

import atexit
import functools
import logging
import multiprocessing.connection as connection
import os
import threading
import time
from contextlib import suppress

from ..protocol import timeouts
from ..protocol.errors import ChannelClosedError, LinkError, WorkerDiedError, WorkerStartError, XDiTError
from ..protocol.messages import STARTING, Abort, Done, Heartbeat, Phase
from . import preflight
from .group_resources import GroupResources, closing, refused_by_the_system
from .handshake import Handshake
from .hang_watchdog import HangWatchdog
from .local_supervisor import local_supervisor
from .pending_requests import Requests
from .startup_watchdog import HELP

log = logging.getLogger(__name__)

STRAGGLER_S = 10               # how long ranks may wait for a failed one outside of counted collectives and transfers
POLL_S = 0.05
PROCESSES_S = 0.5              # how often it is checked that the workers' processes run


def _alone(method):
    """Decorator that serialises a group's methods across threads: all ranks must receive commands in one order."""
    @functools.wraps(method)
    def locked(self, *args, **kwargs):
        with self._lock:
            return method(self, *args, **kwargs)
    return locked


class WorkerGroup:
    """A running worker group. Its methods are thread-safe; a waiting one blocks the others.

    Construction blocks until every worker is ready. on_phase(Phase) receives progress; check() is called often while
    waiting and may raise to give up, as ComfyUI's cancel does. num_fallbacks: number of transports that are known to
    fail (preflight.fallbacks); the field of the same name has the number found. machines: the
    multi_node.listener.Listener where other machines join; None: all devices are on this machine. supervisor: the
    host's Supervisor; None: the group's own, which ends with the group.

    Raises WorkerStartError if a worker cannot start, with the cause or the workers' last lines of output.
    """

    def __init__(self, devices, on_phase=lambda phase: None, check=lambda: None, num_fallbacks=0, machines=None,
                 supervisor=None):
        timeouts.check()
        self.devices = tuple(devices)
        self._supervisor = supervisor or local_supervisor()
        self._owns_supervisor = supervisor is None
        self._machines, self._lock, self._requests = machines, threading.RLock(), Requests()
        self._watch = HangWatchdog(self._requests)
        # rank -> {name: value}: sums of its answers' measurements; memory last reported; Ready.unusable_backends
        self.totals, self.memory, self.unusable_backends = {}, {}, {}
        self._resources = None
        # last time that it received or did work, other than reporting its memory
        self._used_s = time.monotonic()
        self._checked_s = 0.0                                  # last check of the workers' processes
        self._ended_by = ""                                    # cause of the group's end, unless the host closed it
        self._close_at_exit = closing(self)
        self.warnings = []                                     # to show to the user
        self.num_fallbacks = num_fallbacks
        started_s = time.monotonic()
        self._start(on_phase, check)
        for warning in self.warnings:
            log.warning("%s", warning)
            on_phase(Phase(0, warning))
        log.info("worker group ready: %s in %.1f s%s", ",".join(self.devices), time.monotonic() - started_s,
                 self.why_not_forked and f", not forked: {self.why_not_forked}")

    @property
    def is_working(self):
        """Whether an answer is outstanding."""
        return self._requests.are_unanswered

    @property
    def is_probing(self):
        return self._requests.has_unanswered_resumable

    @property
    def idle_s(self):
        """Seconds since the group last had work; 0 while it is working."""
        return 0.0 if self.is_working else time.monotonic() - self._used_s

    @property
    def alive(self):
        return self._resources is not None and self._resources.is_complete

    @property
    def segments(self):
        """The SegmentStore of its shared memory."""
        return self._resources.segments

    @property
    def why_not_forked(self):
        """Reason why its processes are separate programs; "": they are forked."""
        return self._resources.why_not_forked

    def find_file(self, path, on_phase, check):
        """Verify that every other machine has a model file with the contents of this one.

        Raises CheckpointError if one does not have it, WorkerDiedError if a machine is lost.
        """
        if not self._resources.sessions:
            return

        def report(whose):
            return lambda done, total: (check(), on_phase(Phase(0, f"comparing model files{whose}", done, total, True)))
        content = self._machines.contents.of(path, report(""))
        for name, session in self._resources.sessions.items():
            try:
                session.find(path, content, check, report(f" on {name}"))
            except ChannelClosedError:
                self._lost(self._resources.exit_report.rank_of(name), f" while looking for {os.path.basename(path)}")

    # --- requests ---

    @_alone
    def request(self, make_command, on_phase=lambda phase: None, check=lambda: None, segments=()):
        """Send make_command(request number) to every rank and wait for all answers; returns {rank: Done}.

        Raises like `wait`.
        """
        return self.wait([self.post(make_command, segments)], on_phase, check)[1]

    def ask_if_idle(self, make_command):
        """`request` if the group is idle; else None."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self.receive_pending()
            return None if self.is_working or not self.alive else self.request(make_command)
        finally:
            self._lock.release()

    @_alone
    def post(self, make_command, segments=(), answering=None, activity=""):
        """Send make_command(request number) to every rank without waiting; returns the request number.

        `segments` belong to the command and are removed when every rank has answered it. answering: ranks whose answers
        complete it for `wait`; None: all, (): nobody will wait. activity: "step 7 of 20", for messages.
        """
        number = self._requests.next_number()
        with self.segments.removed_on_failure() as unsent:
            unsent += segments
            command = make_command(number)
        self._watch.command_sent(self._resources.channels)
        answering = self._resources.channels if answering is None else answering
        request = self._requests.add(number, command, self._resources.channels, answering, segments, activity)
        self._used_s = time.monotonic() if request.activity else self._used_s
        for rank, channel in list(self._resources.channels.items()):
            try:
                channel.send(command)
            except ChannelClosedError:
                self._lost(rank)
        return number

    @_alone
    def wait(self, numbers, on_phase=lambda phase: None, check=lambda: None):
        """Wait until one of these requests is complete; returns (its number, {rank: Done}).

        Raises a worker's exception (one of this project keeps its class, others become WorkerFailedError), or
        WorkerDiedError, also if the group has ended. If check() raises, the requests are abandoned: workers finish the
        commands, except that they soon abort loading, decoding, encoding and upscaling. A probe can be waited for
        again.
        """
        try:
            while True:
                self._end_if_failed()
                self._end_if_hung()
                self._raise_failure(numbers)
                complete = next((number for number in numbers if self._requests[number].is_complete), None)
                if complete is not None:
                    numbers = [complete]
                    return complete, self._requests.take(complete)
                try:
                    check()
                except BaseException:
                    self._abort(numbers)
                    raise
                self._receive(on_phase)
        finally:
            # the complete one, or all of them after an exception
            self._requests.claim(numbers)
            self._requests.remove_answered(self.segments)

    @_alone
    def abandon(self, numbers):
        """Give up requests that nobody will wait for any more, as `wait` does if check() raises."""
        numbers = self._requests.still_open(numbers)
        if self.alive:
            self._abort(numbers)
        self._requests.claim(numbers)
        self._requests.remove_answered(self.segments)

    def receive_pending(self):
        """Process answers that nobody waits for, such as those to DropModel. Does not block."""
        if not self._requests.are_claimed or not self._lock.acquire(blocking=False):
            return
        try:
            for rank, channel in self._resources.channels.items():
                with suppress(ChannelClosedError):             # the next request will notice
                    while channel.raw.poll():
                        self._take(rank, channel.receive(), lambda phase: None)
            self._end_if_failed()                              # before the failure is removed
            self._requests.remove_answered(self.segments)
        finally:
            self._lock.release()

    def _raise_failure(self, numbers):
        for number in numbers:
            request = self._requests[number]
            if request.failed and (not request.unanswered or not self._resources.channels):
                exit_report, is_ended = self._resources.exit_report, not self._resources.channels
                exit_report.note(error := request.raised(len(self.devices), exit_report.where(), is_ended))
                raise error
        # even if answers are there: they may result from a broken collective
        if not self._resources.channels:
            raise WorkerDiedError(f"The workers have ended{self._ended_by}. Queue the prompt again to start a new "
                                  f"group.")

    def _abort(self, numbers):
        for number in numbers:
            request = self._requests[number]
            for rank in request.unanswered if request.can_stop else ():
                with suppress(ChannelClosedError):             # the next request will notice
                    self._resources.channels[rank].send(Abort(number))

    def _receive(self, on_phase):
        """Process messages of the workers, waiting for them at most POLL_S."""
        ended = self._find_ended()                             # before reading what it sent until then
        self._watch.listening_begins(self._resources.channels)
        ranks = {channel.raw: rank for rank, channel in self._resources.channels.items()}
        for raw in connection.wait(list(ranks), timeout=POLL_S):
            rank = ranks[raw]
            self._watch.record_sign(rank)
            try:
                self._take(rank, self._resources.channels[rank].receive(), on_phase)
                # all available ones: a failure may follow other answers
                while raw.poll():
                    self._take(rank, self._resources.channels[rank].receive(), on_phase)
            except ChannelClosedError:
                self._lost(rank)
        self._watch.listening_ended()
        if ended is not None:
            self._lost(ended)

    def _find_ended(self):
        if time.monotonic() - self._checked_s < PROCESSES_S:
            return None
        self._checked_s = time.monotonic()
        return self._resources.find_ended()

    def _take(self, rank, message, on_phase):
        if isinstance(message, Heartbeat):
            self.memory[rank] = self.memory.get(rank, {}) | message.numbers
            self._watch.heartbeat(rank, message)
            self._requests.heartbeat(rank, message)
            return
        self._watch.record_progress(rank, message)
        if isinstance(message, Phase):
            on_phase(message)
            return
        if (request := self._requests.answer(rank, message)) is None:
            return
        self._used_s = time.monotonic() if request.activity else self._used_s
        if isinstance(message, Done):
            if "reserved_bytes" in message.numbers:
                self.memory[rank] = message.numbers
            for name, number in message.numbers.items():
                totals = self.totals.setdefault(rank, {})
                totals[name] = totals.get(name, 0) + number

    def _start(self, on_phase, check):
        """Start the workers with the first transport that works."""
        ways, failed = preflight.fallbacks(self.devices), []
        self._has_fallbacks = len(ways) > 1
        for number in range(min(self.num_fallbacks, len(ways) - 1), len(ways)):
            self.num_fallbacks = number
            try:
                self._try_to_start(*ways[number], failed, on_phase, check)
                return
            except LinkError as error:
                self._resources.exit_report.note(error)
                self.close()
                failed.append(str(error))
            except BaseException as error:
                if isinstance(error, XDiTError) and self._resources is not None:
                    self._resources.exit_report.note(error)
                # workers of this machine wait for those of a lost one
                self.close(is_broken=self._resources is not None and not self._resources.has_all_machines)
                if isinstance(error, OSError) and not isinstance(error, XDiTError):
                    raise refused_by_the_system(error) from error
                raise
        raise WorkerStartError(f"{', '.join(self.devices)} cannot exchange tensors: {failed[-1]} "
                               f"{preflight.hint(ways)}{HELP}")

    def _try_to_start(self, off, variables, failed, on_phase, check):
        """Start with the transport `off` disabled by environment variables. failed: errors of earlier attempts."""
        self._resources = resources = GroupResources(self.devices)
        atexit.register(self._close_at_exit)
        on_phase(Phase(0, STARTING, 0, len(self.devices)))     # torchrun and the libraries take seconds to load
        resources.take_machines(self._machines, on_phase, check)
        self.warnings = [preflight.warning(self.devices, off, variables, failed)] if off else []
        self._complete_handshake(self._launch(variables, check), on_phase, check)

    def _launch(self, variables, check):
        """Start torchrun on all machines; returns the GroupStart."""
        self.warnings += self._resources.warnings()
        interface = self._machines.interface if self._resources.sessions else ""
        return self._resources.launch(self._supervisor, interface, variables, self._has_fallbacks, check)

    def _complete_handshake(self, group_start, on_phase, check):
        self.unusable_backends = Handshake(group_start, self._resources.channels, self._resources.workers, on_phase,
                                           check).run()

    # --- end ---

    @_alone
    def close(self, is_broken=False):
        """End the workers and remove all files of the group. May be called twice, and from atexit.

        is_broken: workers are blocked for good, so kill them at once.
        """
        atexit.unregister(self._close_at_exit)
        if self._resources is not None:
            self._resources.close(is_broken)
        if self._owns_supervisor:
            self._supervisor.close()

    def _end_if_failed(self):
        """End the group if a failed command leaves ranks waiting in a collective or transfer forever."""
        limit_s = min(STRAGGLER_S, timeouts.seconds("XDIT_SILENCE_TIMEOUT_S"))
        for request in self._requests:
            if not request.failed or not self._resources.channels:
                continue
            is_stuck = request.unanswered and all(self._watch.waits_s(rank) > limit_s for rank in request.unanswered)
            if is_stuck or request.ends_group:
                self._ended_by = request.why_it_ended
                self.close(is_broken=True)

    def _end_if_hung(self):
        """End the group if a rank is silent, or if all ranks wait for each other."""
        limit_s = timeouts.seconds("XDIT_SILENCE_TIMEOUT_S")
        ranks, name_of = list(self._resources.channels), self._resources.exit_report.name_of
        found = self._watch.silent(ranks, limit_s) or self._watch.stuck(ranks, limit_s, name_of)
        if found is not None:
            self._give_up(*found)

    def _lost(self, rank, activity=""):
        """End the group after a worker's connection was lost. activity: replaces that of its unanswered requests."""
        self._give_up(*self._resources.lost(rank, lambda of: activity or self._watch.activity(of) or ""))

    def _give_up(self, rank, what):
        """End the group and raise WorkerDiedError. what: predicate of a sentence about the rank."""
        exit_report = self._resources.exit_report
        lines = exit_report.last_lines(rank)
        self.close(is_broken=True)
        error = WorkerDiedError(f"Worker {exit_report.name_of(rank)} {what}. Queue the prompt again to start a new "
                                f"group. {HELP} {exit_report.where()}Its last lines:\n{lines or '(none)'}")
        exit_report.note(error)
        raise error
