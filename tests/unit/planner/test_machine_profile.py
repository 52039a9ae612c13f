"""Machines in files: what is written is read again, and what is not a machine is refused by name."""

import json
from dataclasses import replace

import pytest

from xdit_backend.planner.cost_model import Device, Links
from xdit_backend.planner.layout_search import Machine
from xdit_backend.planner.machine_profile import machine_of, read_machine, to_json
from xdit_backend.protocol.errors import ConfigError

DEVICE = {"matrix_flops_s": 1e14, "attention_flops_s": 1e14, "memory_bytes_s": 1e12}
LINKS = {"all_to_all": {"2": {"bytes_s": 1e10}}, "hop": {"2": {"bytes_s": 1e10}}}


def test_a_machine_is_read_as_it_was_written(tmp_path):
    fast = Device(1e14, 2e14, 1e12, half_rows=0.0, name="fast", memory_bytes=24e9, narrow_fraction=0.7,
                  kernels={"sage 128": 1.9})
    rates = {("all_to_all", 2): 1e10, ("hop", 2): 2e10, ("gather", 2): 3e9}
    machine = Machine((fast, replace(fast, name="slow", matrix_flops_s=5e13)),
                      Links(rates, 1e-5, 0.6, dict.fromkeys(rates, 0.0001), per_machine=1), alone=1.2)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(to_json(machine, {"cards": "fast, slow"})))

    assert read_machine(path) == machine


def test_devices_that_are_alike_are_said_once():
    assert len(machine_of({"devices": [DEVICE | {"count": 8}], "links": LINKS}, "it").devices) == 8
    assert machine_of({"devices": [DEVICE]}, "it").devices[0].memory_bytes == float("inf")


@pytest.mark.parametrize("said, message", [
    ([], '"devices" must be a list'), ({"devices": []}, "at least one device"),
    ({"devices": [{}]}, "lacks matrix_flops_s, attention_flops_s"),
    ({"devices": [DEVICE], "speed": 1}, '"speed" is not known'),
    ({"devices": [DEVICE | {"tflops": 3}]}, 'a device has "tflops"'),
    ({"devices": [DEVICE | {"count": 0}]}, "count is 0"),
    ({"devices": [DEVICE | {"matrix_flops_s": "fast"}]}, "matrix_flops_s is 'fast'"),
    ({"devices": [DEVICE | {"memory_bytes": -1}]}, "memory_bytes is -1, and must be a number above 0"),
    ({"devices": [DEVICE] * 2}, "links lacks all_to_all, hop, and there are 2 devices"),
    ({"devices": [DEVICE] * 2, "links": LINKS, "a_machine": 3},
     "a_machine is 3, and must be a number that divides the 2 devices"),
    ({"devices": [DEVICE] * 2, "links": LINKS, "a_machine": True}, "a_machine is True"),
    ({"devices": [DEVICE] * 2, "links": {"nvlink": {}}}, 'links has "nvlink"'),
    ({"devices": [DEVICE] * 2, "links": LINKS | {"hop": {"two": {}}}}, 'links.hop has "two"'),
    ({"devices": [DEVICE] * 2, "links": LINKS | {"hop": {"2": {"bytes_s": float("nan")}}}},
     "links.hop.2.bytes_s is nan")], ids=str)
def test_what_is_no_machine_is_refused(tmp_path, said, message):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(said))

    with pytest.raises(ConfigError, match=message):
        read_machine(path)


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "it.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_machine(tmp_path / "it.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_machine(tmp_path / "other.json")
