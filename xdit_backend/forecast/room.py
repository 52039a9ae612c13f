"""Refuses a run that takes more memory than a device has, before it starts, with what would fit. Pure arithmetic.
Used by the bridge."""

from ..protocol.errors import ConfigError
from .memory import Memory, most_that_fits

NOTHING = Memory(0.0, 0.0, 0.0)
HOST = "this machine's host memory"


def check_room(what, devices, device_bytes, weight_bytes, needed=None, images=1, sizes=(), pixels=(1, 1), remedies=(),
               lighter=dict, lean={}, host=(0, 0)):
    """Raise ConfigError where a device is too small for what its ranks need.

    what: is to run, for a person. devices, device_bytes, weight_bytes: for each rank the name of its device, what that
    has in all, and what the rank adds to the weights there. needed(images, sizes): Memory of a rank beside weights, for
    so many images of a latent with these sizes (without batch and channels); None: the weights alone. pixels: of the
    picture that a latent's row and column stand for.
    remedies: what else would fit. lighter(): {other weight_dtype: weight_bytes with it}. lean: {another setting: needed
    with it}.
    host: how many ranks are on this machine, and what its host memory has for what is not on their devices.
    """
    def lacking(images, sizes, weight_bytes=weight_bytes, needed=needed):
        """(bytes that the fullest device lacks, its name, its Memory, what it has)"""
        memory = needed(images, sizes) if needed is not None else NOTHING
        found = []
        for device in dict.fromkeys(devices):
            ranks = [rank for rank, name in enumerate(devices) if name == device]
            held = Memory(sum(weight_bytes[rank] for rank in ranks), memory.keys_values * len(ranks),
                          memory.activations * len(ranks))
            found.append((held.total - device_bytes[ranks[0]], device, held, device_bytes[ranks[0]]))
        num_ranks, room = host
        if memory.host and num_ranks:
            found.append((memory.host * num_ranks - room, HOST, Memory(0.0, memory.host * num_ranks, 0.0), room))
        return max(found, key=lambda each: each[0])

    lacks, device, held, has = lacking(images, sizes)
    if lacks <= 0:
        return
    parts = {"weights": held.weights, "keys and values": held.keys_values, "activations": held.activations}
    text = ", ".join(f"{part / 1e9:.3g} GB of {name}" for name, part in parts.items() if part)
    types = [f"{name} ({sum(size for size, on in zip(sizes_of, devices) if on == device) / 1e9:.3g} GB of weights)"
             for name, sizes_of in lighter().items() if lacking(images, sizes, sizes_of)[0] <= 0]
    leaner = [text for text, other in lean.items() if lacking(images, sizes, needed=other)[0] <= 0]
    would = [*leaner, *(remedies if device != HOST else ()), *([f"weight_dtype {' or '.join(types)}"] if types else [])]
    if needed is not None:
        rows, columns = sizes[-2:]
        fewer = most_that_fits(lambda count: lacking(count, sizes)[0] <= 0, images - 1)
        smaller = most_that_fits(lambda row: lacking(images, _scaled(sizes, row))[0] <= 0, rows - 1)
        if smaller:
            height, width = (size * pixel for size, pixel in zip(_scaled(sizes, smaller)[-2:], pixels))
            would.insert(0, f"at most {width} x {height} pixels instead of {columns * pixels[1]} x {rows * pixels[0]}")
        if fewer:
            would.insert(0, f"at most {fewer} image{'s' if fewer > 1 else ''} at once instead of {images}")
    raise ConfigError(f"{what} needs about {held.total / 1e9:.3g} GB on {device} ({text}), and that has "
                      f"{has / 1e9:.3g} GB. "
                      + (f"It would fit with {'; or '.join(would)}." if would else "Use more devices, or larger ones."))


def _scaled(sizes, rows):
    """Sizes of a latent of the same shape with so many rows."""
    return (*sizes[:-2], rows, max(1, rows * sizes[-1] // sizes[-2]))
