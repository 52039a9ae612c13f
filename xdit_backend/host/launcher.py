"""Start, use and end a worker group: one torchrun, one worker a device. Used by the client.

group_resources.py starts the processes and ends them, handshake.py waits until they are ready; pending_requests.py
knows what they were asked, hang_watchdog.py judges whether they live, exit_report.py finds the words for what became of
them.
"""

import atexit
import functools
import logging
import multiprocessing.connection as connection
import os
import sys
import threading
import time
from contextlib import suppress

from ..protocol import timeouts
from ..protocol.errors import ChannelClosedError, LinkError, WorkerDiedError, WorkerStartError, XDiTError
from ..protocol.messages import Abort, Done, Heartbeat, Phase
from . import preflight
from .forkserver import Forkserver
from .group_resources import GroupResources, closing, refused_by_the_system
from .handshake import Handshake
from .hang_watchdog import HangWatchdog
from .pending_requests import Requests
from .startup_watchdog import HELP

log = logging.getLogger(__name__)

STRAGGLER_S = 10               # how long ranks may wait for a failed one, outside of exchanges that they count
POLL_S = 0.05


def _alone(method):
    """Decorates a method of a group that one thread at a time may run: ranks must get commands in one order."""
    @functools.wraps(method)
    def locked(self, *args, **kwargs):
        with self._lock:
            return method(self, *args, **kwargs)
    return locked


class WorkerGroup:
    """A running worker group. Its methods may be called by several threads; one that waits keeps the others waiting.

    Construction blocks until every worker is ready. on_phase(Phase) shows what workers do meanwhile; check() is called
    often while waiting and may raise to give up, as ComfyUI's cancel does. num_fallbacks: how many ways to join the
    workers are known not to work (preflight.fallbacks); what the group came to is in the field of that name.
    machines: the multi_node.listener.Listener where other machines join; None: nothing listens, and all devices are
    here. forkserver: the host's Forkserver; None: one of its own, which ends with the group.
    Raises WorkerStartError when a worker cannot come up, with what is missing, or the workers' last lines of output.
    """

    def __init__(self, devices, on_phase=lambda phase: None, check=lambda: None, num_fallbacks=0, machines=None,
                 supervisor=None):
        if sys.platform == "win32":
            raise WorkerStartError(f"Start ComfyUI inside WSL2: workers run on Linux, and this is Windows. {HELP}")
        timeouts.check()
        self.devices = tuple(devices)
        self._supervisor = supervisor or Forkserver()
        self._owns_supervisor = supervisor is None
        self._machines, self._lock, self._requests = machines, threading.RLock(), Requests()
        self._watch = HangWatchdog(self._requests)
        # rank -> by name: sums of the measurements in its answers, what it last said of its memory, its Ready's kernels
        self.totals, self.memory, self.unusable_backends = {}, {}, {}
        self._resources = None
        # when it was last given or did work, other than reporting its memory
        self._used_s = time.monotonic()
        self._ended_by = ""                                    # what ended the group, where it was not the host
        self._close_at_exit = closing(self)
        self.warnings = []                                     # what a person should know of how it runs
        self.num_fallbacks = num_fallbacks                     # ways around links that failed
        started_s = time.monotonic()
        self._start(on_phase, check)
        for warning in self.warnings:
            log.warning("%s", warning)
            on_phase(Phase(0, warning))
        log.info("worker group ready: %s in %.1f s%s", ",".join(self.devices), time.monotonic() - started_s,
                 self.why_not_forked and f", not forked: {self.why_not_forked}")

    @property
    def is_working(self):
        """Does a rank owe an answer?"""
        return self._requests.are_unanswered

    @property
    def is_probing(self):
        return self._requests.are_cached_unanswered

    @property
    def idle_s(self):
        """Seconds since it had work to do; 0 while it has."""
        return 0.0 if self.is_working else time.monotonic() - self._used_s

    @property
    def alive(self):
        return self._resources is not None and self._resources.is_whole

    @property
    def segments(self):
        """The SegmentStore of its shared memory."""
        return self._resources.segments

    @property
    def why_not_forked(self):
        """Why its processes are programs of their own, where they are; ""."""
        return self._resources.why_not_forked

    def find_file(self, path, on_phase, check):
        """See that every other machine has the model file of this path, by its content.

        Raises CheckpointError where one has not, WorkerDiedError where one is lost.
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

    # --- ask, and wait ---

    @_alone
    def request(self, make_command, on_phase=lambda phase: None, check=lambda: None, segments=()):
        """Send make_command(request number) to every rank, wait for every answer; returns {rank: Done}.
        Raises as `wait`."""
        return self.wait([self.post(make_command, segments)], on_phase, check)[1]

    def ask_if_idle(self, make_command):
        """As `request`, where nothing else is under way; else None."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self.receive_pending()
            return None if self.is_working or not self.alive else self.request(make_command)
        finally:
            self._lock.release()

    @_alone
    def post(self, make_command, segments=(), answering=None, activity=""):
        """Send make_command(request number) to every rank and wait for nothing; returns the request number.

        `segments` belong to the command and are removed when every rank has answered it. answering: the ranks whose
        answers complete it for `wait`; None: all, (): nobody will wait. activity: "step 7 of 20", for a person.
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
        """Wait until one of the requests of these numbers is complete; returns (its number, {rank: Done}).

        Raises what a worker raised (an error of this project keeps its class; others become WorkerFailedError), or
        WorkerDiedError, also when the group has ended. When check() raises, the answers are aborted: workers finish
        the commands, but leave loading, decoding and encoding soon, and take the next; a probe can be waited for anew.
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
            # the complete one; all, when nobody will come back for them
            self._requests.claim(numbers)
            self._requests.remove_answered(self.segments)

    def receive_pending(self):
        """Take in answers that nobody waits for, as of a model that was dropped. Keeps nobody waiting."""
        if not self._requests.are_claimed or not self._lock.acquire(blocking=False):
            return
        try:
            for rank, channel in self._resources.channels.items():
                with suppress(ChannelClosedError):             # it is noticed by who needs the workers next
                    while channel.raw.poll():
                        self._take(rank, channel.receive(), lambda phase: None)
            self._end_if_failed()                              # before the failure is forgotten
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
        # also where answers are there: they may come of a broken exchange
        if not self._resources.channels:
            raise WorkerDiedError(f"The workers have ended{self._ended_by}. Queue the prompt again to start a new "
                                  f"group.")

    def _abort(self, numbers):
        for number in numbers:
            request = self._requests[number]
            for rank in request.unanswered if request.can_stop else ():
                with suppress(ChannelClosedError):             # it is noticed by who needs the workers next
                    self._resources.channels[rank].send(Abort(number))

    def _receive(self, on_phase):
        """Take in what workers have said, waiting a moment for it."""
        self._watch.listening_begins(self._resources.channels)
        ranks = {channel.raw: rank for rank, channel in self._resources.channels.items()}
        for raw in connection.wait(list(ranks), timeout=POLL_S):
            rank = ranks[raw]
            self._watch.record_sign(rank)
            try:
                self._take(rank, self._resources.channels[rank].receive(), on_phase)
                # all that is there: a failure may stand behind other answers
                while raw.poll():
                    self._take(rank, self._resources.channels[rank].receive(), on_phase)
            except ChannelClosedError:
                self._lost(rank)
        self._watch.listening_ended()

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
        """Start the workers, by the first way to join them that works."""
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
                # those here wait for it
                self.close(is_broken=self._resources is not None and not self._resources.has_all_machines)
                if isinstance(error, OSError) and not isinstance(error, XDiTError):
                    raise refused_by_the_system(error) from error
                raise
        raise WorkerStartError(f"{', '.join(self.devices)} cannot exchange tensors: {failed[-1]} "
                               f"{preflight.hint(ways)}{HELP}")

    def _try_to_start(self, off, variables, failed, on_phase, check):
        """Start, with something switched off by environment variables. failed: how the attempts before went."""
        self._resources = resources = GroupResources(self.devices)
        atexit.register(self._close_at_exit)
        resources.take_machines(self._machines, on_phase, check)
        self.warnings = [preflight.warning(self.devices, off, variables, failed)] if off else []
        self._greet(self._launch(variables, check), on_phase, check)

    def _launch(self, variables, check):
        """Start torchrun here and on other machines; returns the GroupStart whose workers come up."""
        self.warnings += self._resources.warnings()
        interface = self._machines.interface if self._resources.sessions else ""
        return self._resources.launch(self._supervisor, interface, variables, self._has_fallbacks, check)

    def _greet(self, group_start, on_phase, check):
        self.unusable_backends = Handshake(group_start, self._resources.channels, self._resources.workers, on_phase,
                                         check).run()

    # --- end ---

    @_alone
    def close(self, is_broken=False):
        """End the workers and remove every file of the group. May be called twice, and from atexit.

        is_broken: some wait for what will never come, so that they are ended at once.
        """
        atexit.unregister(self._close_at_exit)
        if self._resources is not None:
            self._resources.close(is_broken)
        if self._owns_supervisor:
            self._supervisor.close()

    def _end_if_failed(self):
        """End the group where a failed command, whoever waits for it, leaves ranks in an exchange without an end."""
        limit_s = min(STRAGGLER_S, timeouts.seconds("XDIT_SILENCE_TIMEOUT_S"))
        for request in self._requests:
            if not request.failed or not self._resources.channels:
                continue
            is_stuck = request.unanswered and all(self._watch.waits_s(rank) > limit_s for rank in request.unanswered)
            if is_stuck or request.ends_group:
                self._ended_by = request.why_it_ended
                self.close(is_broken=True)

    def _end_if_hung(self):
        """End the group where a rank is silent, or where all wait for each other."""
        limit_s = timeouts.seconds("XDIT_SILENCE_TIMEOUT_S")
        ranks, called = list(self._resources.channels), self._resources.exit_report.name_of
        found = self._watch.silent(ranks, limit_s) or self._watch.stuck(ranks, limit_s, called)
        if found is not None:
            self._give_up(*found)

    def _lost(self, rank, activity=""):
        """A worker's connection is gone: end the group. activity: what the worker did, beside unanswered requests."""
        self._give_up(*self._resources.lost(rank, lambda of: activity or self._watch.activity(of) or ""))

    def _give_up(self, rank, what):
        """End the group for what became of a rank."""
        exit_report = self._resources.exit_report
        lines = exit_report.last_lines(rank)
        self.close(is_broken=True)
        error = WorkerDiedError(f"Worker {exit_report.name_of(rank)} {what}. Queue the prompt again to start a new "
                                f"group. {HELP} {exit_report.where()}Its last lines:\n{lines or '(none)'}")
        exit_report.note(error)
        raise error
