"""Entry point that torchrun starts on each rank:

    python -m xdit_backend.worker FOLDER DEVICE,DEVICE,... FIRST_RANK LOG_FOLDER
"""

import sys

from .bootstrap import run

if __name__ == "__main__":
    run(*sys.argv[1:])
