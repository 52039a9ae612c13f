"""What the bridge asks of a worker group: predictions of a model and decoded pictures, as tensors in, tensors out."""

import dataclasses
import math
import threading
import time
from contextlib import suppress

import torch

from ..config import devices_a_machine
from ..forecast.decoding import Work
from ..partition import last_stage_ranks
from ..protocol import messages
from ..protocol.devices import machines_of
from ..protocol.errors import WorkerDiedError, XDiTError
from .calls import Ticket, share_call
from .changes import Changes, batches
from .conditionings import Conditionings
from .launcher import WorkerGroup
from .residence import Residence


class Client:
    """A worker group and what it holds. Starts the group when it is first needed, and again after it died.

    on_phase(Phase) and check() are WorkerGroup's; they may be replaced at any time. machines, forkserver: WorkerGroup's.
    """

    def __init__(self, devices, machines=None, forkserver=None):
        self.devices, self._machines, self._forkserver = tuple(devices), machines, forkserver
        self.on_phase = lambda phase: None
        self.check = lambda: None
        self.step = ""                         # that is computed now, for a person: "step 7 of 20"
        self.speeds = ()                       # of each device, relative, see mesh.paced; the same for all calls of a run. (): alike
        self.last_numbers = {}                 # rank -> measurements of the last decode or encode, by name
        self._group, self._models, self._autoencoders = None, {}, set()
        self._is_starting, self._starting = False, threading.RLock()           # by one thread at a time
        self._num_detours = 0                                  # ways to join these workers that did not work before
        self._changes = Changes()                              # of the models' weights
        self._runs, self._num_conditionings = {}, 0            # whose conditioning -> Conditionings; named since the start

    @property
    def group(self):
        """The running worker group."""
        with self._starting:
            if self._group is None or not self._group.alive:
                self.close()
                self._is_starting = True
                try:
                    self._group = WorkerGroup(self.devices, self.on_phase, self.check, self._num_detours, self._machines,
                                              self._forkserver)
                    self._num_detours = self._group.num_detours
                finally:
                    self._is_starting = False
            return self._group

    @property
    def running(self):
        return self._group is not None and self._group.alive

    @property
    def state(self):
        """"starting", "working", "idle", "ended" (by itself: a worker died), or "stopped" (none was started, or it was closed)."""
        group = self._group
        if self._is_starting or group is None:
            return "starting" if self._is_starting else "stopped"
        if not group.alive:
            return "ended"
        group.hear()
        return "working" if group.is_working else "idle"

    @property
    def idle_s(self):
        """Seconds since the running workers had anything to do; 0 where they have, or where none run."""
        group = self._group
        if not self.running or group is None:
            return 0.0
        group.hear()
        return group.idle_s

    def close(self):
        """End the worker group."""
        if self._group is not None:
            self._group.close()
        self._group, self._models, self._autoencoders = None, {}, set()

    @property
    def _holding(self):
        """The group that holds what was just loaded. Where it has ended, none is started, which would hold nothing."""
        if not self.running:
            raise WorkerDiedError("The workers have ended. Queue the prompt again to start a new group.")
        return self._group

    def _request(self, make_command, segments=(), group=None):
        return (group or self.group).request(make_command, self.on_phase, self.check, segments)

    # --- what the group holds ---

    def holds(self, name):
        """Does the running group hold this model or VAE?"""
        return self.running and (name in self._models or name in self._autoencoders)

    @property
    def model_names(self):
        """The models the running group holds."""
        return sorted(self._models) if self.running else []

    @property
    def autoencoder_names(self):
        """The VAEs the running group holds."""
        return sorted(self._autoencoders) if self.running else []

    def drop(self, name):
        """Give a model's or VAE's memory back on every worker."""
        if self.holds(name):
            self._models.pop(name, None)
            self._autoencoders.discard(name)
            self._request(lambda request: messages.DropModel(request, name))

    def forget(self, name):
        """As drop, but waits for nothing, and starts nothing where the workers have ended. From any thread."""
        self._changes.forget(name)
        if self.holds(name):
            self._models.pop(name, None)
            self._autoencoders.discard(name)
            self._post_drop(name)

    def _post_drop(self, name):
        with suppress(WorkerDiedError):                        # who needs the workers next will be told, or start new ones
            if self.running:
                self._group.post(lambda request: messages.DropModel(request, name), answering=())

    # --- models ---

    def load_model(self, spec, changes=None):
        """Make sure that every worker holds the model, on its device, with these changes.

        changes: {name of a tensor in the model's file: Change}, the others are as in the file; None: those of the last time.
        """
        residence = self.residence(spec.name)
        if residence is None:
            self._changes.loaded(spec.name)
            self.group.find_file(spec.path, self.on_phase, self.check)
            try:
                done = self._request(lambda request: messages.LoadModel(request, spec))
            except BaseException:                              # some ranks may hold it, and others not
                self._post_drop(spec.name)
                raise
            self._models[spec.name] = Residence.told(spec, done)
        elif any(residence.parked_bytes):
            residence.parked(self._request(lambda request: messages.RestoreModel(request, spec.name), group=self._holding))
        if changes is not None:
            self._changes.want(spec.name, changes)
        if not self._changes.are_in_effect(spec.name):
            self._change(spec)

    def _change(self, spec):
        """Have the workers change what differs from what is asked for.

        In a run, they keep what they leave as far as there is room, and what they have kept is not made again.
        """
        pending, wanted = self._changes.pending(spec.name), self._changes.wanted(spec.name)
        version = num_sent = 0
        try:
            if self._runs:
                version = self._changes.leave(spec.name)
                if self._has_returned(spec, version):
                    pending = {}
            for batch in batches(pending):
                num_sent += len(batch)
                self.on_phase(messages.Phase(0, "changing weights", num_sent, len(pending)))
                self._send_changes(spec, batch, version, num_sent == len(batch))
        except BaseException:
            self.forget(spec.name)                             # some are changed, and some are not
            self._changes.want(spec.name, wanted)
            raise
        self._changes.take_effect(spec.name, wanted)

    def _has_returned(self, spec, left):
        """Have all workers gone back to weights that they had kept? Some alone may have, which does no harm to making them again."""
        version = self._changes.left(spec.name)
        if version is None:
            return False
        done = self._request(lambda request: messages.ReturnWeights(request, spec.name, version, left), group=self._holding)
        self._models[spec.name] = Residence.told(spec, done)
        return all(each.numbers["kept"] for each in done.values())

    def _send_changes(self, spec, batch, version, begins):
        def share(tensor):
            segments.append(group.segments.share(tensor))
            return segments[-1]

        group = self._holding
        with group.segments.removed_on_failure() as segments:
            changes = {name: change.make(share) for name, change in batch.items()}
        done = self._request(lambda request: messages.ChangeWeights(request, spec.name, changes, version, begins), segments, group)
        self._models[spec.name] = Residence.told(spec, done)

    def residence(self, name):
        """Where the running group holds a model; None where it does not."""
        return self._models.get(name) if self.running else None

    def park(self, name, room_bytes, device=None, num_bytes=math.inf):
        """Move weights of a model to host memory, until `device` has num_bytes more free; None: every device.

        Where host memory has less room than is needed (room_bytes), or shared memory has, or there are several machines, the model is
        dropped instead. Returns the bytes that came free on these devices. load_model brings the weights back.
        """
        residence = self.residence(name)
        if residence is None:
            return 0
        ranks = [rank for rank, own in enumerate(self.devices) if device in (None, own)]
        before = residence.parked_bytes
        targets = residence.targets(ranks, num_bytes)
        if targets == before:
            return 0
        is_here = not machines_of(self.devices)                # memory for what is parked is of one machine
        segments = self._reserve(residence.needed_bytes(targets), room_bytes) if is_here else None
        if segments is None:
            self.drop(name)
            return sum(residence.weight_bytes[rank] - before[rank] for rank in ranks)
        try:                                                   # not to be given up halfway: ranks write what others will read
            residence.parked(self.group.request(lambda request: messages.ParkModel(request, name, targets, segments), self.on_phase,
                                                segments=segments))
        except XDiTError:
            self.forget(name)
            raise
        return sum(residence.parked_bytes[rank] - before[rank] for rank in ranks)

    def _reserve(self, sizes, room_bytes):
        """Segments of these sizes in memory; None where there is no room for them."""
        if sum(sizes) > room_bytes:
            return None
        store = self.group.segments
        try:
            with store.removed_on_failure() as segments:
                for size in sizes:
                    segments.append(store.create((size,), torch.uint8, in_memory=True)[0])
        except XDiTError:
            return None
        return segments

    # --- predictions, and the conditioning of runs ---

    def predict(self, spec, layout, num_channels, calls, run=None):
        """Evaluate the model on one or two calls at once; returns a list of predictions, float32 on the CPU.

        num_channels: channels of a prediction. run: see `name_conditioning`. Raises as WorkerGroup.wait.
        """
        return self.wait([self.submit(spec, layout, num_channels, calls, run=run)])[1]

    def submit(self, spec, layout, num_channels, calls, patch=None, keep=False, by_image=False, forecast=0.0, run=None,
               **displaced):
        """Send calls to the workers and wait for nothing; returns a ticket for `wait`.

        Calls are worked on in the order they are submitted. patch: which rows of the whole latent the calls' latents
        hold. keep: patches of the same conditioning will follow, which need this call's keys and values. by_image: send
        the images of a batch through the stages one after the other. forecast: docs/algorithms.md section 2.9; the same for
        all calls of a run. displaced: Predict's fields of displaced patches. run: see `name_conditioning`. Raises WorkerDiedError
        where a patch or a name needs what a group kept that has ended since.
        """
        if patch is not None or displaced.get("stale") or any(call.name for call in calls):
            self._check_kept(run)
        self.load_model(spec)
        group = self._holding
        names = [call.name or self._name(call.conditioning, run, group) for call in calls]
        branches, predictions, told = [], [], []
        with group.segments.removed_on_failure() as segments:
            for call, name in zip(calls, names):
                branch, prediction, filled = share_call(call, name, num_channels, group.segments, segments)
                branches.append(branch)
                predictions.append(prediction)
                told += filled
        request = group.post(lambda request: messages.Predict(request, spec.name, layout, branches, patch, keep, by_image, forecast,
                                                              speeds=self.speeds, **displaced),
                             segments, last_stage_ranks(layout, len(self.devices)), self.step)
        return Ticket(group, request, tuple(predictions), layout.pipefusion_degree > 1, tuple(told))

    def wait(self, tickets):
        """Wait for the first of these tickets, all of one run; returns (the ticket, its predictions). Raises as WorkerGroup.wait."""
        try:
            request, _ = tickets[0].group.wait([ticket.request for ticket in tickets], self.on_phase, self.check)
        except XDiTError:
            if any(ticket.in_stages for ticket in tickets):    # a stage may wait for what another never sent
                self.close()
            raise
        ticket = next(ticket for ticket in tickets if ticket.request == request)
        for written, wanted in ticket.told:
            wanted.copy_(written)
        return ticket, list(ticket.predictions)

    def name_conditioning(self, tensors, run=None):
        """The name under which the workers hold these tensors for a run; sends them if they do not.

        run: whose they are (hashable). Runs share nothing: the workers keep stale keys and values by this name. Raises
        WorkerDiedError where the group has ended that kept them.
        """
        self._check_kept(run)
        return self._name(tensors, run, self.group)

    def _name(self, tensors, run, group):
        held = self._runs.get(run)
        if held is None or held.group is not group:
            held = self._runs[run] = Conditionings(group)
        name = held.find(tensors)
        if name is None:
            self._num_conditionings += 1
            name = f"conditioning-{self._num_conditionings}"
            segments = group.segments.share_all(tensors)
            held.keep(name, tensors)
            self._request(lambda request: messages.Conditioning(request, name, segments), segments.values(), group)
            self._forget(group, held.drop_surplus())
        return name

    def _check_kept(self, run):
        if run in self._runs and not self._runs[run].group.alive:
            raise WorkerDiedError("The workers that kept this run's tensors have ended. Queue the prompt again to start a new "
                                  "group.")

    def end_run(self, run=None):
        """Forget the conditioning of a run, on both sides. Waits for nothing: a cancelled step may still be running.

        Called between runs, also after one that failed.
        """
        held = self._runs.pop(run, None)
        if held is not None:
            self._forget(held.group, held.drop_all())
        if not self._runs:
            self._changes.end_runs()

    def _forget(self, group, names):
        if names and self.running and group is self._group:
            self._group.post(lambda request: messages.DropConditioning(request, names), answering=())

    @property
    def num_runs(self):
        """Runs that have not ended, whose conditioning the workers keep."""
        return len(self._runs)

    # --- VAEs ---

    def decode(self, name, dtype, weights, latent, picture_shape, measure_memory=False, settings=None, num_ranks=0, first_rank=0):
        """Decode latents (B, C, H, W) or (B, C, F, H, W) to pictures of this shape, float32 in [0, 1].

        picture_shape: (B, H', W', 3) or (B, F', H', W', 3). weights() gives the VAE's tensors, and is called only when the
        group does not hold the VAE `name`. measure_memory: last_numbers then has each rank's peak_bytes. num_ranks: of
        the workers from first_rank on, which share it while the others rest; 0: all.
        """
        self.load_autoencoder(name, dtype, weights, settings)
        return self._transform(messages.Decode, name, latent, picture_shape, measure_memory=measure_memory, num_ranks=num_ranks,
                               first_rank=first_rank)

    def encode(self, name, dtype, weights, picture, latent_shape, settings=None, num_ranks=0, first_rank=0):
        """Encode pictures (B, 3, H, W) or videos (B, 3, F, H, W) in [-1, 1] to latents of this shape, float32."""
        self.load_autoencoder(name, dtype, weights, settings)
        return self._transform(messages.Encode, name, picture, latent_shape, num_ranks=num_ranks, first_rank=first_rank)

    def load_autoencoder(self, name, dtype, weights, settings=None):
        """Make sure that every worker holds the VAE. weights() gives its tensors, where they do not.

        settings: see AutoencoderSpec.
        """
        group = self.group
        if name not in self._autoencoders:
            segments = group.segments.share_all(weights())
            spec = messages.AutoencoderSpec(name, dtype, segments, settings or {})
            self._autoencoders.add(name)
            try:
                self._request(lambda request: messages.LoadAutoencoder(request, spec), segments.values(), group)
            except BaseException:                              # some ranks may hold it
                self.forget(name)
                raise

    def _transform(self, command, name, tensor, shape, **options):
        """Have the workers turn a tensor into one of this shape; the result is a view of the memory they wrote."""
        group = self._holding
        with group.segments.removed_on_failure() as segments:
            given = group.segments.share(tensor)
            segments.append(given)
            result, view = group.segments.create(shape, torch.float32)
        done = self._request(lambda request: command(request, name, given, result, speeds=self.speeds, **options),
                             [given, result], group)
        self.last_numbers = {rank: reply.numbers for rank, reply in done.items()}
        return view

    def estimate(self, name, shape, scale, num_ranks=0):
        """Bytes that a rank needs, beside weights, to decode (scale 1) or encode a tensor of this shape with a VAE it holds.

        num_ranks: as decode's.
        """
        return int(self._estimate(name, shape, scale, num_ranks)["needed_bytes"])

    def work_of(self, name, shape, scale):
        """The Work of one item of a batch of this shape, to be decoded (scale 1) or encoded with a VAE that the workers hold."""
        numbers = self._estimate(name, shape, scale, with_work=True)
        return Work(**{field.name: numbers[field.name] for field in dataclasses.fields(Work)})

    def is_roomy(self, name, shape, scale, num_ranks, first_rank=0):
        """Have these workers so much memory free that they would compute convolutions all at once?"""
        memory = self.report_memory()
        free = [memory[rank]["free_bytes"] for rank in range(first_rank, first_rank + num_ranks)]
        return self._estimate(name, shape, scale, num_ranks)["roomy_bytes"] <= min(free)

    def _estimate(self, name, shape, scale, num_ranks=0, with_work=False):
        done = self._request(lambda request: messages.Estimate(request, name, tuple(shape), scale, num_ranks, with_work),
                             group=self._holding)
        return done[0].numbers

    # --- what workers tell of themselves ---

    def report_memory(self):
        """{rank: measurements}, see Engine."""
        return {rank: reply.numbers for rank, reply in self._request(messages.ReportMemory).items()}

    def give_back(self):
        """Have the running workers give memory back that they keep for the next run. Starts nothing."""
        if self.running:
            self._request(messages.GiveBack, group=self._group)

    def totals(self):
        """{rank: {name: sum}} of all measurements since the group started. Waits until all ranks have caught up."""
        self.report_memory()
        return {rank: dict(numbers) for rank, numbers in self.group.totals.items()}

    @property
    def memory(self):
        """{rank: what the running group's rank last said of its memory}; also while it works."""
        return dict(self._group.memory) if self.running else {}

    def peek(self, since_s=-1.0):
        """{rank: Done} of ReportMemory where the workers run and have nothing to do; else None. Starts nothing, keeps nobody waiting."""
        group = self._group
        try:
            return group and group.ask_if_idle(lambda request: messages.ReportMemory(request, since_s))
        except XDiTError:                                      # they have ended: who needs them next is told
            return None

    def catch_up(self, patience_s, since_s=-1.0):
        """Wait until the workers have done all they were asked, but no longer than this: a step that was given up may take its time.

        Returns {rank: Done}, with the spans from since_s on, or {} where that takes longer.
        """
        if not self.running:
            return {}
        deadline_s = time.monotonic() + patience_s

        def check():
            if time.monotonic() > deadline_s:
                raise TimeoutError

        try:
            return self.group.wait([self.group.post(lambda request: messages.ReportMemory(request, since_s))], self.on_phase, check)[1]
        except (TimeoutError, WorkerDiedError):                # what was asked for is done: who needs the workers next starts new ones
            return {}

    def probe(self, dtype):
        """{rank: what it measured of its device and links, by name}; a few seconds. dtype: that models compute in, "bfloat16"."""
        a_machine = devices_a_machine(self.devices)
        return {rank: done.numbers for rank, done in self._request(lambda request: messages.Probe(request, dtype, a_machine)).items()}
