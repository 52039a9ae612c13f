"""What is known of workers that have ended, for error messages: output, exit codes, log folders. Used by the
launcher."""

from ..protocol.devices import machine_of
from . import logs
from .torchrun import read_text


class ExitReport:
    """Of one group. sessions: {name of another machine: its Session}. folder: with its workers' output."""

    def __init__(self, devices, sessions, folder):
        self._devices, self._sessions, self.folder = devices, sessions, folder
        self.processes = None                                  # WorkerProcesses, once they are started

    def note(self, error):
        """Write down how the group failed."""
        logs.note(self.folder, error)

    def name_of(self, rank):
        return f"rank {rank} ({self._devices[rank]})"

    def session_of(self, rank):
        """The Session of the machine where this rank is; None: it is on this one."""
        return self._sessions.get(machine_of(self._devices[rank]))

    def first_ended(self):
        """(rank, exit code) of the first worker that failed, as its supervisor reports it. None: nothing is known."""
        return None if self.processes is None else self.processes.first_failure()

    def rank_of(self, machine):
        """The rank on another machine that ended first, as that machine reported, or its first one."""
        ranks = [rank for rank, device in enumerate(self._devices) if machine_of(device) == machine]
        return next((rank for rank in ranks if self._sessions[machine].last_lines(rank)), ranks[0])

    def where(self):
        """Where all output is, a sentence with a space after it; "" where it is not kept."""
        is_cached = self.folder.parent == logs.place()
        return f"All output of the workers is in {self.folder}. " if is_cached else ""

    def last_lines(self, rank=None, num_lines=15):
        """The end of what the workers, or one of them, printed."""
        session = None if rank is None else self.session_of(rank)
        if session is not None:
            return session.last_lines(rank)
        ranks = range(len(self._devices)) if rank is None else [rank]
        texts = [read_text(self.folder / f"rank-{rank}.log") for rank in ranks]
        if not any(texts):
            texts = [read_text(self.folder / logs.TORCHRUN)]
        lines = ["\n".join(text.splitlines()[-num_lines:]) for text in texts if text.strip()]
        if logs.is_full(self.folder):
            lines.append(f"(What came last could not be written: the disk of {self.folder} is full.)")
        return "\n".join(lines)
