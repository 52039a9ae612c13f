"""A plan in a person's words: what is chosen, how fast, why, and what came second. Pure text."""

from dataclasses import replace

from .calibration import NEW
from .layout_search import is_worth_it

METHODS = {"cfg": "CFG", "data": "data", "pipefusion": "PipeFusion", "displaced": "DistriFusion", "ring": "Ring",
           "ulysses": "Ulysses", "tensor": "tensor"}
REASONS = {"compute": "the devices compute nearly all of the time",
           "link": "devices wait for transfers {share:.0%} of the time",
           "launch": "there is little to compute: starting kernels takes {share:.0%} of the time",
           "warm-up": "few steps: whole steps and empty slots take {share:.0%} of the time",
           "weights": "devices wait for weights from host memory {share:.0%} of the time"}


def describe_method(degree_of):
    """Of each method that is on, e.g. ["CFG 2", "Ulysses 2"]. degree_of(axis): its degree."""
    return [f"{name} {degree_of(axis)}" for axis, name in METHODS.items() if degree_of(axis) > 1]


def describe_layout(layout, num_branches=0):
    """A layout in a person's words, e.g. "CFG 2 x Ulysses 2". num_branches: beyond which ranks rest, if that is to be
    said."""
    if num_branches:
        layout = replace(layout, cfg_degree=min(layout.cfg_degree, num_branches))
    return " x ".join(describe_method(lambda axis: getattr(layout, f"{axis}_degree"))) or "one device"


def layout_description(one):
    """Of a Forecast, e.g. "CFG 2 x Ulysses 2" or "PipeFusion 2, 4 patches"."""
    if one.working == 1:
        return "one device"
    text = " x ".join(describe_method(lambda axis: getattr(one.degrees, axis)))
    return f"{text}, {one.degrees.num_patches} patches" if one.degrees.num_patches else text


def describe_plan(chosen, one, ordered, measured_s=(None, None), off=NEW):
    """What the node says of a run's Forecasts: the chosen one, that of one device (None: it does not fit there), and
    all.

    measured_s: of such a run before, and of one on a single device, where there were. off: by how much forecasts of
    this family on these cards may be off.
    """
    text = f"Plan: {layout_description(chosen)}, "
    if chosen.working == 1:
        text += f"about {describe_seconds(chosen.seconds)}: one device is as fast"
    elif one is None:
        text += f"about {describe_seconds(chosen.seconds)}: one device has too little memory"
    elif measured_s[0] is not None:
        text += f"{describe_seconds(measured_s[0])} the last time{describe_measurements(*measured_s)}"
    elif is_worth_it(chosen, one):
        faster = one.seconds / chosen.seconds
        text += (f"about {faster:.1f}x as fast as one device ({faster * (1 - off):.1f}x to {faster * (1 + off):.1f}x, "
                 f"{describe_seconds(chosen.seconds)} instead of {describe_seconds(one.seconds)})")
    else:
        text += f"about {describe_seconds(chosen.seconds)}: one device is about as fast"
    text += f". Memory: {chosen.memory.total / 1e9:.2g} GB a card"
    second = next((other for other in ordered if layout_description(other) != layout_description(chosen)), None)
    return text + (f". Next best: {layout_description(second)} in {describe_seconds(second.seconds)}" if second else "")


def describe_measurements(measured_s, one_s):
    """What was measured beside what was measured on one device; "" where that is not known. A forecast is no measure:
    it is off by most in runs of seconds."""
    return f" ({one_s / measured_s:.1f}x as fast as one device)" if one_s else ""


def describe_weights(stay_bytes, streamed_bytes, chosen, num_steps, num_patches=1, is_shared=False):
    """Where weights are that do not all fit on the devices, and what that costs. stay_bytes, streamed_bytes: of a rank.
    chosen: the run's Forecast, or None. num_patches: for each of which they come, one after the other. is_shared:
    Forecast.shards_weights, without one."""
    often = ("in every step" if num_patches == 1 else
             f"for each of {num_patches} patches, {num_patches * streamed_bytes / 1e9:.3g} GB in every step")
    text = (f"Weights: {stay_bytes / 1e9:.3g} GB of each device, and {streamed_bytes / 1e9:.3g} GB come from host "
            f"memory {often}")
    if is_shared or chosen is not None and chosen.shards_weights:
        text += ", a part over each device, which send them to each other"
    if chosen is None or not chosen.streaming_s:
        return text
    step_s = (chosen.seconds - chosen.causes["weights"]) / num_steps
    if chosen.streaming_s <= step_s:
        return f"{text}, hidden ({describe_seconds(chosen.streaming_s)} of {describe_seconds(step_s)})"
    return (f"{text}, which takes {describe_seconds(chosen.streaming_s)} where computing takes "
            f"{describe_seconds(step_s)}. Faster would be weights of a smaller type (fp8, GGUF), or fewer devices, "
            f"or pipefusion_degree")


def describe_disk(bytes_s, step_bytes):
    """What it costs where host memory has no room for the weights that come. bytes_s: at which the file is read."""
    return (f"more than it has room for: {bytes_s / 1e9:.2g} GB/s from disk, {describe_seconds(step_bytes / bytes_s)} "
            f"a step. Faster would be more host memory, or weights of a smaller type (fp8, GGUF)")


def why(chosen):
    """What limits the chosen layout."""
    return REASONS[chosen.limited_by].format(share=chosen.causes[chosen.limited_by] / chosen.seconds)


def describe_seconds(seconds):
    """Two digits, no more than a forecast knows."""
    return f"{float(f'{seconds:.2g}'):.12g} s"


def table(ordered, chosen, one):
    """Lines of a table of Forecasts, the best first, with the chosen one marked. one: that of one device."""
    lines = [f"  {'layout':<34} {'seconds':>8} {'faster':>7} {'GB a card':>10} {'weights':>8} {'keys, values':>13} "
             f"{'activations':>12}  limited by"]
    for other in ordered:
        memory = other.memory
        notes = other.limited_by + ("" if other.is_exact
                                    else "; nearly the same picture") + ("" if other.fits else "; does not fit")
        lines.append(f"{'* ' if other is chosen else '  '}{layout_description(other):<34} {other.seconds:>8.2f} "
                     f"{one.seconds / other.seconds:>6.2f}x {memory.total / 1e9:>10.2f} {memory.weights / 1e9:>8.2f} "
                     f"{memory.keys_values / 1e9:>13.2f} {memory.activations / 1e9:>12.2f}  {notes}")
    return lines
