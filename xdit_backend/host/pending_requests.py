"""The commands that a group has not yet answered in full. Used by the launcher, which sends and receives."""

import time
from dataclasses import dataclass, field

from ..protocol import errors
from ..protocol.errors import WorkerFailedError, WorkerOutOfMemoryError
from ..protocol.messages import Decode, Done, Encode, LoadModel, Probe
from .oom_report import describe_out_of_memory, remedies
from .startup_watchdog import HELP
from .unmatched_collectives import is_unmatched, lost_device

# What workers do, for a person
ACTIVITIES = {"LoadModel": "loading a model", "Predict": "computing a step",
              "ParkModel": "moving weights to host memory", "RestoreModel": "bringing weights back",
              "LoadAutoencoder": "loading a VAE", "LoadNetwork": "loading a model patch",
              "Decode": "decoding", "Encode": "encoding", "Probe": "measuring"}


IN_EXCHANGE = ", in an exchange with other ranks"
GOES_ON = "The workers go on, with the models that they hold."
ENDED = ("The other ranks waited for it, so the workers were ended: the next prompt starts new ones and loads the "
         "model again.")


@dataclass
class Request:
    """One command to every rank, until all have answered it and somebody has taken the answers."""

    unanswered: set
    answering: set                                 # the ranks whose answers somebody will wait for
    segments: list
    claimed: bool                                  # will nobody wait for it any more?
    command: str = ""                              # the name of its message
    can_stop: bool = False                         # do ranks leave it when nobody waits for it any more?
    activity: str = ""                             # with a space before it, for a sentence
    cached: bool = False                             # do its answers stay for who waits again?
    done: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)
    failed_s: float = 0.0
    # of ranks that have not answered: the exchanges that they have entered, as of their last heartbeats
    entered: dict = field(default_factory=dict)

    @property
    def ends_group(self):
        """Has it failed in such a way that its group cannot go on, as far as is known by now?"""
        running = {rank: self.entered.get(rank, {}) for rank in self.unanswered}
        return lost_device(self.failed.values()) or is_unmatched(self.failed, self.done, running)

    @property
    def first_failure(self):
        return min(self.failed.values(), key=lambda failure: failure.rank)

    @property
    def why_it_ended(self):
        """Of a group, where this failed: with a space before it, for a sentence."""
        failure = self.first_failure
        return f" because rank {failure.rank} ({failure.device}) failed with {failure.kind}: {failure.message}"

    @property
    def is_complete(self):
        return not self.failed and self.answering <= self.done.keys()

    def raised(self, num_ranks, where, is_ended):
        """The exception that stands on the host for the first failure. where: all output is, a sentence. is_ended: has
        the group ended?"""
        failure, self.cached = self.first_failure, False
        kind = getattr(errors, failure.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.XDiTError):
            return kind(failure.message)
        where_in = f", in block {failure.block}" * bool(failure.block) + IN_EXCHANGE * failure.is_broken
        who = f"Worker rank {failure.rank} ({failure.device}) failed with {failure.kind}{self.activity}{where_in}"
        if not failure.numbers:
            return WorkerFailedError(f"{who}: {failure.message.rstrip('. ')}. {where}".rstrip())
        # torch's own words, which say less, are in the log
        facts = (f"{who}: memory ran out: {describe_out_of_memory(failure.numbers)} {ENDED if is_ended else GOES_ON} "
                 f"{HELP} {where}".rstrip())
        first = remedies(failure.numbers, num_ranks, self.command, failure.device)
        return WorkerOutOfMemoryError(f"{first} {facts}", failure.rank, failure.device, failure.numbers, self.command,
                                      facts)


class Requests:
    """The open requests of a group, by number, in the order in which they were sent."""

    def __init__(self):
        self._open, self._last = {}, 0

    def __getitem__(self, number):
        return self._open[number]

    def __iter__(self):
        return iter(list(self._open.values()))

    def next_number(self):
        self._last += 1
        return self._last

    def add(self, number, command, ranks, answering, segments, activity):
        """A command goes to these ranks. answering: whose answers complete it. activity: "step 7 of 20".
        Returns the Request."""
        activity = ACTIVITIES.get(type(command).__name__, "") + (activity and f" ({activity})")
        self._open[number] = Request(set(ranks), set(answering), list(segments), claimed=not answering,
                                     command=type(command).__name__,
                                     can_stop=isinstance(command, (LoadModel, Decode, Encode)),
                                     activity=f" while {activity}" if activity else "",
                                     cached=isinstance(command, Probe))
        return self._open[number]

    def answer(self, rank, message):
        """Take in a rank's Done or Failed; returns the Request, None where nobody knows of it any more."""
        request = self._open.get(message.request)
        if request is None:
            return None
        request.unanswered.discard(rank)
        if isinstance(message, Done):
            request.done[rank] = message
        else:
            request.failed[rank] = message
            request.failed_s = request.failed_s or time.monotonic()
        return request

    def heartbeat(self, rank, message):
        """Take in which exchanges a rank has entered by now for the request that it is at."""
        request = self._open.get(message.request)
        if request is not None and rank in request.unanswered:
            request.entered[rank] = message.entered

    def first_unanswered(self, rank):
        """The first request that this rank owes an answer to; None."""
        return next((request for request in self if rank in request.unanswered), None)

    @property
    def are_unanswered(self):
        """Does any rank owe an answer?"""
        return any(request.unanswered for request in self)

    @property
    def are_cached_unanswered(self):
        """Does any rank owe an answer that stays for who waits again?"""
        return any(request.cached and request.unanswered for request in self)

    @property
    def are_claimed(self):
        """Will nobody wait for any of them?"""
        return all(request.claimed for request in self)

    def claim(self, numbers):
        """Nobody will wait for these any more."""
        for number in numbers:
            self._open[number].claimed = True

    def take(self, number):
        """{rank: Done} of a complete request. It stays no longer."""
        self._open[number].cached = False
        return self._open[number].done

    def remove_answered(self, store):
        """Remove the segments of what every rank has answered from this SegmentStore, and what was claimed of it."""
        for number, request in list(self._open.items()):
            if not request.unanswered:
                while request.segments:
                    store.remove(request.segments.pop())
                if request.claimed and not request.cached:
                    del self._open[number]
