"""PipeFusion on a real worker group, driven from the host as the patchwise sampler drives it, equals its oracle."""

import os
import signal
import time

import pytest
import torch

from tests.host.conftest import layout
from tests.models.zoo import CONFIGS, example
from tests.parallel.oracle import simulate
from xdit_backend.host.client import Call, Client
from xdit_backend.planner import choose_num_patches, cut_patches
from xdit_backend.protocol.errors import WorkerDiedError, XDiTError
from xdit_backend.protocol.messages import Layout, Stages

SIGMAS = [1.0, 0.8, 0.6, 0.4, 0.2]
STAGES = Stages(2)
SHAPES = {"Wan 2.1": {"rows": 8, "columns": 6, "frames": 4}}


def small(name, **more):
    return example(name, **{**SHAPES.get(name, {"rows": 12, "columns": 6}), **more})


def sample(client, spec, one, layout, num_patches, warmup_steps, warmup_layout=None, by_image=False):
    """Euler steps; every patch goes on as soon as its own prediction is there."""
    size = one.family.patch_size(one.config)
    patches = cut_patches(one.latent.shape, size, choose_num_patches(num_patches, 1, one.latent.shape, size))
    dim = patches[0][0].dim
    scale = 1.0 if one.family.name == "Flux.1" else 1000.0
    x = one.latent
    last = len(SIGMAS) - 1

    def call(latent, step):
        return Call(latent.clone(), torch.full((latent.shape[0],), SIGMAS[step] * scale, dtype=latent.dtype), one.conditioning)

    def stepped(latent, step, prediction):
        return latent + (SIGMAS[step + 1] - SIGMAS[step]) * prediction.to(latent.dtype)

    for step in range(min(warmup_steps, last)):
        ticket = client.submit(spec, warmup_layout or layout, 4, [call(x, step)], keep=True, by_image=by_image)
        x = stepped(x, step, client.wait([ticket])[1][0])
    if warmup_steps < last:
        pieces = [x.narrow(dim, patch.start, rows) for patch, rows in patches]
        flying = {}
        steps = [warmup_steps] * len(patches)

        def submit(index):
            flying[client.submit(spec, layout, 4, [call(pieces[index], steps[index])], patch=patches[index][0])] = index

        for index in range(len(patches)):
            submit(index)
        while flying:
            ticket, predictions = client.wait(list(flying))
            index = flying.pop(ticket)
            pieces[index] = stepped(pieces[index], steps[index], predictions[0])
            steps[index] += 1
            if steps[index] < last:
                submit(index)
        x = torch.cat(pieces, dim)
    client.end_run()
    return x


def oracle(one, num_patches, warmup_steps):
    size = one.family.patch_size(one.config)
    patches = cut_patches(one.latent.shape, size, choose_num_patches(num_patches, 1, one.latent.shape, size))
    latent = one.latent
    result = simulate(one, one.family.name == "Flux.1", [(patch.start, patch.start + rows) for patch, rows in patches],
                      warmup_steps, SIGMAS, patches[0][0].dim)
    one.latent = latent
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_host_driven_patches_equal_the_oracle(client, spec_of, name):
    """Requests of different shapes one after the other: a run leaves nothing that the next can see."""
    for settings, more in [((4, 1), {}), ((2, 0), {"rows": 8}), ((3, 2), {"num_text_tokens": 5}), ((4, 4), {}), ((1, 1), {})]:
        one = small(name, **more)

        result = sample(client, spec_of(name, stages=STAGES), one, Layout(pipefusion_degree=2), *settings)

        assert (result - oracle(one, *settings)).abs().max() < 1e-6, settings


@pytest.mark.parametrize("name", CONFIGS)
def test_warmup_by_sequence_parallelism_equals_the_oracle(client, spec_of, name):
    one = small(name)
    spec = spec_of(name, stages=Stages(2, every_block=True))

    result = sample(client, spec, one, Layout(pipefusion_degree=2), 4, 2, warmup_layout=Layout(ring_degree=2))

    assert (result - oracle(one, 4, 2)).abs().max() < 1e-6


@pytest.mark.parametrize("by_image", [False, True])
def test_batches_equal_the_oracle(client, spec_of, by_image):
    """by_image: in warm-up, the images of a batch follow one another through the stages."""
    one = small("SD3", batch=3)

    result = sample(client, spec_of("SD3", stages=STAGES), one, Layout(pipefusion_degree=2), 3, 1, by_image=by_image)

    assert (result - oracle(one, 3, 1)).abs().max() < 1e-6
