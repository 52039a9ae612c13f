"""Out-of-memory reports: use of a device's memory, the missing amount, and settings that would fit."""

import math

from ..protocol.devices import own_name

# memory that scales with the size of a run
OF_A_RUN = ("key_value_bytes", "exchange_bytes", "conditioning_bytes", "activation_bytes")
USES = {"weight_bytes": "weights", "cast_bytes": "a second copy of weights for the run",
        "key_value_bytes": "keys and values",
        "exchange_bytes": "other devices' activations", "conditioning_bytes": "conditioning",
        "activation_bytes": "activations", "other_bytes": "other programs and libraries"}
# weight_dtype -> size relative to 16-bit weights: 8 bits a number; nf4 has 36 bytes for 64 numbers
OF_16_BITS = {"fp8_e4m3fn": 0.5, "int8": 0.5, "nf4, with the package bitsandbytes": 36 / 128}
MIN_BYTES = 2 ** 20                        # smaller amounts are not reported
OF_WEIGHTS = ("LoadModel", "RestoreModel", "ChangeWeights", "ReturnWeights", "LoadNetwork", "LoadAutoencoder")
OF_A_VAE = ("Decode", "Encode")


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


def run_bytes(numbers):
    """(bytes that a rank used or requested in addition to weights, bytes that were available for that)."""
    taken = sum(numbers.get(key, 0) for key in OF_A_RUN)
    return taken + numbers.get("requested_bytes", 0), taken + numbers.get("free_bytes", 0)


def remedies(numbers, num_ranks, command="Predict", device="cuda:0"):
    """Suggest settings that would fit, in a sentence.

    They are upper bounds: the run needs at least the memory that it used and requested, and may need more. command:
    name of its message. device: the one that ran out of memory.
    """
    hints = [] if command in OF_WEIGHTS else _of_sizes(numbers, num_ranks, command in OF_A_VAE)
    if command not in OF_A_VAE:
        hints += _of_weights(numbers, own_name(device) != "cpu", command in OF_WEIGHTS)
    if (others := numbers.get("other_bytes", 0)) >= 2 ** 30:
        hints.append(f"the device without other programs, which take {gigabytes(others)} (nvidia-smi shows them)")
    return f"Use {'; or '.join(hints) or 'larger devices'}."


def _of_sizes(numbers, num_ranks, is_of_vae):
    needed, available = run_bytes(numbers)
    smaller = "a smaller image" if is_of_vae else "a smaller latent"
    if needed - numbers.get("requested_bytes", 0) < MIN_BYTES or available >= needed:
        return [smaller, "more devices"]
    fraction, devices = available / needed, max(num_ranks + 1, math.ceil(num_ranks * needed / available))
    return [f"{smaller} or batch: at most {fraction:.0%} of these pixels (each side times {math.sqrt(fraction):.2f}), "
            f"frames or images fit next to the weights",
            f"at least {devices} devices for Distributed VAE Decode or Encode" if is_of_vae
            else f"at least {devices} devices with ulysses_degree or ring_degree"]


def _of_weights(numbers, can_stream, is_load):
    weights, lacking = numbers.get("weight_bytes", 0), numbers.get("requested_bytes", 0) - numbers.get("free_bytes", 0)
    hints = []
    if can_stream and is_load:
        hints.append('weights_memory "auto", or fewer GB than now, with which weights are streamed from system RAM')
    elif can_stream and 0 < lacking < weights - MIN_BYTES:
        cached = math.floor((weights - lacking) / 1e7) / 100
        hints.append(f'weights_memory "{cached:g}", with which the other weights are streamed from system RAM')
    if weights >= MIN_BYTES:
        types = [f"{name} ({gigabytes(weights * share)})" for name, share in OF_16_BITS.items()
                 if weights * (1 - share) >= lacking]
        if types:
            hints.append(f"instead of 16-bit weights, weight_dtype {' or '.join(types)}")
    if weights >= MIN_BYTES or is_load:
        hints.append("pipefusion_degree or tensor_degree, which shard the weights over the devices")
    return hints


def gigabytes(num_bytes):
    """Format a size in GB or MB."""
    return f"{num_bytes / 2 ** 30:.1f} GB" if num_bytes >= 2 ** 30 else f"{num_bytes / 2 ** 20:.0f} MB"
