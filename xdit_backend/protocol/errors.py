"""Exceptions that this project raises on purpose. The nodes show their messages to the user."""


class XDiTError(Exception):
    """Base class of this project's exceptions.

    ComfyUI's page shows an exception class with its module, which is a folder path for a custom node. These classes
    therefore appear as xDiT.ConfigError and so on, and are pickled by class name.
    """

    __module__ = "xDiT"

    def __init_subclass__(cls):
        cls.__module__ = "xDiT"

    def __reduce__(self):
        return _again, (type(self).__name__, self.args)


def _again(name, args):
    return globals()[name](*args)


class ConfigError(XDiTError, ValueError):
    """Impossible settings; raised before anything is launched or moved where that can be known."""


class CheckpointError(XDiTError, ValueError):
    """A file that cannot be loaded as a model: broken, of another kind, or of an unsupported family."""


class UnsupportedError(XDiTError, ValueError):
    """The workflow needs something that the workers do not support. It is rejected, never ignored."""


class WorkerStartError(XDiTError, RuntimeError):
    """The worker group could not be started."""


class LinkError(XDiTError, RuntimeError):
    """The devices of a group cannot exchange tensors with the configured transport."""


class WorkerDiedError(XDiTError, RuntimeError):
    """A worker exited while the host needed it."""


class CopyError(XDiTError, RuntimeError):
    """Weights could not be copied from system RAM to a device. The group is closed, as the CUDA context may be lost."""


class WorkerFailedError(XDiTError, RuntimeError):
    """A worker raised during a command. The group keeps running, unless other ranks wait for that worker."""


class WorkerOutOfMemoryError(WorkerFailedError):
    """A worker ran out of memory.

    rank, device: of the worker. numbers: bytes by name, see worker.engine.Engine.out_of_memory. command: name of the
    message that it was executing. facts: the error's text without the suggestion.
    """

    def __init__(self, text, rank=0, device="", numbers=None, command="", facts=""):
        super().__init__(text)
        self.rank, self.device, self.numbers = rank, device, numbers or {}
        self.command, self.facts = command, facts


class ChannelClosedError(XDiTError, ConnectionError):
    """The other end closed the connection, or its process exited."""
