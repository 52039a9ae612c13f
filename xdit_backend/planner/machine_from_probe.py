"""Conversion of a probe's measurements (worker/device_probe.py) to a Machine. Arithmetic only."""

import statistics

from .cost_model import COLLECTIVES, Device, Links
from .layout_search import Machine

SMALL_BYTES, LARGE_BYTES, ACROSS_BYTES = 2 ** 16, 2 ** 24, 2 ** 20        # as in worker/device_probe.py
PAGEABLE_WORTH = 1.1           # speedup by the driver's copies, on each device, that justifies that the host may wait
# prefixes of names from measure_backends, measure_products and measure_operators
KERNEL, PRODUCT, OPERATOR = "kernel ", "product ", "operator "
# fraction of the message's bytes that a rank sends in a collective
SENT = {"all_to_all": lambda size: (size - 1) / size, "hop": lambda size: 1.0,
        "all_reduce": lambda size: 2 * (size - 1) / size, "gather": lambda size: (size - 1) / size}


def machine_of_probe(ranks, names, memory_bytes, per_machine=0):
    """The Machine of a worker group. ranks: measurements of each rank. names, memory_bytes: of each rank's GPU.
    per_machine: of Links.

    The rate of a link is that of its slowest rank.
    """
    first = ranks[0]
    alone = waits = 1.0
    if "round_s" in first:                                     # in a group a step ends when the last rank is done
        waits = max(1.0, min(numbers["round_of_all_s"] / numbers["round_s"] for numbers in ranks))
        alone = max(1.0, waits * first["round_s"] / first["round_alone_s"])
    ranks = _by_faster_copies(ranks)
    devices = tuple(_device(numbers, name, size).slower(waits)
                    for numbers, name, size in zip(ranks, names, memory_bytes))
    rates, latencies = {}, {}
    sizes = sorted({int(key.split()[1]) for key in ranks[0] if key.startswith("hop ")})
    for collective in COLLECTIVES:
        for size in sizes:
            small_s, large_s = (max(numbers[f"{collective} {size} {which}_s"] for numbers in ranks)
                                for which in ("small", "large"))
            sent = SENT[collective](size)
            large_bytes = ACROSS_BYTES if Links(per_machine=per_machine).crosses(size) else LARGE_BYTES
            a_byte_s = max(1e-15, (large_s - small_s) / (sent * (large_bytes - SMALL_BYTES)))
            rates[collective, size] = 1 / a_byte_s
            latencies[collective, size] = max(1e-6, small_s - sent * SMALL_BYTES * a_byte_s)
    hidden = 1.0
    if "beside_both_s" in first:
        attention_s, hop_s, both_s = (statistics.mean(numbers[f"beside_{what}_s"] for numbers in ranks)
                                      for what in ("attention", "hop", "both"))
        hidden = min(1.0, max(0.0, (attention_s + hop_s - both_s) / min(attention_s, hop_s)))
    return Machine(devices, Links(rates, hidden=hidden, latencies=latencies, per_machine=per_machine), alone)


def _by_faster_copies(ranks):
    """The measurements of each rank with the copy rates used in a run: of the driver if it is faster on all devices,
    otherwise of copies through pinned chunks."""
    rates = [(numbers.get("pageable_bytes_s", 0.0), numbers.get("host_bytes_s", 0.0)) for numbers in ranks]
    if not all(pageable > PAGEABLE_WORTH * staged for pageable, staged in rates):
        return ranks
    return [numbers | {"host_bytes_s": numbers["pageable_bytes_s"], "host_pageable": 1.0,
                       "host_alone_bytes_s": numbers["pageable_alone_bytes_s"]} for numbers in ranks]


def _device(numbers, name, memory_bytes):
    rows, short_rows, keys, short_keys = (numbers[key] for key in ("rows", "short_rows", "keys", "short_keys"))
    matrix_s, half_rows = _line(numbers["matrix_s"], numbers["matrix_short_s"], rows, short_rows)
    wide_s, half_keys = _line(numbers["attention_128_long_s"], numbers["attention_128_short_s"], keys, short_keys)
    narrow_s, _ = _line(numbers["attention_64_long_s"], numbers["attention_64_short_s"], keys, short_keys)
    launches = {f"{kind}_launch_s": min(value for key, value in numbers.items() if key.startswith("launch ")
                                        and key.endswith(f" {of}_s"))
                for kind, of in (("collective", "all_to_all"), ("round", "hop"))
                if any(key.startswith("launch ") for key in numbers)}
    return Device(matrix_flops_s=numbers["matrix_flops"] / matrix_s,
                  attention_flops_s=numbers["attention_flops"] / wide_s,
                  memory_bytes_s=numbers["move_bytes_s"], convolution_flops_s=numbers.get("convolution_flops_s", 0.0),
                  host_bytes_s=numbers.get("host_bytes_s", 0.0),
                  host_alone_bytes_s=numbers.get("host_alone_bytes_s", 0.0),
                  host_pageable=numbers.get("host_pageable", 0.0),
                  half_rows=half_rows, half_keys=half_keys,
                  block_launch_s=numbers["block_launch_s"], narrow_fraction=min(1.5, wide_s / narrow_s / 2),
                  busy_ring=0.0,
                  name=name, memory_bytes=memory_bytes, launch_hidden=numbers["launch_hidden"], **launches,
                  kernels=_named(numbers, KERNEL), products=_named(numbers, PRODUCT),
                  operators=_named(numbers, OPERATOR),
                  capability=numbers.get("capability", 0.0))


def _named(numbers, start):
    return {key.removeprefix(start): value for key, value in numbers.items() if key.startswith(start)}


def _line(full_s, short_s, full, short):
    """(seconds of the full size without the fixed cost; the fixed cost, in units of size)."""
    slope = max((full_s - short_s) / (full - short), 0.5 * full_s / full)
    return slope * full, max(0.0, min(full_s / slope - full, full))
