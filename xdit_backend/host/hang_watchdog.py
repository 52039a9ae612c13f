"""Are the workers that carry out a command alive, and do they make progress? Judged by when they sent what. Used by the
launcher."""

import time

from ..protocol.messages import Phase

AWAY_S = 5.0                                       # for so long nobody listened, or this process itself was stopped


class HangWatchdog:
    """Signs of life of the ranks of a running group. requests: its Requests, which say what each rank does."""

    def __init__(self, requests):
        self._requests = requests
        self._last_sign_s, self._last_listened_s = {}, 0.0     # when each rank last gave a sign; when anyone listened
        # of each rank: its last Phase; (how far it is, since when)
        self._phases, self._heartbeats = {}, {}

    def command_sent(self, ranks):
        """A command goes to these ranks. Those that were idle until now had no reason to say anything."""
        self._last_sign_s |= {rank: time.monotonic() for rank in ranks if self.activity(rank) is None}

    def listening_begins(self, ranks):
        """Somebody is about to listen to these ranks. Time in which nobody listened does not count as silence."""
        if time.monotonic() - self._last_listened_s > AWAY_S:
            self._last_sign_s, self._heartbeats = dict.fromkeys(ranks, time.monotonic()), {}

    def record_sign(self, rank):
        self._last_sign_s[rank] = time.monotonic()

    def listening_ended(self):
        self._last_listened_s = time.monotonic()

    def heartbeat(self, rank, message):
        """A rank reports how many exchanges it has passed, and whether it waits now (messages.Heartbeat)."""
        where = message.request, message.num_passed, message.waits
        before, since_s = self._heartbeats.get(rank, (None, 0.0))
        self._heartbeats[rank] = where, since_s if where == before else time.monotonic()

    def waits_s(self, rank):
        """For how many seconds a rank has waited for others, and got nothing; 0 where it does not wait."""
        where, since_s = self._heartbeats.get(rank, ((False,), 0.0))
        return self._last_listened_s - since_s if where[-1] else 0.0

    def record_progress(self, rank, message):
        """A rank has answered or reported a phase, so the others may have made progress since their last heartbeats."""
        self._heartbeats.clear()
        if isinstance(message, Phase):
            self._phases[rank] = message
        else:
            self._phases.pop(rank, None)

    def activity(self, rank):
        """What a rank does for the first request it owes an answer to, "" where that has no name;
        None where it owes none."""
        request = self._requests.first_unanswered(rank)
        if request is None:
            return None
        phase = self._phases.get(rank) if request.activity else None
        if phase is None or not phase.total:
            return request.activity
        return f"{request.activity}, {phase.text} {phase.done} of {phase.total}"

    def silent(self, ranks, limit_s):
        """(rank, what became of it) of one that is at a command and has given no sign for long:
        it is stopped, or hangs; else None."""
        for rank in ranks:
            silent_s = self._last_listened_s - self._last_sign_s.get(rank, self._last_listened_s)
            if silent_s > limit_s and (activity := self.activity(rank)) is not None:
                return (rank, f"has given no sign of life for {silent_s:.0f} s{activity}: it was stopped, or hung, and "
                              f"is ended")
        return None

    def stuck(self, ranks, limit_s, name_of):
        """(rank, what became of it) where every rank at a command waits for others, and none has got on for long; else
        None.

        A rank that computes, however slowly, says that it does not wait; those that wait for it are not stuck. called:
        (rank) -> words.
        """
        busy = [rank for rank in ranks if self.activity(rank) is not None]
        heartbeats = [self._heartbeats[rank] for rank in busy if rank in self._heartbeats
                      and self._heartbeats[rank][0][-1]]
        stuck_s = min((self._last_listened_s - since_s for _, since_s in heartbeats), default=0.0)
        if len(heartbeats) < len(busy) or stuck_s <= limit_s:
            return None
        return busy[0], (f"hangs{self.activity(busy[0])}: {' and '.join(map(name_of, busy))} waited for other ranks, "
                         f"and nothing has come for {stuck_s:.0f} s. An exchange was lost, and the group is ended")
