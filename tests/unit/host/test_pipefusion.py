"""PipeFusion on a real worker group, driven from the host as the patchwise sampler drives it, equals its oracle."""

import os
import time

import psutil
import pytest
import torch

from tests.support.model_zoo import BARE, example, having
from tests.support.pipefusion_oracle import simulate
from tests.support.tolerances import within
from tests.unit.host.conftest import call_of
from xdit_backend.host import launcher
from xdit_backend.host.calls import Call, ForwardPass
from xdit_backend.host.client import Client
from xdit_backend.partition import cut_patches
from xdit_backend.planner.planner import choose_num_patches
from xdit_backend.protocol.errors import WorkerDiedError, WorkerFailedError, XDiTError
from xdit_backend.protocol.specs import Layout, Stages
from xdit_backend.tools.bench.sampler import Method, Model, Sampling
from xdit_backend.tools.bench.sampler import sample as euler

SIGMAS = [1.0, 0.8, 0.6, 0.4, 0.2]
STAGES = Stages(2)
SHAPES = {"Wan": {"rows": 8, "columns": 6, "frames": 4}}


def small(name, **more):
    return example(name, **{**SHAPES.get(name, {"rows": 12, "columns": 6}), **more})


def cuts(one, num_patches):
    size = one.family.patch_size(one.config)
    return cut_patches(one.latent.shape, size, choose_num_patches(num_patches, 1, one.latent.shape, size))


def sample(client, spec, one, layout, num_patches, warmup_steps, by_image=False, extrapolation=0.0):
    """A run as the bench drives it; every patch goes on as soon as its own prediction is there."""
    x = euler(client, Model(spec, one.latent.shape[1], one.family.inputs.time_scale), call_of(one), Sampling(SIGMAS),
              Method(layout, warmup_steps, cuts(one, num_patches), extrapolation, by_image))
    client.end_run()
    return x


def oracle(one, num_patches, warmup_steps, extrapolation=0.0):
    patches, latent = cuts(one, num_patches), one.latent
    result = simulate(one, [(patch.start, patch.start + rows) for patch, rows in patches],
                      warmup_steps, SIGMAS, patches[0][0].dim, extrapolation)
    one.latent = latent
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SD3", "Flux.1", "Lumina 2", "HunyuanDiT", "DiT", "Latte"])
def test_host_driven_patches_equal_the_oracle(client, spec_of, name):
    """Requests of different shapes one after the other: a run leaves nothing that the next can see.
    tests/integration/sampling/test_pipefusion.py has every family that ComfyUI has."""
    for settings, extrapolation, more in [((4, 1), 0.8, {}), ((3, 0), 0.5, {"batch": 2}), ((2, 0), 0.0, {"rows": 8}),
                                     ((3, 2), 0.0, {"num_text_tokens": 5}), ((4, 4), 0.8, {}), ((1, 1), 0.0, {})]:
        one = small(name, **more)

        result = sample(client, spec_of(name, stages=STAGES), one, Layout(pipefusion_degree=2), *settings,
                        extrapolation=extrapolation)

        within((result - oracle(one, *settings, extrapolation)).abs().max(), 1e-6, settings)


@pytest.mark.parametrize("name", having("pipefusion", BARE))
def test_warmup_by_sequence_parallelism_equals_the_oracle(client, spec_of, name):
    one = small(name)
    spec = spec_of(name, stages=Stages(2, every_block=True))

    result = sample(client, spec, one, Layout(pipefusion_degree=2), 4, 2)

    within((result - oracle(one, 4, 2)).abs().max(), 1e-6)


@pytest.mark.parametrize("by_image", [False, True])
def test_batches_equal_the_oracle(client, spec_of, by_image):
    """by_image: in warm-up, the images of a batch follow one another through the stages."""
    one = small("SD3", batch=3)

    result = sample(client, spec_of("SD3", stages=STAGES), one, Layout(pipefusion_degree=2), 3, 1, by_image=by_image)

    within((result - oracle(one, 3, 1)).abs().max(), 1e-6)


def keep_flying(client, spec, one, num_patches=4, rounds=3):
    """Handles of a warm-up step and some steps of patches that are all on their way."""
    layout = Layout(pipefusion_degree=2)
    timestep = torch.full((1,), 700.0, dtype=torch.float64)
    handles = [client.submit(spec, layout, 4, [Call(one.latent, timestep, one.conditioning)],
                             ForwardPass(keep=True))]
    for patch, rows in cut_patches(one.latent.shape, (2, 2), num_patches) * rounds:
        piece = one.latent.narrow(2, patch.start, rows).clone()
        handles.append(client.submit(spec, layout, 4, [Call(piece, timestep, one.conditioning)], ForwardPass(patch)))
    return handles


def finish(client, handles):
    while handles:
        handles.remove(client.wait(handles)[0])


class GivenUp(Exception):
    pass


def test_a_cancelled_run_leaves_the_group_ready_and_nothing_behind(client, spec_of):
    """Patches that are on their way are finished by the workers; the next run sees nothing of them."""
    one, spec = small("SD3"), spec_of("SD3", stages=STAGES)
    pids = {rank: numbers["pid"] for rank, numbers in client.report_memory().items()}
    handles = keep_flying(client, spec, small("SD3", rows=40, columns=40), rounds=5)

    def give_up():
        raise GivenUp

    client.workers.check = give_up
    try:
        with pytest.raises(GivenUp):
            client.wait(handles)
    finally:
        client.workers.check = lambda: None
    client.end_run()

    result = sample(client, spec, one, Layout(pipefusion_degree=2), 4, 1)
    within((result - oracle(one, 4, 1)).abs().max(), 1e-6)
    memory = client.report_memory()
    assert {rank: numbers["pid"] for rank, numbers in memory.items()} == pids
    assert [numbers["key_value_bytes"] for numbers in memory.values()] == [0, 0]
    assert client.group.segments.names() == []


@pytest.mark.slow
def test_an_error_in_a_stage_is_told_and_the_next_run_works(client, spec_of, monkeypatch):
    """A stage may wait for what another never sent, so the group is started anew."""
    monkeypatch.setattr(launcher, "STRAGGLER_S", 1)
    one, spec = small("SD3"), spec_of("SD3", stages=STAGES)
    wrong = Call(torch.zeros(1, 3, 12, 6, dtype=torch.float64), one.timestep, one.conditioning)

    with pytest.raises(WorkerFailedError, match="Worker rank"):
        client.wait([client.submit(spec, Layout(pipefusion_degree=2), 4, [wrong], ForwardPass(keep=True))])
    client.end_run()

    within((sample(client, spec, one, Layout(pipefusion_degree=2), 4, 1) - oracle(one, 4, 1)).abs().max(), 1e-6)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_stage_is_named_and_ends_the_run_within_ten_times_what_the_run_takes_undisturbed(
    client, spec_of, rank):
    """Nobody waits for what it owed: stages have half an hour for that."""
    large, spec = small("SD3", rows=60, columns=60), spec_of("SD3", stages=STAGES)
    finish(client, keep_flying(client, spec, large, rounds=1))
    started_s = time.monotonic()
    finish(client, keep_flying(client, spec, large, rounds=20))
    client.end_run()
    undisturbed_s = time.monotonic() - started_s
    pids = {rank: int(numbers["pid"]) for rank, numbers in client.report_memory().items()}
    handles = keep_flying(client, spec, large, rounds=20)

    killed_s = time.monotonic()
    psutil.Process(pids[rank]).kill()
    with pytest.raises(WorkerDiedError, match=f"Worker rank {rank} "):
        finish(client, handles)
    client.end_run()

    assert time.monotonic() - killed_s < 10 * undisturbed_s
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())


@pytest.mark.slow
def test_a_run_whose_workers_died_is_not_continued_by_a_new_group(client, spec_of):
    """A new group holds no keys and values: its patches would begin cold and give another picture without a word."""
    client.end_run()
    one, spec, layout = small("SD3"), spec_of("SD3", stages=STAGES), Layout(pipefusion_degree=2)
    handles = keep_flying(client, spec, one, rounds=1)
    first, others = handles[0], handles[1:]
    client.wait([first])
    client.group.close()
    patch, rows = cut_patches(one.latent.shape, (2, 2), 4)[0]
    call = Call(one.latent.narrow(2, patch.start, rows).clone(), torch.full((1,), 600.0, dtype=torch.float64),
                one.conditioning)

    with pytest.raises(WorkerDiedError, match="Queue the prompt again"):
        client.submit(spec, layout, 4, [call], ForwardPass(patch))
    with pytest.raises(WorkerDiedError, match="Queue the prompt again"):
        client.wait(others)
    client.end_run()

    within((sample(client, spec, one, layout, 4, 1) - oracle(one, 4, 1)).abs().max(), 1e-6)


@pytest.mark.slow
def test_a_stage_that_hangs_is_named(spec_of, monkeypatch, supervisor):
    monkeypatch.setenv("XDIT_STAGE_TIMEOUT_S", "3")
    monkeypatch.setattr(launcher, "STRAGGLER_S", 1)            # the stopped one will not answer
    one, spec = small("SD3"), spec_of("SD3", stages=STAGES)
    client = Client(("cpu", "cpu"), supervisor=supervisor)
    try:
        finish(client, keep_flying(client, spec, one, rounds=1))
        psutil.Process(int(client.report_memory()[0]["pid"])).suspend()
        with pytest.raises(XDiTError, match=r"Stage 0 \(rank 0\) sent nothing to stage 1 for 3 s"):
            finish(client, keep_flying(client, spec, one, rounds=1))
    finally:
        client.close()
