"""How long the calls of one run of a MODEL took, to compare with its forecast. Used by layout_selection.py."""

import statistics
import time


class StepTimes:
    """How long the calls of a run's model took."""

    def __init__(self, job):
        self.job, self._calls_s, self._client, self._before = job, [], None, {}

    def call(self, client, predict):
        if not self._calls_s:
            self._client, self._before = client, {rank: dict(totals) for rank, totals in client.group.totals.items()}
        started_s = time.perf_counter()
        result = predict()
        self._calls_s.append(time.perf_counter() - started_s)
        return result

    @property
    def seconds(self):
        """Seconds of a run with one call a step; None before there are enough calls. The first call is left out, since
        much is prepared in it."""
        return statistics.median(self._calls_s[1:]) * self.job.steps if len(self._calls_s) > 2 else None

    def split(self):
        """What the workers did in that time, for a person."""
        if not (self._client and self._client.running):
            return "the workers have ended"
        after = self._client.totals()
        did = {name: [numbers.get(name, 0) - self._before.get(rank, {}).get(name, 0)
                      for rank, numbers in sorted(after.items())]
               for name in ("busy_s", "sent_bytes")}
        busy, sent = (", ".join(f"{number / unit:.1f}" for number in did[name])
                      for name, unit in (("busy_s", 1), ("sent_bytes", 1e6)))
        return f"in {len(self._calls_s)} calls the workers were busy {busy} s and sent {sent} MB"
