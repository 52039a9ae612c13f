"""Warm-up and staleness rule of PipeFusion and displaced patches: which calls may use what earlier calls cached."""

import math

# some samplers compute a step's sigma by differences and logarithms
ROUNDING = 1 + 1e-3


class Staleness:
    """Decides which calls of one run are synchronous, that is, use nothing stale.

    Warm-up is counted in sigmas, staleness in calls. A call is synchronous if its sigma is above sigmas[warmup_steps]
    by more than rounding (some samplers call twice at one sigma), or if the workers have cached nothing for its
    conditioning yet. Any other call uses the cache of the last call with the same conditioning, whichever stage of a
    sampler's step that was, and updates it. is_cold: with warmup_steps = 0, no call of the first step is synchronous.
    """

    def __init__(self, schedule, warmup_steps, is_cold=False):
        sigmas = [sigma * ROUNDING for sigma in schedule.tolist()]
        self._warm_sigma = sigmas[warmup_steps] if warmup_steps < len(sigmas) - 1 else -math.inf
        self._cold_sigma = sigmas[1] if is_cold and warmup_steps == 0 and len(sigmas) > 1 else None
        self._cached = set()

    @property
    def ends(self):
        """Whether calls that are not synchronous follow."""
        return self._warm_sigma > -math.inf

    def hold(self, names):
        """Record that the workers have cached a call with each of these. names: of conditionings, each with the CFG
        rank that runs it."""
        self._cached.update(names)

    def is_synchronous(self, names, sigma):
        """Whether this call must be synchronous. names: of the call's conditionings, as for `hold`."""
        if sigma > self._warm_sigma:
            return True
        if self._cold_sigma is not None and sigma > self._cold_sigma:
            return False
        return not self._cached.issuperset(names)
