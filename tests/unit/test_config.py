"""Degrees and devices: every rule accepts what works and refuses what does not, with the value and a remedy."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.conftest import ROOT
from xdit_backend.config import ParallelConfig, fitting, validate, validate_layout, validate_stages
from xdit_backend.protocol import devices as devices_module
from xdit_backend.protocol.devices import (
    check_counts,
    devices_per_machine,
    missing_devices,
    num_cores,
    resolve_devices,
)
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.protocol.specs import Layout, SparseOptions, chosen_for


def manual(**degrees):
    return ParallelConfig(mode="manual", **{f"{name}_degree": value for name, value in degrees.items()})


def test_there_is_no_split_scheme_to_ask_for():
    """xDiT's option, which xDiT accepts and does not read. docs/design/tensor.md has the reason; a request for it is
    an error."""
    docs = (ROOT / "docs" / "design" / "tensor.md").read_text(encoding="utf-8")

    for takes_degrees in (ParallelConfig, Layout):
        with pytest.raises((TypeError, ValueError), match="split_scheme"):
            takes_degrees(tensor_degree=2, split_scheme="row")
    assert "splits all linears by columns, or all by rows" in docs and "There is no option for it." in docs


@pytest.mark.parametrize("config, num_devices", [
    (ParallelConfig(), 1), (ParallelConfig(), 7), (manual(), 1), (manual(cfg=2), 2),
    (manual(cfg=2, ring=2, ulysses=2), 8),
    (manual(data=3), 3), (manual(pipefusion=2, ulysses=2), 4), (manual(tensor=2, cfg=2), 4),
    (replace(manual(pipefusion=2), stage_blocks=" 20, 37 "), 2), (ParallelConfig(num_patches=8, warmup_steps=0), 2)],
                         ids=str)
def test_accepts_what_works(config, num_devices):
    validate(config, num_devices)


@pytest.mark.parametrize("config, num_devices, words", [
    (ParallelConfig(mode="magic"), 1, ['mode="magic"']),
    (manual(ring=0), 1, ["ring_degree=0", "1 or more"]),
    (manual(cfg=3), 3, ["cfg_degree=3", "1 or 2"]),
    (manual(cfg=2, ulysses=2), 2, ["cfg_degree=2", "ulysses_degree=2", "multiply to 4", "2 devices", "for example"]),
    (manual(), 2, ["multiply to 1", "2 devices"]),
    (replace(manual(pipefusion=2), stage_blocks="3,x"), 2, ['stage_blocks="3,x"', "such as"]),
    (replace(manual(pipefusion=2), stage_blocks="3,0"), 2, ['stage_blocks="3,0"', "at least 1"]),
    (replace(manual(pipefusion=2), stage_blocks="3"), 2, ["has 1 stages", "pipefusion_degree=2"]),
    (ParallelConfig(warmup="cold"), 1, ['warmup="cold"', "micro_batches"]),
    (manual(displaced=2, pipefusion=2), 4, ["displaced_degree=2 and pipefusion_degree=2",
                                                 "Set displaced_degree or pipefusion_degree to 1"]),
    (ParallelConfig(displaced_mode="stale"), 1, ['displaced_mode="stale"', "corrected_async_gn"]),
    (ParallelConfig(approximate="a bit"), 1, ['approximate="a bit"', "not allowed"]),
    (replace(manual(pipefusion=2), approximate="not allowed"), 2,
     ['approximate="not allowed"', "pipefusion_degree=2", "tensor_degree"]),
    (replace(manual(displaced=2), approximate="not allowed"), 2,
     ['approximate="not allowed"', "displaced_degree=2", "full_sync"]),
    (ParallelConfig(exchange="fp4"), 1, ['exchange="fp4"', "all in fp8"]),
    (ParallelConfig(exchange="all in fp8", approximate="not allowed"), 1, ['exchange="all in fp8"', "Set exchange to"]),
    (ParallelConfig(sparse_attention="vsa"), 1, ['sparse_attention="vsa"', "off, sol-attn or sla"]),
    (ParallelConfig(sparse_attention="sla", approximate="not allowed"), 1,
     ['approximate="not allowed"', 'sparse_attention="sla"', "Set sparse_attention to off"]),
    (replace(manual(displaced=2), sparse_attention="sla"), 2, ["displaced_degree=2", "Set displaced_degree to 1"]),
    *((ParallelConfig(sparse_attention="sol-attn", sparse_settings=text), 1, words) for text, words in (
        ("tau=9", ['has "tau=9"', "tau in sparse_settings to a number from 0 to 4"]),
        ("tau=1, min_tokens=1.5", ['has "min_tokens=1.5"']), ("extra_tokens=256", ["with the names tau, keep_percent"]),
        ("dense_blocks=0,1", ['has "1"']), ("dense_blocks=1-x", ["separated by spaces"]),
        ("sink_conditioning=no", ["exact_kv_and_rows, exact_kv or off"]))),
    (ParallelConfig(forecast_keys_values=7), 1, ["forecast_keys_values=7", "from 0 to 1"]),
    (ParallelConfig(forecast_keys_values=float("nan")), 1, ["forecast_keys_values=nan", "from 0 to 1"]),
    (ParallelConfig(num_patches=-1), 1, ["num_patches=-1"])], ids=str)
def test_refuses_what_cannot_work(config, num_devices, words):
    with pytest.raises(ConfigError) as error:
        validate(config, num_devices)

    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("given, words", [
    ({"ring_degree": "2"}, "Set ring_degree to a whole number: ring_degree=2 is not"),
    ({"num_patches": 2.5}, "Set num_patches to a whole number: num_patches=2.5 is not"),
    ({"forecast_keys_values": None}, "to a number: forecast_keys_values=None is not"),
    ({"stage_blocks": [1, 2]}, "Set stage_blocks to text: stage_blocks=.* is not"),
    ({"devices": ["cpu"] * 99}, "Set devices to text: devices=.{60} is not"),
    ({"offload_keys_values": "on"}, "to true or false: offload_keys_values=on is not"),
], ids=str)
def test_refuses_values_of_another_type(given, words):
    """As a prompt of ComfyUI's API may have them."""
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**given)


@pytest.mark.parametrize("config",
                         [replace(manual(pipefusion=2), num_patches=1),
                          replace(manual(displaced=2), displaced_mode="full_sync"),
                          manual(tensor=2), replace(manual(pipefusion=2), mode="auto")], ids=str)
def test_what_is_exact_goes_where_nothing_else_is_allowed(config):
    validate(replace(config, approximate="not allowed"), 2)


@pytest.mark.parametrize("devices, num_cuda, expected", [
    ("auto", 0, ("cpu", "cpu")), ("auto", 2, ("cuda:0", "cuda:1")), ("AUTO", 1, ("cuda:0",)), ("cuda", 1, ("cuda:0",)),
    ("other-pc/cuda:1, cuda, third/cuda, other-pc/cuda:0", 1,
     ("cuda:0", "other-pc/cuda:1", "other-pc/cuda:0", "third/cuda:0")),
    ("cuda:1, cuda:0", 2, ("cuda:1", "cuda:0")), ("cuda:0,cuda:0", 1, ("cuda:0", "cuda:0")),
    ("cpu,cpu", 2, ("cpu", "cpu"))])
def test_devices_resolve(devices, num_cuda, expected, monkeypatch):
    monkeypatch.setattr(devices_module, "num_cores", lambda: 8)
    assert resolve_devices(devices, num_cuda) == expected


@pytest.mark.parametrize("devices, num_cuda, words", [
    ("", 1, "devices is empty"), ("gpu", 1, '"gpu" is not a device'), ("cuda:2", 2, "has cuda:0, cuda:1"),
    ("cuda:0,cuda:2", 2, 'Set devices to "cuda:0,cuda:1" and the degrees to a product of 2'),
    ("other-pc/gpu", 1, '"other-pc/gpu" is not a device'), ("a/b/cuda:0", 1, '"a/b/cuda:0" is not'),
    ("/cuda:0", 1, '"/cuda:0" is not'),
    ("other-pc/cuda:0", 1, "Name a device of this machine too, which has cuda:0"),
    ("cuda:0,other-pc/cpu", 1, "mixes CPU and CUDA"),
    ("cuda:0", 0, "has no CUDA device"), ("cpu,cuda:0", 1, "mixes CPU and CUDA")])
def test_impossible_devices_are_refused(devices, num_cuda, words):
    with pytest.raises(ConfigError, match=words):
        resolve_devices(devices, num_cuda)


@pytest.mark.parametrize("mode", ["manual", "auto"])
@pytest.mark.parametrize("devices, num_cuda, words", [
    (",".join(["cpu"] * 1000), 0, r'^Name "cpu" at most 4 times, .*devices="cpu,.{0,60}\.\.\." names it 1000 times\.$'),
    ("cpu,cpu,cpu,cpu,cpu", 0, r'devices="cpu,cpu,cpu,cpu,cpu" names it 5 times'),
    ("cuda:0, cuda, cuda:1", 2, r'^Name each GPU once, .*devices="cuda:0, cuda, cuda:1" names cuda:0 2 times\.$'),
    ("cuda:0,other-pc/cuda:1,other-pc/cuda:1", 1, "names other-pc/cuda:1 2 times")])
def test_a_core_and_a_gpu_have_one_worker_each(devices, num_cuda, words, mode, monkeypatch):
    monkeypatch.setattr(devices_module, "num_cores", lambda: 4)
    with monkeypatch.context() as lifted:
        lifted.setenv("XDIT_SHARED_DEVICES", "1")
        assert len(resolve_devices(devices, num_cuda)) == devices.count(",") + 1
    monkeypatch.delenv("XDIT_SHARED_DEVICES")
    with pytest.raises(ConfigError, match=words):
        resolve_devices(devices, num_cuda, mode)

    assert len(resolve_devices("cpu,cpu,cpu,cpu,other-pc/cpu,other-pc/cpu", 0)) == 6       # which counts its own
    with pytest.raises(ConfigError, match="names it 5 times"):
        check_counts(["cpu"] * 5, "cpu,cpu,cpu,cpu,cpu")       # as there


def test_cores_are_those_that_this_process_may_use():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not bind processes to cores")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_cores() == len(allowed)


@pytest.mark.parametrize("devices, num_cuda, expected", [
    ("cuda:0,cuda:1,cuda:2", 2, ("cuda:0", "cuda:1")), ("cuda:3,cuda:1", 2, ("cuda:1",)),
    ("cuda:2,cuda:3", 2, ("cuda:0", "cuda:1")),
    ("cuda:0,cuda:1", 0, ("cpu", "cpu")), ("auto", 0, ("cpu", "cpu")), ("cpu", 0, ("cpu",)),
    ("cpu,cpu", 2, ("cpu", "cpu"))])
def test_auto_takes_those_of_another_machines_devices_that_are_there(devices, num_cuda, expected, monkeypatch):
    monkeypatch.setattr(devices_module, "num_cores", lambda: 8)
    assert resolve_devices(devices, num_cuda, "auto") == expected


@pytest.mark.parametrize("mode", ["manual", "auto"])
@pytest.mark.parametrize("num_cores, num_cuda", [(1, 0), (8, 0), (8, 3)])
def test_auto_selects_the_same_devices_in_both_modes(num_cores, num_cuda, mode, monkeypatch):
    monkeypatch.setattr(devices_module, "num_cores", lambda: num_cores)

    expected = tuple(f"cuda:{index}" for index in range(num_cuda)) or ("cpu",) * min(2, num_cores)
    assert resolve_devices("auto", num_cuda, mode) == expected


@pytest.mark.parametrize("devices, num_cuda, missing", [
    ("auto", 0, []), ("cuda:0,cuda:1", 0, ["cuda:0", "cuda:1"]), ("CUDA, cuda:1", 1, ["cuda:1"]),
    ("cuda:0,cuda:1", 2, []), ("cpu,cpu", 0, []), ("cuda:0,other-pc/cuda:3", 1, []), ("cuda", 0, ["cuda:0"])])
def test_devices_that_this_machine_lacks_are_named(devices, num_cuda, missing):
    assert missing_devices(devices, num_cuda) == missing


def test_sparse_settings_are_those_of_comfyuis_node():
    assert ParallelConfig().sparse is None is ParallelConfig(sparse_settings="tau=1").forward_options.sparse
    assert ParallelConfig(sparse_attention="sla").sparse == SparseOptions("sla")
    text = "tau=1.5, keep_percent=20,start_percent=0, end_percent = 0.9, dense_blocks=0 2 47-49, min_tokens=64,"
    assert ParallelConfig(
        sparse_attention="sol-attn", sparse_settings=f"{text} sink_conditioning=off").forward_options.sparse == (
        SparseOptions("sol-attn", 1.5, 20.0, 0.0, 0.9, (0, 2, 47, 48, 49), 64, "off"))


@pytest.mark.parametrize("count, words", [(1, "and there is 1 device."), (3, "and there are 3 devices.")])
def test_a_message_counts_devices_in_the_right_number(count, words):
    with pytest.raises(ConfigError) as rejected:
        validate(manual(cfg=2, ulysses=2), count)
    assert str(rejected.value).endswith(words)


@pytest.mark.parametrize("degree", [1, 2, 3, 6])
def test_accepts_ulysses_degree_that_divides_heads(degree):
    validate_layout(Layout(ulysses_degree=degree), 6, "FLUX")


@pytest.mark.parametrize("layout, num_heads, num_key_heads, words", [
    (Layout(tensor_degree=5), 24, None, "Set tensor_degree to 1, 2, 3, 4, 6, 8, 12 or 24: tensor_degree=5 does not "
                                        "divide FLUX's 24 attention heads."),
    (Layout(tensor_degree=3), 24, 8, "Set tensor_degree to 1, 2, 4 or 8: tensor_degree=3 does not divide FLUX's 24 "
                                     "attention heads and 8 key heads."),
    (Layout(tensor_degree=4, ulysses_degree=4), 24, None, "Set ulysses_degree to 1, 2, 3 or 6, or use ring_degree: "
     "ulysses_degree=4 does not divide the 6 of FLUX's 24 attention heads that a rank has with tensor_degree=4."),
    (Layout(tensor_degree=2), 7, None, "Set tensor_degree to 1 or 7: .* 7 attention heads."),
    (Layout(tensor_degree=2), None, None, "tensor_degree=2 splits .* and FLUX is a U-Net")])
def test_rejects_tensor_degree_that_does_not_divide_heads(layout, num_heads, num_key_heads, words):
    with pytest.raises(ConfigError, match=words):
        validate_layout(layout, num_heads, "FLUX", num_key_heads)


def test_accepts_tensor_degree_that_divides_heads():
    validate_layout(Layout(tensor_degree=2, ulysses_degree=6), 24, "FLUX", 8)


def test_rejects_ulysses_degree_that_does_not_divide_heads():
    with pytest.raises(ConfigError) as error:
        validate_layout(Layout(ulysses_degree=5), 24, "FLUX")

    assert str(error.value) == ("Set ulysses_degree to 1, 2, 3, 4, 6, 8, 12 or 24, or use ring_degree: "
                                "ulysses_degree=5 does not divide FLUX's 24 attention heads.")


@pytest.mark.slow
def test_checks_survive_optimised_python():
    """Refusals are exceptions of our own, not assert statements."""
    code = "from xdit_backend.config import *; validate(ParallelConfig(mode='manual', cfg_degree=2), 3)"

    result = subprocess.run([sys.executable, "-O", "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert "ConfigError: Set mode to auto, or" in result.stderr and "(cfg_degree=2) multiply to 2" in result.stderr


def test_stages_must_fit_the_models_blocks():
    validate_stages(replace(manual(pipefusion=2), stage_blocks="20,37"), 57, "Flux.1")
    with pytest.raises(ConfigError, match="adds up to 58, and this Flux.1 model has 57 blocks"):
        validate_stages(replace(manual(pipefusion=2), stage_blocks="20,38"), 57, "Flux.1")
    with pytest.raises(ConfigError, match="Set pipefusion_degree to at most 4: pipefusion_degree=5 is more than SD3"):
        validate_stages(manual(pipefusion=5), 4, "SD3")


@pytest.mark.parametrize("given, num_cuda, expected", [
    ({"devices": "cuda:0,cuda:1,cuda:2,cuda:3", "cfg_degree": 2, "ulysses_degree": 2}, 2,
     {"devices": "cuda:0,cuda:1", "cfg_degree": 2}),
    ({"devices": "cuda:0,cuda:1,cuda:2,cuda:3", "pipefusion_degree": 4, "stage_blocks": "1,2,3,4"}, 2,
     {"devices": "cuda:0,cuda:1",
   "pipefusion_degree": 2}),
    ({"devices": "cpu,cpu", "ring_degree": 3}, 0, {"devices": "cpu,cpu", "ring_degree": 2}),
    ({"devices": "cpu, cpu, cpu", "cfg_degree": 2}, 0, {"devices": "cpu, cpu, cpu", "cfg_degree": 1}),
    ({"devices": "gpu0", "ulysses_degree": 8}, 8, {"ulysses_degree": 8}),
    ({"devices": "cuda:0,cuda:1", "cfg_degree": 2}, 0, {"devices": "cpu,cpu", "cfg_degree": 2}),
    ({"devices": ",".join(f"cuda:{index}" for index in range(64)), "ring_degree": 3}, 64, {"ring_degree": 64}),
    ({"devices": "cpu,cpu", "displaced_degree": 2, "tensor_degree": 2}, 0, {"devices": "cpu,cpu"}),
], ids=str)
def test_what_fits_is_near_and_can_work(given, num_cuda, expected, monkeypatch):
    monkeypatch.setattr(devices_module, "num_cores", lambda: 8)
    found = fitting(ParallelConfig(mode="manual", **given), num_cuda)

    devices = resolve_devices(found.devices, num_cuda)
    validate(found, len(devices))
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.stage_blocks == ""


@pytest.mark.parametrize("devices, size", [
    ("cpu,cpu", 0), ("cpu,a/cpu", 1), ("cpu,cpu,a/cpu,a/cpu", 2), ("cpu,cpu,a/cpu", 1),
    ("cpu,cpu,cpu,cpu,a/cpu,a/cpu,b/cpu,b/cpu", 2)])
def test_devices_a_machine(devices, size):
    assert devices_per_machine(resolve_devices(devices, 0)) == size


@pytest.mark.parametrize("num_rows, mode, words", [
    (1, "sync_gn", "1 row of"), (3, "sync_gn", "3 rows of"), (4, "corrected_async_gn", "4 rows of"),
    (16, "corrected_async_gn", "16 rows of"), (None, "corrected_async_gn", "")])
def test_auto_chooses_how_displaced_patches_synchronise_by_rows(num_rows, mode, words):
    chosen, because = chosen_for(num_rows)

    assert chosen == mode and words in because and bool(words) == bool(because)


def test_the_mode_that_older_workflows_name_is_not_told_as_unused():
    assert ParallelConfig(displaced_mode="corrected_async_gn").idle == ParallelConfig().idle == ""
    assert "displaced_mode=sync_gn unused" in ParallelConfig(displaced_mode="sync_gn").idle
