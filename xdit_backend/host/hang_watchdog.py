"""Hang watchdog of a running group: detects silent and deadlocked ranks from the times of their messages."""

import time

from ..protocol.messages import Phase

AWAY_S = 5.0               # after a longer pause between receives, nobody was listening or this process was suspended


class HangWatchdog:
    """Signs of life of the ranks of a running group. requests: its Requests."""

    def __init__(self, requests):
        self._requests = requests
        self._last_sign_s, self._last_listened_s = {}, 0.0     # rank -> time of its last message; end of last listening
        # rank -> its last Phase; rank -> (state of its last Heartbeat, time since which it is unchanged)
        self._phases, self._heartbeats = {}, {}

    def command_sent(self, ranks):
        """Record a command to these ranks; the silence of those that were idle does not count."""
        self._last_sign_s |= {rank: time.monotonic() for rank in ranks if self.activity(rank) is None}

    def listening_begins(self, ranks):
        """Record that the host starts to listen; time during which it did not listen does not count as silence."""
        if time.monotonic() - self._last_listened_s > AWAY_S:
            self._last_sign_s, self._heartbeats = dict.fromkeys(ranks, time.monotonic()), {}

    def record_sign(self, rank):
        self._last_sign_s[rank] = time.monotonic()

    def listening_ended(self):
        self._last_listened_s = time.monotonic()

    def heartbeat(self, rank, message):
        """Record a messages.Heartbeat."""
        where = message.request, message.num_passed, message.waits
        before, since_s = self._heartbeats.get(rank, (None, 0.0))
        self._heartbeats[rank] = where, since_s if where == before else time.monotonic()

    def waits_s(self, rank):
        """Seconds for which a rank has waited for other ranks without progress; 0 if it does not wait."""
        where, since_s = self._heartbeats.get(rank, ((False,), 0.0))
        return self._last_listened_s - since_s if where[-1] else 0.0

    def record_progress(self, rank, message):
        """Record an answer or Phase of a rank, after which the other ranks' heartbeats are outdated."""
        self._heartbeats.clear()
        if isinstance(message, Phase):
            self._phases[rank] = message
        else:
            self._phases.pop(rank, None)

    def activity(self, rank):
        """Description of the first request that a rank has not answered, "" if it has none; None: all are answered."""
        request = self._requests.first_unanswered(rank)
        if request is None:
            return None
        phase = self._phases.get(rank) if request.activity else None
        if phase is None or not phase.total:
            return request.activity
        return f"{request.activity}, {phase.text} {phase.done} of {phase.total}"

    def silent(self, ranks, limit_s):
        """Find a rank that executes a command and has been silent for longer than limit_s.

        Returns (rank, predicate of a sentence about it), or None.
        """
        for rank in ranks:
            silent_s = self._last_listened_s - self._last_sign_s.get(rank, self._last_listened_s)
            if silent_s > limit_s and (activity := self.activity(rank)) is not None:
                return (rank, f"has given no sign of life for {silent_s:.0f} s{activity}: it was stopped, or hung, and "
                              f"is ended")
        return None

    def stuck(self, ranks, limit_s, name_of):
        """Detect that all busy ranks have waited for each other for longer than limit_s without progress.

        A rank that computes, however slowly, reports that it does not wait, and then nobody is stuck. name_of:
        (rank) -> text. Returns (rank, predicate of a sentence about it), or None.
        """
        busy = [rank for rank in ranks if self.activity(rank) is not None]
        heartbeats = [self._heartbeats[rank] for rank in busy if rank in self._heartbeats
                      and self._heartbeats[rank][0][-1]]
        stuck_s = min((self._last_listened_s - since_s for _, since_s in heartbeats), default=0.0)
        if len(heartbeats) < len(busy) or stuck_s <= limit_s:
            return None
        return busy[0], (f"hangs{self.activity(busy[0])}: {' and '.join(map(name_of, busy))} waited for other ranks "
                         f"without progress for {stuck_s:.0f} s. A collective or transfer was lost, and the group is "
                         f"ended")
