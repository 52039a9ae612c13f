"""What to tell a person of a device that ran out of memory: who holds how much of it, and what would fit.
Used by the launcher."""

import math

HOLDERS = {"weight_bytes": "weights", "cast_bytes": "weights held a second time for the run",
           "key_value_bytes": "keys and values",
           "exchange_bytes": "other devices' rows", "conditioning_bytes": "conditioning",
           "activation_bytes": "activations", "other_bytes": "other programs and libraries"}
# What weights in 16 bits come to in other values of weight_dtype, as a share: a byte a number; 36 bytes for 64 numbers.
OF_16_BITS = {"fp8_e4m3fn": 0.5, "int8": 0.5, "nf4, with the package bitsandbytes": 36 / 128}
MIN_BYTES = 2 ** 20                        # less than that is not worth a word


def shortage_words(numbers):
    """A sentence or two about a failed rank's memory. numbers: of its messages.Failed; see Engine.shortage."""
    asked, free = numbers.get("asked_bytes", 0), numbers.get("free_bytes", 0)
    held = ", ".join(f"{name} {gigabytes(numbers[key])}" for key, name in HOLDERS.items()
                     if numbers.get(key, 0) >= MIN_BYTES)
    of = f" of {gigabytes(numbers['total_bytes'])}" if "total_bytes" in numbers else ""
    text = (f"{f'{gigabytes(asked)} more were asked for' if asked else 'it asked for more'}, and "
            f"{gigabytes(free)}{of} are free.")
    return f"{text} Held by: {held}." if held else text


def remedies(numbers, num_ranks):
    """What would fit, a sentence. It is a bound from above: the run took at least what it held and had asked for, and
    might have asked for more."""
    taken = sum(numbers.get(key, 0)
                for key in ("key_value_bytes", "exchange_bytes", "conditioning_bytes", "activation_bytes"))
    available, needed = taken + numbers.get("free_bytes", 0), taken + numbers.get("asked_bytes", 0)
    hints = []
    if taken >= MIN_BYTES and available < needed:
        share = available / needed
        devices = max(num_ranks + 1, math.ceil(num_ranks * needed / available))
        hints.append(f"Use a smaller latent or batch: at most {share:.0%} of these pixels (each side times "
                        f"{math.sqrt(share):.2f}), frames or images fit beside the weights")
        hints.append(f"or at least {devices} devices with ulysses_degree or ring_degree")
    else:
        hints.append("Use a smaller latent, or more devices")
    if (weights := numbers.get("weight_bytes", 0)) >= MIN_BYTES:
        lacking = numbers.get("asked_bytes", 0) - numbers.get("free_bytes", 0)
        types = [f"{name} ({gigabytes(weights * share)})" for name, share in OF_16_BITS.items()
                 if weights * (1 - share) >= lacking]
        if types:
            hints.append(f"in place of weights in 16 bits, weight_dtype {' or '.join(types)}")
        hints.append("pipefusion_degree or tensor_degree, which spread the weights over the devices")
    if (others := numbers.get("other_bytes", 0)) >= 2 ** 30:
        hints.append(f"close what else is on the device ({gigabytes(others)}; nvidia-smi shows it)")
    return "; ".join(hints) + "."


def gigabytes(num_bytes):
    """Bytes as a person reads them."""
    return f"{num_bytes / 2 ** 30:.1f} GB" if num_bytes >= 2 ** 30 else f"{num_bytes / 2 ** 20:.0f} MB"
