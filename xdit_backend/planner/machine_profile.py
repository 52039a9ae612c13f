"""JSON files that describe a machine: stored probe results, or a user's description of another machine.

    {"devices": [{"name": "RTX 3090", "count": 2, "memory_bytes": 24e9, "matrix_flops_s": 71e12, "attention_flops_s":
    60e12, "memory_bytes_s": 936e9}],
     "links": {"all_to_all": {"2": {"bytes_s": 11e9, "latency_s": 3e-5}}, "hop": {"2": {"bytes_s": 12e9}}}}

A device may have any field of cost_model.Device; `count` is the number of identical devices. Rates are what one rank
sends, by collective and group size. For several machines "a_machine" is the number of neighbouring devices in each,
such as 2.
"""

import dataclasses
import math

from ..protocol.bounded_json import parse_json
from ..protocol.errors import ConfigError
from .cost_model import COLLECTIVES, Device, Links
from .layout_search import Machine

NEEDED = ("memory_bytes", "matrix_flops_s", "attention_flops_s", "memory_bytes_s")
MAY_BE_ZERO = ("half_rows", "half_keys", "busy_ring", "latency_s", "hidden", "convolution_flops_s", "launch_hidden",
               "host_bytes_s", "host_alone_bytes_s", "host_pageable", "capability")
OBJECTS = "kernels", "products", "operators"           # fields of a device that map names to numbers
MAX_DEVICES = 4096
MAX_BYTES, MAX_VALUES = 2 ** 22, 2 ** 18


def read_machine(path):
    """The Machine that a file describes. Raises ConfigError, which names the invalid entry."""
    try:
        with open(path, "rb") as file:
            values = parse_json(file.read(MAX_BYTES + 1), MAX_BYTES, MAX_VALUES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}).") from error
    return machine_of(values, path)


def machine_of(values, name):
    """The Machine that parsed JSON describes. name: of its source, for error messages."""
    _check(isinstance(values, dict) and isinstance(values.get("devices"), list) and values["devices"], name,
           '"devices" must be a list of at least one device')
    unknown = sorted(set(values) - {"devices", "links", "alone", "hidden", "latency_s", "a_machine", "of"})
    _check(not unknown, name, f'"{", ".join(unknown)}" is not known. Known are devices, links, alone, hidden, '
                              f'latency_s, a_machine '
           'and of')
    devices = [device for entry in values["devices"] for device in _devices(entry, name)]
    _check(len(devices) <= MAX_DEVICES, name, f"{len(devices)} devices are more than {MAX_DEVICES}")
    rates, latencies = _rates(values.get("links", {}), len(devices), name)
    shared = {key: _number(values.get(key, getattr(Links, key)), key, name) for key in ("hidden", "latency_s")}
    per_machine = values.get("a_machine", 0)
    _check(type(per_machine) is int and per_machine >= 0 and (not per_machine or len(devices) % per_machine == 0), name,
           f"a_machine is {per_machine!r}, and must be a number that divides the {len(devices)} devices, or 0 where "
           f"all are in one")
    links = Links(rates, latencies=latencies, per_machine=per_machine, **shared)
    return Machine(tuple(devices), links, _number(values.get("alone", 1.0), "alone", name))


def to_json(machine, of):
    """The JSON object that machine_of reads as this Machine. of: {property: value} that identifies it for the user."""
    devices = [{key: value for key, value in dataclasses.asdict(device).items() if value != math.inf}
               for device in machine.devices]
    rates, latencies = machine.links.rates, machine.links.latencies
    links: dict = {}
    for (collective, size), rate in rates.items():
        links.setdefault(collective, {})[str(size)] = {
            "bytes_s": rate, "latency_s": latencies.get((collective, size), machine.links.latency_s)}
    return {"of": of, "devices": devices, "links": links, "hidden": machine.links.hidden,
            "latency_s": machine.links.latency_s, "alone": machine.alone, "a_machine": machine.links.per_machine}


def _devices(entry, name):
    fields = {field.name for field in dataclasses.fields(Device)}
    _check(isinstance(entry, dict), name, f"a device is {entry!r}, and must be an object")
    unknown = sorted(set(entry) - fields - {"count"})
    _check(not unknown, name, f'a device has "{", ".join(unknown)}". Known are {", ".join(sorted(fields | {"count"}))}')
    missing = [key for key in NEEDED if key not in entry and key != "memory_bytes"]
    _check(not missing, name, f"a device lacks {', '.join(missing)}")
    count = entry.get("count", 1)
    _check(isinstance(count, int) and 1 <= count <= MAX_DEVICES, name,
           f"count is {count!r}, and must be a number from 1 to {MAX_DEVICES}")
    values: dict = {key: str(value) if key == "name" else _number(value, key, name) for key, value in entry.items()
                   if key not in ("count", *OBJECTS)}
    for key in OBJECTS:
        numbers = entry.get(key, {})
        _check(isinstance(numbers, dict), name, f"{key} is {numbers!r}, and must be an object of numbers")
        values[key] = {str(what): _number(value, key, name) for what, value in numbers.items()}
    return [Device(**values)] * count


def _rates(links, num_devices, name):
    """({(collective, size): bytes per second}, {(collective, size): seconds})."""
    _check(isinstance(links, dict), name, '"links" must be an object of collectives')
    rates, latencies = {}, {}
    for collective, sizes in links.items():
        _check(collective in (*COLLECTIVES, "network") and isinstance(sizes, dict), name,
               f'links has "{collective}". Known are {", ".join(COLLECTIVES)} and network, each with group sizes')
        for size, of in sizes.items():
            _check(str(size).isdecimal() and isinstance(of, dict) and "bytes_s" in of, name,
                   f'links.{collective} has "{size}": {of!r}. Needed is a group size, and an object with bytes_s')
            rates[collective, int(size)] = _number(of["bytes_s"], f"links.{collective}.{size}.bytes_s", name)
            if "latency_s" in of:
                latencies[collective, int(size)] = _number(of["latency_s"], f"links.{collective}.{size}.latency_s",
                                                           name)
    missing = [collective for collective in ("all_to_all", "hop") if not any(known == collective for known, _ in rates)]
    _check(num_devices == 1 or not missing, name, f"links lacks {', '.join(missing)}, and there are {num_devices} "
                                                  f"devices")
    return rates, latencies


def _number(value, key, name):
    least = 0 if key.rpartition(".")[2] in MAY_BE_ZERO else 1e-12
    _check(isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= least,
           name, f"{key} is {value!r}, and must be a number {'of at least' if not least else 'above'} 0")
    return float(value)


def _check(holds, name, text):
    if not holds:
        raise ConfigError(f"{name}: {text}.")
