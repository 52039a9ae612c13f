"""Out-of-memory reports: use of a device's memory and the missing amount."""

from ..planner.descriptions import gigabytes
from ..planner.memory_fit import MIN_BYTES

USES = {"weight_bytes": "weights", "cast_bytes": "a second copy of weights for the run",
        "key_value_bytes": "keys and values",
        "exchange_bytes": "other devices' activations", "conditioning_bytes": "conditioning",
        "activation_bytes": "activations", "other_bytes": "other programs and libraries"}


def describe_out_of_memory(numbers):
    """Describe a failed rank's memory in a sentence or two. numbers: Failed.numbers, see Engine.out_of_memory."""
    requested, free = numbers.get("requested_bytes", 0), numbers.get("free_bytes", 0)
    in_use = "; ".join(f"{name} {gigabytes(numbers[key])}" for key, name in USES.items()
                       if numbers.get(key, 0) >= MIN_BYTES)
    of = f" of {gigabytes(numbers['total_bytes'])}" if "total_bytes" in numbers else ""
    missing = f": {gigabytes(requested - free)} are missing" if requested > free else ""
    wanted = f"{gigabytes(requested)} more were requested, and " if requested else "more memory was requested, and "
    text = f"{wanted}{gigabytes(free)}{of} are free{missing}."
    return f"{text} In use: {in_use}." if in_use else text
