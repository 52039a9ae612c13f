"""Samplers over a worker group, in which each patch advances as soon as its own prediction arrives.

A sampler is a function of one patch of the latent: step(x, sigma, following, prediction, before, noise) -> (x at
`following`, the value of `before` for the next step). Latents are (1 - sigma) image + sigma noise, predictions
velocities.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...host.calls import ForwardPass
from ...planner.planner import warmup_layout
from ...planner.run_time import synchronous_steps
from ...protocol.specs import Layout, ModelSpec


def euler(x, sigma, following, prediction, before, noise):
    return x + (following - sigma) * prediction, None


def dpmpp_2m(x, sigma, following, prediction, before, noise):
    """DPM-Solver++(2M) (C. Lu et al. 2022, arXiv 2211.01095), in -log sigma."""
    image = x - sigma * prediction
    if following == 0:
        return image, None
    stride, towards = math.log(sigma / following), image
    if before is not None:
        earlier, last_stride = before
        towards = image + (image - earlier) * stride / (2 * last_stride)
    return following / sigma * x - math.expm1(-stride) * towards, (image, stride)


def euler_ancestral(x, sigma, following, prediction, before, noise):
    """Euler steps that go below the next sigma and return to it with fresh noise (eta 1), for latents as above."""
    image = x - sigma * prediction
    if following == 0:
        return image, None
    down = following * following / sigma
    shrink = (1 - following) / (1 - down)
    x = shrink * (down / sigma * x + (1 - down / sigma) * image)
    return x + noise * math.sqrt(max(0.0, following ** 2 - (shrink * down) ** 2)), None


SAMPLERS = {function.__name__: function for function in (euler, dpmpp_2m, euler_ancestral)}


@dataclass(frozen=True)
class Model:
    """The model to sample from. num_channels: of a prediction. time_scale: timestep at sigma 1."""

    spec: ModelSpec
    num_channels: int
    time_scale: float = 1.0


@dataclass(frozen=True)
class Sampling:
    """The schedule of a run. step_by: one of SAMPLERS. guidance: scale of classifier-free guidance; the call's
    conditioning then has twice as many rows as its latent, the unconditional ones last."""

    sigmas: list
    guidance: float | None = None
    step_by: Callable = euler

    @property
    def num_steps(self):
        return len(self.sigmas) - 1

    def call(self, call, latent, step, time_scale):
        """The Call of a step, on a latent or a patch of it."""
        latent = latent if self.guidance is None else torch.cat([latent, latent])
        timestep = torch.full((len(latent),), self.sigmas[step] * time_scale, dtype=latent.dtype)
        return dataclasses.replace(call, latent=latent.clone(), timestep=timestep)

    def stepped(self, latent, step, prediction, before, noise):
        """(latent after a step, `before` of the next one). noise: as `noise` returns it, for the same rows."""
        if self.guidance is not None:
            conditional, unconditional = prediction.chunk(2)
            prediction = unconditional + self.guidance * (conditional - unconditional)
        return self.step_by(latent, self.sigmas[step], self.sigmas[step + 1], prediction.to(latent.dtype), before,
                            noise)

    def noise(self, latent, step):
        """Fresh noise of a step for the full latent; None if the sampler needs none."""
        if self.step_by is not euler_ancestral:
            return None
        return torch.randn(latent.shape, generator=torch.Generator().manual_seed(10 ** 6 + step)).to(latent.dtype)


@dataclass(frozen=True)
class Method:
    """The parallel method of a run. patches: from partition.cut_patches; None: every step is synchronous and nothing is
    cached.

    extrapolation: of stale keys and values, docs/design/pipefusion.md. by_image: the images of a batch pass
    through the stages one after the other. With displaced patches in the layout, steps after the warm-up are stale,
    except the first; displaced_mode selects how.
    """

    layout: Layout
    warmup_steps: int = 0
    patches: list | None = None
    extrapolation: float = 0.0
    by_image: bool = False
    displaced_mode: str = "corrected_async_gn"

    def num_synchronous(self, num_steps):
        """Steps of a run that are not split into patches."""
        return num_steps if self.patches is None else min(self.warmup_steps, num_steps)


def sample(client, model, call, sampling, method):
    """Sample from the call's latent down the sigmas; returns the latent."""
    call = dataclasses.replace(call, options=dataclasses.replace(call.options, extrapolation=method.extrapolation))
    x, before = _synchronous_steps(client, model, call, sampling, method)
    if not method.patches or method.num_synchronous(sampling.num_steps) == sampling.num_steps:
        return x
    return _patched_steps(client, model, dataclasses.replace(call, latent=x), sampling, method, before)


def _synchronous_steps(client, model, call, sampling, method):
    """(latent after the synchronous steps, `before` of the next one)."""
    displaced = method.layout.displaced_degree > 1
    num_synchronous = synchronous_steps(sampling.num_steps, method.warmup_steps)
    layout = warmup_layout(method.layout, model.spec.stages) if model.spec.stages else method.layout
    x, before = call.latent, None
    for step in range(method.num_synchronous(sampling.num_steps)):
        requested = sampling.call(call, x, step, model.time_scale)
        forward = ForwardPass(keep=displaced or method.patches is not None, by_image=method.by_image,
                              stale=displaced and step >= num_synchronous, displaced_mode=method.displaced_mode)
        handle = client.submit(model.spec, layout, model.num_channels, [requested], forward)
        x, before = sampling.stepped(x, step, client.wait([handle])[1][0], before, sampling.noise(x, step))
    return x, before


def _patched_steps(client, model, call, sampling, method, before):
    """The latent after the remaining steps, in which each patch advances as soon as its own prediction arrives."""
    patches, x, num_steps = method.patches, call.latent, sampling.num_steps
    dim = patches[0][0].dim
    latents = [x.narrow(dim, patch.start, rows) for patch, rows in patches]
    histories = [before and (before[0].narrow(dim, patch.start, rows), *before[1:]) for patch, rows in patches]
    steps, in_flight = [method.num_synchronous(num_steps)] * len(patches), {}

    def submit(index):
        if steps[index] < num_steps:
            requested = sampling.call(call, latents[index], steps[index], model.time_scale)
            forward = ForwardPass(patches[index][0])
            in_flight[client.submit(model.spec, method.layout, model.num_channels, [requested], forward)] = index

    for index in range(len(patches)):
        submit(index)
    while in_flight:
        handle, predictions = client.wait(list(in_flight))
        index = in_flight.pop(handle)
        patch, rows = patches[index]
        noise = sampling.noise(x, steps[index])
        latents[index], histories[index] = sampling.stepped(
            latents[index], steps[index], predictions[0], histories[index],
            noise if noise is None else noise.narrow(dim, patch.start, rows))
        steps[index] += 1
        submit(index)
    return torch.cat(latents, dim)
