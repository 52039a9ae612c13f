"""Redirection of a worker's output into a log file of bounded size."""

import os
from contextlib import suppress

from .. import system

MAX_BYTES = 2 ** 22                        # of a file, and of the rotated one


def take_over(path):
    """Redirect stdout and stderr of this process to the end of this file."""
    file = system.open_output(path)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def keep_small(path):
    """Rotate the file to NAME.before if it is too large, and reopen it if it was removed."""
    # if its folder was removed, or its disk is full, the worker continues without a log
    with suppress(OSError):
        if not os.path.exists(path):
            take_over(path)
        elif os.path.getsize(path) > MAX_BYTES:
            if system.rotate(path, f"{path}.before"):
                take_over(path)
