"""Exit reports: output, exit codes and log folder of ended workers, for error messages."""

from ..protocol.devices import machine_of
from . import logs
from .torchrun import read_text


class ExitReport:
    """Exit report of one group. sessions: {machine name: its Session}. folder: has its workers' output."""

    def __init__(self, devices, sessions, folder):
        self._devices, self._sessions, self.folder = devices, sessions, folder
        self.processes = None                                  # WorkerProcesses, once they are started

    def note(self, error):
        """Log how the group failed."""
        logs.note(self.folder, error)

    def name_of(self, rank):
        return f"rank {rank} ({self._devices[rank]})"

    def session_of(self, rank):
        """Session of this rank's machine; None: it is this machine."""
        return self._sessions.get(machine_of(self._devices[rank]))

    def first_ended(self):
        """(rank, exit code) of the worker that failed first, as reported by its supervisor; None if unknown."""
        return None if self.processes is None else self.processes.first_failure()

    def rank_of(self, machine):
        """Rank that ended first on another machine, as reported by that machine; else its first rank."""
        ranks = [rank for rank, device in enumerate(self._devices) if machine_of(device) == machine]
        return next((rank for rank in ranks if self._sessions[machine].last_lines(rank)), ranks[0])

    def where(self):
        """Sentence that names the log folder, with a trailing space; "" if the folder is temporary."""
        is_logged = self.folder.parent == logs.base_folder()
        return f"All output of the workers is in {self.folder}. " if is_logged else ""

    def last_lines(self, rank=None, num_lines=15):
        """Last lines of output of one worker, or of all (None)."""
        session = None if rank is None else self.session_of(rank)
        if session is not None:
            return session.last_lines(rank)
        ranks = range(len(self._devices)) if rank is None else [rank]
        texts = [read_text(self.folder / f"rank-{rank}.log") for rank in ranks]
        if not any(texts):
            texts = [read_text(self.folder / logs.TORCHRUN)]
        lines = ["\n".join(text.splitlines()[-num_lines:]) for text in texts if text.strip()]
        if logs.is_full(self.folder):
            lines.append(f"(The last lines are missing: the disk of {self.folder} is full.)")
        return "\n".join(lines)
