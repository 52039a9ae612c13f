"""Handshake with starting workers: waits until all of them are ready, or until the cause of a failure is known."""

import math
import multiprocessing.connection as connection
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from .. import system
from ..protocol import timeouts
from ..protocol.errors import ChannelClosedError, LinkError, WorkerStartError
from ..protocol.messages import JOINING, STARTING, TRYING_LINKS, Phase, Ready, StartFailed
from .exit_report import ExitReport
from .startup_watchdog import HELP, TORCHRUN, StartMonitor, describe_exit
from .supervisor import WorkerProcesses

# for workers that make progress, however slowly; others are noticed sooner
START_TIMEOUT_S = 1800
# from the first worker that cannot start until all causes are collected
FAILURES_S = 8
LINK_TIMEOUT_S = 60                                # of a short transfer, once all ranks have begun it
JOIN_TIMEOUT_S = 600                               # of the rendezvous, for which NCCL loads a gigabyte of libraries
# after a link timeout, a worker that has been silent for this long is to blame instead of its links
QUIET_S = 20
POLL_S = 0.05


@dataclass
class GroupStart:
    """Processes and connections of a starting group. own: ranks of this machine."""

    devices: tuple
    own: list
    processes: WorkerProcesses
    channel_listener: object                       # where workers of this machine connect
    at_once: list                                  # Channels to ranks of other machines, already connected
    sessions: dict                                 # machine name -> its Session
    exit_report: ExitReport
    has_fallbacks: bool                            # whether another transport can be tried


class Handshake:
    """Waits for the workers of a GroupStart; enters each ready one into `channels` and its process into `workers`."""

    def __init__(self, group_start, channels, workers, on_phase, check):
        self._group_start, self._channels, self._workers, self._on_phase, self._check = (
            group_start, channels, workers, on_phase, check)
        self._unusable_backends = {}                           # rank -> Ready.unusable_backends
        self._connected = [*group_start.at_once]
        self._begun = {JOINING: {}, TRYING_LINKS: {}}          # phase -> {rank: when it began}
        self._failures, self._silent = [], []                  # StartFailed messages; channels that send no more
        self._failed_s = math.inf                              # time of the first failure
        self._signs = StartMonitor(group_start.processes.pid, len(group_start.own), group_start.processes.workers)
        self._deadline_s = time.monotonic() + START_TIMEOUT_S

    def run(self):
        """Wait until every worker is ready; returns {rank: Ready.unusable_backends}.

        Raises WorkerStartError, or LinkError if another transport may help.
        """
        devices = self._group_start.devices
        while len(self._channels) < len(devices):
            self._check()
            self._check_machines()
            self._check_time()
            has_ended = self._group_start.processes.has_ended  # before reading what workers sent until then
            if len(self._connected) < len(devices):
                channel = self._group_start.channel_listener.accept(POLL_S)
                if channel is not None:
                    self._connected.append(channel)
            self._listen()
            if self._silent or has_ended:
                self._check_failed(has_ended)
        return self._unusable_backends

    def _check_machines(self):
        exit_report = self._group_start.exit_report
        for name, session in self._group_start.sessions.items():
            if not session.is_open:
                rank = exit_report.rank_of(name)
                raise WorkerStartError(f"Worker {exit_report.name_of(rank)}: {name} was lost while the workers "
                                       f"started: {session.ended}\n{exit_report.last_lines(rank)}".rstrip())

    def _check_time(self):
        devices, exit_report = self._group_start.devices, self._group_start.exit_report
        late = [rank for rank in range(len(devices)) if rank not in self._channels]
        late_names = ", ".join(map(exit_report.name_of, late))
        if time.monotonic() > self._deadline_s:
            raise WorkerStartError(f"{late_names}: not ready after {START_TIMEOUT_S} s. {HELP} {exit_report.where()}"
                                   f"Their last lines:\n{exit_report.last_lines()}")
        over = [activity for activity, limit_s in ((JOINING, JOIN_TIMEOUT_S), (TRYING_LINKS, LINK_TIMEOUT_S))
                if len(self._begun[activity]) == len(devices)
                and time.monotonic() - max(self._begun[activity].values()) > limit_s]
        has_tried = TRYING_LINKS in over or (bool(over) and not self._begun[TRYING_LINKS])
        silence_s = timeouts.seconds("XDIT_SILENCE_TIMEOUT_S")
        found = self._signs.silent(late, min(QUIET_S, silence_s) if has_tried else silence_s)
        # workers that reported a failure are silent because they wait to be ended
        if found is not None and not self._silent:
            rank, what = found
            who = "torchrun, which starts the workers," if rank == TORCHRUN else f"Worker {exit_report.name_of(rank)}"
            lines = exit_report.last_lines(None if rank == TORCHRUN else rank)
            raise WorkerStartError(f"{who} {what}. Queue the prompt again to start a new group. {HELP} "
                                   f"{exit_report.where()}Its last lines:\n{lines or '(none)'}")
        if has_tried:
            what = (f"a transfer between them was not complete after {LINK_TIMEOUT_S}" if self._begun[TRYING_LINKS] else
                    f"they had not joined after {JOIN_TIMEOUT_S}")
            raise LinkError(f"{what} s on {late_names}.")

    def _listen(self):
        listening = [channel.raw for channel in self._connected if channel not in self._silent]
        for raw in connection.wait(listening, timeout=POLL_S) if listening else []:
            channel = next(channel for channel in self._connected if channel.raw is raw)
            try:
                self._take(channel, channel.receive())
            except ChannelClosedError:
                self._silent.append(channel)

    def _take(self, channel, message):
        self._signs.record_sign(message.rank, getattr(message, "text", None))
        if isinstance(message, StartFailed):
            self._silent.append(channel)
            self._failures.append(message)
        if isinstance(message, Phase) and message.text in self._begun:
            self._begun[message.text][message.rank] = time.monotonic()
            self._on_phase(message)
        if isinstance(message, Ready):
            self._channels[message.rank] = channel
            self._unusable_backends[message.rank] = message.unusable_backends
            if message.rank in self._group_start.own:          # another machine's pid would be some other process here
                with suppress(psutil.NoSuchProcess):
                    self._workers[message.rank] = psutil.Process(message.pid)
            self._on_phase(Phase(message.rank, STARTING, len(self._channels), len(self._group_start.devices)))

    def _check_failed(self, has_ended):
        """Raise the cause of a failed start as soon as it is known. has_ended: torchrun has ended."""
        self._failed_s = min(self._failed_s, time.monotonic())
        ready = self._channels.values()
        others = [channel for channel in self._connected if channel not in self._silent and channel not in ready]
        all_connected = len(self._connected) == len(self._group_start.devices)
        all_failed = len(self._silent) == len(self._failures) or self._group_start.exit_report.first_ended()
        is_known = has_ended or (all_connected and all_failed)
        is_over = time.monotonic() - self._failed_s > FAILURES_S
        if (is_known and not others) or any(not message.by_links for message in self._failures) or is_over:
            raise self._why()

    def _why(self):
        """Return the exception for workers that reported a failure, or ended without a report."""
        devices, exit_report = self._group_start.devices, self._group_start.exit_report
        rank, code = exit_report.first_ended() or (None, None)
        cause = cause_of(self._failures, code)
        if cause is not None:
            return (LinkError if cause.by_links else WorkerStartError)(f"{cause.message}.".replace("..", "."))
        lines = exit_report.last_lines()
        if len(self._begun[JOINING]) == len(devices) and self._group_start.has_fallbacks:
            return LinkError(f"a worker ended in a transfer between them, with these last lines of output:\n{lines}\n")
        which = f"A worker for {', '.join(devices)}" if rank is None else f"Worker {exit_report.name_of(rank)}"
        return WorkerStartError(f"{which} ended while starting{describe_exit(code)}. {HELP} {exit_report.where()}"
                                f"Its last lines:\n{lines}")


def cause_of(failures, exit_code):
    """Return the StartFailed that caused the failed start; None if the exit of the first ended worker did.

    A rank that reports a failure stays alive until it is ended, so it does not make other ranks exit. A link failure
    may be the result of another rank's exit, except after abort(): gloo aborts a process when a peer breaks off a
    transfer. exit_code: of the worker that ended first; None: none ended, or unknown.
    """
    own = [message for message in failures if not message.by_links]
    by_links = failures if exit_code in (None, system.ABORTED) else []
    return min(own or by_links, key=lambda message: message.rank, default=None)
