"""What the bridge asks of a worker group: predictions of a model, tensors in and tensors out; models and VAEs through
its parts.

workers.py is the group, models.py and autoencoders.py know what it holds; here are runs, and the workers' reports of
themselves.
"""

import collections
import time

from ..partition import last_stage_ranks
from ..protocol import messages
from ..protocol.devices import devices_per_machine
from ..protocol.errors import WorkerDiedError, XDiTError
from ..protocol.specs import BY_KERNEL
from .autoencoders import Autoencoders
from .calls import WHOLE, CallHandle, refuse_unusable, share_call
from .conditioning_cache import Conditionings
from .injected_networks import Networks
from .models import Models
from .workers import Workers


class Client:
    """A worker group and what it holds. Starts the group when it is first needed, and again after it died."""

    def __init__(self, devices, machines=None, supervisor=None, on_phase=lambda phase: None, check=lambda: None):
        """machines, forkserver, on_phase, check: WorkerGroup's."""
        # whose conditioning -> Conditionings; named since the start
        self._runs, self._num_conditionings = {}, 0
        self.workers = Workers(devices, machines, supervisor, on_phase, check)
        self.models, self.autoencoders = Models(self.workers, self._runs), Autoencoders(self.workers)
        self.networks = Networks(self.workers)
        self._step = ""                                        # see begin_step
        self._probing = (None, "", 0)                          # the group, dtype and request of the last probe

    @property
    def devices(self):
        return self.workers.devices

    @property
    def group(self):
        """The running worker group."""
        return self.workers.group

    @property
    def running(self):
        return self.workers.running

    def begin_step(self, step):
        """From now on calls are of this step, which errors name: "step 7 of 20"."""
        self._step = step

    def close(self):
        """End the worker group."""
        self.workers.close()

    # --- what the group holds ---

    def holds(self, name):
        """Does the running group hold this model or VAE?"""
        return name in self.models.loaded or name in self.autoencoders.loaded

    def drop(self, name):
        """Give a model's or VAE's memory back on every worker."""
        self.models.loaded.drop(name)
        self.autoencoders.loaded.drop(name)

    def forget(self, name):
        """As drop, but waits for nothing, and starts no workers where they have ended. From any thread."""
        self.models.forget(name)
        self.autoencoders.loaded.forget(name)

    # --- predictions, and the conditioning of runs ---

    def predict(self, spec, layout, num_channels, calls, run=None):
        """Evaluate the model on one or two calls at once; returns a list of predictions, float32 on the CPU.

        num_channels: channels of a prediction. run: see `name_conditioning`. Raises as WorkerGroup.wait.
        """
        return self.wait([self.submit(spec, layout, num_channels, calls, run=run)])[1]

    def submit(self, spec, layout, num_channels, calls, forward=WHOLE, run=None):
        """Send calls to the workers and wait for nothing; returns a handle for `wait`.

        Calls are worked on in the order they are submitted. run: see `name_conditioning`. Raises WorkerDiedError where
        a patch or a name needs what a group kept that has ended since.
        """
        if forward.patch is not None or forward.stale or any(call.name or call.left_out for call in calls):
            self._check_cached(run)
        self.models.load(spec)
        for _, network in (pair for call in calls for pair in call.networks):
            self.networks.load(network)
        group = self.workers.holding
        refuse_unusable(calls[0].backend, group.unusable_backends, self.devices)
        names = [call.name or self._name(call.conditioning, run, group) for call in calls]
        self._runs[run].keep_alongside({name for call in calls if call.cached and call.cached.fills
                                     for name, _ in call.cached.rows})
        branches, predictions, extra_outputs = [], [], []
        with group.segments.removed_on_failure() as segments:
            for call, name in zip(calls, names):
                branch, prediction, filled = share_call(call, name, num_channels, group.segments, segments)
                branches.append(branch)
                predictions.append(prediction)
                extra_outputs += filled
        # Of a stage whose weights come, whether the file was written to is known only when it has sent to the next one.
        answering = None if spec.weights_memory else last_stage_ranks(layout, len(self.devices))
        request = group.post(
            lambda request: messages.Predict(request, spec.name, layout, branches, **vars(forward),
                                             speeds=self.workers.speeds, compile_backend=calls[0].compile_backend,
                                             backend=calls[0].backend, exchange=calls[0].exchange,
                                             copies=calls[0].copies),
            segments, answering, self._step)
        return CallHandle(group, request, tuple(predictions), tuple(extra_outputs))

    def wait(self, handles):
        """Wait for the first of these handles, all of one run; returns (the handle, its predictions).
        Raises as WorkerGroup.wait."""
        request, _ = handles[0].group.wait([handle.request for handle in handles], self.workers.on_phase,
                                           self.workers.check)
        handle = next(handle for handle in handles if handle.request == request)
        for written, wanted in handle.extra_outputs:
            wanted.copy_(written)
        return handle, list(handle.predictions)

    def name_conditioning(self, tensors, run=None):
        """The name under which the workers hold these tensors for a run; sends them if they do not.

        run: whose they are (hashable). Runs share nothing: the workers keep stale keys and values by this name. Raises
        WorkerDiedError where the group has ended that kept them.
        """
        self._check_cached(run)
        return self._name(tensors, run, self.group)

    def _name(self, tensors, run, group):
        conditionings = self._runs.get(run)
        if conditionings is None or conditionings.group is not group:
            conditionings = self._runs[run] = Conditionings(group)
        name = conditionings.find(tensors)
        if name is None:
            self._num_conditionings += 1
            name = f"conditioning-{self._num_conditionings}"
            segments = group.segments.share_all(tensors)
            conditionings.keep(name, tensors)
            self.workers.request(lambda request: messages.Conditioning(request, name, segments), segments.values(),
                                 group)
            self._forget(group, conditionings.drop_surplus())
        return name

    def _check_cached(self, run):
        if run in self._runs and not self._runs[run].group.alive:
            raise WorkerDiedError("The workers that kept this run's tensors have ended. Queue the prompt again to "
                                  "start a new group.")

    def end_run(self, run=None):
        """Forget the conditioning of a run, on both sides. Waits for nothing: a cancelled step may still be running.

        Called between runs, also after one that failed.
        """
        conditionings = self._runs.pop(run, None)
        if conditionings is not None:
            self._forget(conditionings.group, conditionings.drop_all())
        if not self._runs:
            self.models.changes.end_runs()
            self.networks.forget_all()

    def _forget(self, group, names):
        if names and self.running and group is self.workers.current:
            self.workers.current.post(lambda request: messages.DropConditioning(request, names), answering=())

    @property
    def num_runs(self):
        """Runs that have not ended, whose conditioning the workers keep."""
        return len(self._runs)

    # --- what workers tell of themselves ---

    def report_memory(self):
        """{rank: measurements}, see Engine."""
        return {rank: reply.numbers for rank, reply in self.workers.request(messages.ReportMemory).items()}

    def give_back(self):
        """Have the running workers give memory back that they keep for the next run. Starts nothing.
        Returns the bytes that came free, by the names of GPUs."""
        given = {}
        if self.running:
            for rank, done in self.workers.request(messages.GiveBack, group=self.workers.current).items():
                given[self.devices[rank]] = given.get(self.devices[rank], 0) + done.numbers["given_bytes"]
        return given

    def totals(self):
        """{rank: {name: sum}} of all measurements since the group started. Waits until all ranks have caught up."""
        self.report_memory()
        return {rank: dict(numbers) for rank, numbers in self.group.totals.items()}

    @property
    def backend_counts(self):
        """A Counter: attentions that the running group's ranks have computed since it started, by the kernel, with the
        reason where it is another than was asked for: "sage", "sdpa (masks)". Available also while it works."""
        counts: collections.Counter = collections.Counter()
        for numbers in self.workers.current.totals.values() if self.running else ():
            counts.update({name.removeprefix(BY_KERNEL): round(count) for name, count in numbers.items()
                           if name.startswith(BY_KERNEL)})
        return counts

    @property
    def memory(self):
        """{rank: the memory that the running group's rank last reported}; available also while it works."""
        return dict(self.workers.current.memory) if self.running else {}

    def report_if_idle(self, since_s=-1.0):
        """{rank: Done} of ReportMemory where the workers run and are idle; else None. Starts nothing, and keeps nobody
        waiting."""
        group = self.workers.current
        try:
            return group and group.ask_if_idle(lambda request: messages.ReportMemory(request, since_s))
        except XDiTError:                                      # they have ended: whoever needs them next gets the error
            return None

    def catch_up(self, timeout_s, since_s=-1.0):
        """Wait until the workers have done all that they were asked, but no longer than this, since a cancelled step
        may take its time. Returns {rank: Done}, with the spans from since_s on, or {} where it takes longer, and
        while they measure their devices."""
        if not self.running or self.group.is_probing:
            return {}
        deadline_s = time.monotonic() + timeout_s

        def check():
            if time.monotonic() > deadline_s:
                raise TimeoutError

        try:
            group = self.group
            requested = group.post(lambda request: messages.ReportMemory(request, since_s))
            return group.wait([requested], self.workers.on_phase, check)[1]
        except (TimeoutError, WorkerDiedError):
            # what was asked for is done: who needs the workers next starts new ones
            return {}

    def probe(self, dtype):
        """{rank: what it measured of its device and links, by name}; a few seconds. After one that check() ended, the
        workers have gone on, and what they measured is taken. dtype: that models compute in, "bfloat16"."""
        per_machine, group = devices_per_machine(self.devices), self.group
        if self._probing[:2] != (group, dtype):
            self._probing = group, dtype, group.post(lambda request: messages.Probe(request, dtype, per_machine))
        try:
            answers = group.wait([self._probing[2]], self.workers.on_phase, self.workers.check)[1]
        except XDiTError:
            self._probing = (None, "", 0)
            raise
        self._probing = (None, "", 0)
        return {rank: done.numbers for rank, done in answers.items()}
