"""The checkpoints that ComfyUI's process has open: each file or folder is read once, until it changes on disk.
Asked by proxy_model.py, and by the page before it converts a workflow."""

import threading
from collections import OrderedDict

from ....xdit_backend.checkpoints.checkpoint import open_checkpoint, state_of
from ....xdit_backend.checkpoints.diffusers_folder import files_of

MAX_OPEN = 4                               # headers take megabytes; a MODEL keeps its own Checkpoint in any case


class Checkpoints:
    """Checkpoints by path, those used last. Several threads may ask."""

    def __init__(self):
        self._open = OrderedDict()                             # path -> (state of its files, Checkpoint)
        self._lock = threading.Lock()

    def open(self, path):
        """The Checkpoint of a file or folder. Raises as open_checkpoint."""
        path = str(path)
        try:
            state = fingerprint(path)
        except OSError:
            state = None                                       # open_checkpoint says what is wrong
        with self._lock:
            known, checkpoint = self._open.pop(path, (None, None))
            if state is None or known != state:
                checkpoint = open_checkpoint(path)
            self._open[path] = state, checkpoint
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return checkpoint


def fingerprint(path):
    """What changes where other files take the place of a file's, or of a diffusers folder's."""
    files = files_of(path)
    return state_of(files)


CHECKPOINTS = Checkpoints()
