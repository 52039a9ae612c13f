"""Euler's sampler over a worker group, each patch going on as soon as its own prediction is there. Used by pipefusion and quality."""

import dataclasses

import torch

from ..planner import warmup_layout


def sample(client, spec, layout, call, sigmas, warmup_steps, patches, num_channels, time_scale=1.0, by_image=False,
           guidance=None, forecast=0.0):
    """Euler steps from the call's latent down the sigmas; returns the latent.

    patches: of partition.cut_patches; None: every step is whole and nothing is kept. time_scale: timestep at sigma 1.
    guidance: the scale of classifier-free guidance; the call's conditioning is then of twice as many rows as its latent,
    the unconditional ones last.
    """
    num_steps = len(sigmas) - 1
    num_whole = num_steps if patches is None else min(warmup_steps, num_steps)

    def at(latent, step):
        latent = latent if guidance is None else torch.cat([latent, latent])
        timestep = torch.full((len(latent),), sigmas[step] * time_scale, dtype=latent.dtype)
        return dataclasses.replace(call, latent=latent.clone(), timestep=timestep)

    def stepped(latent, step, prediction):
        if guidance is not None:
            conditional, unconditional = prediction.chunk(2)
            prediction = unconditional + guidance * (conditional - unconditional)
        return latent + (sigmas[step + 1] - sigmas[step]) * prediction.to(latent.dtype)

    x = call.latent
    whole_layout = warmup_layout(layout, spec.stages) if spec.stages else layout
    for step in range(num_whole):
        ticket = client.submit(spec, whole_layout, num_channels, [at(x, step)], keep=patches is not None, by_image=by_image,
                               forecast=forecast)
        x = stepped(x, step, client.wait([ticket])[1][0])
    if not patches or num_whole == num_steps:
        return x
    dim = patches[0][0].dim
    pieces = [x.narrow(dim, patch.start, rows) for patch, rows in patches]
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
        pieces[index] = stepped(pieces[index], steps[index], predictions[0])
        steps[index] += 1
        submit(index)
    return torch.cat(pieces, dim)
