"""Has workers count what lives in them when they are sent SIGUSR1, and print it as JSON.
On their path by the `client` of these tests."""

import os
import signal


def count(signum, frame):
    import ctypes
    import gc
    import json
    import sys

    import torch

    class Blocks(ctypes.Structure):                        # glibc's struct mallinfo2
        _fields_ = [(name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]
    gc.collect()
    objects, libc = gc.get_objects(), ctypes.CDLL(None)
    tensors = [one for one in objects if isinstance(one, torch.Tensor)]
    libc.mallinfo2.restype = Blocks
    blocks = libc.mallinfo2()
    print("counted " + json.dumps({
        "tensors": len(tensors), "tensor_bytes": sum(one.nbytes for one in tensors),
        "own": sum(str(type(one).__module__).startswith("xdit_backend") for one in objects),
        "allocated_bytes": blocks.uordblks + blocks.hblkhd}), file=sys.stderr)



signal.signal(signal.SIGUSR1, count)

if os.environ.get("TEST_DEVICE"):
    from tests.support.renamed_device import install
    install()
