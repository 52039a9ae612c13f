"""Patchwise sampler: each patch of the latent runs its own copy of ComfyUI's sampler, as a coroutine.

Samplers work elementwise on the latent, so one copy per patch gives the same result as one for the full latent. When a
patch requests a prediction, the request goes to the workers and another patch resumes, so the stages stay busy across
steps. Parallel Sampler uses it if nothing in the workflow reads the full latent.
"""

import collections
import dataclasses
import functools
import time
from contextlib import contextmanager

import torch
from greenlet import getcurrent

import comfy.conds
import comfy.k_diffusion.sampling as k_sampling
import comfy.samplers

from ....xdit_backend.protocol.errors import UnsupportedError
from .cfg_branches import Task, end_tasks

SHOWN_S = 1.0                              # minimum between two previews, which delay the stages


class PatchTask(Task):
    """Coroutine that samples one patch and switches to its parent with each request to the workers."""

    def __init__(self, run, remote, cut):
        super().__init__(run)
        self.remote = remote                   # RemoteModel that the patches belong to
        self.cut = cut                         # cuts a tensor with the full latent's rows to the patch's


def ask(remote, requests, sigma):
    """Return the predictions for a patch's requests from the sampler of this model's patches; None outside it."""
    current = getcurrent()
    return (current.parent.switch((requests, sigma)) if isinstance(current, PatchTask) and current.remote is remote
            else None)


def cut_conditioning(remote, conds):
    """While a patch is sampled, cut ComfyUI's conds to its rows: those of the latent's size that are concatenated to it
    and are no separate input of the model."""
    task = getcurrent()
    if not isinstance(task, PatchTask) or task.remote is not remote:
        return conds

    def cut(entry):
        images = {name: cond._copy_with(task.cut(cond.cond)) for name, cond in entry["model_conds"].items()
                    if isinstance(cond, comfy.conds.CONDNoiseShape) and name not in remote.family.inputs.conditioning}
        return {**entry, "model_conds": {**entry["model_conds"], **images}}
    return [[cut(entry) for entry in cond] if cond else cond for cond in conds]


@contextmanager
def patchwise(sampler, remote):
    """Context manager: ComfyUI's KSAMPLER calls its sampler function once for each patch of this run."""
    function = sampler.sampler_function
    sampler.sampler_function = functools.partial(sample_patches, remote, function)
    try:
        yield
    finally:
        sampler.sampler_function = function


def sample_patches(remote, sampler_function, model, x, sigmas, **options):
    """Run a k-diffusion style sampler function once for each patch and concatenate the patches.

    model: ComfyUI's KSamplerX0Inpaint. x: (B, C, H, W) or (B, C, F, H, W), noised. options: of the sampler function;
    ComfyUI passes extra_args, callback and disable by name. Returns like x.
    """
    run = remote.begin_run(sigmas, x.shape)
    if len(run.patches) == 1:
        return sampler_function(model, x, sigmas, **options)
    extra_args, callback = options.pop("extra_args", None) or {}, options.pop("callback", None)
    return PatchwiseSampler(remote, run, model, x, extra_args, callback).sample(sampler_function, sigmas, options)


class PatchwiseSampler:
    """Coroutines of one run's patches, their pending requests, and what each has reported to the callback."""

    def __init__(self, remote, run, model, x, extra_args, callback):
        self._remote, self._run, self._model, self._x = remote, run, model, x
        self._extra_args, self._callback = extra_args, callback
        self._noise = SharedNoise(x, run.dim, [(patch.start, rows) for patch, rows in run.patches])
        self._shown = {}                       # step -> {patch: state that its sampler gave the callback}
        # last state of each patch; state of the last completed step; time of the last callback
        self._newest, self._done, self._last_shown_s = {}, None, 0.0
        self._waiting, self._in_flight, self._outputs = {}, {}, {}
        # for each call that the first patch has sent and the last patch has not
        self._first_rows = collections.deque()

    def sample(self, sampler_function, sigmas, options):
        def run_patch(index):
            quiet = {"disable": True} if index else {}         # the first patch shows the progress bar
            return sampler_function(self._patch_model(index), self._slice(self._x, index).clone(), sigmas,
                                    extra_args=self._patch_arguments(index),
                                    callback=functools.partial(self._show, index), **options | quiet)

        self._tasks = [PatchTask(run_patch, self._remote, functools.partial(self._slice, index=index))
                       for index in range(len(self._run.patches))]
        try:
            with self._noise.sampled_for_full_latent(), self._remote.memory.explaining():
                for index in range(len(self._tasks)):
                    self._resume(index, index)
                while self._waiting or self._in_flight:
                    self._advance()
            return torch.cat([self._outputs[index] for index in range(len(self._tasks))], self._run.dim)
        finally:
            end_tasks(self._tasks)
            self._tasks = []                   # tasks refer to this object: a cycle that would keep the MODEL alive

    def _advance(self):
        """Process the next prediction, or, if all patches wait for a synchronous call, evaluate the full latent."""
        run = self._run
        if self._in_flight:
            handle, predictions = run.wait(list(self._in_flight))
            self._resume(self._in_flight.pop(handle), predictions)
            return
        requested = [self._waiting.pop(index) for index in range(len(self._tasks))]
        if len({tuple(request.name for request in requests) for requests in requested}) > 1:
            raise UnsupportedError("Use KSampler: Parallel Sampler cannot run this workflow patch by patch, as its "
                                   "patches request different prompts at the same step.")
        full = [dataclasses.replace(patches[0], latent=torch.cat([patch.latent for patch in patches], run.dim))
                for patches in zip(*requested)]
        predictions = run.predict_synchronously(full)
        for index in range(len(self._tasks)):
            self._resume(index, [self._slice(prediction, index) for prediction in predictions])

    def _resume(self, index, value):
        """Resume a patch until its next request, and submit that at once unless it must be synchronous."""
        self._noise.begin_turn(index)
        answer = self._tasks[index].switch(value)
        if self._tasks[index].dead:
            self._outputs[index] = answer
            return
        requests, sigma = answer
        requests = self._run.name(requests)
        if self._run.is_replicated(requests, sigma):
            self._waiting[index] = requests
            return
        if index == 0:
            self._first_rows.append(self._run.first_rows(requests))
        first_rows = self._first_rows.popleft() if index == len(self._tasks) - 1 else None
        self._in_flight[self._run.submit_patch(requests, index, first_rows)] = index

    def _slice(self, tensor, index):
        patch, rows = self._run.patches[index]
        if tensor is None or tensor.shape[self._run.dim] == 1:
            return tensor
        return tensor.narrow(self._run.dim, patch.start, rows)

    def _patch_model(self, index):
        """Copy ComfyUI's model for samplers, with the latent and noise of inpainting cut to the patch."""
        model = comfy.samplers.KSamplerX0Inpaint(self._model.inner_model, self._model.sigmas)
        model.latent_image = self._slice(self._model.latent_image, index)
        model.noise = self._slice(self._model.noise, index)
        return model

    def _patch_arguments(self, index):
        arguments = dict(self._extra_args)
        if arguments.get("denoise_mask") is not None:
            arguments["denoise_mask"] = self._slice(arguments["denoise_mask"], index)
        return arguments

    def _show(self, index, state):
        """Call ComfyUI's callback with the full latent once all patches have completed a step; in a long step, also as
        patches arrive."""
        shown = self._shown.setdefault(state["i"], {})
        shown[index] = self._newest[index] = state
        if len(shown) == len(self._tasks):
            self._done = self._shown.pop(state["i"])[index]
            self._call_back(shown)
        elif self._done is not None and time.monotonic() - self._last_shown_s > SHOWN_S:
            self._call_back(self._newest)

    def _call_back(self, shown):
        full = {key: torch.cat([shown[patch][key] for patch in range(len(self._tasks))], self._run.dim)
                for key in ("x", "denoised")}
        self._callback({**self._done, **full})
        self._last_shown_s = time.monotonic()


class SharedNoise:
    """Noise that samplers generate during a run: generated once for the full latent and sliced for each patch."""

    def __init__(self, x, dim, cuts):
        self._x, self._dim, self._cuts = x, dim, cuts
        self._patch = 0                        # the running patch
        self._made = [0] * len(cuts)           # noise samplers that each patch has created
        self._samplers = []

    @contextmanager
    def sampled_for_full_latent(self):
        """Context manager: ComfyUI's noise samplers sample for the full latent and return the running patch's slice."""
        originals = {name: getattr(k_sampling, name) for name in ("default_noise_sampler", "BrownianTreeNoiseSampler")}
        try:
            for name, original in originals.items():
                setattr(k_sampling, name, functools.partial(self._make, original))
            yield
        finally:
            for name, original in originals.items():
                setattr(k_sampling, name, original)

    def begin_turn(self, patch):
        """Set the running patch."""
        self._patch = patch

    def _make(self, make, x, *args, **kwargs):
        patch = self._patch
        number = self._made[patch]
        self._made[patch] += 1
        if number == len(self._samplers):
            self._samplers.append((make(self._x, *args, **kwargs), {}))
        sample, cached = self._samplers[number]
        count = 0

        def noise(sigma, sigma_next):
            nonlocal count
            step, count = count, count + 1
            if step not in cached:
                cached[step] = [sample(sigma, sigma_next), len(self._cuts)]
            full, num_left = cached[step]
            cached[step][1] = num_left - 1
            if num_left == 1:
                del cached[step]
            start, rows = self._cuts[patch]
            return full.narrow(self._dim, start, rows)
        return noise
