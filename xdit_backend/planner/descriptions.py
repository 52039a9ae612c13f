"""Text that describes a plan to the user: the chosen layout, its estimated time, the reason and the runner-up.
Formatting only."""

from dataclasses import replace

from .calibration import NEW
from .layout_search import is_worth_it

METHODS = {"cfg": "CFG", "data": "data", "pipefusion": "PipeFusion", "displaced": "DistriFusion", "ring": "Ring",
           "ulysses": "Ulysses", "tensor": "tensor"}
SHOWN_S = 2.0                              # a shorter run is not estimated to the user: its error is as large
REASONS = {"compute": "compute-bound: the devices compute {share:.0%} of the time",
           "link": "transfer-bound: transfers between devices take {share:.0%} of the time",
           "launch": "launch-bound: there is little to compute, and launching kernels takes {share:.0%} of the time",
           "warm-up": "few steps: warm-up steps and empty pipeline slots take {share:.0%} of the time",
           "weights": "transfer-bound: transfers of offloaded weights take {share:.0%} of the time"}


def describe_method(degree_of):
    """One text per enabled method, e.g. ["CFG 2", "Ulysses 2"]. degree_of(axis): its degree."""
    return [f"{name} {degree_of(axis)}" for axis, name in METHODS.items() if degree_of(axis) > 1]


def describe_layout(layout, num_branches=0):
    """Text for a Layout, e.g. "CFG 2 x Ulysses 2". num_branches: if not 0, cfg_degree is shown as at most this, since
    ranks beyond it are idle."""
    if num_branches:
        layout = replace(layout, cfg_degree=min(layout.cfg_degree, num_branches))
    return " x ".join(describe_method(lambda axis: getattr(layout, f"{axis}_degree"))) or "one device"


def layout_description(one):
    """Text for an Estimate's layout, e.g. "CFG 2 x Ulysses 2" or "PipeFusion 2, 4 patches"."""
    if one.working == 1:
        return "one device"
    text = " x ".join(describe_method(lambda axis: getattr(one.degrees, axis)))
    return f"{text}, {one.degrees.num_patches} patches" if one.degrees.num_patches else text


def describe_plan(chosen, one, ordered, measured_s=(None, None), off=NEW):
    """The text that the node shows about a plan.

    chosen: Estimate of the chosen layout. one: Estimate of one device; None: the run does not fit there. ordered: all
    Estimates, best first. measured_s: seconds of an earlier run like this one, and of one on a single device; None:
    there was none. off: relative error to expect of estimates for this family on these devices. Estimates are shown for
    runs of SHOWN_S or longer that have not been measured yet.
    """
    text = f"Plan: {layout_description(chosen)}"
    second = next((other for other in ordered if layout_description(other) != layout_description(chosen)), None)
    second_best = f". Next best: {layout_description(second)}" if second else ""
    if measured_s[0] is not None and chosen.working > 1:
        last = f"{describe_seconds(measured_s[0])} the last time{describe_measurements(*measured_s)}"
        return f"{text}, {last}{second_best}"
    if chosen.seconds < SHOWN_S:
        return text + second_best
    text += ", "
    if chosen.working == 1:
        text += f"about {describe_seconds(chosen.seconds)}: one device is as fast"
    elif one is None:
        text += f"about {describe_seconds(chosen.seconds)}: one device has too little memory"
    elif is_worth_it(chosen, one):
        faster = one.seconds / chosen.seconds
        text += (f"about {faster:.1f}x as fast as one device ({faster * (1 - off):.1f}x to {faster * (1 + off):.1f}x, "
                 f"{describe_seconds(chosen.seconds)} instead of {describe_seconds(one.seconds)})")
    else:
        text += f"about {describe_seconds(chosen.seconds)}: one device is about as fast"
    return text + second_best + (f" in {describe_seconds(second.seconds)}" if second else "")


def describe_measurements(measured_s, one_s):
    """The measured speedup over one device; "" where one device has not been measured. Measurements are never compared
    with estimates, whose relative error is largest for runs of a few seconds."""
    return f" ({one_s / measured_s:.1f}x as fast as one device)" if one_s else ""


def describe_speedup(step_s, one, is_cuda):
    """Text for a measured run of step_s seconds a step. one: the MeasuredRun of the same run on one device."""
    faster = one.step_s / step_s
    return (f"; {faster:.1f}x one GPU, measured here on {one.date}" if is_cuda
            else f"; {faster:.1f}x one device, measured here on {one.date}")


def describe_weights(stay_bytes, streamed_bytes, chosen, num_steps, num_patches=1, is_shared=False):
    """Text about offloaded weights and their cost.

    stay_bytes, streamed_bytes: a rank's resident and streamed weights. chosen: the run's Estimate, or None.
    num_patches: the weights are streamed once for each. is_shared: Estimate.shards_weights, if there is no Estimate.
    """
    often = ("at every step" if num_patches == 1 else
             f"for each of {num_patches} patches ({num_patches * streamed_bytes / 1e9:.3g} GB per step)")
    text = (f"Weights: {stay_bytes / 1e9:.3g} GB resident per device, {streamed_bytes / 1e9:.3g} GB offloaded to "
            f"system RAM and streamed {often}")
    if is_shared or chosen is not None and chosen.shards_weights:
        text += ", one shard by each device, which all-gather them"
    if chosen is None or not chosen.streaming_s:
        return text
    step_s = (chosen.seconds - chosen.causes["weights"]) / num_steps
    if chosen.streaming_s <= step_s:
        return (f"{text}, hidden behind compute ({describe_seconds(chosen.streaming_s)} of "
                f"{describe_seconds(step_s)} per step)")
    return (f"{text}, transfer-bound: {describe_seconds(chosen.streaming_s)} of transfers for "
            f"{describe_seconds(step_s)} of compute per step. For a faster run, use smaller weights (fp8, GGUF), fewer "
            f"devices or pipefusion_degree")


def describe_disk(bytes_s, step_bytes):
    """Text about the cost of streaming where the offloaded weights exceed free system RAM. bytes_s: read rate of the
    file."""
    return (f"more than fits in free system RAM: read from disk at {bytes_s / 1e9:.2g} GB/s, "
            f"{describe_seconds(step_bytes / bytes_s)} per step. For a faster run, add system RAM or use smaller "
            f"weights (fp8, GGUF)")


def why(chosen):
    """The bottleneck of the chosen Estimate."""
    return REASONS[chosen.limited_by].format(share=chosen.causes[chosen.limited_by] / chosen.seconds)


def describe_seconds(seconds):
    """Seconds to two significant digits, the precision of an estimate."""
    return f"{float(f'{seconds:.2g}'):.12g} s"


def table(ordered, chosen, one):
    """Lines of a table of Estimates, best first, with the chosen one marked. one: Estimate of one device."""
    lines = [f"  {'layout':<34} {'seconds':>8} {'speedup':>7} {'GB/device':>10} {'weights':>8} {'keys, values':>13} "
             f"{'activations':>12}  limited by"]
    for other in ordered:
        memory = other.memory
        notes = other.limited_by + ("" if other.is_exact
                                    else "; approximate") + ("" if other.fits else "; does not fit")
        lines.append(f"{'* ' if other is chosen else '  '}{layout_description(other):<34} {other.seconds:>8.2f} "
                     f"{one.seconds / other.seconds:>6.2f}x {memory.total / 1e9:>10.2f} {memory.weights / 1e9:>8.2f} "
                     f"{memory.keys_values / 1e9:>13.2f} {memory.activations / 1e9:>12.2f}  {notes}")
    return lines


def gigabytes(num_bytes):
    """Format a size in GB or MB."""
    return f"{num_bytes / 2 ** 30:.1f} GB" if num_bytes >= 2 ** 30 else f"{num_bytes / 2 ** 20:.0f} MB"
