"""Checkpoint cache of ComfyUI's process: each file or folder is read once, until it changes on disk."""

import threading
from collections import OrderedDict

from ....xdit_backend.checkpoints.checkpoint import open_checkpoint, state_of
from ....xdit_backend.checkpoints.diffusers_folder import files_of

MAX_OPEN = 4                               # headers take megabytes; a MODEL holds its own Checkpoint in any case


class Checkpoints:
    """Most recently used checkpoints by path. Thread-safe."""

    def __init__(self):
        self._open = OrderedDict()                             # path -> (fingerprint, Checkpoint)
        self._lock = threading.Lock()

    def open(self, path):
        """Return the Checkpoint of a file or folder. Raises the errors of open_checkpoint."""
        path = str(path)
        try:
            state = fingerprint(path)
        except OSError:
            state = None                                       # open_checkpoint raises the error
        with self._lock:
            known, checkpoint = self._open.pop(path, (None, None))
            if state is None or known != state:
                checkpoint = open_checkpoint(path)
            self._open[path] = state, checkpoint
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return checkpoint


def fingerprint(path):
    """Return a value that changes when a file, or a file of a diffusers folder, is replaced."""
    files = files_of(path)
    return state_of(files)


CHECKPOINTS = Checkpoints()
