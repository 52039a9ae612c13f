"""Looks at something again and again while other code runs. Used by tests that ask for the most memory there was."""

import threading
from contextlib import contextmanager


@contextmanager
def looking(look, every_s):
    """Calls look() in a thread every so many seconds, and once more when the block has ended."""
    ended = threading.Event()

    def repeat():
        while not ended.wait(every_s):
            look()
        look()
    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
