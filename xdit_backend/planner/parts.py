"""What the seconds of a block, a step or a run are made of. Used by cost_model.py and run_time.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Parts:
    """Seconds of a block, a step or a run: what the device computes, waits for others, and the host launches."""

    compute: float
    link: float
    launch: float

    @property
    def seconds(self):
        return max(self.compute + self.link, self.launch)

    def times(self, factor):
        return Parts(self.compute * factor, self.link * factor, self.launch * factor)

    def plus(self, other):
        return Parts(self.compute + other.compute, self.link + other.link, self.launch + other.launch)
