"""When a call of the model may use what earlier calls have left on the workers: one rule for PipeFusion and for
displaced patches."""

import math

# some samplers come to a step's noise level by differences and logarithms
ROUNDING = 1 + 1e-3


class Staleness:
    """Which calls of one run are synchronous, where everything is fresh.

    Warm-up is counted in noise levels, staleness in calls: a call is synchronous while its sigma is above
    sigmas[warmup_steps], by more than rounding (some samplers ask twice at one level), and where the workers hold
    nothing of its conditioning yet. Any other uses what the last call with the same conditioning left, whichever part
    of a sampler's step that was, and leaves its own. is_cold: with warmup_steps = 0 the first step is none of the
    synchronous ones.
    """

    def __init__(self, schedule, warmup_steps, is_cold=False):
        sigmas = [sigma * ROUNDING for sigma in schedule.tolist()]
        self._warm_sigma = sigmas[warmup_steps] if warmup_steps < len(sigmas) - 1 else -math.inf
        self._cold_sigma = sigmas[1] if is_cold and warmup_steps == 0 and len(sigmas) > 1 else None
        self._held = set()

    @property
    def ends(self):
        """Will calls follow that are not synchronous?"""
        return self._warm_sigma > -math.inf

    def hold(self, names):
        """Note that the workers hold what a call with each of these has left. names: of conditionings, each with the
        CFG rank that runs it."""
        self._held.update(names)

    def is_synchronous(self, names, sigma):
        """Must this call be synchronous? names: as hold's, of the call's conditionings."""
        if sigma > self._warm_sigma:
            return True
        if self._cold_sigma is not None and sigma > self._cold_sigma:
            return False
        return not self._held.issuperset(names)
