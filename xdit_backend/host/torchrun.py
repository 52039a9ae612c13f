"""torchrun, which ends when the host does: its standard input is a pipe of the host's, whose child it is. Started by the launcher.

Its first argument names a file, for what it says of workers that fail: in memory, since the disk that its output goes to may be full.

Left to itself, torchrun waits for minutes for the store of a host that was killed. Workers notice by their own connection; one
that is stopped, or hangs, does not, nor does any while a process lives that the host has forked, which holds the host's end of all.
"""

import logging
import os
import select
import sys
import threading
import time

import psutil

LOOK_S = 0.5
WORKERS_S = 2.0                # which workers have to notice, and to remove the files of the group


def main():
    threading.Thread(target=end_with_the_host, args=(os.getppid(),), daemon=True).start()
    logging.getLogger("torch.distributed.elastic").addHandler(logging.FileHandler(sys.argv.pop(1)))
    from torch.distributed.run import main as torchrun  # takes seconds, in which the host may end
    torchrun()


def end_with_the_host(host):
    """host: its process number, of whom this is a child."""
    while os.getppid() == host:
        # not sys.stdin, whose lock a process that ends would wait for
        if select.select([0], [], [], LOOK_S)[0] and not os.read(0, 1):
            break
    time.sleep(WORKERS_S)
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(1)


if __name__ == "__main__":
    main()
