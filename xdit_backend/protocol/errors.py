"""Every failure this project raises on purpose. The nodes show the message; nothing is answered with another result."""


class XDiTError(Exception):
    """Base of all errors of this project.

    ComfyUI's page shows a class with its module, which is a path of folders there: these are called xDiT.ConfigError
    and so on, and are pickled by their names here.
    """

    __module__ = "xDiT"

    def __init_subclass__(cls):
        cls.__module__ = "xDiT"

    def __reduce__(self):
        return _again, (type(self).__name__, self.args)


def _again(name, args):
    return globals()[name](*args)


class ConfigError(XDiTError, ValueError):
    """A person chose something impossible; raised before anything is launched or moved where that can be known."""


class CheckpointError(XDiTError, ValueError):
    """A file is not a model that can be loaded: broken, of another kind, or of a family that is not supported."""


class UnsupportedError(XDiTError, ValueError):
    """The workflow asks for something the workers cannot honour. It is refused, never dropped."""


class WorkerStartError(XDiTError, RuntimeError):
    """The worker group did not come up."""


class LinkError(XDiTError, RuntimeError):
    """The devices of a group cannot exchange tensors as they were asked to."""


class WorkerDiedError(XDiTError, RuntimeError):
    """A worker ended while the host needed it."""


class CopyError(XDiTError, RuntimeError):
    """Weights could not be copied from host memory to a device. The group ends: the device's context may be lost."""


class WorkerFailedError(XDiTError, RuntimeError):
    """A worker raised while it carried out a command. The group goes on, unless other ranks waited for that worker."""


class WorkerOutOfMemoryError(WorkerFailedError):
    """Memory ran out on a worker. numbers: bytes by name, see worker.engine.Engine.shortage. rank, device: where.
    command: the name of the message that it was at. facts: the error's text without what would fit."""

    def __init__(self, text, rank=0, device="", numbers=None, command="", facts=""):
        super().__init__(text)
        self.rank, self.device, self.numbers = rank, device, numbers or {}
        self.command, self.facts = command, facts


class ChannelClosedError(XDiTError, ConnectionError):
    """The other end of a connection is gone."""
