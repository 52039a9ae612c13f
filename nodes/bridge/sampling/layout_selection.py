"""Layout selection for a run of a MODEL: its estimate, and the comparison with the measured time."""

import dataclasses
import functools
import logging
import statistics
import time

import torch

from ....xdit_backend.host.measured_runs import ONE_DEVICE
from ....xdit_backend.memory.system_memory import pages_of
from ....xdit_backend.planner.attention_choice import fastest_operators, with_fastest
from ....xdit_backend.planner.calibration import KNOWN, NEW, Calibration, calibrated
from ....xdit_backend.planner.descriptions import SHOWN_S, describe_plan, describe_speedup, layout_description
from ....xdit_backend.planner.planner import is_long, plan_run
from ....xdit_backend.protocol.devices import own_name
from ....xdit_backend.protocol.specs import FASTEST, OPERATORS, WeightCopies
from ..compatibility.attention_override import backend_of
from ..workers.worker_groups import GROUPS

log = logging.getLogger(__name__)

MAX_DEVIATION = 0.25                       # relative error of an estimate above which it is logged


class Estimates:
    """Estimates for one MODEL's runs, one run at a time. memory: its MemoryCheck, which accounts for a LoRA."""

    def __init__(self, setup, memory):
        self._setup, self._memory = setup, memory
        # Plan of this run, if it has one; times of its calls
        self.plan = self.timed = None
        self.streaming_plan = None                             # Plan of a run without one, if weights are streamed
        # {(Job, MemoryCheck.changed): Plan or None}; GPU names
        self._plans, self._gpus = {}, ()
        self._pages = None                                     # system_memory.pages_of the file
        self.work = None                                       # run_digest of the run, while a sampler runs
        self._fastest = None                                   # BackendChoice.fastest of the run

    def begin(self, job, is_planned):
        """Return the Plan of the run that this call belongs to. A call with another plan begins another run."""
        plan = self.look(job, may_measure=True) if is_planned else None
        self.streaming_plan = self._plan_streaming(job) if is_planned else None
        if self.timed is None or plan is not self.plan:
            self.plan, self.timed = plan, StepTimes(job)
        if self._fastest is None:
            self._fastest = self._fastest_attention(job)
        return plan

    def end(self):
        self.plan = self.timed = self.streaming_plan = self.work = self._fastest = None
        self._plans.clear()

    def look(self, job, may_measure):
        """Return the Plan of a run, or None if nothing can be estimated, see why_none.

        Devices are measured once, before the first run that is long enough to justify it.
        """
        setup = self._setup
        if self.why_none != "unmeasured":
            return None
        key = job, self._memory.changed
        if key not in self._plans:
            may_measure = may_measure and is_long(setup.dims, job, torch.device(setup.devices[0]).type)
            machine = self._machine(may_measure)
            self._plans[key] = None if machine is None else plan_run(setup.config, machine, setup.dims, job, None,
                                                                     setup.spec.tensor_degree, self._memory.changed)
            self._gpus = () if machine is None else tuple(device.name for device in machine.devices)
        return self._plans[key]

    def with_measurements(self, calls):
        """Set on these calls what the devices' measurements decide: the attention operators that auto takes, and how
        offloaded weights are copied to the devices."""
        if self._fastest is None:
            self._fastest = self._fastest_attention(None)
        return self._with_copies([_with_fastest(call, self._fastest) for call in calls] if self._fastest else calls)

    def _with_copies(self, calls):
        """Set how offloaded weights are copied, by the measurements and this run's Plan."""
        setup, plan = self._setup, self.plan or self.streaming_plan
        machine = GROUPS.machine(setup.devices, setup.spec.compute_dtype, False) if setup.spec.weights_memory else None
        if machine is None:
            return calls
        copies = WeightCopies(all(device.host_pageable for device in machine.devices),
                              plan is not None and plan.chosen.shards_weights)
        return [dataclasses.replace(call, options=dataclasses.replace(call.options, copies=copies)) for call in calls]

    def _fastest_attention(self, job):
        """BackendChoice.fastest by the devices' measurements; {} on CPUs, where torch has one operator. A single GPU is
        measured before its first long run, as several are."""
        setup = self._setup
        if setup.config.attention != FASTEST or any(own_name(name) == "cpu" for name in setup.devices):
            return {}
        may_measure = (len(setup.devices) == 1 and job is not None and setup.dims is not None
                       and is_long(setup.dims, job, torch.device(own_name(setup.devices[0])).type))
        machine = GROUPS.machine(setup.devices, setup.spec.compute_dtype, may_measure)
        return {} if machine is None else fastest_operators(machine.devices)

    def num_patches(self, job):
        """Estimated fastest number of patches of a PipeFusion run with offloaded weights; 0 without offloaded weights
        or measurements."""
        self.streaming_plan = None if self._setup.spec.stages is None else self._plan_streaming(job)
        return 0 if self.streaming_plan is None else self.streaming_plan.chosen.degrees.num_patches

    def _plan_streaming(self, job):
        """Plan of a run whose layout is fixed: manual degrees, stages or one device. None if no weights are offloaded
        or nothing can be estimated."""
        setup, spec = self._setup, self._setup.spec
        if self.why_none not in ("manual", "one", "stages") or not spec.weights_memory or setup.dims is None:
            return None
        key = job, self._memory.changed
        if key not in self._plans:
            machine = self._machine(may_measure=False)
            self._plans[key] = machine and plan_run(setup.config, machine, setup.dims, job, spec.stages,
                                                    spec.tensor_degree, self._memory.changed)
        plan = self._plans[key]
        return plan if plan and plan.chosen.memory.streamed else None

    def _machine(self, may_measure):
        """Measured devices as this MODEL uses them; None if they are not measured."""
        setup, spec = self._setup, self._setup.spec
        machine = GROUPS.machine(setup.devices, spec.compute_dtype, may_measure)
        if machine is None:
            return None
        self._pages = self._pages or pages_of(setup.checkpoint.files)
        backend, fastest = backend_of(setup.config).name, {}
        if setup.config.attention == FASTEST and backend in OPERATORS:
            fastest = fastest_operators(machine.devices)
        machine = dataclasses.replace(machine, devices=tuple(
            with_fastest(device, fastest) if fastest else device.by_backend(backend) for device in machine.devices))
        return calibrated(machine, GROUPS.calibrations(), setup.family.name).exchanging(
            setup.config.exchange).reading(self._pages)

    @property
    def why_none(self):
        """Reason for which a run of this MODEL has no Plan: "manual" degrees, "one" device, "stages", a "unet" (or
        another model whose tokens are not split), or devices that are "unmeasured" so far."""
        setup = self._setup
        cases = {"manual": setup.config.mode == "manual", "one": len(setup.devices) < 2,
                 "stages": setup.spec.stages is not None, "unet": setup.dims is None or not setup.shards_tokens}
        return next((case for case, applies in cases.items() if applies), "unmeasured")

    def describe(self):
        """Describe the estimate and the reason for the layout, for the user; "" without a plan."""
        if self.plan is None:
            return ""
        plan, known = self.plan, (self._setup.family.name, self._gpus[0]) in GROUPS.calibrations()
        return ". " + describe_plan(plan.chosen, plan.one if plan.one.fits else None, plan.ordered,
                                 self._measured_s(plan), KNOWN if known else NEW)

    def _measured_s(self, plan):
        """Measured seconds of such a run with this Plan's layout, and on one device; each may be None."""
        if self.work is None:
            return None, None
        several, one = (GROUPS.measured.find(self.work, self.gpus, layout_description(plan.chosen)), self.on_one_device)
        return tuple(run and run.step_s * self.timed.job.steps for run in (several, one))

    @functools.cached_property
    def gpus(self):
        """Names of the devices."""
        return tuple(GROUPS.gpu_of(device)[0] for device in self._setup.devices)

    @property
    def on_one_device(self):
        """The MeasuredRun of this run on a single one of the devices, or None."""
        return None if self.work is None else GROUPS.measured.on_one_device(self.work, self.gpus)

    @property
    def num_working(self):
        """Number of devices that compute; the others have nothing to do in the layout that auto mode has chosen."""
        return len(self._setup.devices) if self.plan is None else self.plan.chosen.working

    def record(self, step_s):
        """Store a run's measured seconds per step, if a later run is compared with it: on one device, or in a layout
        that auto mode has chosen."""
        if self.work is None or not step_s:
            return
        if self.num_working == 1:
            GROUPS.measured.record(self.work, self.gpus[:1], ONE_DEVICE, step_s)
        elif self.plan is not None:
            GROUPS.measured.record(self.work, self.gpus, layout_description(self.plan.chosen), step_s)

    def compare(self, how, elapsed_s):
        """Compare a run's time with its estimate, for the user: both a step, without the first one's preparation. ""
        without an estimate, or for a run whose estimate is less than SHOWN_S. Logs large deviations.

        how: description of the split. Runs in which no device waits for another calibrate the estimates.
        """
        if self.plan is None:
            return ""
        chosen, timed, family = self.plan.chosen, self.timed, self._setup.family.name
        estimated_s, measured_s = chosen.seconds, timed.seconds or elapsed_s
        if abs(measured_s / estimated_s - 1) > MAX_DEVIATION:
            log.debug("estimated %.1f s for %s (%s), measured %.1f s (%s)", estimated_s, how, ", ".join(
                f"{cause} {seconds:.1f} s" for cause, seconds in chosen.causes.items()), measured_s, timed.split())
        if timed.seconds and chosen.is_independent and len(set(self._gpus)) == 1:
            known = GROUPS.calibrations().get((family, self._gpus[0]), Calibration())
            GROUPS.record_run(family, self._gpus[0], known.factor * measured_s / estimated_s)
        shown = timed.seconds and estimated_s >= SHOWN_S
        return f" (estimate: {estimated_s / timed.job.steps:.2f} s a step)" if shown else ""

    def describe_speedup(self, step_s):
        """Describe a run's measured speedup over one device, for the user; "" if that has not been measured."""
        one = None if self.num_working == 1 or not step_s else self.on_one_device
        return "" if one is None else describe_speedup(step_s, one, own_name(self._setup.devices[0]) != "cpu")


def _with_fastest(call, fastest):
    """A Call whose attention runs on these operators, unless a node or the user has selected a backend, or one of
    ComfyUI's that rounds."""
    backend = call.options.backend
    if backend.is_required or backend.name not in OPERATORS:
        return call
    return dataclasses.replace(call, options=dataclasses.replace(
        call.options, backend=dataclasses.replace(backend, fastest=fastest)))


def describe_spare(data_degree, num_images):
    """Describe devices that have no image to generate, for the user; "" if all have one."""
    if num_images >= data_degree:
        return ""
    return (f" ({data_degree - num_images} of data_degree={data_degree} have no image: set batch_size to {data_degree}"
            f" in the empty latent's node, or use another degree)")


class StepTimes:
    """Times of the calls of a run's model."""

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
        """Seconds of a run with one call per step, or None with too few calls. The first call is left out, since it
        includes preparation."""
        return statistics.median(self._calls_s[1:]) * self.job.steps if len(self._calls_s) > 2 else None

    def split(self):
        """Describe what the workers did in that time, for the log."""
        if not (self._client and self._client.running):
            return "the workers have ended"
        after = self._client.totals()
        did = {name: [numbers.get(name, 0) - self._before.get(rank, {}).get(name, 0)
                      for rank, numbers in sorted(after.items())]
               for name in ("busy_s", "sent_bytes")}
        busy, sent = (", ".join(f"{number / unit:.1f}" for number in did[name])
                      for name, unit in (("busy_s", 1), ("sent_bytes", 1e6)))
        return f"in {len(self._calls_s)} calls the workers were busy {busy} s and sent {sent} MB"
