"""Selection of the Supervisor of this machine's workers."""

from .. import system
from .forkserver import Forkserver
from .programs import ProgramSupervisor


def local_supervisor():
    """A Forkserver, which forks torchrun, or a ProgramSupervisor where torchrun does not run."""
    return Forkserver() if system.HAS_TORCHRUN else ProgramSupervisor()
