"""The error for a system that opens no more files."""

import errno

from .errors import XDiTError


def out_of_files(error, kind=XDiTError):
    """An error of this kind where the OSError says that this process, or the system, has as many open files as it may
    have; else None."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return kind(f"Close other programs, or allow more open files in the shell that starts ComfyUI (ulimit -n 65536), "
                f"and restart ComfyUI: no more files can be opened ({error.strerror}).")
