"""Names of devices: torch's own, "cuda:0" or "cpu", of this machine;
of another with its name and a slash before it, "other-pc/cuda:0". Which of them a person means."""

import collections
import math
import os
import re

from .errors import ConfigError

MACHINE_NAME = r"[a-z0-9][a-z0-9.-]{0,62}"
MAX_SHOWN = 60                             # characters of the setting in an error


def machine_of(device):
    """The name of the machine that a device is in; "" for this one."""
    return device.rpartition("/")[0]


def own_name(device):
    """A device's name on its own machine, which torch takes."""
    return device.rpartition("/")[2]


def machines_of(devices):
    """The other machines that these devices are in, in their order."""
    return tuple(name for name in dict.fromkeys(map(machine_of, devices)) if name)


def resolve_devices(devices, num_cuda_devices, mode="manual"):
    """Turn the `devices` setting into torch device names, one a worker.

    "auto" takes every CUDA device; where there is none, the mode "auto" two CPU workers on two cores, all else one. Of
    devices that this machine does not have, the mode "auto" takes those that are there, and what "auto" takes where
    none is: a workflow from another machine runs. Those of this machine come first, then those of each other one
    together, so that ranks which talk most are on one. What another machine has is known when it has joined.
    Raises ConfigError for names that make no sense, for more workers than check_counts allows, and in other modes for
    devices that are not there.
    """
    cuda = [f"cuda:{index}" for index in range(num_cuda_devices)]
    names = [name.strip().lower() for name in devices.split(",") if name.strip()]
    if not names:
        raise ConfigError('Set devices to "auto", or to names with commas such as "cuda:0,cuda:1": devices is empty.')
    auto = tuple(cuda) or ("cpu",) * (2 if mode == "auto" and num_cores() > 1 else 1)
    if names == ["auto"]:
        return auto
    names = [f"{name}:0" if own_name(name) == "cuda" else name for name in names]
    for name in names:
        if not re.fullmatch(rf"({MACHINE_NAME}/)?(cpu|cuda:\d+)", name):
            raise ConfigError('Set devices to "auto", or to names such as "cuda:0,cuda:1" or "cpu,cpu"; those of '
                              f'another machine with its name, "cuda:0,other-pc/cuda:0": of devices="{devices}", '
                              f'"{name}" is not a device.')
        if name.startswith("cuda:") and name not in cuda and mode != "auto":
            raise ConfigError(f'Set devices to "{",".join(cuda) or "cpu"}" and the degrees to a product of '
                              f'{max(1, len(cuda))}, or mode to "auto" to take what is there: of devices="{devices}", '
                              f'{name} is not on this machine, which has {", ".join(cuda) or "no CUDA device"}.')
    if len({own_name(name).partition(":")[0] for name in names}) > 1:
        raise ConfigError(f'Name devices of one kind: devices="{devices}" mixes CPU and CUDA workers.')
    check_counts(names, devices)
    own = tuple(name for name in names if name == "cpu" or name in cuda)
    others = [name for machine in machines_of(names) for name in names if machine_of(name) == machine]
    if others and not own:
        raise ConfigError("Name a device of this machine too, which has "
                          f'{", ".join(cuda) or "the device cpu alone"}: devices="{devices}" names none.')
    return (own or auto) + tuple(others)


def check_counts(names, setting):
    """Refuse more CPU workers than cores, and several workers on one GPU. Cores of another machine are counted there,
    with names of its own. setting: `devices` as the user gave it, for the error.

    Raises ConfigError.
    """
    if os.environ.get("XDIT_SHARED_DEVICES", "") not in ("", "0"):
        return                                                 # tests of many workers
    shown = setting if len(setting) <= MAX_SHOWN else f"{setting[:MAX_SHOWN]}..."
    counts = collections.Counter(names)
    if counts["cpu"] > num_cores():
        raise ConfigError(f'Name "cpu" at most {num_cores()} times, once for each core that may be used here: '
                          f'devices="{shown}" names it {counts["cpu"]} times.')
    twice = next((name for name, count in counts.items() if count > 1 and own_name(name) != "cpu"), None)
    if twice is not None:
        raise ConfigError(f'Name each GPU once, for one worker: devices="{shown}" names {twice} {counts[twice]} times.')


def num_cores():
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_per_machine(devices):
    """The largest size of groups of neighbours, of what resolve_devices gives, that lie within one machine;
    0: there is one machine."""
    counts = collections.Counter(map(machine_of, devices))
    return math.gcd(*counts.values()) if len(counts) > 1 else 0
