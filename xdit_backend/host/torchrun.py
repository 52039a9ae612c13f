"""torchrun, which ends when the host does: its standard input is a pipe that the host alone holds. Started by the launcher.

Left to itself, torchrun waits for minutes for the store of a host that was killed. Workers notice by their own connection; one
that is stopped, or hangs, does not.
"""

import os
import threading
import time

import psutil

WORKERS_S = 2.0                # which workers have to notice, and to remove the files of the group


def main():
    threading.Thread(target=_end_with_the_host, daemon=True).start()
    from torch.distributed.run import main as torchrun  # takes seconds, in which the host may end
    torchrun()


def _end_with_the_host():
    while os.read(0, 1):                                       # not sys.stdin, whose lock a process that ends would wait for
        pass
    time.sleep(WORKERS_S)
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(1)


if __name__ == "__main__":
    main()
