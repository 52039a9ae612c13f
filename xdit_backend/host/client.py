"""Client of a worker group: predictions of a model, with tensors as input and output, and the workers' reports.

workers.py manages the group; models.py, autoencoders.py, upscalers.py and injected_networks.py track what it has
loaded.
"""

import collections
import time

from ..partition import last_stage_ranks
from ..protocol import messages
from ..protocol.devices import devices_per_machine
from ..protocol.errors import WorkerDiedError, XDiTError
from ..protocol.specs import BY_BACKEND
from .autoencoders import Autoencoders
from .calls import SYNCHRONOUS, CallHandle, refuse_unusable, share_call
from .conditioning_cache import Conditionings
from .injected_networks import Networks
from .models import Models
from .upscalers import Upscalers
from .workers import Workers


class Client:
    """A worker group and its loaded models. The group starts when it is first needed, and again after it died."""

    def __init__(self, devices, machines=None, supervisor=None, on_phase=lambda phase: None, check=lambda: None):
        """machines, supervisor, on_phase, check: see WorkerGroup."""
        # run -> its Conditionings; number of names assigned so far
        self._runs, self._num_conditionings = {}, 0
        self.workers = Workers(devices, machines, supervisor, on_phase, check)
        self.models, self.autoencoders = Models(self.workers, self._runs), Autoencoders(self.workers)
        self.networks, self.upscalers = Networks(self.workers), Upscalers(self.workers)
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
        """Set the step that error messages name for the following calls: "step 7 of 20"."""
        self._step = step

    def close(self):
        """End the worker group."""
        self.workers.close()

    # --- loaded models ---

    def holds(self, name):
        """Whether the running group has loaded this model, VAE or upscale model."""
        return any(name in loaded for loaded in self._loaded)

    def drop(self, name):
        """Unload a model, VAE or upscale model on every worker."""
        for loaded in self._loaded:
            loaded.drop(name)

    def forget(self, name):
        """Unload a model, VAE or upscale model without waiting, and without restarting ended workers. Thread-safe."""
        self.models.forget(name)
        self.autoencoders.loaded.forget(name)
        self.upscalers.loaded.forget(name)

    @property
    def _loaded(self):
        return self.models.loaded, self.autoencoders.loaded, self.upscalers.loaded

    # --- predictions, and the conditioning of runs ---

    def predict(self, spec, layout, num_channels, calls, run=None):
        """Evaluate the model on one or two calls at once; returns a list of predictions, float32 on the CPU.

        num_channels: of a prediction. run: see `name_conditioning`. Raises like WorkerGroup.wait.
        """
        return self.wait([self.submit(spec, layout, num_channels, calls, run=run)])[1]

    def submit(self, spec, layout, num_channels, calls, forward=SYNCHRONOUS, run=None):
        """Send calls to the workers without waiting; returns a handle for `wait`.

        Calls are executed in the order in which they are submitted. run: see `name_conditioning`. Raises
        WorkerDiedError if a patch or a name refers to tensors cached by a group that has ended.
        """
        if forward.patch is not None or forward.stale or any(call.name or call.left_out for call in calls):
            self._check_cached(run)
        self.models.load(spec)
        for _, network in (pair for call in calls for pair in call.networks):
            self.networks.load(network)
        group = self.workers.holding
        refuse_unusable(calls[0].options.backend, group.unusable_backends, self.devices)
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
        # A stage with streamed weights notices a modified model file only after it has sent to the next stage, so the
        # answers of all ranks are needed.
        answering = None if spec.weights_memory else last_stage_ranks(layout, len(self.devices))
        request = group.post(
            lambda request: messages.Predict(request, spec.name, layout, branches, **vars(forward),
                                             speeds=self.workers.speeds, options=calls[0].options),
            segments, answering, self._step)
        return CallHandle(group, request, tuple(predictions), tuple(extra_outputs))

    def wait(self, handles):
        """Wait for the first completed one of these handles, all of one run; returns (handle, predictions).

        Raises like WorkerGroup.wait.
        """
        request, _ = handles[0].group.wait([handle.request for handle in handles], self.workers.on_phase,
                                           self.workers.check)
        handle = next(handle for handle in handles if handle.request == request)
        for written, wanted in handle.extra_outputs:
            wanted.copy_(written)
        return handle, list(handle.predictions)

    def name_conditioning(self, tensors, run=None):
        """Return the name under which the workers cache these tensors for a run, after sending them if they are new.

        run: hashable id of their owner. Runs share nothing, since the workers key stale keys and values by this name.
        Raises WorkerDiedError if the group that cached the run's tensors has ended.
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
            raise WorkerDiedError("Queue the prompt again to start a new worker group: the workers that cached this "
                                  "run's tensors have ended.")

    def end_run(self, run=None):
        """Drop the conditioning of a run on the host and the workers, without waiting: a cancelled step may still run.

        Called between runs, also after a failed one.
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
        """Number of runs that have not ended, whose conditioning the workers cache."""
        return len(self._runs)

    # --- reports of the workers ---

    def report_memory(self):
        """{rank: memory measurements}, see worker.engine.Engine."""
        return {rank: reply.numbers for rank, reply in self.workers.request(messages.ReportMemory).items()}

    def give_back(self):
        """Free memory that running workers cache for the next run; returns {device: bytes freed}. Starts no workers."""
        freed = {}
        if self.running:
            for rank, done in self.workers.request(messages.GiveBack, group=self.workers.current).items():
                freed[self.devices[rank]] = freed.get(self.devices[rank], 0) + done.numbers["given_bytes"]
        return freed

    def totals(self):
        """{rank: {name: sum}} of all measurements since the group started, after waiting for pending commands."""
        self.report_memory()
        return {rank: dict(numbers) for rank, numbers in self.group.totals.items()}

    @property
    def backend_counts(self):
        """Counter of attention calls that the running group has computed since it started, by attention backend, with
        the reason for a fallback: "sage", "sdpa (masks)". Does not wait for busy workers."""
        counts: collections.Counter = collections.Counter()
        for numbers in self.workers.current.totals.values() if self.running else ():
            counts.update({name.removeprefix(BY_BACKEND): round(count) for name, count in numbers.items()
                           if name.startswith(BY_BACKEND)})
        return counts

    @property
    def memory(self):
        """{rank: memory that it last reported} of the running group. Does not wait for busy workers."""
        return dict(self.workers.current.memory) if self.running else {}

    def report_if_idle(self, since_s=-1.0):
        """{rank: Done} of ReportMemory if the workers run and are idle; else None. Does not block other callers."""
        group = self.workers.current
        try:
            return group and group.ask_if_idle(lambda request: messages.ReportMemory(request, since_s))
        except XDiTError:                                      # they have ended; the next request gets the error
            return None

    def catch_up(self, timeout_s, since_s=-1.0):
        """Wait for pending commands, at most timeout_s, since a cancelled step may take long.

        Returns {rank: Done} with the spans from since_s on; {} after the timeout, and while a probe runs.
        """
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
            # the run itself is complete: the next caller that needs workers starts new ones
            return {}

    def probe(self, dtype):
        """Measure the devices and their links, which takes a few seconds; returns {rank: {name: measurement}}.

        If check() ended an earlier probe, the workers have continued it, and its results are returned. dtype: compute
        dtype of models, "bfloat16".
        """
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
