"""Time and memory of a published model with random weights on a real GPU, to compare with the dry run of one device."""

import gc
import time

import torch

from ...checkpoints.weight_table import weight_table
from ...distributed.collectives import Traffic
from ...memory.copy_thread import CopyThread
from ...memory.staging import StagingBuffers
from ...protocol.specs import Layout
from ...worker.predictions import Predictions
from ...worker.timeline import Timeline
from .fake_cuda import CUDA
from .simulated_rank import Calls, HostMemory, load, outline, own_blocks

FIRST_STEPS = 2                            # which compile and autotune
SMALL = 0.02                               # standard deviation of a weight
SMALL_BYTES = 0x3f                         # of a packed weight: values below 2 in any 8-bit or 16-bit type


@torch.inference_mode()
def measure(checkpoint, spec, run, backend, num_steps):
    """(seconds of each step from its command to its prediction in system RAM, starting with FIRST_STEPS warm-up steps;
    bytes of weights on the GPU; peak bytes in addition to weights). Arguments are those of count; backend: of
    torch.compile."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, packed = outline(checkpoint, spec)
    table = weight_table(model, checkpoint.family, spec, checkpoint, packed)
    loaded = load(checkpoint, table, model, packed, (own_blocks(table, 0), 0),
                  lambda _: CopyThread(CUDA, StagingBuffers(CUDA)))
    fill(loaded)
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


def fill(loaded):
    """Set all weights, which are uninitialised, to random values."""
    offloaded = loaded.transformer.offloaded
    if offloaded is not None:
        offloaded.drop()                                       # weights are their host copies from here on
    model = loaded.transformer.model
    for weight in (*model.parameters(), *model.buffers()):
        values = torch.empty_like(weight.data, device=CUDA)    # on the CPU this would take minutes
        if weight.dtype.itemsize > 1:
            values.normal_(0, SMALL)
        else:
            values.view(torch.uint8).random_(0, SMALL_BYTES + 1)
        weight.data.copy_(values)
    if offloaded is not None:
        offloaded.restore()
