"""Entry point torchrun starts on each rank: python -m xdit_backend.worker FOLDER DEVICE,DEVICE,... STORE_PORT"""

import logging
import os
import sys

from .serve import serve

if __name__ == "__main__":
    folder, devices = sys.argv[1], sys.argv[2].split(",")
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=os.environ.get("XDIT_LOG", "WARNING").upper(), format=f"[rank {rank}] %(name)s: %(message)s")
    serve(folder, rank, devices, int(sys.argv[3]))
