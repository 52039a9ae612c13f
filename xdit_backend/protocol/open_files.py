"""Words for an error of the system that says that no more files can be opened."""

import errno

HOW = ("Close other programs, or allow more open files in the shell that starts ComfyUI (ulimit -n 65536), and restart "
       "it: no more files can be opened")


def is_out_of_files(error):
    """Has this process, or the system, as many open files as it may have?"""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
