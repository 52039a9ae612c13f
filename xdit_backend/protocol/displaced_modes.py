"""How displaced patches may synchronise after the warm-up: DistriFusion's ways (arXiv 2402.19481, section 4). Read on both sides."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """norms: moments of a group norm are "corrected" stale ones, "stale" ones with the own fresh, exchanged at "once", or the rank's
    "own"."""

    norms: str = "corrected"
    is_stale: bool = True
    keeps: bool = True                     # are later calls told what this one has?


MODES = {"corrected_async_gn": Mode(), "stale_gn": Mode("stale"), "sync_gn": Mode("once"), "separate_gn": Mode("own"),
         "no_sync": Mode("own", keeps=False), "full_sync": Mode(is_stale=False)}
