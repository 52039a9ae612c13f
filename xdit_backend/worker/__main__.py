"""Entry point torchrun starts on each rank: python -m xdit_backend.worker FOLDER DEVICE,DEVICE,... STORE_PORT LOG_FOLDER"""

import gc
import logging
import os
import sys

from .output import take_over

if __name__ == "__main__":
    folder, devices, port, log_folder = sys.argv[1:]
    rank = int(os.environ["RANK"])
    log_file = os.path.join(log_folder, f"rank-{rank}.log")
    take_over(log_file)
    # diffusers does without what cannot be imported: a worker runs no text encoder, and transformers takes it a second to import.
    sys.modules["transformers"] = None
    # Takes seconds, and may fail. Collecting garbage meanwhile would be a fifth of them, and what is imported stays.
    gc.disable()
    from .serve import serve
    gc.freeze()
    gc.enable()
    logging.basicConfig(level=os.environ.get("XDIT_LOG", "WARNING").upper(),
                        format=f"%(asctime)s [rank {rank}] %(name)s: %(message)s")
    serve(folder, rank, devices.split(","), int(port), log_file)
