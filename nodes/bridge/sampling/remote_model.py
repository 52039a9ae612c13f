"""Remote model: answers ComfyUI's calls of a proxy model's diffusion model with the workers' predictions."""

import dataclasses
import functools
import math

import torch

from comfy.patcher_extension import WrapperExecutor

from ....xdit_backend.host.calls import Call
from ....xdit_backend.planner.descriptions import describe_layout, layout_description
from ....xdit_backend.planner.planner import USUAL_JOB, branches_together
from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.specs import describe_exchange
from ..compatibility.block_patches import free_u_of, guided_of, operations_of, scores_of, tiles_of
from ..compatibility.comfyui_variants import variant_of
from ..compatibility.enhance_video import enhanced_of
from ..compatibility.forward_patches import ForwardPatches
from ..compatibility.input_checks import check_call, check_conditioning, check_finite, check_latent
from ..compatibility.ltx_guidance import isolation_of
from ..compatibility.model_options import (
    call_backend,
    refuse_call,
    refuse_changed_modules,
    refuse_positions,
    scales_of,
    wrappers_inside,
)
from ..compatibility.pipefusion_support import COMPILE, DRAINED, SYNCHRONOUS
from ..compatibility.token_shuffle import orders_of
from ..workers.vram_accounting import ask_for_memory
from ..workers.worker_groups import GROUPS, describe_missing, parking_bytes, show_text
from .compile_choice import CompileChoice
from .controlnet import control_residuals
from .displaced_run import DisplacedRun
from .injected_networks import networks_of, style_of
from .layout_selection import Estimates, describe_spare
from .pipefusion_run import PipelineRun
from .reference_kv_cache import RunReferences, default_method, num_cached, with_default_method

MEMORY_TIMEOUT_S = 0.5                     # for the workers' memory reports at the end of a run


class RemoteModel:
    """Implementation of a proxy model's diffusion model by calls to the workers. One for each MODEL.

    computing_in(dtype, ModelSpec.weights_memory) -> (model_setup.Setup, memory_checks.MemoryCheck) for another compute
    dtype or memory budget for weights; None: the config's. load_device: the proxy model's when it was created.
    """

    def __init__(self, computing_in, dtype, load_device):
        # changes of the next run; last Job for which ComfyUI requested memory
        self._computing_in, self._expected, self._job = computing_in, {}, None
        self._set_up(dtype)
        setup, self.load_device = self.setup, load_device
        self.checkpoint, self.family = setup.checkpoint, setup.family
        self.config, self.devices = setup.config, setup.devices
        self.modules, self.weight_sources, self.additions = {}, None, None     # see attach
        self.forwards = ForwardPatches()
        self._checked_sigmas = set()                           # sigmas of this run at which modules were compared
        self._taken_channels = self.family.taken_channels(setup.transformer_config)
        self.compiling = CompileChoice()
        self._run_bytes = 0                                    # per rank for a run, as reported to ComfyUI
        self._most_run_bytes = 0.0                             # maximum of the estimates since the last run
        # `how`: description of this run's split for the user
        self.how = self._pipeline = self._schedule = None
        # `changes`: see use_changes
        self.changes, self.changes_uuid, self._references = {}, None, RunReferences()
        self._sparse_sigmas = math.inf, 0.0                    # highest and lowest sigma of block-sparse attention
        self.comparison = None                                 # with ComfyUI's class: a Future, see family_check.py

    def attach(self, modules, weight_sources, additions):
        """Connect the proxy model's diffusion model. modules: of proxy_modules.remember_modules, for comparison.
        weight_sources(): locations of its weights in the file, see state_dict.py; found once, which takes half a second
        for Flux. additions: host_residuals.Additions."""
        self.modules, self.weight_sources, self.additions = modules, weight_sources, additions
        self._default_method = default_method(modules[""][0])

    def _set_up(self, dtype, weights_memory=None):
        self.setup, self.memory = self._computing_in(dtype, weights_memory)
        self.memory.expect(self._expected)
        self.estimates, self.spec = Estimates(self.setup, self.memory), self.setup.spec
        if self._job is not None:
            self.memory.run_patches = self.estimates.num_patches(self._job)

    def compute_in(self, dtype, base_model):
        """Set the compute dtype (its name), and a memory budget for weights that suits the next run. Workers have the
        weights for one dtype at a time, as ComfyUI does."""
        before = self.spec
        if dtype != before.compute_dtype:
            self._set_up(dtype, before.weights_memory)
        run_bytes = self._most_run_bytes or self.memory.estimate_of_run(USUAL_JOB, self.setup.layout(1))
        weights_memory = self.memory.weights_memory_alongside(run_bytes, self._model_memory() is not None)
        if weights_memory != before.weights_memory:
            self._set_up(dtype, weights_memory)
        if self.spec.name != before.name:
            GROUPS.release(self.devices, before.name, base_model)

    def expect(self, changes):
        """Set the changes of the file's weights that the next run will have, for memory estimates."""
        self._expected = changes
        self.memory.expect(changes)

    def use_changes(self, changes, uuid=None):
        """Set the changes of the file's weights from the next call on, see Models.load.

        uuid: of the patches that they stand for; None: hooks change those of the MODEL temporarily.
        """
        self.expect(changes)
        self.changes, self.changes_uuid = changes, uuid or self.changes_uuid

    def use_sampling(self, model_sampling):
        """Set ComfyUI's sampling parameters of the next run, which relate percentages of a run to noise levels."""
        sparse = self.config.sparse
        if sparse is not None:
            self._sparse_sigmas = tuple(float(model_sampling.percent_to_sigma(percent))
                                        for percent in (sparse.start_percent, sparse.end_percent))

    # --- called by vram_accounting.py ---

    def load(self, base_model):
        if not self.is_loaded:
            self.memory.check_host()
        client = GROUPS.client(self.devices)
        missing = {device: self.bytes_on(device) - self.loaded_on(device) for device in set(self.devices)}
        with self.memory.explaining():
            GROUPS.load_model(client, self.spec, base_model, missing, self.changes)
        self.memory.update(client.models.memory(self.spec.name))

    @property
    def is_loaded(self):
        model_memory = self._model_memory()
        return model_memory is not None and not any(model_memory.parked_bytes)

    def bytes_on(self, device):
        return self.memory.weights_on(device)

    def loaded_on(self, device):
        model_memory = self._model_memory()
        return 0 if model_memory is None else self.bytes_on(device) - sum(
            parked for parked, name in zip(model_memory.parked_bytes, self.devices) if name == str(device))

    def memory_required(self, of_one_device, input_shape, cond_shapes={}):
        """Implement ComfyUI's BaseModel.memory_required: bytes that a run takes in addition to weights, on load_device.

        of_one_device: ComfyUI's own function, for the full model on one device.
        """
        branches, shape, one = 2 - input_shape[0] % 2, input_shape, of_one_device(input_shape, cond_shapes=cond_shapes)
        if len(shape) == 3:                                    # several latents, packed into one row of numbers
            shape = (shape[0], self._taken_channels, 1, 1, -(-shape[2] // self._taken_channels))
        tokens = self.family.inputs.latent.num_tokens(shape) * self.family.inputs.latent.sequences(shape)
        images = max(1, input_shape[0] // branches)
        job = dataclasses.replace(USUAL_JOB, tokens=tokens, branches=branches, images=images)
        if self._pipeline is None:
            self._job, self.memory.run_patches = job, self.estimates.num_patches(job)
        plan = self.estimates.look(job, may_measure=False)
        layout = self.setup.layout(2) if plan is None else plan.layout
        self._run_bytes = self.memory.of_run(job, layout, one, tuple(shape[2:]))
        self._most_run_bytes = max(self._most_run_bytes, self.memory.estimate_of_run(job, layout, self._run_bytes))
        return self._run_bytes * self.devices.count(str(self.load_device))

    def free_memory_elsewhere(self):
        """Have ComfyUI's models free the memory that workers need on devices other than load_device, which ComfyUI
        frees itself."""
        for name in set(self.devices) - {str(self.load_device)}:
            ask_for_memory(name, self.bytes_on(name) - self.loaded_on(name) + self._run_bytes
                           * self.devices.count(name))

    def free(self, device, num_bytes):
        client = GROUPS.client_if(self.devices)
        if client is None:
            return 0
        freed_bytes = client.give_back().get(str(device), 0)   # caches left by runs are freed before weights
        if freed_bytes >= num_bytes:
            return freed_bytes
        return freed_bytes + client.models.park(self.spec.name, parking_bytes(), str(device), num_bytes - freed_bytes)

    def unload(self):
        client = GROUPS.client_if(self.devices)
        if client is not None:
            client.models.park(self.spec.name, parking_bytes())

    def _model_memory(self):
        client = GROUPS.client_if(self.devices)
        return None if client is None else client.models.memory(self.spec.name)

    def _client(self):
        """Return the Client with this MODEL loaded. Another MODEL of the same file may have changed its weights."""
        client = GROUPS.client(self.devices)
        client.models.load(self.spec, self.changes)
        return client

    # --- a run ---

    def end_run(self):
        self._checked_sigmas.clear()
        self.how, self._most_run_bytes = None, 0.0
        for end in (self.estimates.end, self.additions.end, self.memory.end_run, self.compiling.end):
            end()
        client = self._forget_conditioning()
        if client is not None:                                 # ComfyUI should see the memory that this frees at once
            GROUPS.runs.collect(client, lambda since_s: client.catch_up(MEMORY_TIMEOUT_S, since_s))

    def forward(self, x, timestep=None, context=None, control=None, transformer_options={}, **extra):
        """Answer ComfyUI's call of a diffusion model. x: (B, C, H, W) or (B, C, F, H, W); returns like x, float32. For
        a model with several latents, x and timestep are lists.

        Wrappers of the diffusion model are called where ComfyUI's own model of the family calls them.
        """
        if context is None and self.family.inputs.runs_without_text:
            width = self.setup.transformer_config[self.family.inputs.conditioning["context"]]
            context = x.new_zeros(len(x), 0, width)
        check_call(self.family, x, timestep, context)
        x, rescaled_options, finish = self.family.inputs.components.rescale(x, timestep, extra, transformer_options)
        positions = scales_of(self.family, transformer_options) | self.forwards.positions(self.modules)
        refuse_positions(self.family, positions, extra)
        extra = self.family.inputs.unfold(extra | positions | variant_of(self.family)
                                   | isolation_of(self.family, transformer_options))
        diffusion_model = self.modules[""][0]
        refuse_call(self.family, transformer_options, {"context": context, **extra}, diffusion_model)
        extra = with_default_method(extra, diffusion_model, self._default_method)
        wrappers = wrappers_inside(diffusion_model, self.family, transformer_options)
        return finish(WrapperExecutor.new_class_executor(self._answer, diffusion_model, wrappers).execute(
            x, timestep, context=context, control=control, transformer_options=rescaled_options, **extra))

    def _answer(self, x, timestep, context, transformer_options, control=None, **extra):
        from . import cfg_branches as branches
        schedule, sigmas = transformer_options.get("sample_sigmas"), transformer_options.get("sigmas")
        of_latent, components = self.family.inputs.components, {}
        call_conditioning = self.family.inputs.per_call_inputs(timestep, transformer_options)
        if of_latent.names and isinstance(x, list):
            components = {name: torch.zeros(latent.shape) for name, latent in zip(of_latent.names, x[1:])}
            x, timestep, call_conditioning = of_latent.split(x, timestep, self.setup.transformer_config,
                                                             transformer_options)
        sigmas = timestep if sigmas is None else sigmas
        sigma = sigmas.max().item()
        self._refuse_changed_modules(schedule, sigma)
        check_latent(self.setup, x, self._taken_channels)
        # numbers that are not finite are so from a run's first sigma on
        begins = self._checked_sigmas == {sigma}
        if begins:
            check_finite((x, *call_conditioning.values()), "the latent",
                         "Check the node that made it, another sampler, or an encode in half precision")
        requested = self.family, self.setup.transformer_config, transformer_options
        displaced_degree = self.config.displaced_degree if self.config.mode == "manual" else 1
        scores = scores_of(*requested, x.shape, displaced_degree)
        residuals = self.additions.residuals(self, (x, timestep, context), transformer_options, extra)
        networks, images = networks_of(*requested, x, self.modules, self.forwards)
        options = self._options(sigma)
        conditioning = self.family.tensors({"context": context, **extra, **style_of(*requested, x)})
        enhanced = enhanced_of(*requested[:2], self.forwards.enhanced(self.modules), transformer_options,
                               functools.partial(self.family.token_counts, x.shape, conditioning | call_conditioning))
        shuffled = orders_of(*requested[:2], x, self.forwards.shuffling(self.modules), transformer_options,
                             displaced_degree)
        call = Call(x, timestep, conditioning, shuffled=shuffled,
                    control=control_residuals(*requested[:2], control, x.shape) | residuals | images,
                    networks=networks,
                    free_u=free_u_of(self.family, transformer_options, control), tiles=tiles_of(*requested, x.shape),
                    operations=enhanced | operations_of(*requested, x.shape, displaced_degree),
                    scores=scores and scores.buffer, parts=components,
                    guided=guided_of(self.family, transformer_options), call_conditioning=call_conditioning,
                    options=dataclasses.replace(
                        options, backend=call_backend(self.config, transformer_options),
                        compile_backend=transformer_options.get(COMPILE, options.compile_backend)))
        check_conditioning(self.setup, call.conditioning, x)
        call = self._references.used_by(call, self.setup, transformer_options)
        num_branches = len(transformer_options.get("cond_or_uncond", ()))
        prediction = branches.ask(branches.ModelCall(
            self, call, schedule, sigmas, num_branches, transformer_options.get(SYNCHRONOUS),
            transformer_options.get(DRAINED)))
        if begins:
            check_finite((prediction, *components.values()), f"the prediction of {self.family.name} at the first step",
                         f"Try another weight_dtype than {self.spec.compute_dtype} in Load xDiT Model, without LoRA")
        if scores is not None:
            scores.write(x.device)
        first, *others = (latent.to(x.device) for latent in (prediction, *components.values()))
        return [self.family.inputs.components.first(first), *others] if components else first

    def _options(self, sigma):
        """The ForwardOptions of a call at this noise level."""
        options = self.config.forward_options
        first, last = self._sparse_sigmas
        return options if last <= sigma <= first else dataclasses.replace(options, sparse=None)

    def runs_branches_separately(self):
        """Whether two branches are two calls for the workers rather than one with twice the batch."""
        return self.uses_cache or self.family.branches_apart or self.setup.layout(2).cfg_degree > 1

    @property
    def uses_cache(self):
        """Whether calls of a run use what earlier calls have cached on the workers."""
        return self.spec.stages is not None or (self.config.mode == "manual" and self.config.displaced_degree > 1)

    def begin_run(self, schedule, shape, synchronous_reason=None, drained_reason=None):
        """Begin a run with PipeFusion or displaced patches. schedule: its sigmas. shape: of its full latent. For the
        reasons see pipefusion_support.py."""
        self._end_pipeline()
        self._schedule = schedule
        client, patches = self._client(), self.memory.requested_patches
        self._pipeline = PipelineRun(client, self.setup, self.setup.layout(1), schedule, shape, patches)
        self._show(self._pipeline.describe(synchronous_reason, drained_reason))
        return self._pipeline

    def predict(self, model_call, calls):
        """Return the predictions for one or two calls of this model, which are all calls of this step at this time."""
        GROUPS.client(self.devices).begin_step(model_call.step)
        try:
            with self.memory.explaining():
                return self._predict(model_call, calls)
        finally:
            if model_call.schedule is None:                    # called outside a sampler: no run will end
                self._forget_conditioning()

    def _predict(self, model_call, calls):
        if self.spec.stages is not None:
            return self._predict_in_stages(model_call, self.estimates.with_measurements(calls))
        latent, conditioning, is_one_batch = calls[0].latent, calls[0].given, "data" in self.family.refused
        num_steps = 1 if model_call.schedule is None else len(model_call.schedule) - 1
        together = any(call.compares_images for call in calls)
        plan = self.estimates.begin(self.setup.job(latent.shape, conditioning, num_steps, len(calls)),
                                    is_planned=not together)
        calls = self.estimates.with_measurements(calls)
        layout = self.setup.layout(len(calls)) if plan is None else plan.layout
        if together or is_one_batch:
            layout = branches_together(layout)
        self._check_run(model_call, calls, layout)
        if layout.displaced_degree > 1:
            return self._predict_displaced(model_call, calls, layout)
        client = self._client()
        how = describe_layout(layout, len(calls) * is_one_batch) if plan is None else layout_description(plan.chosen)
        if together:
            alone = describe_layout(dataclasses.replace(layout, cfg_degree=1))
            how = (f"{alone}, both prompts in one batch, which Normalized Attention Guidance compares"
                   if calls[0].guided else f"{alone}, both prompts in one batch, over which Enhance-A-Video averages")
        spare = "" if self.config.mode == "auto" else describe_spare(layout.data_degree, latent.shape[0])
        self._show(how + describe_exchange(self.config.exchange, layout) + spare + self.config.idle
                   + self.compiling.describe(), self.estimates.describe)

        def predict(calls):
            return self.estimates.timed.call(
                client, lambda: client.predict(self.spec, layout, self.setup.num_channels, calls, run=self))
        try:
            return predict(self.compiling.applied(calls, layout))
        except UnsupportedError as error:
            if not self.compiling.gives_up(error):
                raise
            return predict(calls)

    def _check_run(self, model_call, calls, layout):
        """Raise an error for a run that cannot fit, before its first call, and for calls that cannot use the cached
        references. A call for a patch is checked like one for the full latent."""
        self._references.check_placement(calls, layout)
        latent = calls[0].latent
        together = max(1, model_call.num_branches // len(calls))               # branches that ComfyUI has batched
        self.memory.check_run(latent.shape if self._pipeline is None else self._pipeline.shape, calls[0].given,
                              max(1, latent.shape[0] // together), len(calls) * together, layout,
                              num_cached(calls, self.family))

    def _predict_in_stages(self, model_call, calls):
        from . import patchwise_sampler as patches
        self._check_run(model_call, calls, self.setup.layout(1))
        sigma = model_call.sigmas.max().item()
        predictions = patches.ask(self, calls, sigma)
        if predictions is not None:
            return predictions
        schedule = model_call.schedule
        if schedule is None:                                   # called outside a sampler: no step can be stale
            schedule = torch.tensor([sigma])
        if self._pipeline is None or schedule is not self._schedule:
            self.begin_run(schedule, calls[0].latent.shape, model_call.synchronous_reason, model_call.drained_reason)
        self._client()
        return self._pipeline.predict(calls, sigma, model_call.synchronous_reason)

    def _predict_displaced(self, model_call, calls, layout):
        sigma, client = model_call.sigmas.max().item(), self._client()
        if self._pipeline is None or model_call.schedule is not self._schedule:
            self._end_pipeline()
            self._schedule = model_call.schedule
            # called outside a sampler, no step can be stale
            schedule = torch.tensor([sigma]) if self._schedule is None else self._schedule
            self._pipeline = DisplacedRun(client, self.setup, layout, schedule, calls[0].latent.shape)
            self._show(self._pipeline.describe(model_call.synchronous_reason))
        return self._pipeline.predict(calls, sigma, model_call.synchronous_reason)

    def _refuse_changed_modules(self, schedule, sigma):
        """Raise UnsupportedError for modules that nodes have changed during a call. Checked once for each sigma of a
        run."""
        if schedule is None or sigma not in self._checked_sigmas:
            refuse_changed_modules(self.modules[""][0], self.modules, self.forwards)
            self._checked_sigmas.add(sigma)

    def _forget_conditioning(self):
        """Have the workers drop the run's conditioning and the caches that belong to it. Returns the Client, if any."""
        self._end_pipeline()
        self._references = RunReferences()
        client = GROUPS.client_if(self.devices)
        if client is not None:
            client.end_run(self)
        return client

    def _end_pipeline(self):
        if self._pipeline is not None:
            self._pipeline.end()
        self._pipeline = self._schedule = None

    def _show(self, how, describe_estimate=str):
        """Show the split of the run on the node. describe_estimate(): text that follows."""
        if how != self.how:
            missing = describe_missing(self.config)
            devices = ", ".join(self.devices) + (f" ({missing})" if missing else "")
            show_text(f"running on {devices}: {how}{describe_estimate()}"
                      f"{self.memory.describe_placement(self.estimates)}{self.forwards.describe_idle(self.modules)}")
            self.how = how
