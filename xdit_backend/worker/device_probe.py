"""Device probe: measurements of a rank's device and links, in a few seconds, as input of the cost model.

All ranks run it at the same time in the same order, so that they share memory, processors and buses as in a run.
"""

import functools
import importlib
import itertools
import logging
import math
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..attention.backends import BACKENDS, BackendUse, attend, capability_of, run_backend, unusable
from ..checkpoints.quantisation import kitchen_layers
from ..checkpoints.quantisation.layer_formats import FORMATS, ROTATING, Layer
from ..distributed.collectives import RingExchange, all_gather, all_reduce, all_to_all
from ..distributed.mesh import make_group
from ..memory.copy_thread import CopyThread
from ..memory.staging import StagingBuffers
from ..protocol.specs import OPERATOR_HEADS, OPERATOR_KEYS, OPERATORS, SDPA
from ..system import accelerator

log = logging.getLogger(__name__)

SMALL_BYTES, LARGE_BYTES = 2 ** 16, 2 ** 24
HOST_BYTES = 2 ** 28           # larger than any processor cache
ACROSS_BYTES = 2 ** 20         # large message between machines: a slow network takes a second for it
# (width, rows of a full and of a short matrix, tokens of a long and of a short attention, elements of a memory-bound
# operation)
ON_GPU, ON_CPU = (3072, 4096, 512, 4096, 1024, 2 ** 25), (512, 1024, 128, 768, 192, 2 ** 22)
HEADS = 8
MOST_ROTATED = 256             # columns that ConvRot rotates together, as in published files
MIN_S, ROUNDS = 0.01, 7
ALONE = 3                      # copies of one device while the others are idle
ROUND_S, SHARED_ROUNDS = 0.05, 12         # rounds in which all ranks wait for the last one, as in a step
BLOCK_TOKENS, BLOCK_WIDTH = 16, 64


def measure(rank, world_size, device, dtype, traffic, report, per_machine=0):
    """Measure; returns {name: seconds or bytes per second}, see planner/machine_from_probe.py for the names.

    A collective: every rank of the world calls it. report(text, done, total) shows progress. per_machine:
    protocol.devices.devices_per_machine.
    """
    watch = Stopwatch(rank, world_size, device, dtype)
    numbers = {}
    sizes = sorted({size for size in (2, 4, 8, 16, per_machine, world_size) if size > 1 and world_size % size == 0})
    steps = 2 + len(sizes)
    report("measuring the devices", 0, steps)
    numbers |= measure_device(watch)
    numbers |= measure_backends(device, dtype)
    numbers |= measure_operators(device, dtype)
    numbers |= measure_products(device, dtype)
    report("measuring the devices", 1, steps)
    if world_size > 1:
        numbers |= measure_waiting(watch)
    numbers["block_launch_s"] = measure_launches(watch)
    if device.type != "cpu":
        numbers |= measure_host_copies(watch)
        if (capability := accelerator.capability(device)) is not None:
            numbers["capability"] = capability[0] + capability[1] / 10
    for index, size in enumerate(sizes):
        report("measuring the links", 2 + index, steps)
        large_bytes = ACROSS_BYTES if per_machine and per_machine % size else LARGE_BYTES
        numbers |= measure_links(watch, size, traffic, large_bytes, is_first=index == 0)
    return numbers


def matrix_flops_s(device, dtype):
    """FLOP/s of a feed-forward's matrix multiplication, measured in a fraction of a second. Not a collective."""
    width, rows, *_ = ON_GPU if device.type != "cpu" else ON_CPU
    weight, tokens = (torch.randn(count, width, device=device).to(dtype) for count in (4 * width, rows))
    return 8.0 * rows * width ** 2 / Stopwatch(0, 1, device, dtype).seconds({"": lambda: F.linear(tokens, weight)})[""]


class Stopwatch:
    """Times work on this rank's device, in the models' dtype, in rounds that all ranks begin together."""

    def __init__(self, rank, world_size, device, dtype):
        self.rank, self.world_size, self.device, self.dtype = rank, world_size, device, dtype
        self.together = world_size > 1

    def done(self):
        if self.device.type != "cpu":
            accelerator.module(self.device).synchronize(self.device)

    def seconds(self, works, repeats=None, wait=True):
        """{name: seconds of one call of works[name]}, as means over rounds without the longest and shortest ones.

        The works are interleaved, so that a temporary slowdown of the machine affects all of them equally. wait:
        synchronise the device; False: measure only the launch on the host. repeats: calls per round; None: enough for
        MIN_S. Ranks of a collective must pass a number, so that all make the same number of calls.
        """
        often = {name: repeats or self._often(work) for name, work in works.items()}
        rounds_s: dict[str, list] = {name: [] for name in works}
        for round_ in range(ROUNDS + 1):                       # the first one warms up
            for name, work in works.items():
                if self.together:
                    dist.barrier()
                    self.done()
                started_s = time.perf_counter()
                for _ in range(often[name] if round_ else 1):
                    work()
                if wait:
                    self.done()
                if round_:
                    rounds_s[name].append((time.perf_counter() - started_s) / often[name])
                self.done()
        return {name: statistics.mean(sorted(times)[ROUNDS // 6:ROUNDS - ROUNDS // 6])
                for name, times in rounds_s.items()}

    def _often(self, work):
        work()
        self.done()
        started_s = time.perf_counter()
        work()
        self.done()
        return max(1, math.ceil(MIN_S / max(1e-6, time.perf_counter() - started_s)))


def measure_waiting(watch):
    """Median seconds of rounds of the same work: of rank 0 while the others are idle (0 on other ranks), of this rank
    while the others work, and until the last rank is done, which includes the variation of the machine."""
    device, dtype = watch.device, watch.dtype
    width, full, *_ = ON_GPU if device.type != "cpu" else ON_CPU
    weight = torch.randn(4 * width, width, device=device).to(dtype)
    tokens = torch.randn(full, width, device=device).to(dtype)
    own_s, all_s = [], []

    def work(repeats):
        for _ in range(repeats):
            F.linear(tokens, weight)
        watch.done()

    def timed(repeats):
        started_s = time.perf_counter()
        work(repeats)
        return time.perf_counter() - started_s
    work(1)
    # per rank, so that rounds of heterogeneous devices have the same length
    repeats = max(1, round(ROUND_S / max(1e-6, timed(1))))
    alone_s = [timed(repeats) for _ in range(SHARED_ROUNDS)] if watch.rank == 0 else [0.0]
    for _ in range(SHARED_ROUNDS):
        dist.barrier()
        watch.done()
        started_s = time.perf_counter()
        own_s.append(timed(repeats))
        dist.barrier()
        watch.done()
        all_s.append(time.perf_counter() - started_s)
    return {"round_alone_s": statistics.median(alone_s), "round_s": statistics.median(own_s),
            "round_of_all_s": statistics.median(all_s)}


def measure_device(watch):
    """Measure a feed-forward's matrix multiplication with many and few rows, attention with many and few keys, a
    convolution, and a memory-bound operation."""
    device, dtype = watch.device, watch.dtype
    width, full, short, long, brief, elements = ON_GPU if device.type != "cpu" else ON_CPU
    weight, tokens = torch.randn(4 * width, width, device=device).to(dtype), torch.randn(full, width, device=device).to(
        dtype)
    works = {"matrix_s": lambda: F.linear(tokens, weight), "matrix_short_s": lambda: F.linear(tokens[:short], weight)}
    for head, (name, keys) in itertools.product((64, 128), (("long", long), ("short", brief))):
        query, key = (torch.randn(1, HEADS, count, head, device=device).to(dtype) for count in (long, keys))
        works[f"attention_{head}_{name}_s"] = lambda query=query, key=key: F.scaled_dot_product_attention(
            query, key, key)
    channels, side = (256, 128) if device.type != "cpu" else (64, 64)
    image, kernel = (torch.randn(shape, device=device).to(dtype)
                     for shape in ((1, channels, side, side), (channels, channels, 3, 3)))
    one, other = (torch.randn(elements, device=device).to(dtype) for _ in range(2))
    seconds = watch.seconds(works | {"convolution": lambda: F.conv2d(image, kernel, padding=1),
                                     "move": lambda: torch.add(one, other)})
    return {name: seconds[name] for name in works} | {
        "matrix_flops": 8.0 * full * width ** 2, "rows": full, "short_rows": short,
        "launch_hidden": float(device.type != "cpu"),
        "attention_flops": 4.0 * HEADS * long * long * 128, "keys": long, "short_keys": brief,
        "convolution_flops_s": 18.0 * (channels * side) ** 2 / seconds["convolution"],
        "move_bytes_s": 3 * one.nbytes / seconds["move"]}


def measure_backends(device, dtype):
    """Speedups of the installed attention backends over torch SDPA, by head size: {"kernel NAME HEAD": ratio}.

    Not a collective: other ranks may have other packages.
    """
    numbers, tokens = {}, (ON_GPU if device.type != "cpu" else ON_CPU)[3]
    usable, modules = [name for name, why in unusable(device).items() if not why], {}
    for name, head in itertools.product(usable, (64, 128)):
        query = torch.randn(1, HEADS, tokens, head, device=device).to(dtype)
        works = {use.name: functools.partial(attend, query, query, query, use)
                 for use in (BackendUse(), BackendUse(name, True, modules))}
        try:
            seconds = Stopwatch(0, 1, device, dtype).seconds(works)
        except Exception as error:                             # a third-party package's
            log.warning("attention by %s is not measured: %s", name, error)
            continue
        numbers[f"kernel {name} {head}"] = seconds[SDPA] / seconds[name]
    return numbers


def measure_operators(device, dtype):
    """Seconds of attention by each exact operator that runs here: {"operator NAME HEAD KEYS": seconds}; {} on CPUs and
    ROCm, where torch has one. Operators return a log-sum-exp, which costs them little; torch SDPA does not.

    Not a collective: other ranks may have other packages.
    """
    capability = capability_of(device)
    if capability is None:
        return {}
    missing, numbers = unusable(device), {}
    names = [name for name in OPERATORS if name != SDPA and not missing.get(name)]
    modules = {name: importlib.import_module(BACKENDS[name].module) if BACKENDS[name].module else None
               for name in names if _imports(BACKENDS[name].module)}
    for head, keys in itertools.product(OPERATOR_HEADS, OPERATOR_KEYS):
        query = torch.randn(1, HEADS, keys, head, device=device).to(dtype)
        works = {SDPA: functools.partial(F.scaled_dot_product_attention, query, query, query)}
        for name, module in modules.items():
            if not BACKENDS[name].supports(dtype, head, keys, capability, False):
                continue
            work = functools.partial(run_backend, BACKENDS[name], module, query, query, query, None, None, True)
            try:
                work()
                accelerator.module(device).synchronize(device)
            except Exception as error:                         # of a package, or of cuDNN for this GPU
                log.warning("attention by %s is not timed: %s", name, error)
                continue
            works[name] = work
        seconds = Stopwatch(0, 1, device, dtype).seconds(works)
        numbers |= {f"operator {name} {head} {keys}": each for name, each in seconds.items()}
    return numbers


def _imports(module):
    try:
        return not module or importlib.import_module(module) is not None
    except Exception as error:                                 # a third-party package's
        log.warning("%s is not timed: %s", module, error)
        return False


def measure_products(device, dtype):
    """Speedups of matrix multiplications with weights in each of ComfyUI's quantised formats over weights of `dtype`:
    {"product FORMAT": ratio}; {} without comfy-kitchen.

    The device quantises inputs or dequantises the weight, whichever it supports. Not a collective.
    """
    if not kitchen_layers.is_installed():
        return {}
    kitchen_layers.choose_backends()
    width, rows, *_ = ON_GPU if device.type != "cpu" else ON_CPU
    plain, tokens = (torch.randn(count, width, device=device).to(dtype) for count in (4 * width, rows))
    works = {"": lambda: F.linear(tokens, plain)}
    for format_ in FORMATS:
        layer = Layer(format_, (4 * width, width), dict.fromkeys(FORMATS[format_].scales, ""), 1,
                      math.gcd(width, MOST_ROTATED) if format_ in ROTATING else 0, group=FORMATS[format_].group)
        weight = torch.zeros(layer.stored_shape, dtype=torch.uint8, device=device).view(layer.how.held)
        auxiliary = {name: torch.zeros(shape, dtype=stored_dtype, device=device)
                     for name, (shape, stored_dtype) in layer.auxiliary_as_stored(4 * width).items()}
        try:
            kitchen_layers.check([layer], "the probe")
            work = functools.partial(product_of, layer, weight, kitchen_layers.in_tiles(layer, auxiliary), tokens)
            work()
        except Exception as error:                             # a third-party package's
            log.warning("products in %s are not measured: %s", format_, error)
            continue
        works[format_] = work
    seconds = Stopwatch(0, 1, device, dtype).seconds(works)
    return {f"product {format_}": seconds[""] / seconds[format_] for format_ in works if format_}


def product_of(layer, weight, auxiliary, tokens):
    """Multiply as quantisation/layerwise_casting.py does."""
    if kitchen_layers.multiplies(layer, weight.device):
        return kitchen_layers.product(layer, weight, auxiliary, tokens, None)
    return F.linear(tokens, kitchen_layers.unpacked(layer, weight, auxiliary, tokens.dtype))


def measure_launches(watch):
    """Seconds that the host needs to launch a block of PixArt's structure with almost nothing to compute."""
    from diffusers.models.attention import BasicTransformerBlock
    device, dtype = watch.device, watch.dtype
    block = BasicTransformerBlock(BLOCK_WIDTH, 2, BLOCK_WIDTH // 2, cross_attention_dim=BLOCK_WIDTH,
                                  num_embeds_ada_norm=1, norm_type="ada_norm_single").to(device, dtype)
    tokens = torch.randn(1, BLOCK_TOKENS, BLOCK_WIDTH, device=device).to(dtype)
    times = torch.randn(1, 6 * BLOCK_WIDTH, device=device).to(dtype)
    return watch.seconds({"launch": lambda: block(tokens, encoder_hidden_states=tokens, timestep=times)},
                         wait=False)["launch"]


def measure_host_copies(watch):
    """Bytes per second of streamed weights to this device, while all other ranks copy too, and alone.

    All ranks share the host's memory bandwidth, and some share a link. Measured through page-locked buffers
    ("host_bytes_s", "host_alone_bytes_s") and by the driver from pageable memory ("pageable_..."), in the copy thread
    of a run. The memory is this process's own, which the system allocates on the near NUMA node.
    """
    thread = CopyThread(watch.device, StagingBuffers(watch.device))
    source = torch.ones(HOST_BYTES, dtype=torch.uint8)
    target = torch.empty(HOST_BYTES, dtype=torch.uint8, device=watch.device)

    def copy(is_pageable):
        thread.is_pageable = is_pageable
        thread.wait(thread.start([(source, target)]))
    works = {"host": functools.partial(copy, False), "pageable": functools.partial(copy, True)}
    rates = {f"{way}_bytes_s": HOST_BYTES / seconds for way, seconds in watch.seconds(works, repeats=1).items()}
    for turn in range(watch.world_size):
        if watch.together:
            dist.barrier()
        for way, work in works.items() if turn == watch.rank else ():
            started_s = time.perf_counter()
            for _ in range(ALONE):
                work()
            watch.done()
            rates[f"{way}_alone_bytes_s"] = ALONE * HOST_BYTES / (time.perf_counter() - started_s)
    return rates


def measure_links(watch, size, traffic, large_bytes, is_first):
    """Seconds of each collective in groups of `size` neighbouring ranks, all groups at once, for small and large
    messages.

    is_first: also measure the overlap of attention and a ring hop.
    """
    numbers, device, dtype, world_size = {}, watch.device, watch.dtype, watch.world_size
    own = dist.group.WORLD if size == world_size else make_group(
        [range(first, first + size) for first in range(0, world_size, size)])
    for name, num_bytes in (("small", SMALL_BYTES), ("large", large_bytes)):
        message = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        chunks = message[:len(message) // size * size].view(size, -1)
        shapes = [chunks[0].shape] * size
        works = {f"all_to_all {size} {name}_s": lambda chunks=chunks, shapes=shapes:
                 all_to_all(chunks, shapes, own, traffic, chunks),
                 f"hop {size} {name}_s": lambda message=message:
                 RingExchange(message, message.shape, own, traffic).wait(),
                 f"all_reduce {size} {name}_s": lambda message=message: all_reduce([message], own, traffic),
                 f"gather {size} {name}_s": lambda chunks=chunks:
                 all_gather(chunks[0], [len(chunks[0])] * size, 0, own, traffic)}
        numbers |= watch.seconds(works, repeats=10 if name == "small" else 1)
    message = torch.zeros(16, dtype=dtype, device=device)
    chunks = torch.zeros(size, 8, dtype=dtype, device=device)
    numbers |= watch.seconds(
        {f"launch {size} all_to_all_s": lambda: all_to_all(chunks, [(8,)] * size, own, traffic, chunks),
         f"launch {size} hop_s": lambda: RingExchange(message, message.shape, own, traffic).wait()}, repeats=10,
        wait=False)
    if is_first:
        numbers |= measure_overlap(watch, own, traffic, large_bytes)
    if size < world_size:
        dist.destroy_process_group(own)
    return numbers


def measure_overlap(watch, group, traffic, large_bytes):
    """Seconds of attention, of a ring hop, and of both at once, which show how far they overlap."""
    device, dtype = watch.device, watch.dtype
    _, _, _, tokens, *_ = ON_GPU if device.type != "cpu" else ON_CPU
    query = torch.randn(1, HEADS, tokens, 128, device=device).to(dtype)
    message = torch.zeros(large_bytes // dtype.itemsize, dtype=dtype, device=device)

    def attend():
        return F.scaled_dot_product_attention(query, query, query)

    def both():
        exchange = RingExchange(message, message.shape, group, traffic)
        attend()
        exchange.wait()
    return watch.seconds({"beside_attention_s": attend, "beside_both_s": both,
                          "beside_hop_s": lambda: RingExchange(message, message.shape, group, traffic).wait()},
                         repeats=1)
