"""The models that a group's workers hold: loaded, changed, moved to host memory and back. Used by client.py."""

import math

import torch

from ..partition import ranks_by_part
from ..protocol import messages
from ..protocol.devices import machines_of
from ..protocol.errors import XDiTError
from .weight_residency import ModelMemory
from .weight_updates import Changes, batches
from .workers import Loaded


class Models:
    """Of the group of these Workers. runs: a collection of the client's runs that have not ended,
    which may go back to weights."""

    def __init__(self, workers, runs):
        self._workers, self._runs, self.loaded = workers, runs, Loaded(workers)    # the last: name -> ModelMemory
        self.changes = Changes()                               # of the models' weights

    @property
    def names(self):
        """The models the running group holds."""
        return self.loaded.names

    def forget(self, name):
        """A model is dropped, or not known to be whole any more: have the workers drop it. Waits for nothing.
        From any thread."""
        self.changes.forget(name)
        self.loaded.forget(name)

    def load(self, spec, changes=None):
        """Make sure that every worker holds the model, on its device, with these changes.

        changes: {name of a tensor in the model's file: Change}, the others are as in the file; None: those of the last
        time.
        """
        model_memory = self.memory(spec.name)
        if model_memory is None:
            self.changes.loaded(spec.name)
            self._workers.group.find_file(spec.path, self._workers.on_phase, self._workers.check)
            try:
                segments = self._host_copies(spec)
                done = self._workers.request(lambda request: messages.LoadModel(request, spec, segments), segments)
            except BaseException:                              # some ranks may hold it, and others not
                self._workers.post_drop(spec.name)
                raise
            self.loaded.by_name[spec.name] = ModelMemory.from_answers(spec, done)
        elif any(model_memory.parked_bytes):
            model_memory.update(self._workers.request(lambda request: messages.RestoreModel(request, spec.name),
                                                   group=self._workers.holding))
        if changes is not None:
            self.changes.request(spec.name, changes)
        if not self.changes.are_in_effect(spec.name):
            self._change(spec)

    def _host_copies(self, spec):
        """A segment for each part of the model where weights come from host memory that the file has otherwise; none
        on several machines, whose ranks have their own."""
        if not spec.host_bytes or machines_of(self._workers.devices):
            return []
        store = self._workers.group.segments
        with store.removed_on_failure() as segments:
            for _ in ranks_by_part(len(self._workers.devices), spec):
                segments.append(store.create((spec.host_bytes,), torch.uint8)[0])
        return segments

    def _change(self, spec):
        """Have the workers change what differs from what is asked for.

        In a run, they keep what they leave as far as there is room, and what they have kept is not made again.
        """
        pending, wanted = self.changes.pending(spec.name), self.changes.requested(spec.name)
        version = num_sent = 0
        try:
            if self._runs:
                version = self.changes.leave(spec.name)
                if self._has_returned(spec, version):
                    pending = {}
            for batch in batches(pending):
                num_sent += len(batch)
                self._workers.on_phase(messages.Phase(0, "changing weights", num_sent, len(pending)))
                self._send_changes(spec, batch, version, num_sent == len(batch))
        except BaseException:
            self.forget(spec.name)                             # some are changed, and some are not
            self.changes.request(spec.name, wanted)
            raise
        self.changes.take_effect(spec.name, wanted)

    def _has_returned(self, spec, left):
        """Have all workers gone back to weights that they had kept? Some alone may have,
        which does no harm to making them again."""
        version = self.changes.left(spec.name)
        if version is None:
            return False
        done = self._workers.request(lambda request: messages.ReturnWeights(request, spec.name, version, left),
                                     group=self._workers.holding)
        self.loaded.by_name[spec.name] = ModelMemory.from_answers(spec, done)
        return all(each.numbers["cached"] for each in done.values())

    def _send_changes(self, spec, batch, version, begins):
        def share(tensor):
            segments.append(group.segments.share(tensor))
            return segments[-1]

        group = self._workers.holding
        with group.segments.removed_on_failure() as segments:
            changes = {name: change.make(share) for name, change in batch.items()}
        done = self._workers.request(lambda request: messages.ChangeWeights(
            request, spec.name, changes, version, begins), segments, group)
        self.loaded.by_name[spec.name] = ModelMemory.from_answers(spec, done)

    def memory(self, name):
        """Where the running group holds a model; None where it does not."""
        return self.loaded.by_name.get(name) if self._workers.running else None

    def park(self, name, spare_bytes, device=None, num_bytes=math.inf):
        """Move weights of a model to host memory, until `device` has num_bytes more free; None: every device.

        Where host memory has less room than is needed (spare_bytes), or shared memory has, or there are several
        machines, the model is dropped instead. Returns the bytes that came free on these devices. load brings the
        weights back.
        """
        model_memory = self.memory(name)
        if model_memory is None:
            return 0
        ranks = [rank for rank, own in enumerate(self._workers.devices) if device in (None, own)]
        before = model_memory.parked_bytes
        targets = model_memory.targets(ranks, num_bytes)
        if targets == before:
            return 0
        is_here = not machines_of(self._workers.devices)                # memory for what is parked is of one machine
        segments = self._reserve(model_memory.needed_bytes(targets), spare_bytes) if is_here else None
        if segments is None:
            self.loaded.drop(name)
            return sum(model_memory.weight_bytes[rank] - before[rank] for rank in ranks)
        # not to be given up halfway: ranks write what others will read
        try:
            model_memory.update(
                self._workers.group.request(lambda request: messages.ParkModel(request, name, targets, segments),
                                            self._workers.on_phase, segments=segments))
        except XDiTError:
            self.forget(name)
            raise
        return sum(model_memory.parked_bytes[rank] - before[rank] for rank in ranks)

    def _reserve(self, sizes, spare_bytes):
        """Segments of these sizes in memory; None where there is no room for them."""
        if sum(sizes) > spare_bytes:
            return None
        store = self._workers.group.segments
        try:
            with store.removed_on_failure() as segments:
                for size in sizes:
                    segments.append(store.create((size,), torch.uint8, in_memory=True)[0])
        except XDiTError:
            return None
        return segments
