"""Out-of-memory reports: who holds how much of a device, how much is lacking, and which settings would fit."""

import math

from ..protocol.devices import own_name

# of a run, which a smaller one would take less of
OF_A_RUN = ("key_value_bytes", "exchange_bytes", "conditioning_bytes", "activation_bytes")
HOLDERS = {"weight_bytes": "weights", "cast_bytes": "weights held a second time for the run",
           "key_value_bytes": "keys and values",
           "exchange_bytes": "other devices' rows", "conditioning_bytes": "conditioning",
           "activation_bytes": "activations", "other_bytes": "other programs and libraries"}
# What weights in 16 bits come to in other values of weight_dtype, as a share: a byte a number; 36 bytes for 64 numbers.
OF_16_BITS = {"fp8_e4m3fn": 0.5, "int8": 0.5, "nf4, with the package bitsandbytes": 36 / 128}
MIN_BYTES = 2 ** 20                        # less than that is not worth a word
OF_WEIGHTS = ("LoadModel", "RestoreModel", "ChangeWeights", "ReturnWeights", "LoadNetwork", "LoadAutoencoder")
OF_A_VAE = ("Decode", "Encode")


def describe_out_of_memory(numbers):
    """A sentence or two about a failed rank's memory. numbers: of its messages.Failed; see Engine.shortage."""
    requested, free = numbers.get("requested_bytes", 0), numbers.get("free_bytes", 0)
    held = ", ".join(f"{name} {gigabytes(numbers[key])}" for key, name in HOLDERS.items()
                     if numbers.get(key, 0) >= MIN_BYTES)
    of = f" of {gigabytes(numbers['total_bytes'])}" if "total_bytes" in numbers else ""
    lacking = f": {gigabytes(requested - free)} are lacking" if requested > free else ""
    text = (f"{f'{gigabytes(requested)} more were asked for' if requested else 'it asked for more'}, and "
            f"{gigabytes(free)}{of} are free{lacking}.")
    return f"{text} Held by: {held}." if held else text


def run_bytes(numbers):
    """(bytes that a rank had beside weights and had asked for, those that it could have had)."""
    taken = sum(numbers.get(key, 0) for key in OF_A_RUN)
    return taken + numbers.get("requested_bytes", 0), taken + numbers.get("free_bytes", 0)


def remedies(numbers, num_ranks, command="Predict", device="cuda:0"):
    """Settings that would fit, a sentence. It is a bound from above: the run took at least what it held and had asked
    for, and might have asked for more.

    command: the name of its message. device: where memory ran out.
    """
    hints = [] if command in OF_WEIGHTS else _of_sizes(numbers, num_ranks, command in OF_A_VAE)
    if command not in OF_A_VAE:
        hints += _of_weights(numbers, own_name(device) != "cpu", command in OF_WEIGHTS)
    if (others := numbers.get("other_bytes", 0)) >= 2 ** 30:
        hints.append(f"the device without other programs, which take {gigabytes(others)} (nvidia-smi shows them)")
    return f"Use {'; or '.join(hints) or 'larger devices'}."


def _of_sizes(numbers, num_ranks, is_of_vae):
    (needed, available), name = run_bytes(numbers), "image" if is_of_vae else "latent"
    method = "for Distributed VAE Decode or Encode" if is_of_vae else "with ulysses_degree or ring_degree"
    if needed - numbers.get("requested_bytes", 0) < MIN_BYTES or available >= needed:
        return [f"a smaller {name}", "more devices"]
    share, devices = available / needed, max(num_ranks + 1, math.ceil(num_ranks * needed / available))
    return [f"a smaller {name} or batch: at most {share:.0%} of these pixels (each side times "
            f"{math.sqrt(share):.2f}), frames or images fit beside the weights", f"at least {devices} devices {method}"]


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
            hints.append(f"in place of weights in 16 bits, weight_dtype {' or '.join(types)}")
    if weights >= MIN_BYTES or is_load:
        hints.append("pipefusion_degree or tensor_degree, which shard the weights over the devices")
    return hints


def gigabytes(num_bytes):
    """Bytes as a user reads them."""
    return f"{num_bytes / 2 ** 30:.1f} GB" if num_bytes >= 2 ** 30 else f"{num_bytes / 2 ** 20:.0f} MB"
