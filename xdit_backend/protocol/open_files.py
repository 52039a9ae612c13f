"""Error for exhausted file descriptors."""

import errno

from .errors import XDiTError


def out_of_files(error, kind=XDiTError):
    """Return an error of class `kind` if this process, or the system, has reached its limit of open files; else
    None."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return kind(f"Close other programs, or allow more open files in the shell that starts ComfyUI (ulimit -n 65536), "
                f"and restart ComfyUI: no more files can be opened ({error.strerror}).")
