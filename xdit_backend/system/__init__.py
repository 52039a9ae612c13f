"""Everything that differs between operating systems, behind one interface: posix.py and windows.py define the same
names, which posix.py documents.

No other package of this project queries which system it runs on.
"""

import sys

if sys.platform == "win32":
    from .windows import *  # noqa: F403
else:
    from .posix import *  # noqa: F403
