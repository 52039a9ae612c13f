"""Models loaded on a group's workers: loading, weight updates, parking in system RAM."""

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
    """The models of a worker group. workers: its Workers. runs: the client's active runs, which may return to earlier
    versions of weights."""

    def __init__(self, workers, runs):
        self._workers, self._runs = workers, runs
        self.loaded = Loaded(workers)                          # name -> ModelMemory
        self.changes = Changes()                               # updates of the models' weights

    @property
    def names(self):
        """Names of the models loaded by the running group."""
        return self.loaded.names

    def forget(self, name):
        """Unload a model, also one in an unknown state after a failure, without waiting. Thread-safe."""
        self.changes.forget(name)
        self.loaded.forget(name)

    def load(self, spec, changes=None):
        """Load the model on every worker's device, with these weight updates.

        changes: {tensor in the model's file: Change}, all others as in the file; None: those requested last.
        """
        model_memory = self.memory(spec.name)
        if model_memory is None:
            self.changes.loaded(spec.name)
            self._workers.group.find_file(spec.path, self._workers.on_phase, self._workers.check)
            try:
                segments = self._host_copies(spec)
                done = self._workers.request(lambda request: messages.LoadModel(request, spec, segments), segments)
            except BaseException:                              # some ranks may have loaded it
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
        """Segments for offloaded weights that are stored differently in the file, one per partition of the model; none
        for several machines, whose ranks allocate their own memory."""
        if not spec.host_bytes or machines_of(self._workers.devices):
            return []
        store = self._workers.group.segments
        with store.removed_on_failure() as segments:
            for _ in ranks_by_part(len(self._workers.devices), spec):
                segments.append(store.create((spec.host_bytes,), torch.uint8)[0])
        return segments

    def _change(self, spec):
        """Update the weights that differ from the requested ones.

        During a run, workers cache replaced versions while memory allows, and a cached version is restored instead.
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
            self.forget(spec.name)                             # only some weights are updated
            self.changes.request(spec.name, wanted)
            raise
        self.changes.take_effect(spec.name, wanted)

    def _has_returned(self, spec, left):
        """Restore a cached version; returns whether all workers had cached it. If only some had, updating the weights
        again is still correct."""
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
        """ModelMemory of a model; None if the running group has not loaded it."""
        return self.loaded.by_name.get(name) if self._workers.running else None

    def park(self, name, spare_bytes, device=None, num_bytes=math.inf):
        """Park weights of a model in system RAM, until `device` (None: every device) has num_bytes more free.

        The model is unloaded instead if spare_bytes of system RAM or the shared memory are not enough, or if there are
        several machines. Returns the bytes freed on these devices. `load` restores the weights.
        """
        model_memory = self.memory(name)
        if model_memory is None:
            return 0
        ranks = [rank for rank, own in enumerate(self._workers.devices) if device in (None, own)]
        before = model_memory.parked_bytes
        targets = model_memory.targets(ranks, num_bytes)
        if targets == before:
            return 0
        is_local = not machines_of(self._workers.devices)      # shared memory for parked weights is on one machine
        segments = self._reserve(model_memory.needed_bytes(targets), spare_bytes) if is_local else None
        if segments is None:
            self.loaded.drop(name)
            return sum(model_memory.weight_bytes[rank] - before[rank] for rank in ranks)
        # not interrupted by check(): ranks write memory that others will read
        try:
            model_memory.update(
                self._workers.group.request(lambda request: messages.ParkModel(request, name, targets, segments),
                                            self._workers.on_phase, segments=segments))
        except XDiTError:
            self.forget(name)
            raise
        return sum(model_memory.parked_bytes[rank] - before[rank] for rank in ranks)

    def _reserve(self, sizes, spare_bytes):
        """Create segments of these sizes in memory; returns None if there is not enough."""
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
