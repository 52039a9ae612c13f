"""The choice of the fastest exact attention operator from a probe's timings. Arithmetic only.

The host chooses for all ranks of a group at once, so that no choice depends on the rank.
"""

from dataclasses import replace

from ..protocol.specs import OPERATOR_HEADS, OPERATOR_KEYS, OPERATORS, SDPA, operator_key

WORTH = 0.97                   # of torch SDPA's time, below which another operator replaces it
USUAL_KEYS = 4096              # for the cost model


def fastest_operators(devices):
    """BackendChoice.fastest for these Devices: the operator whose slowest device is fastest, of those that all have.

    Where no log-sum-exp is needed, torch SDPA stays unless another one is faster by more than the noise. {} for devices
    without timings.
    """
    found = {}
    for head in OPERATOR_HEADS:
        for keys in OPERATOR_KEYS:
            seconds = {name: max(device.operators[f"{name} {head} {keys}"] for device in devices) for name in OPERATORS
                       if all(f"{name} {head} {keys}" in device.operators for device in devices)}
            usual_s = seconds.pop(SDPA, None)
            if not seconds or usual_s is None:
                continue
            best = min(seconds, key=lambda name: seconds[name])
            found[operator_key(head, keys, True)] = best
            found[operator_key(head, keys, False)] = best if seconds[best] < WORTH * usual_s else SDPA
    return found


def with_fastest(device, fastest):
    """The device with the attention rates of these operators."""
    wide, narrow = (_speedup(device, head, fastest) for head in (128, 64))
    return replace(device, attention_flops_s=device.attention_flops_s * wide,
                   narrow_fraction=device.narrow_fraction * narrow / wide)


def _speedup(device, head, fastest):
    name = fastest.get(operator_key(head, USUAL_KEYS, False), SDPA)
    if name == SDPA:
        return 1.0
    return device.operators[f"{SDPA} {head} {USUAL_KEYS}"] / device.operators[f"{name} {head} {USUAL_KEYS}"]
