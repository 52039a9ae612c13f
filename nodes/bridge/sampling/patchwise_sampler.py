"""The patchwise sampler: each patch of the latent runs its own copy of ComfyUI's sampler, as a coroutine.

A sampler works on each element of the latent alone, so a copy for each patch gives the same as one for the whole.
Whenever a patch asks for a prediction, its request goes to the workers and another patch runs, so the stages stay full
across steps. Used by Parallel Sampler, where nothing looks at the whole latent.
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

SHOWN_S = 1.0                              # from one picture of a run to the next: a preview costs the stages time


class PatchTask(Task):
    """A coroutine that samples one patch. It hands its parent the requests that it makes of the workers."""

    def __init__(self, run, remote, cut):
        super().__init__(run)
        self.remote = remote                   # the RemoteModel whose patches these are
        self.cut = cut                         # a tensor of the whole latent's rows -> of the patch's


def ask(remote, requests, sigma):
    """The predictions for a patch's requests, from the sampler that runs this model's patches; None outside of it."""
    current = getcurrent()
    return (current.parent.switch((requests, sigma)) if isinstance(current, PatchTask) and current.remote is remote
            else None)


def cut_conditioning(remote, conds):
    """ComfyUI's conds, where a patch is being sampled, with the patch's rows of what lies on the latent: is as large as
    it, and no input of the model by itself."""
    task = getcurrent()
    if not isinstance(task, PatchTask) or task.remote is not remote:
        return conds

    def cut(entry):
        images = {name: cond._copy_with(task.cut(cond.cond)) for name, cond in entry["model_conds"].items()
                    if isinstance(cond, comfy.conds.CONDNoiseShape) and name not in remote.family.conditioning}
        return {**entry, "model_conds": {**entry["model_conds"], **images}}
    return [[cut(entry) for entry in cond] if cond else cond for cond in conds]


@contextmanager
def patchwise(sampler, remote):
    """In this context, ComfyUI's KSAMPLER of this run calls its sampler function once for each patch."""
    function = sampler.sampler_function
    sampler.sampler_function = functools.partial(sample_patches, remote, function)
    try:
        yield
    finally:
        sampler.sampler_function = function


def sample_patches(remote, sampler_function, model, x, sigmas, **options):
    """Run a k-diffusion style sampler function once for each patch and put the patches together.

    model: ComfyUI's KSamplerX0Inpaint. x: (B, C, H, W) or (B, C, F, H, W), noised. options: of the sampler function, to
    which ComfyUI gives extra_args, callback and disable by name. Returns like x.
    """
    run = remote.begin_run(sigmas, x.shape)
    if len(run.patches) == 1:
        return sampler_function(model, x, sigmas, **options)
    extra_args, callback = options.pop("extra_args", None) or {}, options.pop("callback", None)
    return PatchwiseSampler(remote, run, model, x, extra_args, callback).sample(sampler_function, sigmas, options)


class PatchwiseSampler:
    """The patches of one run: their coroutines, what each waits for, and what each has reported to the callback."""

    def __init__(self, remote, run, model, x, extra_args, callback):
        self._remote, self._run, self._model, self._x = remote, run, model, x
        self._extra_args, self._callback = extra_args, callback
        self._noise = SharedNoise(x, run.dim, [(patch.start, rows) for patch, rows in run.patches])
        self._shown = {}                       # step -> {patch: what its sampler gave the callback}
        # of each patch what it gave last; of all, the last step; when that was
        self._newest, self._done, self._last_shown_s = {}, None, 0.0
        self._waiting, self._in_flight, self._outputs = {}, {}, {}
        # of the calls that the first patch has sent and the last has not
        self._first_rows = collections.deque()

    def sample(self, sampler_function, sigmas, options):
        def run_patch(index):
            quiet = {"disable": True} if index else {}         # one progress bar
            return sampler_function(self._patch_model(index), self._slice(self._x, index).clone(), sigmas,
                                    extra_args=self._patch_arguments(index),
                                    callback=functools.partial(self._show, index), **options | quiet)

        self._tasks = [PatchTask(run_patch, self._remote, functools.partial(self._slice, index=index))
                       for index in range(len(self._run.patches))]
        try:
            with self._noise.drawn_whole(), self._remote.memory.explaining():
                for index in range(len(self._tasks)):
                    self._resume(index, index)
                while self._waiting or self._in_flight:
                    self._advance()
            return torch.cat([self._outputs[index] for index in range(len(self._tasks))], self._run.dim)
        finally:
            end_tasks(self._tasks)
            self._tasks = []                   # each refers to this object: a circle, which would keep the MODEL

    def _advance(self):
        """Take the next answer, or evaluate the whole latent when all patches wait for that; what may go then is sent
        off."""
        run = self._run
        if self._in_flight:
            handle, predictions = run.wait(list(self._in_flight))
            self._resume(self._in_flight.pop(handle), predictions)
            return
        requested = [self._waiting.pop(index) for index in range(len(self._tasks))]
        if len({tuple(request.name for request in requests) for requests in requested}) > 1:
            raise UnsupportedError("Use KSampler: Parallel Sampler cannot run this workflow piece by piece, as its "
                                   "pieces ask the model for different prompts at the same step.")
        whole = [dataclasses.replace(parts[0], latent=torch.cat([part.latent for part in parts], run.dim))
                 for parts in zip(*requested)]
        predictions = run.predict_synchronously(whole)
        for index in range(len(self._tasks)):
            self._resume(index, [self._slice(prediction, index) for prediction in predictions])

    def _resume(self, index, value):
        """Let a patch go on until it asks for its next prediction, and send that off at once where it may go."""
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
        """ComfyUI's own model for samplers, with the latent and the noise of inpainting cut to the patch."""
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
        """Call ComfyUI's callback for a step that all patches have done, with the whole latent; in a long step, also as
        patches arrive."""
        shown = self._shown.setdefault(state["i"], {})
        shown[index] = self._newest[index] = state
        if len(shown) == len(self._tasks):
            self._done = self._shown.pop(state["i"])[index]
            self._call_back(shown)
        elif self._done is not None and time.monotonic() - self._last_shown_s > SHOWN_S:
            self._call_back(self._newest)

    def _call_back(self, shown):
        whole = {key: torch.cat([shown[patch][key] for patch in range(len(self._tasks))], self._run.dim)
                 for key in ("x", "denoised")}
        self._callback({**self._done, **whole})
        self._last_shown_s = time.monotonic()


class SharedNoise:
    """Noise that samplers draw during a run: drawn once for the whole latent, and sliced for each patch."""

    def __init__(self, x, dim, cuts):
        self._x, self._dim, self._cuts = x, dim, cuts
        self._patch = 0                        # the patch that runs now
        self._made = [0] * len(cuts)           # noise samplers made by each patch
        self._samplers = []

    @contextmanager
    def drawn_whole(self):
        """In this context, ComfyUI's noise samplers draw for the whole latent and give the running patch its slice."""
        originals = {name: getattr(k_sampling, name) for name in ("default_noise_sampler", "BrownianTreeNoiseSampler")}
        try:
            for name, original in originals.items():
                setattr(k_sampling, name, functools.partial(self._make, original))
            yield
        finally:
            for name, original in originals.items():
                setattr(k_sampling, name, original)

    def begin_turn(self, patch):
        """This patch runs until the next turn begins."""
        self._patch = patch

    def _make(self, make, x, *args, **kwargs):
        patch = self._patch
        number = self._made[patch]
        self._made[patch] += 1
        if number == len(self._samplers):
            self._samplers.append((make(self._x, *args, **kwargs), {}))
        draw, drawn = self._samplers[number]
        count = 0

        def noise(sigma, sigma_next):
            nonlocal count
            step, count = count, count + 1
            if step not in drawn:
                drawn[step] = [draw(sigma, sigma_next), len(self._cuts)]
            whole, left = drawn[step]
            drawn[step][1] = left - 1
            if left == 1:
                del drawn[step]
            start, rows = self._cuts[patch]
            return whole.narrow(self._dim, start, rows)
        return noise
