"""Pending requests of a group: commands that not all ranks have answered."""

import time
from dataclasses import dataclass, field

from ..planner.memory_fit import remedies
from ..protocol import errors
from ..protocol.errors import WorkerFailedError, WorkerOutOfMemoryError
from ..protocol.messages import Decode, Done, Encode, LoadModel, Probe, Upscale
from .oom_report import describe_out_of_memory
from .startup_watchdog import HELP
from .unmatched_collectives import is_unmatched, lost_device

# command -> work of the workers, for messages
ACTIVITIES = {"LoadModel": "loading a model", "Predict": "computing a step",
              "ParkModel": "parking weights in system RAM", "RestoreModel": "loading parked weights",
              "LoadAutoencoder": "loading a VAE", "LoadNetwork": "loading a model patch",
              "LoadUpscaler": "loading an upscale model",
              "Decode": "decoding", "Encode": "encoding", "Upscale": "upscaling", "Probe": "measuring"}


IN_EXCHANGE = ", in a transfer between ranks"
GOES_ON = "The workers keep running, with their models loaded."
ENDED = ("The other ranks waited for it, so the workers were ended: the next prompt starts new ones and loads the "
         "model again.")


@dataclass
class Request:
    """One command to every rank, until all have answered it and the answers were taken."""

    unanswered: set
    answering: set                                 # ranks whose answers complete it
    segments: list
    claimed: bool                                  # nobody will wait for it any more
    command: str = ""                              # name of its message
    can_stop: bool = False                         # ranks can abort it when nobody waits for it any more
    activity: str = ""                             # part of a sentence, with a leading space
    is_resumable: bool = False                     # its answers can be waited for again
    done: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)
    failed_s: float = 0.0
    # rank that has not answered -> collectives and transfers that it has entered, by its last heartbeat
    entered: dict = field(default_factory=dict)

    @property
    def ends_group(self):
        """Whether it failed in a way that ends the group, as far as is known."""
        running = {rank: self.entered.get(rank, {}) for rank in self.unanswered}
        return lost_device(self.failed.values()) or is_unmatched(self.failed, self.done, running)

    @property
    def first_failure(self):
        return min(self.failed.values(), key=lambda failure: failure.rank)

    @property
    def why_it_ended(self):
        """Part of a sentence about the group that this failure ended, with a leading space."""
        failure = self.first_failure
        return f" because rank {failure.rank} ({failure.device}) failed with {failure.kind}: {failure.message}"

    @property
    def is_complete(self):
        return not self.failed and self.answering <= self.done.keys()

    def raised(self, num_ranks, where, is_ended):
        """Return the host's exception for the first failure.

        where: sentence that names the log folder. is_ended: the group has ended.
        """
        failure, self.is_resumable = self.first_failure, False
        kind = getattr(errors, failure.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.XDiTError):
            return kind(failure.message)
        where_in = f", in block {failure.block}" * bool(failure.block) + IN_EXCHANGE * failure.is_broken
        who = f"Worker rank {failure.rank} ({failure.device}) failed with {failure.kind}{self.activity}{where_in}"
        if not failure.numbers:
            return WorkerFailedError(f"{who}: {failure.message.rstrip('. ')}. {where}".rstrip())
        # torch's own message, which says less, is in the log
        facts = (f"{who}: out of memory: {describe_out_of_memory(failure.numbers)} {ENDED if is_ended else GOES_ON} "
                 f"{HELP} {where}".rstrip())
        first = remedies(failure.numbers, num_ranks, self.command, failure.device)
        return WorkerOutOfMemoryError(f"{first} {facts}", failure.rank, failure.device, failure.numbers, self.command,
                                      facts)


class Requests:
    """The pending requests of a group, by number, in the order in which they were sent."""

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
        """Add a command to these ranks; returns the Request.

        answering: ranks whose answers complete it. activity: "step 7 of 20".
        """
        activity = ACTIVITIES.get(type(command).__name__, "") + (activity and f" ({activity})")
        self._open[number] = Request(set(ranks), set(answering), list(segments), claimed=not answering,
                                     command=type(command).__name__,
                                     can_stop=isinstance(command, (LoadModel, Decode, Encode, Upscale)),
                                     activity=f" while {activity}" if activity else "",
                                     is_resumable=isinstance(command, Probe))
        return self._open[number]

    def answer(self, rank, message):
        """Process a rank's Done or Failed; returns the Request, or None if it was removed."""
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
        """Record which collectives and transfers a rank has entered for its current request."""
        request = self._open.get(message.request)
        if request is not None and rank in request.unanswered:
            request.entered[rank] = message.entered

    def first_unanswered(self, rank):
        """First request that this rank has not answered; None if there is none."""
        return next((request for request in self if rank in request.unanswered), None)

    @property
    def are_unanswered(self):
        """Whether any answer is outstanding."""
        return any(request.unanswered for request in self)

    @property
    def has_unanswered_resumable(self):
        """Whether an answer to a resumable request is outstanding."""
        return any(request.is_resumable and request.unanswered for request in self)

    @property
    def are_claimed(self):
        """Whether nobody will wait for any of them."""
        return all(request.claimed for request in self)

    def claim(self, numbers):
        """Mark requests that nobody will wait for any more."""
        for number in numbers:
            self._open[number].claimed = True

    def still_open(self, numbers):
        """Those of these requests that have not been removed."""
        return [number for number in numbers if number in self._open]

    def take(self, number):
        """Return {rank: Done} of a complete request, which is no longer resumable then."""
        self._open[number].is_resumable = False
        return self._open[number].done

    def remove_answered(self, store):
        """Remove the segments of fully answered requests from this SegmentStore, and the requests that are claimed."""
        for number, request in list(self._open.items()):
            if not request.unanswered:
                while request.segments:
                    store.remove(request.segments.pop())
                if request.claimed and not request.is_resumable:
                    del self._open[number]
