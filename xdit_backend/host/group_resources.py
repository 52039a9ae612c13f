"""Processes, connections and files of a worker group: opened when it starts, closed when it ends.

On one machine the group has a socket file and torch's FileStore in a private folder (0700), and opens no port. Other
machines have joined over their own connections (multi_node/); a session represents the ranks of each.
"""

import os
import time
import weakref
from contextlib import suppress

import psutil

from ..protocol import timeouts
from ..protocol.channel import STORE_FILE, ChannelListener
from ..protocol.devices import machine_of, machines_of
from ..protocol.errors import ChannelClosedError, WorkerStartError
from ..protocol.messages import Phase, Stop
from ..protocol.open_files import out_of_files
from ..protocol.shared_memory import SegmentStore, folders_of
from . import logs, preflight, torchrun
from .exit_report import ExitReport
from .handshake import GroupStart
from .startup_watchdog import HELP, describe_exit
from .supervisor import LocalRanks


class GroupResources:
    """One start of a group on these devices."""

    def __init__(self, devices):
        self.devices = devices
        self.channels, self.workers = {}, {}                   # rank -> its Channel, its process; filled by Handshake
        self.sessions = {}                                     # machine name -> its Session
        self.processes = self.channel_listener = None          # WorkerProcesses, ChannelListener
        self.why_not_forked = ""                               # of WorkerProcesses
        self.segments = SegmentStore()
        self._finalizer = weakref.finalize(self, self.segments.close)
        folder = logs.make(self.segments.folder.name, self.segments.overflow_folder / "logs")
        self.exit_report = ExitReport(devices, self.sessions, folder)

    @property
    def is_complete(self):
        """Whether all workers are connected and none is known to have ended."""
        has_all = len(self.channels) == len(self.devices) and self.has_all_machines
        return self.processes is not None and not self.processes.has_ended and has_all

    @property
    def has_all_machines(self):
        return all(session.is_open for session in self.sessions.values())

    def take_machines(self, machines, on_phase, check):
        """Open a session with each other machine. machines: the Listener where they join; None: there is none."""
        for name in machines_of(self.devices):
            if machines is None:
                raise WorkerStartError(f"Leave {name} out of the devices: only ComfyUI's nodes can use devices of "
                                       f"other machines.")
            self.sessions[name] = machines.take(name, lambda text: on_phase(Phase(0, text)), check)

    def launch(self, supervisor, interface, variables, has_fallbacks, check):
        """Start the workers on all machines; returns their GroupStart.

        interface: network interface to the other machines; "": there are none.
        """
        own = [rank for rank, device in enumerate(self.devices) if not machine_of(device)]
        silence_s = timeouts.seconds("XDIT_SILENCE_TIMEOUT_S")
        self.channel_listener = ChannelListener(self.segments.folder, silence_s)
        ranks = LocalRanks(self.devices, own[0], len(own), self.segments.folder, self.segments.overflow_folder,
                           self.exit_report.folder)
        environment = torchrun.environment_of(self.devices, len(own), interface) | variables
        self.processes = self.exit_report.processes = supervisor.start(ranks, environment, check)
        self.why_not_forked = self.processes.why_not_forked
        at_once = []
        for session in self.sessions.values():
            at_once += session.start(self.devices, self.segments.folder / STORE_FILE, variables).values()
        return GroupStart(self.devices, own, self.processes, self.channel_listener, at_once, self.sessions,
                          self.exit_report, has_fallbacks)

    def warnings(self):
        """Run the preflight check of this machine (preflight.check); returns its warnings."""
        own = [device for device in self.devices if not machine_of(device)]
        return preflight.check(own, (self.segments.folder, self.segments.overflow_folder))

    def close(self, is_broken=False):
        """End the workers and remove all files. is_broken: workers are blocked for good, so kill them at once."""
        for channel in self.channels.values():
            with suppress(ChannelClosedError):
                channel.send(Stop())
        if self.processes is not None:
            timeout_s = 3 if len(self.channels) == len(self.devices) else 0
            self.processes.end(self.workers.values(), None if is_broken else timeout_s)
        for connection in (*self.channels.values(), *self.sessions.values(),
                           *([self.channel_listener] if self.channel_listener else [])):
            connection.close()
        for entries in (self.channels, self.workers, self.sessions):
            entries.clear()
        self.processes = self.channel_listener = None
        self._finalizer()

    def find_ended(self):
        """Rank of a worker of this machine whose process has ended; None: all run.

        Its connection may still be open: a process that the worker has forked has a copy of its socket.
        """
        failure = self.exit_report.first_ended()
        if failure is not None:
            return failure[0]
        return next((rank for rank, worker in self.workers.items() if not _is_running(worker)), None)

    def lost(self, rank, activity):
        """Explain a lost connection to a worker; returns (rank, predicate of a sentence about it).

        activity: (rank) -> its current work, as part of the sentence.
        """
        session = self.exit_report.session_of(rank)
        if session is not None:
            name, ended = session.name, session.ended or "it closed the connection"
            ranks = ", ".join(str(other) for other, device in enumerate(self.devices) if machine_of(device) == name)
            return self.exit_report.rank_of(name), (f"was lost with its machine, {name} (all of rank {ranks})"
                                               f"{activity(rank)}: {ended.rstrip('. ')}. {name} joins again by itself "
                                               f"when it can")
        worker = self.workers.get(rank)
        # torchrun notices within a tenth of a second, then ends the others
        for _ in range(50):
            if self.processes is None or self.processes.has_ended:
                break
            time.sleep(0.1)
        else:
            if worker is not None and _is_running(worker):
                return rank, f"was stopped, or hung, in the middle of a message{activity(rank)}, and is ended"
        # torchrun has ended the other workers, whose connections may have closed earlier than the failed one's
        rank, code = self.exit_report.first_ended() or (rank, None)
        return rank, f"died{describe_exit(code)}{activity(rank)}"


def _is_running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def refused_by_the_system(error):
    """WorkerStartError for an OSError during the start."""
    if (out := out_of_files(error, WorkerStartError)) is not None:
        return out
    folders = " and ".join(dict.fromkeys(str(folder.parent) for folder in folders_of("of a group")))
    return WorkerStartError(f"Make sure that this user can write to {folders}, that there is free space, and that the "
                            f"paths are short: the workers cannot be started ({error}). {HELP}")


def closing(group):
    """Exit handler that closes a group in its host process but not in forked ones; holds only a weak reference."""
    reference, host = weakref.ref(group), os.getpid()

    def close_group():
        group = reference()
        if group is not None and os.getpid() == host:
            group.close()
    return close_group
