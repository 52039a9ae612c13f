"""A model of published size on a real GPU, with random weights: what simulated_rank.py counts of one device, measured.
Used by bench card.
"""

import gc
import time

import torch

from ...checkpoints.tensor_sharding import held
from ...distributed.collectives import Traffic
from ...memory.copy_thread import CopyThread
from ...memory.staging import StagingBuffers
from ...protocol.specs import Layout
from ...worker.predictions import Predictions
from ...worker.timeline import Timeline
from .fake_cuda import CUDA
from .simulated_rank import Calls, HostMemory, load, outline, own_blocks

FIRST_STEPS = 2                            # which compile and choose kernels
SMALL = 0.02                               # standard deviation of a weight
SMALL_BYTES = 0x3f                         # of a packed weight: numbers below 2, whatever of 8 or 16 bits they are of


@torch.inference_mode()
def measure(checkpoint, spec, run, backend, num_steps):
    """(seconds of each step from its command to its prediction in host memory, the first FIRST_STEPS among them; bytes
    of weights on the GPU; peak of what is there beside them). Arguments are count's; backend: of torch.compile."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, packed = outline(checkpoint, spec)
    loaded = load(checkpoint, spec, model, packed, (own_blocks(model, checkpoint.family, spec, 0), 0),
                  lambda _: CopyThread(CUDA, StagingBuffers(CUDA)))
    fill(loaded, checkpoint.family, spec)
    weight_bytes, memory = torch.cuda.memory_allocated() - before, HostMemory()
    predictions = Predictions({spec.name: loaded}, 1, CUDA, StagingBuffers(CUDA), Timeline(CUDA),
                              map_segment=memory.map)
    calls, seconds = Calls(loaded, spec, Layout(), run, memory, backend), []
    for command in calls.conditionings():
        predictions.keep_conditioning(command, Traffic())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(FIRST_STEPS + num_steps):
        command, = calls.next_step()
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        predictions.predict(command, Traffic())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    peak_bytes = torch.cuda.max_memory_allocated() - before - weight_bytes
    return seconds, weight_bytes, peak_bytes


def fill(loaded, family, spec):
    """Give random values to all weights, which have none yet."""
    offloaded = loaded.transformer.offloaded
    if offloaded is not None:
        offloaded.drop()                                       # weights are their host copies now
    for _, weight, _ in held(loaded.transformer.model, family, spec):
        values = torch.empty_like(weight.data, device=CUDA)    # a processor would take minutes
        if weight.dtype.itemsize > 1:
            values.normal_(0, SMALL)
        else:
            values.view(torch.uint8).random_(0, SMALL_BYTES + 1)
        weight.data.copy_(values)
    if offloaded is not None:
        offloaded.restore()
