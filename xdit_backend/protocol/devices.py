"""Names of devices: torch's own, "cuda:0" or "cpu", of this machine;
of another with its name and a slash before it, "other-pc/cuda:0"."""

MACHINE_NAME = r"[a-z0-9][a-z0-9.-]{0,62}"


def machine_of(device):
    """The name of the machine that a device is in; "" for this one."""
    return device.rpartition("/")[0]


def own_name(device):
    """A device's name on its own machine, which torch takes."""
    return device.rpartition("/")[2]


def machines_of(devices):
    """The other machines that these devices are in, in their order."""
    return tuple(name for name in dict.fromkeys(map(machine_of, devices)) if name)
