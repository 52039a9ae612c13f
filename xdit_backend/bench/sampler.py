"""Samplers over a worker group, each patch going on as soon as its own prediction is there. Used by pipefusion and
quality.

A sampler is a function of one piece of the latent: step(x, sigma, following, prediction, before, noise) -> (x at
`following`, what it wants to be given as `before` in the next step). Latents are (1 - sigma) picture + sigma noise,
predictions velocities.
"""

import dataclasses
import math

import torch

from ..forecast.planner import warmup_layout
from ..forecast.seconds import synchronous_steps


def euler(x, sigma, following, prediction, before, noise):
    return x + (following - sigma) * prediction, None


def dpmpp_2m(x, sigma, following, prediction, before, noise):
    """DPM-Solver++(2M) (C. Lu et al. 2022, arXiv 2211.01095), in -log sigma."""
    picture = x - sigma * prediction
    if following == 0:
        return picture, None
    stride, towards = math.log(sigma / following), picture
    if before is not None:
        earlier, last_stride = before
        towards = picture + (picture - earlier) * stride / (2 * last_stride)
    return following / sigma * x - math.expm1(-stride) * towards, (picture, stride)


def euler_ancestral(x, sigma, following, prediction, before, noise):
    """Euler steps that go below the next sigma and come back by fresh noise (eta 1), for latents as above."""
    picture = x - sigma * prediction
    if following == 0:
        return picture, None
    down = following * following / sigma
    shrink = (1 - following) / (1 - down)
    x = shrink * (down / sigma * x + (1 - down / sigma) * picture)
    return x + noise * math.sqrt(max(0.0, following ** 2 - (shrink * down) ** 2)), None


SAMPLERS = {function.__name__: function for function in (euler, dpmpp_2m, euler_ancestral)}


def sample(client, spec, layout, call, sigmas, warmup_steps, patches, num_channels, time_scale=1.0, by_image=False,
           guidance=None, forecast=0.0, step_by=euler, displaced_mode="corrected_async_gn"):
    """Sample from the call's latent down the sigmas; returns the latent.

    patches: of partition.cut_patches; None: every step is whole and nothing is kept. time_scale: timestep at sigma 1.
    guidance: the scale of classifier-free guidance; the call's conditioning is then of twice as many rows as its
    latent, the unconditional ones last. forecast: of stale keys and values, docs/algorithms.md section 2.9. step_by:
    one of SAMPLERS. With displaced patches in the layout, steps after the warm-up are stale, and never the first;
    displaced_mode is how.
    """
    num_steps, displaced = len(sigmas) - 1, layout.displaced_degree > 1
    num_synchronous = synchronous_steps(num_steps, warmup_steps)
    num_whole = num_steps if patches is None else min(warmup_steps, num_steps)

    def at(latent, step):
        latent = latent if guidance is None else torch.cat([latent, latent])
        timestep = torch.full((len(latent),), sigmas[step] * time_scale, dtype=latent.dtype)
        return dataclasses.replace(call, latent=latent.clone(), timestep=timestep)

    def noise_of(step):
        return torch.randn(call.latent.shape,
                           generator=torch.Generator().manual_seed(10 ** 6 + step)).to(call.latent.dtype)

    def stepped(latent, step, prediction, before, place=None):
        if guidance is not None:
            conditional, unconditional = prediction.chunk(2)
            prediction = unconditional + guidance * (conditional - unconditional)
        noise = noise_of(step) if step_by is euler_ancestral else None
        if noise is not None and place is not None:
            noise = noise.narrow(dim, place.start, latent.shape[dim])
        return step_by(latent, sigmas[step], sigmas[step + 1], prediction.to(latent.dtype), before, noise)

    x, before = call.latent, None
    whole_layout = warmup_layout(layout, spec.stages) if spec.stages else layout
    for step in range(num_whole):
        ticket = client.submit(spec, whole_layout, num_channels, [at(x, step)], keep=displaced or patches is not None,
                               by_image=by_image, forecast=forecast, stale=displaced and step >= num_synchronous,
                               displaced_mode=displaced_mode)
        x, before = stepped(x, step, client.wait([ticket])[1][0], before)
    if not patches or num_whole == num_steps:
        return x
    dim = patches[0][0].dim
    pieces = [x.narrow(dim, patch.start, rows) for patch, rows in patches]
    befores = [before and (before[0].narrow(dim, patch.start, rows), *before[1:]) for patch, rows in patches]
    steps, flying = [num_whole] * len(patches), {}

    def submit(index):
        if steps[index] < num_steps:
            asked = at(pieces[index], steps[index])
            flying[client.submit(spec, layout, num_channels, [asked], patch=patches[index][0],
                                 forecast=forecast)] = index

    for index in range(len(patches)):
        submit(index)
    while flying:
        ticket, predictions = client.wait(list(flying))
        index = flying.pop(ticket)
        pieces[index], befores[index] = stepped(pieces[index], steps[index], predictions[0], befores[index],
                                                patches[index][0])
        steps[index] += 1
        submit(index)
    return torch.cat(pieces, dim)
