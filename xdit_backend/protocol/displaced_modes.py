"""How displaced patches may synchronise after the warm-up: DistriFusion's ways (arXiv 2402.19481, section 4).
Read on both sides."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """norms: moments of a group norm are "corrected" stale ones, "stale" ones with the own fresh, exchanged at "once",
    or the rank's "own"."""

    norms: str = "corrected"
    is_stale: bool = True
    publishes: bool = True                 # are later calls sent what this one has?


MODES = {"corrected_async_gn": Mode(), "stale_gn": Mode("stale"), "sync_gn": Mode("once"), "separate_gn": Mode("own"),
         "no_sync": Mode("own", publishes=False), "full_sync": Mode(is_stale=False)}
AUTO = "auto"                              # chosen_for
ROWS_FOR_CORRECTION = 4


def chosen_for(num_rows):
    """(the mode for a run, why in a person's words).

    num_rows: the fewest that a rank has of a U-Net's smallest images; None: of a transformer, which has no norms over
    the picture, so that these modes are one. By the figures of docs/benchmarks.md: with four rows
    the correction is as near to one device as 37 dB, 2 dB behind moments exchanged at once, for which all ranks wait in
    every norm; with two and with one it is at 31 to 33 dB, up to 4 dB behind. Stale moments are behind the correction
    in all of these.
    """
    if num_rows is None:
        return "corrected_async_gn", ""
    rows = f"a device has {num_rows} row{'' if num_rows == 1 else 's'} of the smallest images"
    if num_rows < ROWS_FOR_CORRECTION:
        return "sync_gn", f"norms exchanged at once: {rows}, fewer than {ROWS_FOR_CORRECTION}"
    return "corrected_async_gn", f"norms corrected: {rows}"
