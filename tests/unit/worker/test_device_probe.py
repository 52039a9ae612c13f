"""The probe: what ranks measure together makes a machine whose forecasts can be used,
on three and on four CPU workers."""

import itertools
import math
import sys
import time
import types

import comfy_kitchen.tensor
import pytest
import torch

from tests.support import kernel_packages
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from xdit_backend.attention import backends
from xdit_backend.checkpoints.quantisation import kitchen_layers
from xdit_backend.checkpoints.quantisation.layer_formats import FORMATS
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.planner.cost_model import Device, Job, ModelDims
from xdit_backend.planner.layout_search import choose, estimates
from xdit_backend.planner.machine_from_probe import ACROSS_BYTES, LARGE_BYTES, SENT, SMALL_BYTES, machine_of_probe
from xdit_backend.worker import device_probe


def measured(rank, world_size, per_machine=0):
    device_probe.ROUNDS, device_probe.MIN_S, device_probe.LARGE_BYTES = 1, 0.0, 2 ** 20
    device_probe.ROUND_S, device_probe.SHARED_ROUNDS = 0.0, 1
    said, traffic = [], Traffic()
    numbers = device_probe.measure(rank, world_size, torch.device("cpu"), torch.float32, traffic,
                            lambda *progress: said.append(progress), per_machine)
    return numbers, said, traffic.num_exchanges


@pytest.mark.slow
@pytest.mark.parametrize("world_size, per_machine, sizes", [(3, 0, {"3"}), (4, 2, {"2", "4"})])
def test_workers_measure_what_a_forecast_needs(world_size, per_machine, sizes):
    results = run_ranks(measured, world_size, per_machine)
    numbers = [result[0] for result in results]

    assert all(set(one) == set(numbers[0]) and all(math.isfinite(value) and value > 0 for name, value in one.items()
                                                   if name not in ("round_alone_s", "launch_hidden"))
               for one in numbers)
    assert {name.split()[1] for name in numbers[0] if name.startswith("all_to_all ")} == sizes
    assert [one["round_alone_s"] > 0 for one in numbers] == [True] + [False] * (world_size - 1)
    assert (all(one["round_of_all_s"] > one["round_s"] for one in numbers)
            and all(exchanges > 0 for _, _, exchanges in results))
    assert (results[0][1][0] == ("measuring the devices", 0, len(results[0][1]))
            and results[0][1][-1][0] == "measuring the links")
    machine = machine_of_probe(numbers, ["CPU"] * world_size, [1e12] * world_size, per_machine)
    made = estimates(ModelDims(8, 256, 4, 12.0, 1e7), Job(1024, 32, 10, branches=2), machine)
    assert all(math.isfinite(one.seconds) and one.seconds > 0 for one in made) and choose(made).fits


def copied(rank, world_size):
    device_probe.HOST_BYTES, device_probe.ROUNDS = 2 ** 16, 1
    copies, slow = [], 0.05
    device_probe.StagingBuffers = lambda device: types.SimpleNamespace(
        copy=lambda source, target: (copies.append(time.perf_counter()), time.sleep(slow)),
        copy_pageable=lambda source, target: time.sleep(slow / 2))
    rates = device_probe.measure_host_copies(device_probe.Stopwatch(rank, world_size, torch.device("cpu"),
                                                                    torch.float32))
    return rates, copies[-device_probe.ALONE:]


def test_copies_from_host_memory_are_measured_at_once_and_alone():
    (first, own), (second, other) = run_ranks(copied, 2)

    for rates in (first, second):
        for way, copy_s in (("host", 0.05), ("pageable", 0.025)):
            for rate in (rates[f"{way}_bytes_s"], rates[f"{way}_alone_bytes_s"]):
                assert 2 ** 16 / 1.0 < rate <= 2 ** 16 / copy_s
        assert rates["pageable_alone_bytes_s"] > rates["host_alone_bytes_s"]
    assert own[-1] + 0.05 <= other[0]                          # one after the other


def test_copies_go_by_the_driver_where_it_is_faster_on_every_device():
    """As the two ways were measured; the forecast has the rates of the one that is taken."""
    staged = {"host_bytes_s": 12e9, "host_alone_bytes_s": 20e9}
    for pageable, others, is_pageable in ((14e9, 14e9, True), (14e9, 13e9, False), (8e9, 14e9, False),
                                          (13e9, 13e9, False)):
        machine = machine_of_probe([made_up(staged | {"pageable_bytes_s": rate, "pageable_alone_bytes_s": 2 * rate})
                                    for rate in (pageable, others)], ["a card"] * 2, [24e9] * 2)
        for device, rate in zip(machine.devices, (pageable, others)):
            assert (device.host_pageable, device.host_bytes_s, device.host_alone_bytes_s) == (
                (1, rate, 2 * rate) if is_pageable else (0, 12e9, 20e9))
    assert machine_of_probe([made_up(staged)], ["a card"], [24e9]).devices[0].host_pageable == 0


def made_up(rates):
    """What a rank might have measured, with these rates."""
    return dict.fromkeys(("matrix_flops", "rows", "short_rows", "matrix_s", "matrix_short_s", "attention_flops", "keys",
                          "short_keys", "attention_128_long_s", "attention_128_short_s", "attention_64_long_s",
                          "attention_64_short_s", "move_bytes_s", "block_launch_s", "launch_hidden"),
                         1.0) | {"short_rows": 0.5, "short_keys": 0.5} | rates


def test_a_machine_is_found_from_the_times_that_it_would_take():
    """Rates, rows at half of the rate, latencies and what is hidden, from times by the forecast's own lines."""
    numbers = {"matrix_flops": 1e12, "rows": 4096, "short_rows": 512, "matrix_s": (4096 + 300) / 4096 * 0.01,
               "matrix_short_s": (512 + 300) / 4096 * 0.01, "attention_flops": 1e11, "keys": 4096, "short_keys": 1024,
               "attention_128_long_s": (4096 + 200) / 4096 * 0.002,
               "attention_128_short_s": (1024 + 200) / 4096 * 0.002,
               "attention_64_long_s": 0.002, "attention_64_short_s": 0.0005, "move_bytes_s": 1e12,
               "block_launch_s": 1e-3,
               "round_alone_s": 0.04, "round_s": 0.05, "round_of_all_s": 0.06, "launch_hidden": 0.25,
               "beside_attention_s": 0.01, "beside_hop_s": 0.004, "beside_both_s": 0.012,
               "launch 2 all_to_all_s": 1e-4, "launch 2 hop_s": 2e-4, "host_bytes_s": 12e9, "host_alone_bytes_s": 20e9}
    for collective, sent in SENT.items():
        numbers |= {f"{collective} 2 {name}_s": 5e-5 + sent(2) * num_bytes / 1e10 for name, num_bytes in
                    (("small", SMALL_BYTES), ("large", LARGE_BYTES))}
    slow = numbers | {"round_s": 0.055, "round_alone_s": 0.0}
    machine = machine_of_probe([numbers, slow], ["a card"] * 2, [24e9] * 2)
    device = machine.devices[0].slower(0.055 / 0.06)           # the last one is waited for by so much in a round

    links = machine.links
    for value, expected in (
            (device.matrix_flops_s, 1e14), (device.half_rows, 300), (device.attention_flops_s, 5e13),
            (device.half_keys, 200),
            (device.narrow_fraction, 0.5), (machine.alone, 0.05 / 0.04 * 0.06 / 0.055),
            (device.launch_hidden, 0.25), (device.host_bytes_s, 12e9), (device.host_alone_bytes_s, 20e9),
            (links.hidden, 0.5),
            (links.rate("hop", 2), 1e10),
            (links.rate("gather", 2), 1e10), (links.latency("all_to_all", 2), 5e-5), (device.collective_launch_s, 1e-4),
            (device.round_launch_s, 2e-4)):
        within(abs(value / expected - 1), 1e-6, expected)


def test_between_machines_smaller_messages_are_enough():
    """A second size, of two machines of two: the same times as before mean another rate, since less was sent."""
    numbers = made_up({})
    for (collective, sent), size in itertools.product(SENT.items(), (2, 4)):
        large_bytes, rate = (LARGE_BYTES, 1e10) if size == 2 else (ACROSS_BYTES, 1e8)
        numbers |= {f"{collective} {size} {name}_s": 5e-4 + sent(size) * num_bytes / rate for name, num_bytes in
                    (("small", SMALL_BYTES), ("large", large_bytes))}
    links = machine_of_probe([numbers] * 4, ["a card"] * 4, [24e9] * 4, 2).links

    for size, rate in ((2, 1e10), (3, 1e8), (4, 1e8)):
        within(abs(links.rate("hop", size) / rate - 1), 1e-6)
        within(abs(links.latency("all_reduce", size) / 5e-4 - 1), 1e-6)
    assert links.per_machine == 2


def test_products_with_each_format_are_timed_and_the_forecast_reads_them(monkeypatch):
    """A format in which a device is slow, or that its packages cannot multiply, is forecast as that."""
    for name, value in {"ROUNDS": 1, "MIN_S": 0.0, "ON_CPU": (64, 64, 16, 96, 48, 2 ** 10)}.items():
        monkeypatch.setattr(device_probe, name, value)
    product = device_probe.product_of

    def slow(layer, *given):
        assert layer.format != "nvfp4", "not here"
        time.sleep(0.05 * (layer.format == "mxfp8"))
        return product(layer, *given)
    monkeypatch.setattr(device_probe, "product_of", slow)
    numbers = device_probe.measure_products(torch.device("cpu"), torch.bfloat16)

    known = [format_ for format_ in FORMATS if hasattr(comfy_kitchen.tensor, kitchen_layers.LAYOUTS[format_])]
    assert set(numbers) == {f"product {format_}" for format_ in known if format_ != "nvfp4"}
    assert numbers["product mxfp8"] < 0.5 * min(value for name, value in numbers.items() if name != "product mxfp8")
    device = Device(1e12, 1e12, 1e11, products={"mxfp8": 2.0, "int8_tensorwise": 4.0})
    half = ModelDims(1, 64, 1, 12, 1, formats={"mxfp8": 0.5})
    mixed = ModelDims(1, 64, 1, 12, 1, formats={"mxfp8": 0.5, "int8_tensorwise": 0.25, "nvfp4": 0.25})
    within(device.product_s(half, 1e12) - 0.75, 1e-12)
    within(device.product_s(mixed, 1e12) - (0.25 + 0.0625 + 0.25), 1e-12)


def test_exact_operators_are_timed_for_each_size_and_broken_ones_are_left_out(tmp_path, monkeypatch):
    """Torch's own have no CUDA here, and are left out as broken ones are."""
    for module in (backends, device_probe):
        monkeypatch.setattr(module, "capability_of", lambda device: kernel_packages.HOPPER)
    for name, value in {"ROUNDS": 1, "MIN_S": 0.0, "OPERATOR_KEYS": (8, 16)}.items():
        monkeypatch.setattr(device_probe, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    broken = {"flash_attn_interface.py": "raise ImportError('built for another torch')"}
    kernel_packages.use(kernel_packages.write(tmp_path, **broken), exact=False)
    try:
        numbers = device_probe.measure_operators(torch.device("cpu"), torch.bfloat16)
    finally:
        kernel_packages.forget()

    assert set(numbers) == {f"operator {name} {head} {keys}" for name in ("sdpa", "flash", "xformers")
                            for head in (64, 128) for keys in (8, 16)}
    assert all(value > 0 for value in numbers.values())


def test_cpus_have_one_operator():
    assert device_probe.measure_operators(torch.device("cpu"), torch.float32) == {}


def test_packages_are_timed_beside_torchs_own_attention_and_the_forecast_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "capability_of", backends.capability_of)
    monkeypatch.setattr(sys, "path", list(sys.path))
    slow = (kernel_packages.SAGE2 + "\nimport time\nfast = sageattn\ndef sageattn(*args, **kwargs):\n"
            "    time.sleep(0.05)\n    return fast(*args, **kwargs)\n")
    broken = {"flash_attn_interface.py": "raise ImportError('built for another torch')", "xformers/ops.py": "1 / 0"}
    kernel_packages.use(kernel_packages.write(tmp_path, **broken, **{"sageattention/__init__.py": slow}), exact=False)
    for name, value in {"ROUNDS": 1, "MIN_S": 0.0, "ON_CPU": (64, 64, 16, 96, 48, 2 ** 10)}.items():
        monkeypatch.setattr(device_probe, name, value)
    try:
        numbers = device_probe.measure_backends(torch.device("cpu"), torch.bfloat16)
    finally:
        kernel_packages.forget()

    names = "flash", "sage", "comfy_kitchen_int8"
    assert set(numbers) == {f"kernel {name} {head}" for name in names for head in (64, 128)}
    assert numbers["kernel sage 64"] < 0.5
    plain = Device(1e12, 1e12, 1e11, kernels={"sage 128": 2.0, "sage 64": 1.5})
    assert plain.by_backend("flash") == plain and plain.by_backend("sage").attention_rate(128) == 2e12
    within(plain.by_backend("sage").attention_rate(64) / 1.5e12 - 1, 1e-12)
