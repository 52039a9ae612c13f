"""Device names, and the `devices` setting.

A device of this machine has torch's name, "cuda:0" or "cpu"; one of another machine has that machine's name and a slash
in front, "other-pc/cuda:0".
"""

import collections
import math
import os
import re

from ..system import accelerator, num_cores
from .errors import ConfigError

MACHINE_NAME = r"[a-z0-9][a-z0-9.-]{0,62}"
MAX_SHOWN = 60                             # characters of the setting in an error


def machine_of(device):
    """Name of a device's machine; "" for this one."""
    return device.rpartition("/")[0]


def own_name(device):
    """Name of a device for torch on its own machine."""
    return device.rpartition("/")[2]


def machines_of(devices):
    """Names of the other machines of these devices, in order of first use."""
    return tuple(name for name in dict.fromkeys(map(machine_of, devices)) if name)


def can_use_nccl(devices):
    """Whether NCCL can connect workers on these devices: several, each on a GPU of its own, or on_one_gpu."""
    are_gpus = len(devices) > 1 and all(own_name(device) != "cpu" for device in devices)
    return are_gpus and (len(set(devices)) == len(devices) or on_one_gpu(devices))


def on_one_gpu(devices):
    """Whether NCCL connects workers that share GPUs of this machine: XDIT_NCCL_ON_ONE_GPU=1, a switch for developers.
    It needs NCCL 2.30 or newer; an older one rejects the workers as they join."""
    return (os.environ.get("XDIT_NCCL_ON_ONE_GPU") == "1" and len(set(devices)) < len(devices)
            and not machines_of(devices) and "cpu" not in devices)


def resolve_devices(devices, num_cuda_devices, mode="manual"):
    """Turn the `devices` setting into device names, one per worker.

    "auto" selects every GPU or, where there is none, two CPU workers (one on a single core). If the setting
    names devices that this machine does not have, mode "auto" selects those that it has, or what "auto" selects if it
    has none, so that a workflow from another machine runs. Devices of this machine come first, then those of each other
    machine together, so that ranks which communicate most are on one machine. The devices of another machine are known
    once it has joined.

    Raises ConfigError for names that are no devices, for more workers than check_counts allows, and in other modes for
    devices that this machine does not have.
    """
    gpus = list(map(accelerator.name_of, range(num_cuda_devices)))
    names = [name.strip().lower() for name in devices.split(",") if name.strip()]
    if not names:
        raise ConfigError('Set devices to "auto", or to names with commas such as "cuda:0,cuda:1": devices is empty.')
    auto = tuple(gpus) or ("cpu",) * min(2, num_cores())
    if names == ["auto"]:
        return auto
    names = _with_index(names)
    for name in names:
        if not re.fullmatch(rf"({MACHINE_NAME}/)?(cpu|({'|'.join(accelerator.known_types())}):\d+)", name):
            raise ConfigError('Set devices to "auto", or to names such as "cuda:0,cuda:1" or "cpu,cpu"; those of '
                              f'another machine with its name, "cuda:0,other-pc/cuda:0": in devices="{devices}", '
                              f'"{name}" is not a device.')
        if not machine_of(name) and name != "cpu" and name not in gpus and mode != "auto":
            raise ConfigError(f'Set devices to "{",".join(gpus) or "cpu"}" and the degrees to a product of '
                              f'{max(1, len(gpus))}, or mode to "auto" to use the devices of this machine: '
                              f'devices="{devices}" names {name}, and this machine has '
                              f'{", ".join(gpus) or "no CUDA device"}.')
    if len({own_name(name).partition(":")[0] for name in names}) > 1:
        raise ConfigError(f'Name devices of one kind: devices="{devices}" mixes CPU and CUDA workers.')
    check_counts(names, devices)
    own = tuple(name for name in names if name == "cpu" or name in gpus)
    others = [name for machine in machines_of(names) for name in names if machine_of(name) == machine]
    if others and not own:
        raise ConfigError("Name a device of this machine too, which has "
                          f'{", ".join(gpus) or "the device cpu alone"}: devices="{devices}" names none.')
    return (own or auto) + tuple(others)


def missing_devices(devices, num_cuda_devices):
    """Names in a `devices` setting that are devices of this machine, which it does not have."""
    names = _with_index([name.strip().lower() for name in devices.split(",")])
    gpus = set(map(accelerator.name_of, range(num_cuda_devices)))
    return [name for name in names if own_name(name).partition(":")[0] in accelerator.known_types()
            and not machine_of(name) and name not in gpus]


def _with_index(names):
    return [f"{name}:0" if own_name(name) in accelerator.known_types() else name for name in names]


def check_counts(names, setting):
    """Reject more CPU workers than cores, and several workers on one GPU.

    Another machine counts its cores itself and calls this with its own names. setting: `devices` as the user entered
    it, for the error. Raises ConfigError.
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


def devices_per_machine(devices):
    """Largest size of groups of neighbouring ranks that lie within one machine; 0: there is one machine.

    devices: result of resolve_devices.
    """
    counts = collections.Counter(map(machine_of, devices))
    return math.gcd(*counts.values()) if len(counts) > 1 else 0
