"""What a shell's diffusion model does instead of computing: it asks the workers. Made by shell.py, one a MODEL."""

import dataclasses
import functools
import logging

import torch

from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers

from ...xdit_backend.checkpoints.net import job_of
from ...xdit_backend.forecast.cost import Job
from ...xdit_backend.forecast.learning import KNOWN, NEW, Learnt, as_learnt
from ...xdit_backend.forecast.memory import Memory, rank_memory, working_share
from ...xdit_backend.forecast.room import check_room
from ...xdit_backend.forecast.words import layout_words, measured_words, plan_words, seconds_words
from ...xdit_backend.host.client import Call
from ...xdit_backend.partition import holders
from ...xdit_backend.planner import (
    USUAL_JOB,
    branches_together,
    choose_layout,
    degrees_of,
    describe_layout,
    is_long,
    memory_settings,
    plan_run,
    rank_bytes,
    stages_that_fit,
    tensor_degree_that_fits,
)
from ...xdit_backend.protocol.errors import ConfigError
from .carried import refuse_call, refuse_changed_modules
from .control import places_of
from .displaced import DisplacedRun
from .groups import GROUPS, ask_for_room, parking_room, show_text
from .operations import guided_of, operations_of, scores_of
from .pipeline import DRAINED, WHOLE, PipelineRun
from .timed import Timed

log = logging.getLogger(__name__)

MISSED = 0.25                              # by how much a run's time may differ from its forecast and not be logged
PATIENCE_S = 0.5                           # to wait for the workers' memory when a run ends


class RemoteModel:
    """What a shell's diffusion model does instead of computing: it asks the workers.

    latent_format: ComfyUI's, of the model. config, devices: how and where it runs. modules, load_device: of the shell as it
    was made, to compare with; see carried.py. weight_bytes: of all blocks, as a rank holds them. net: None of a U-Net. device_bytes: of
    memory, of each rank's device. told_bytes: of a U-Net, net.told_bytes of its model.
    """

    def __init__(self, spec, family, transformer_config, latent_format, config, devices, modules, load_device, weight_bytes, net,
                 device_bytes, told_bytes, lighter_bytes):
        self.modules, self.load_device, self._looked_at = modules, load_device, set()
        self.spec, self.family = spec, family
        self.num_heads, self._num_key_heads = family.num_heads(transformer_config), family.num_key_heads(transformer_config)
        self._shares_tokens = "ulysses" not in family.refused
        self.num_channels, self._taken_channels = family.num_channels(transformer_config), family.taken_channels(transformer_config)
        self.config, self.devices = config, devices
        self._transformer_config, self._latent_format = transformer_config, latent_format
        self._rank_bytes = [rank_bytes(weight_bytes, spec.stages)] * len(devices)        # until the workers have told theirs
        self._beside_bytes = 0                                 # that ComfyUI was told a rank needs for a run
        self.how = None                                        # how this run is split, in a person's words; None before it
        self._pipeline = self._schedule = None
        self._timed, self._cards, self._measured = None, (), {}                # {(Job, Degrees): seconds of the last such run}
        self._device_bytes, self._told_bytes, self._roomy = device_bytes, told_bytes, set()
        self._lighter_bytes = lighter_bytes                    # () -> {another weight_dtype: bytes that a rank with all blocks holds}
        self._net, self._plans, self.plan = net, {}, None      # what forecasts need; {Job: Plan or None}; the Plan of this run
        self.changes, self.changes_uuid = {}, None             # of the file's weights, see Client.load_model; whose patches those are

    @property
    def num_classes(self):
        """How many classes a prompt may name; None where it is a text."""
        sampled = self.family.sampled
        return self._transformer_config[sampled.labels] if sampled and sampled.labels else None

    # --- what placement.py asks ---

    def load(self, base_model):
        client = GROUPS.client(self.devices)
        missing = {device: self.bytes_on(device) - self.loaded_on(device) for device in set(self.devices)}
        GROUPS.load_model(client, self.spec, base_model, missing, self.changes)
        self._rank_bytes = client.residence(self.spec.name).weight_bytes

    @property
    def is_loaded(self):
        residence = self._residence()
        return residence is not None and not any(residence.parked_bytes)

    def bytes_on(self, device):
        return sum(size for size, name in zip(self._rank_bytes, self.devices) if name == str(device))

    def loaded_on(self, device):
        residence = self._residence()
        return 0 if residence is None else self.bytes_on(device) - sum(
            parked for parked, name in zip(residence.parked_bytes, self.devices) if name == str(device))

    def memory_required(self, of_one_device, input_shape, cond_shapes={}):
        """ComfyUI's question to a BaseModel: bytes that a run takes beside weights; here on load_device. of_one_device: its own answer."""
        branches, whole = 2 - input_shape[0] % 2, input_shape
        if len(whole) == 3:                                    # of several parts, packed into one row of numbers
            whole = (whole[0], self._taken_channels, 1, 1, -(-whole[2] // self._taken_channels))
        job = Job(self.family.latent.num_tokens(whole), 0, USUAL_JOB.steps, branches, images=max(1, input_shape[0] // branches))
        plan, stages = self._plan(job, may_measure=False), self.spec.stages
        degrees = degrees_of(self._layout(2) if plan is None else plan.layout, self.config, stages)
        activations = of_one_device(input_shape, cond_shapes=cond_shapes) * working_share(job, degrees, branches_apart=True)
        kept = 0.0
        if self._net is not None:
            kept = rank_memory(self._net, job, degrees, **memory_settings(self.config, stages)).keys_values
        self._beside_bytes = activations + kept
        return self._beside_bytes * self.devices.count(str(self.load_device))

    def make_room_elsewhere(self):
        """Have ComfyUI's own models leave other devices than load_device, where it asks itself, as far as the workers need room there."""
        for name in set(self.devices) - {str(self.load_device)}:
            ask_for_room(name, self.bytes_on(name) - self.loaded_on(name) + self._beside_bytes * self.devices.count(name))

    def check_weights(self):
        """Refuse weights that a device has no room for, before they are read."""
        check_room(f"{self.family.title} over {len(self.devices)} device{'s' if len(self.devices) > 1 else ''}", self.devices,
                   self._device_bytes, self._added_bytes(self._rank_bytes), remedies=self._spread(Job(1, 0, 1)), lighter=self._lighter)

    def _check_room(self, question, calls, layout):
        """Refuse a run that cannot fit before its first call. Calls for a patch are for the whole latent."""
        latent = calls[0].latent
        shape = latent.shape if self._pipeline is None else self._pipeline.shape
        key = (tuple(shape), tuple(latent.shape[:1]), len(calls), layout)
        if key in self._roomy:
            return
        together = max(1, question.num_branches // len(calls))                 # branches that ComfyUI has put into one batch
        branches, degrees = len(calls) * together, degrees_of(layout, self.config, self.spec.stages)

        def job(images, sizes):
            return job_of(self.family, self._net, (images, shape[1], *sizes), calls[0].conditioning, USUAL_JOB.steps, branches)

        def needed(images, sizes, config=self.config):
            if self._net is not None:
                return rank_memory(self._net, job(images, sizes), degrees, **memory_settings(config, self.spec.stages))
            own = -(-images // degrees.data) * -(-branches // degrees.cfg)
            told = 0 if degrees.displaced == 1 else self._told_bytes(sizes, degrees.displaced, getattr(torch, self.spec.compute_dtype), own)
            return Memory(0.0, config.steps_kept * degrees.displaced * told, 0.0)

        without = dataclasses.replace(self.config, forecast_keys_values=0.0)
        lean = {"forecast_keys_values 0": functools.partial(needed, config=without)} if self.config.steps_kept > 1 else {}
        images, sizes = max(1, latent.shape[0] // together), tuple(shape[2:])
        check_room(f"This run ({describe_layout(layout)})", self.devices, self._device_bytes, self._added_bytes(self._rank_bytes), needed,
                   images, sizes, self.family.pixels(self._transformer_config)[1:], self._spread(self._net and job(images, sizes)),
                   self._lighter, lean)
        self._roomy.add(key)

    def _lighter(self):
        """{weight_dtype in which a rank holds less: what each rank then adds to the weights on its device}"""
        return {name: self._added_bytes([rank_bytes(size, self.spec.stages)] * len(self.devices))
                for name, size in self._lighter_bytes().items() if rank_bytes(size, self.spec.stages) < max(self._rank_bytes)}

    def _added_bytes(self, weight_bytes):
        """What each rank adds to the weights on its device: on CPUs, those that hold the same weights map one file."""
        first = {ranks[0] for ranks in holders(len(self.devices), self.spec)}
        return [size if device != "cpu" or rank in first else 0 for rank, (device, size) in enumerate(zip(self.devices, weight_bytes))]

    def _spread(self, job):
        """Over how many devices the model would fit, for a person: [text]. Exactly, where nothing else is allowed."""
        if self._net is None:
            return []
        if self.config.approximate == "allowed" and "pipefusion" not in self.family.refused:
            name, degree = "pipefusion_degree", stages_that_fit(self.config, self._net, job, min(self._device_bytes))
        elif "tensor" in self.family.refused:
            return []
        else:
            name, degree = "tensor_degree", tensor_degree_that_fits(self._net, job, min(self._device_bytes))
        return [f"{name}={degree} on as many devices like these"] if degree else []

    def free(self, device, num_bytes):
        client = GROUPS.client_if(self.devices)
        return 0 if client is None else client.park(self.spec.name, parking_room(), str(device), num_bytes)

    def unload(self):
        client = GROUPS.client_if(self.devices)
        if client is not None:
            client.park(self.spec.name, parking_room())

    def _residence(self):
        client = GROUPS.client_if(self.devices)
        return None if client is None else client.residence(self.spec.name)

    def _client(self):
        """The workers, which hold this MODEL: another of the same file may have had its weights changed."""
        client = GROUPS.client(self.devices)
        client.load_model(self.spec, self.changes)
        return client

    # --- a run ---

    def end_run(self):
        self._looked_at.clear()
        self.how = self.plan = self._timed = None
        self._plans.clear()
        self._roomy.clear()
        client = self._forget_told()
        if client is not None:
            # ComfyUI is to see the memory that the workers give back now
            GROUPS.runs.collect(client, lambda since_s: client.catch_up(PATIENCE_S, since_s))

    def forward(self, x, timestep=None, context=None, control=None, transformer_options={}, **extra):
        """ComfyUI's call of a diffusion model. x: (B, C, H, W) or (B, C, F, H, W); returns like x, float32. Of a latent of several parts, a
        list of them, and a timestep for each.

        Wrappers of the diffusion model are called where ComfyUI's own model of the family calls them.
        """
        in_parts = self.family.parts and isinstance(x, list) and isinstance(timestep, tuple)
        if not (in_parts or torch.is_tensor(timestep)) or not torch.is_tensor(context):
            raise ConfigError(f"A node calls this MODEL in a way of its own, and {self.family.name} takes a latent, a timestep and "
                              f"conditioning. Use a sampler node, or the kind of model that the node is for.")
        refuse_call(self.family, transformer_options, {"context": context, **extra})
        net = self.modules[""][0]
        forwards = [vars(class_)["forward"] for class_ in type(net).__mro__ if "forward" in vars(class_)]
        calls_wrappers = self.family.sampled or any(WrapperExecutor.__name__ in forward.__code__.co_names for forward in forwards)
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options) if calls_wrappers else []
        return WrapperExecutor.new_class_executor(self._answer, net, wrappers).execute(
            x, timestep, context=context, control=control, transformer_options=transformer_options, **extra)

    def _answer(self, x, timestep, context, transformer_options, control=None, **extra):
        from . import branches
        schedule, sigmas = transformer_options.get("sample_sigmas"), transformer_options.get("sigmas")
        beside, parts = {}, {}
        if self.family.parts and isinstance(x, list):
            parts = {name: torch.zeros(part.shape) for name, part in zip(self.family.parts, x[1:])}
            x, timestep, beside = self.family.parted(x, timestep, self._transformer_config)
        sigmas = timestep if sigmas is None else sigmas
        sigma = sigmas.max().item()
        self._refuse_changed_modules(schedule, sigma)
        self.check_latent(x, self._taken_channels)
        begins = self._looked_at == {sigma}                    # whatever is not finite is so from a run's first noise level on
        if begins:
            check_finite(x, "The latent", "Look at what made it: another sampler, or an encode in half precision.")
        asked = self.family, self._transformer_config, transformer_options
        scores = scores_of(*asked, x.shape, self.config.displaced_degree if self.config.mode == "manual" else 1)
        call = Call(x, timestep, self.family.tensors({"context": context, **extra}),
                    control=places_of(self.family, self._transformer_config, control, x.shape), operations=operations_of(*asked),
                    scores=scores and scores.room, guided=guided_of(self.family, transformer_options), beside=beside, parts=parts)
        self.check_conditioning(call.conditioning, x)
        num_branches = len(transformer_options.get("cond_or_uncond", ()))
        prediction = branches.ask(branches.Question(self, call, schedule, sigmas, num_branches, transformer_options.get(WHOLE),
                                                    transformer_options.get(DRAINED)))
        if begins:
            check_finite(prediction, f"What {self.family.name} predicts at the first step",
                         f"Its weights, a LoRA or the conditioning have such numbers, or {self.spec.compute_dtype} is too small for it: "
                         f"try another weight_dtype in Load xDiT Model, without LoRA.")
        prediction = prediction.to(x.device)
        if scores is not None:
            scores.tell(x.device)
        return [prediction, *(part.to(x.device) for part in parts.values())] if parts else prediction

    def runs_branches_apart(self):
        """Are two branches two calls for the workers, and not one of twice the batch?"""
        return self.keeps_calls or self._layout(2).cfg_degree > 1

    @property
    def keeps_calls(self):
        """Do calls of a run use what earlier ones have left on the workers?"""
        return self.spec.stages is not None or (self.config.mode == "manual" and self.config.displaced_degree > 1)

    def begin_run(self, schedule, shape, whole_because=None, drained_because=None):
        """PipeFusion of a run that begins. schedule: its sigmas. shape: of its whole latent. The others: see pipeline.py."""
        self._end_pipeline()
        self._schedule = schedule
        self._pipeline = PipelineRun(self._client(), self.spec, self.family, self._transformer_config, self.config, self._layout(1),
                                     schedule, shape)
        self._show(self._pipeline.describe(whole_because, drained_because))
        return self._pipeline

    def predict(self, question, calls):
        """The predictions for one or two calls of this model, all of the step that the branches.Question is of."""
        GROUPS.client(self.devices).step = _step_of(question)
        try:
            return self._predict(question, calls)
        finally:
            if question.schedule is None:                      # called outside of a sampler: no run will end
                self._forget_told()

    def _predict(self, question, calls):
        if self.spec.stages is not None:
            return self._predict_in_stages(question, calls)
        job = self._job(question, calls)
        together = any(call.guided for call in calls)
        plan = None if together else self._plan(job, may_measure=True)
        if self._timed is None or plan is not self.plan:
            self.plan, self._timed = plan, Timed(job)
        layout = self._layout(len(calls)) if self.plan is None else self.plan.layout
        if together:
            layout = branches_together(layout)
        self._check_room(question, calls, layout)
        if layout.displaced_degree > 1:
            return self._predict_displaced(question, calls, layout)
        client = self._client()
        how = describe_layout(layout) if self.plan is None else layout_words(self.plan.chosen)
        if together:
            how = (f"{describe_layout(dataclasses.replace(layout, cfg_degree=1))}, both prompts in one batch, which Normalized Attention "
                   f"Guidance compares")
        self._show(how + self.config.idle, self.plan)
        return self._timed.call(client, lambda: client.predict(self.spec, layout, self.num_channels, calls, run=self))

    def _predict_in_stages(self, question, calls):
        from . import patches
        self._check_room(question, calls, self._layout(1))
        sigma = question.sigmas.max().item()
        predictions = patches.ask(self, calls, sigma)
        if predictions is not None:
            return predictions
        schedule = question.schedule
        if schedule is None:                                   # called outside of a sampler: no step can be stale
            schedule = torch.tensor([sigma])
        if self._pipeline is None or schedule is not self._schedule:
            self.begin_run(schedule, calls[0].latent.shape, question.whole_because, question.drained_because)
        self._client()
        return self._pipeline.predict(calls, sigma, question.whole_because)

    def _predict_displaced(self, question, calls, layout):
        sigma, client = question.sigmas.max().item(), self._client()
        if self._pipeline is None or question.schedule is not self._schedule:
            self._end_pipeline()
            self._schedule = question.schedule
            # Called outside of a sampler, no step can be stale.
            self._pipeline = DisplacedRun(client, self.spec, self.family, self._transformer_config, self.config, layout,
                                          torch.tensor([sigma]) if self._schedule is None else self._schedule, calls[0].latent.shape)
            self._show(self._pipeline.describe(question.whole_because))
        return self._pipeline.predict(calls, sigma, question.whole_because)

    def _refuse_changed_modules(self, schedule, sigma):
        """Nodes may change modules for the time of a call. Looked at once for each noise level of a run."""
        if schedule is None or sigma not in self._looked_at:
            refuse_changed_modules(self.modules[""][0], self.modules)
            self._looked_at.add(sigma)

    def _layout(self, num_branches):
        return choose_layout(self.config, len(self.devices), num_branches, self.num_heads, self.family.name, self.spec.stages,
                             self._num_key_heads, self.spec.tensor_degree, self._shares_tokens)

    def _plan(self, job, may_measure):
        """The Plan of a run; None where nothing is forecast: one device, degrees by hand, stages, U-Nets, or devices that are not measured
        yet. They are, once, before the first run that is long enough to be worth it. None, too, where ranks share no tokens."""
        is_planned = self._net is not None and self._shares_tokens and self.config.mode == "auto"
        if not is_planned or len(self.devices) < 2 or self.spec.stages is not None:
            return None
        if job not in self._plans:
            may_measure = may_measure and is_long(self._net, job, torch.device(self.devices[0]).type)
            machine = GROUPS.machine(self.devices, self.spec.compute_dtype, may_measure)
            self._plans[job] = None if machine is None else plan_run(
                self.config, as_learnt(machine, GROUPS.learnt(), self.family.name), self._net, job, None, self.spec.tensor_degree)
            self._cards = () if machine is None else tuple(device.name for device in machine.devices)
        return self._plans[job]

    def _job(self, question, calls):
        """The Job of the run that this call is of; None of a U-Net."""
        steps = 1 if question.schedule is None else len(question.schedule) - 1
        return self._net and job_of(self.family, self._net, calls[0].latent.shape, calls[0].conditioning, steps, len(calls))

    def compare(self, elapsed_s):
        """What a run took beside its forecast, in a person's words; "" where there was none. One that missed by far is logged.

        Runs in which no device waited for another teach the forecast.
        """
        if self.plan is None:
            return ""
        chosen, one, timed = self.plan.chosen, self.plan.one, self._timed
        forecast_s, measured_s = chosen.seconds, timed.seconds or elapsed_s
        if timed.seconds:
            self._measured[timed.job, chosen.degrees] = timed.seconds
        if abs(measured_s / forecast_s - 1) > MISSED:
            log.info("the forecast of %s was %.1f s (%s), and the run took %.1f s (%s)", self.how, forecast_s, ", ".join(
                f"{cause} {seconds:.1f} s" for cause, seconds in chosen.causes.items()), measured_s, timed.split())
        if timed.seconds and chosen.is_apart and len(set(self._cards)) == 1:
            known = GROUPS.learnt().get((self.family.name, self._cards[0]), Learnt())
            GROUPS.learn(self.family.name, self._cards[0], known.factor * measured_s / forecast_s)
        measured = f"; {measured_words(one, measured_s)}" if timed.seconds and chosen.working > 1 else ""
        return f" (forecast: {seconds_words(forecast_s)}{measured})"

    def _forget_told(self):
        """Have the workers forget the conditioning they were told, and what they keep with it. Returns the Client, if there is one."""
        self._end_pipeline()
        client = GROUPS.client_if(self.devices)
        if client is not None:
            client.end_run(self)
        return client

    def _end_pipeline(self):
        if self._pipeline is not None:
            self._pipeline.end()
        self._pipeline = self._schedule = None

    def _show(self, how, plan=None):
        if how != self.how:
            words = "" if plan is None else ". " + plan_words(
                plan.chosen, plan.one if plan.one.fits else None, plan.ordered, self._measured.get((self._timed.job, plan.chosen.degrees)),
                KNOWN if (self.family.name, self._cards[0]) in GROUPS.learnt() else NEW)
            show_text(f"running on {', '.join(self.devices)}: {how}{words}")
            self.how = how

    def check_latent(self, x, channels=None):
        """Refuse a latent of another model. channels: where it is not the latent alone. Raises ConfigError."""
        if self.family.parts and getattr(x, "is_nested", False):
            x = self.family.parted(x.unbind(), (torch.zeros(1), torch.zeros(1)), self._transformer_config)[0]
        own, num_dims = self._latent_format.latent_channels, self._latent_format.latent_dimensions
        channels = channels or own
        if not torch.is_tensor(x) or x.is_nested or x.ndim != num_dims + 2 or x.shape[1] != channels:
            given = f"the shape {tuple(x.shape)}" if torch.is_tensor(x) and not x.is_nested else "several parts"
            needs = f"{channels} channels, " + ("frames, rows and columns" if num_dims == 3 else "rows and columns")
            raise ConfigError(f"The latent has {given}, and {self.family.name} works on (batch, {needs}). It was made for another model: "
                              f"use the VAE or the empty latent node that belongs to this one"
                              + (". Or remove what puts channels beside it, such as a noise mask." if channels > own else "."))

    def check_conditioning(self, conditioning, x):
        """Refuse text or reference latents of another model. conditioning: {name: tensor}. x: the latent. Raises ConfigError."""
        for reference in (tensor for name, tensor in conditioning.items() if name.startswith("ref_latents.")):
            if reference.ndim != x.ndim or reference.shape[1] != x.shape[1]:
                raise ConfigError(f"The conditioning has a reference latent of {reference.shape[1]} channels and {reference.ndim} dims, "
                                  f"and this {self.family.name} model takes {x.shape[1]} and {x.ndim}. Encode the picture with the "
                                  f"VAE that belongs to it; models that take pictures otherwise (Fill, Canny, Depth) take none.")
        maker = "xDiT Class Label" if self.num_classes else "the CLIP that belongs to this model"
        for name, argument in self.family.conditioning.items():
            if argument is None or name not in conditioning:
                continue
            given, needed = conditioning[name].shape[-1], self._transformer_config[argument]
            if needed is None:                                 # a model without this input, as ComfyUI's
                continue
            if given < needed or (given > needed and name != "y"):             # of a wider pooled text the first numbers count
                what = {"y": "pooled text", "clip_fea": "a picture's CLIP vision tokens"}.get(name, "text")
                raise ConfigError(f"The conditioning has {what} of {given} numbers a token, and this {self.family.name} model takes "
                                  f"{needed}. It was made by another text encoder: use {maker}.")


def _step_of(question):
    """Which step of a run a branches.Question is of, for a person; of a call outside of a sampler, nothing."""
    if question.schedule is None or len(question.schedule) < 2:
        return ""
    steps = question.schedule[:-1]
    nearest = (steps.to(question.sigmas) - question.sigmas.max()).abs().argmin()               # samplers also call between two steps
    return f"step {int(nearest) + 1} of {len(steps)}"


def check_finite(tensor, what, remedy):
    """Refuse a tensor with NaN or infinite numbers, of which no picture can come. what: it is. Raises ConfigError."""
    if not tensor.isfinite().all():
        raise ConfigError(f"{what} has numbers that are not finite (NaN or infinite), and no picture can come of it. {remedy}")
