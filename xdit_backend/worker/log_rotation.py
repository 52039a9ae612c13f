"""A worker's output, whoever prints it, goes to a file of its own that does not grow without bound.
Used by __main__ and serve."""

import os
from contextlib import suppress

MAX_BYTES = 2 ** 22                        # of a file; as many are kept of what came before


def take_over(path):
    """From now on what this process prints is written to the end of this file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def keep_small(path):
    """Begin the file anew where it has grown large; what was in it is beside it, as NAME.before.
    And where it was removed."""
    # its folder was removed, or its disk is full: nothing else ends for that
    with suppress(OSError):
        if not os.path.exists(path):
            take_over(path)
        elif os.path.getsize(path) > MAX_BYTES:
            os.replace(path, f"{path}.before")
            take_over(path)
