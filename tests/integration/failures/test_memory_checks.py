"""A run that a device has no room for is refused before it starts, with what would fit:
that does run, and one more does not."""

import dataclasses
import functools
import importlib
import re
import types

import pytest
import torch

from tests.integration.sampling.test_pipefusion import EXACT
from tests.support.tiers import by_default
from tests.support.tolerances import close, within
from tests.unit.checkpoints.test_header import PUBLISHED
from tests.unit.tools.dry_run.test_loading import sparse_file
from xdit_backend.__main__ import make_parser
from xdit_backend.checkpoints.model_dims import job_of
from xdit_backend.checkpoints.offload.offload_plan import offload_plan
from xdit_backend.partition import FULL
from xdit_backend.planner.cost_model import Degrees, Device, Links
from xdit_backend.planner.layout_search import Machine
from xdit_backend.tools.bench import fits, size
from xdit_backend.tools.dry_run.simulated_rank import count


def limited(comfyui, monkeypatch, num_bytes, kind, **degrees):
    """Our MODEL on two CPU workers of a machine with so much memory."""
    monkeypatch.setattr(comfyui.proxy, "memory_of", lambda device: num_bytes)
    return comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees))


@pytest.mark.parametrize("kind, degrees",
                         [("flux", {"ulysses": 2}), ("flux", {"pipefusion": 2}), ("flux", {"displaced": 2}),
                          pytest.param("sdxl", {"displaced": 2}, marks=pytest.mark.slow)], ids=str)
def test_what_cannot_fit_is_refused_with_what_would(comfyui, monkeypatch, kind, degrees):
    weights = comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees)).model.remote.bytes_on("cpu") / (
        1 if "pipefusion" in degrees else 2)
    model = limited(comfyui, monkeypatch, weights + 12e6, kind, **degrees)
    sent, client = [], comfyui.groups.client(("cpu", "cpu"))
    submit = client.submit
    monkeypatch.setattr(client, "submit", lambda *args, **kwargs: sent.append(1) or submit(*args, **kwargs))

    def sample(batch, size):
        return comfyui.sample(model, kind, steps=2, cfg=1.0, latent=comfyui.latent(kind, batch=batch, size=size))

    def refusal(batch, size):
        with pytest.raises(comfyui.errors.ConfigError, match=r"this run \(.* 2.*needs about .* GB on cpu") as refused:
            sample(batch, size)
        assert not sent
        return str(refused.value)

    most = int(re.search(r"at most (\d+) of the 64 images at once", refusal(64, (16, 16)))[1])
    width, height = map(int, re.search(r"at most (\d+) x (\d+) pixels instead of 4096 x 4096",
                                       refusal(1, (512, 512))).groups())
    assert ("forecast_keys_values 0" in refusal(most + 1, (16, 16))) == ("ulysses" not in degrees)
    refusal(1, (height // 8 + 1, width // 8 + 1))
    fitting = sample(most, (16, 16))
    assert sent and fitting.shape[0] == most and torch.isfinite(fitting).all()
    sample(1, (height // 8, width // 8))


def test_keys_and_values_that_host_memory_has_no_room_for_are_refused(comfyui, monkeypatch):
    """Of the ranks on this machine together; those on the devices would fit."""
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", pipefusion=2, offload_keys_values=True,
                                               forecast_keys_values=0.0))

    checks = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.memory_checks")

    def sample():
        return comfyui.sample(model, "sd3", steps=2, cfg=1.0, latent=comfyui.latent("sd3", size=(16, 16)))

    monkeypatch.setattr(checks, "available_memory", lambda: (1000, 10 ** 12))
    with pytest.raises(comfyui.errors.ConfigError, match=r"needs about (\S+) GB on this machine's system RAM "
                       r"\(\1 GB of keys and values\), and that has 1e-06 GB\.") as refused:
        sample()
    needed = float(re.search(r"needs about (\S+) GB", str(refused.value))[1]) * 1e9
    monkeypatch.setattr(checks, "available_memory", lambda: (1.01 * needed, 10 ** 12))

    assert torch.isfinite(sample()).all()


def test_weights_that_cannot_fit_are_refused_when_loading(comfyui, monkeypatch):
    weights = comfyui.ours("sd3", comfyui.config()).model.remote.bytes_on("cpu")

    with pytest.raises(comfyui.errors.ConfigError, match=r"^Use more devices, or larger ones: .* over 2 devices needs "
                                                         r"about .* GB of weights\)"):
        limited(comfyui, monkeypatch, 1e5, "sd3", ulysses=2)
    monkeypatch.setattr(comfyui.proxy, "is_installed", lambda type_: type_ == "NF4")
    with pytest.raises(comfyui.errors.ConfigError, match=r"Use pipefusion_degree=2 on as many devices "
                                                         r"like these; or "
                       r"weight_dtype fp8_e4m3fn \(.* GB of weights\) or nf4 \(.* GB of weights\): ") as refused:
        limited(comfyui, monkeypatch, weights * 0.95, "sd3", ulysses=2)
    fp8, nf4 = (float(size) * 1e9 for size in re.findall(r"\(([\d.e-]+) GB of weights\)", str(refused.value))[:2])
    within(abs(fp8 - comfyui.ours("sd3", comfyui.config(), "fp8_e4m3fn").model.remote.bytes_on("cpu")) / fp8, 1e-2)
    assert nf4 < fp8
    with pytest.raises(comfyui.errors.ConfigError, match=r"weight_dtype nf4 \([^)]* GB of weights\): "):
        limited(comfyui, monkeypatch, (nf4 + fp8) / 2, "sd3", ulysses=2)


def test_what_is_too_large_for_one_device_is_drawn_exactly_where_nothing_else_is_allowed(comfyui, said, monkeypatch):
    """In auto mode."""
    weights = comfyui.ours("sd3", comfyui.config()).model.remote.bytes_on("cpu")
    monkeypatch.setattr(comfyui.proxy, "memory_of", lambda device: weights * 1.24)
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", approximate="not allowed", mode="auto"))

    result = comfyui.sample(model, "sd3", steps=3)

    assert said[0].startswith("running on cpu, cpu: tensor 2"), said
    close(result, comfyui.reference("sd3", steps=3), EXACT)


def apart(comfyui, monkeypatch):
    """CPU workers stand for devices with memory of their own, none of which CUDA takes."""
    checks = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.memory_checks")
    placement = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.model.weight_placement")
    for module in (checks, placement):
        monkeypatch.setattr(module, "has_own_memory", lambda device: True)
    extrapolation = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.planner.memory_model")
    monkeypatch.setattr(extrapolation, "CONTEXT_BYTES", 0)
    return checks


def whole_bytes(comfyui, kind):
    return comfyui.ours(kind, comfyui.config()).model.remote.bytes_on("cpu")


@pytest.mark.parametrize("kind, number", [("sd3", True), ("sd3", False), ("sdxl", False)],
                         ids=["a number", "auto", "a U-Net"])
def test_what_is_too_large_for_the_devices_draws_the_same_with_weights_from_host_memory(comfyui, said, monkeypatch,
                                                                                       kind, number):
    """Each of two devices has room for 0.95 of the weights; stages and tensor shards, which would fit, are not taken
    where a number is given, and are not to be had for one device."""
    weights = whole_bytes(comfyui, kind)
    apart(comfyui, monkeypatch)
    wanted = comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu" if number else "cpu", mode="auto")), kind,
                            steps=2)
    monkeypatch.setattr(comfyui.proxy, "memory_of", lambda device: weights * 0.95)
    given = {"weights_memory": f"{0.9 * weights / 1e9:.6f}"} if number else {}
    model = comfyui.ours(kind, comfyui.config("cpu,cpu" if number else "cpu", mode="auto", **given))
    said.clear()

    result = comfyui.sample(model, kind, steps=2)

    assert torch.equal(result, wanted)
    stay, streamed = map(float, re.search(r"Weights: (\S+) GB resident per device, (\S+) GB offloaded to system RAM "
                                          r"and streamed at every step", said[0]).groups())
    assert stay * 1e9 <= (0.9 if number else 0.95) * weights and streamed > 0


def test_weights_that_host_memory_has_no_room_for_are_said_to_come_from_the_disk_and_how_fast(comfyui, said,
                                                                                             monkeypatch):
    """The file is read once, before the workers have it."""
    weights, checks, read = whole_bytes(comfyui, "sd3"), apart(comfyui, monkeypatch), []
    monkeypatch.setattr(comfyui.proxy, "memory_of", lambda device: weights * 0.95)
    model = comfyui.ours("sd3", comfyui.config(mode="auto"))
    monkeypatch.setattr(checks, "available_memory", lambda: (model.model.remote.spec.host_bytes + 1, 10 ** 12))
    monkeypatch.setattr(checks, "disk_bytes_s", lambda path: read.append(path) or 1e6)

    comfyui.sample(model, "sd3", steps=1)

    panel = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.server.panel")
    assert panel.state()["run"]["streamed"] == max(model.model.remote.memory.offloaded_bytes) > 0
    streamed, rate, step_s = map(float, re.search(
        r"(\S+) GB offloaded to system RAM and streamed at every step, more than fits in free system RAM: read from "
        r"disk at (\S+) GB/s, (\S+) s per step\. For a faster run, add system RAM or use smaller weights",
        said[0]).groups())
    assert read == [model.model.remote.checkpoint.files[0]] and rate == 1e-3
    within(abs(step_s - streamed * 1e3) / step_s, 0.05)


def test_a_run_that_leaves_less_room_has_more_weights_come(comfyui, said, monkeypatch):
    """All weights are on the device for a small picture; for a larger one the workers load the model anew, and have
    some come. Where not even that does, the run is refused."""
    apart(comfyui, monkeypatch)
    wanted = [comfyui.sample(comfyui.ours("sd3", comfyui.config()), "sd3", steps=2,
                             latent=comfyui.latent("sd3", size=size)) for size in ((8, 8), (64, 64))]
    base = comfyui.ours("sd3", comfyui.config()).model
    weights, least = base.remote.memory.model_bytes, base.remote.memory.group.least_bytes
    taken = []
    for rows_columns in ((8, 8), (64, 64)):
        base.remote._most_run_bytes = 0
        base.memory_required([2, 16, *rows_columns])
        taken.append(base.remote._most_run_bytes)
    memory = (weights + least) / 2 + taken[1]
    assert least < weights and weights + taken[0] < memory < weights + taken[1]
    monkeypatch.setattr(comfyui.proxy, "memory_of", lambda device: memory / 0.95)
    model, how = comfyui.ours("sd3", comfyui.config()), []
    for rows_columns, want in zip(((8, 8), (64, 64), (8, 8)), (*wanted, wanted[0])):
        said.clear()
        result = comfyui.sample(model, "sd3", steps=2, latent=comfyui.latent("sd3", size=rows_columns))
        assert torch.equal(result, want)
        how.append((model.model.remote.spec.weights_memory > 0, "streamed at every step" in said[0]))

    assert how == [(False, False), (True, True), (True, True)]         # what suits a larger run stays
    client = comfyui.groups.client(("cpu",))
    assert client.models.memory(model.model.remote.spec.name).weight_bytes[0] <= memory - taken[1]
    with pytest.raises(comfyui.errors.ConfigError, match=r"this run \(one device\) needs about .* GB on cpu"):
        comfyui.sample(model, "sd3", steps=2, latent=comfyui.latent("sd3", batch=64, size=(64, 64)))


def requested(comfyui, layout_name, num_bytes, weights_memory, monkeypatch):
    """(what bench size says of Flux.1 dev on such devices, the node's MemoryCheck of the same), where host memory has
    room for all that comes from it."""
    checks = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.memory_checks")
    monkeypatch.setattr(checks, "available_memory", lambda: (10 ** 12, 10 ** 12))
    options = make_parser().parse_args(["bench", "size", "flux.1-dev", "--branches", "1", "--weights-memory",
                                        weights_memory])
    subject, layout = size.subject_of(options), size.parse_layout(layout_name)
    fit = fits.Fit(subject, layout, Machine((Device(1e14, 1e14, 1e12, memory_bytes=num_bytes),) * 2, Links()))
    count, family = fit.degrees.devices, subject.checkpoint.family
    spec = subject.spec(fit.stages, layout.tensor_degree)
    setup = types.SimpleNamespace(
        dims=subject.dims, family=family, config=fit.config, spec=spec, transformer_config=subject.checkpoint.config,
        devices=tuple(f"cuda:{index}" for index in range(count)), device_bytes=[num_bytes] * count,
        job=lambda shape, *others: job_of(family, subject.dims, shape, *others))
    plan_of = functools.partial(offload_plan, subject.table(layout.tensor_degree))
    return fit, checks.MemoryCheck(setup, plan_of, None, dict, dict)


@pytest.mark.parametrize("layout_name, num_bytes", [
    ("one", 16e9), ("pipefusion2", 12e9), ("tensor2", 8e9), ("displaced2", 16e9)])
def test_bench_size_answers_as_the_node(comfyui, monkeypatch, layout_name, num_bytes):
    """Of Flux.1 dev, word for word: the refusal of its run."""
    fit, check = requested(comfyui, layout_name, num_bytes, "all on the device", monkeypatch)
    run = fit.subject.run
    conditioning = {name: torch.empty(shape, device="meta") for name, shape in run.conditioning.items()}
    with pytest.raises(comfyui.errors.ConfigError) as refused:
        check.check_run(run.shape, conditioning, 1, 1, fit.layout)

    def without_types(text):
        return re.sub(r"; or weight_dtype .*? of weights\)(?=:)", "", re.sub(r"[\d.]+ GB", digits, text))

    def digits(match):                                         # what tensor ranks hold is known to a tenth of a percent
        return f"{float(match[0].split()[0]):.2g} GB"
    assert without_types(fit.answer()) == without_types(str(refused.value))


@pytest.mark.parametrize("layout_name, num_bytes", [
    ("one", 16e9), ("ulysses2", 12e9), ("one", 30e9), ("tensor2", 8e9), ("pipefusion2", 12e9), ("pipefusion2", 30e9)])
def test_bench_size_has_as_many_weights_come_as_the_node(comfyui, monkeypatch, layout_name, num_bytes):
    """Of the run that ComfyUI asks for room for: both branches, and 512 tokens of text."""
    fit, check = requested(comfyui, layout_name, num_bytes, "auto", monkeypatch)
    job = dataclasses.replace(fit.job(1, fit.subject.run.shape[2:]), text=512, branches=2)

    weights_memory = check.weights_memory_alongside(check.estimate_of_run(job, fit.layout), False)

    assert fit.weights_memory == weights_memory
    assert (weights_memory > 0) == (num_bytes < 30e9) == ("offloaded to system RAM" in fit.answer())
    check._setup.spec = dataclasses.replace(check._setup.spec, weights_memory=weights_memory)
    coming = type(check)(check._setup, check.group.plan_of, None, dict, dict)
    assert fit.hold == (coming.weight_bytes, coming.offloaded_bytes)
    estimates = types.SimpleNamespace(plan=None, streaming_plan=None, timed=None)
    assert fit.answer().endswith(coming.describe_placement(estimates))


def test_stages_that_are_too_large_have_weights_come_once_for_each_of_as_few_patches_as_can_be(comfyui, monkeypatch):
    """Of Flux.1 dev, 22 GB, on two cards of 12 GB: the node says how often, and a rank holds what was foreseen."""
    fit, check = requested(comfyui, "pipefusion2", 12e9, "auto", monkeypatch)
    job = fit.job(1, fit.subject.run.shape[2:])
    check.check_weights()
    before = check.requested_patches

    budget = check.weights_memory_alongside(check.estimate_of_run(job, fit.layout), False)
    spec = dataclasses.replace(check._setup.spec, weights_memory=budget)
    check._setup.spec = spec
    coming = type(check)(check._setup, check.group.plan_of, None, dict, dict)
    counted = count(fit.subject.checkpoint, spec, fit.layout, 0, dataclasses.replace(fit.subject.run, num_patches=2),
                    [12e9 * FULL] * 2)

    assert before == 0 and coming.requested_patches == 2 and 0 < budget < 12e9
    said = coming.describe_placement(types.SimpleNamespace(plan=None, streaming_plan=None, timed=None))
    stay, once, a_step = map(float, re.search(
        r"Weights: (\S+) GB resident per device, (\S+) GB offloaded to system RAM and streamed for each of 2 patches "
        r"\((\S+) GB per step\)$", said).groups())
    assert counted.weight_bytes == coming.weight_bytes[0] <= budget and counted.weight_bytes / 1e9 <= 1.01 * stay
    assert a_step == pytest.approx(2 * once, rel=0.01) and counted.streamed_bytes == 2 * coming.offloaded_bytes[0]
    with pytest.raises(comfyui.errors.ConfigError, match="needs about"):
        requested(comfyui, "pipefusion2", 1e9, "auto", monkeypatch)[1].check_weights()


@pytest.mark.parametrize("given", by_default([{"mode": "auto"}], [{"mode": "auto"}, {"pipefusion": 2}]), ids=str)
@pytest.mark.parametrize("is_hidden", [True, pytest.param(False, marks=pytest.mark.slow)],
                         ids=["with busy stages", "once a step"])
def test_stages_that_are_too_large_have_weights_come_as_often_as_is_forecast_to_be_fastest(comfyui, said, monkeypatch,
                                                                                         is_hidden, given):
    """Of two cards none has room for its half. Where the way from the host is slow, weights come once a step, for one
    patch, and the picture is one device's; else it is that of two patches."""
    apart(comfyui, monkeypatch)
    unstreamed = comfyui.config("cpu,cpu", pipefusion=2, num_patches=2) if is_hidden else comfyui.config("cpu")
    wanted = comfyui.sample(comfyui.ours("sd3", unstreamed, size="demo"), "sd3", steps=4)
    weights = comfyui.ours("sd3", comfyui.config("cpu"), size="demo").model.remote.memory.model_bytes
    gpu = Device(1e10, 1e10, 1e12, memory_bytes=0.45 * weights, host_bytes_s=1e12 if is_hidden else 1e7)
    links = Links({("hop", 2): 1e6, ("all_to_all", 2): 1e5})
    choice, cost, planner, remote = (importlib.import_module(f"{comfyui.pack.__name__}.{name}") for name in (
        "xdit_backend.planner.layout_search", "xdit_backend.planner.cost_model", "xdit_backend.planner.planner",
        "nodes.bridge.sampling.remote_model"))
    for module in (planner, remote):                           # a usual picture has no room beside so few weights
        monkeypatch.setattr(module, "USUAL_JOB", cost.Job(64, 20, 20))
    machine = choice.Machine((cost.Device(**vars(gpu)),) * 2, cost.Links(links.rates))
    monkeypatch.setattr(comfyui.groups, "machine", lambda *given, **more: machine)
    monkeypatch.setattr(comfyui.proxy, "memory_of", lambda device: 0.9 * weights)      # of both
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", **given), size="demo")
    said.clear()

    result = comfyui.sample(model, "sd3", steps=4)

    assert model.model.remote.spec.stages.pipefusion_degree == 2
    often = "for each of 2 patches (" if is_hidden else "at every step"
    assert f"PipeFusion 2, {2 if is_hidden else 1} patch" in said[0] and f" and streamed {often}" in said[0]
    assert (", hidden behind" in said[0]) == is_hidden and ("transfer-bound" in said[0]) != is_hidden
    close(result, wanted, EXACT)


def test_what_displaced_patches_of_a_u_net_send_leaves_less_room_for_weights(comfyui, monkeypatch):
    """It is what a run of two devices takes beside its activations, of half of the rows of one branch at a time."""
    apart(comfyui, monkeypatch)
    taken = []
    for names, degrees in (("cpu", {}), ("cpu,cpu", {"displaced": 2})):
        base = comfyui.ours("sdxl", comfyui.config(names, **degrees)).model
        base.memory_required([2, 4, 32, 32])
        taken.append(base.remote._most_run_bytes)
    group = base.remote.memory.group
    cached = group.run_memory(None, (1, 2), (32, 32), Degrees(displaced=2), group.settings()).keys_values

    assert 0 < cached == pytest.approx(taken[1] - taken[0] / 4)


def flux2_file(comfyui, monkeypatch, folder):
    """Flux.2 dev in bfloat16, under the names of ComfyUI's own module, with holes for content."""
    import comfy.ldm.flux.model
    import comfy.model_detection
    import comfy.ops
    import comfy.supported_models
    monkeypatch.setattr(comfy.supported_models.Flux2, "unet_extra_config", {}, raising=False)
    shapes = {name: torch.empty(shape, device="meta") for name, shape in PUBLISHED["flux2-dev"][1].items()}
    arguments = comfy.model_detection.detect_unet_config(shapes, "", {})
    module = comfy.ldm.flux.model.Flux(**arguments, dtype=torch.bfloat16, device="meta",
                                       operations=comfy.ops.disable_weight_init)
    return sparse_file(folder / "flux2.safetensors", {name: tuple(tensor.shape) for name, tensor in
                                                      module.state_dict().items()})


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"mode": "auto"}], ids=str)
def test_flux2_in_fp8_on_two_gpus_is_answered_alike(comfyui, monkeypatch, tmp_path, degrees):
    """Two cards of 16 GB, 2048 pixels: bench size by the model's name, and Load xDiT Model with a file of it."""
    pack, gpus = comfyui.pack.__name__, ("cuda:0", "cuda:1")
    for name, value in {"devices_of": lambda config: gpus, "memory_of": lambda device: int(16e9),
                        "load_device_of": lambda devices: torch.device("cpu")}.items():
        monkeypatch.setattr(comfyui.proxy, name, value)
    monkeypatch.setattr(importlib.import_module(f"{pack}.nodes.bridge.workers.memory_checks"), "available_memory",
                        lambda: (10 ** 12, 10 ** 12))
    monkeypatch.setattr(comfyui.groups, "prepare", lambda devices: None)
    monkeypatch.setattr(importlib.import_module(f"{pack}.nodes.bridge.model.weight_placement").GROUPS, "machine",
                        lambda *given, **more: None)
    monkeypatch.setattr(comfyui.detection.Detection, "dtypes",
                        lambda self, *given: (torch.float8_e4m3fn, torch.bfloat16))
    path = flux2_file(comfyui, monkeypatch, tmp_path)
    config = dataclasses.replace(comfyui.config("cpu,cpu", **degrees), devices=",".join(gpus))
    base_model = comfyui.proxy.load_proxy(str(path), "fp8_e4m3fn", config).model
    remote = base_model.remote
    remote._most_run_bytes = 0
    for num_branches in (2, 1):                                # as ComfyUI asks before any run
        remote.memory_required(lambda *given, **more: 0, [num_branches, 128, 128, 128])

    options = ["bench", "size", "flux.2-dev", "--weight-dtype", "fp8_e4m3fn", "--size", "2048x2048"]
    gpu = Device(1e14, 1e14, 1e12, memory_bytes=16e9, host_bytes_s=12e9)
    subject, machine = size.subject_of(make_parser().parse_args(options)), Machine((gpu,) * 2, Links())
    fit = (fits.auto_fit(subject, machine) if "mode" in degrees else
           fits.Fit(subject, size.parse_layout("ulysses2"), machine))

    # a run with built-in guidance is by Ulysses; what stays on the cards leaves room for both branches
    assert remote.setup.layout(1).ulysses_degree == 2 and remote.spec.stages is None
    assert fit.all_bytes == remote.setup.dims.resident_bytes
    assert fit.weights_memory == remote.memory.weights_memory_alongside(remote._most_run_bytes, False)
    remote.compute_in("bfloat16", base_model)
    assert fit.hold == (remote.memory.weight_bytes, remote.memory.offloaded_bytes)
    said = remote.memory.describe_placement(types.SimpleNamespace(plan=None, streaming_plan=None, timed=None))
    assert fit.answer().startswith("fits: ") and fit.answer().endswith(said)
    assert said.startswith(". Weights: ") and "streamed at every step" in said


@pytest.mark.parametrize("command", ["Predict", "LoadModel"])
def test_a_worker_that_runs_out_of_memory_has_the_nodes_estimates_say_what_would_fit(comfyui, monkeypatch, command):
    """Flux.1 dev by CFG parallelism on two GPUs of 30 GB. The run took three times what was estimated; or the weights
    did not fit, since others use the GPU."""
    fit, check = requested(comfyui, "cfg2", 30e9, "auto", monkeypatch)
    run, errors = fit.subject.run, comfyui.errors
    conditioning = {name: torch.empty(shape, device="meta") for name, shape in run.conditioning.items()}
    check.check_run(run.shape, conditioning, 1, 2, fit.layout)
    weights, facts = check.weight_bytes[1], "Worker rank 1 (cuda:1) failed with OutOfMemoryError."
    numbers = {"weight_bytes": weights, "activation_bytes": 3e9, "requested_bytes": 2e9, "free_bytes": 0.5e9}
    if command == "LoadModel":
        numbers = {"activation_bytes": 12e9, "requested_bytes": 2e9, "free_bytes": 0.5e9}

    with pytest.raises(errors.WorkerOutOfMemoryError) as raised, check.explaining():
        raise errors.WorkerOutOfMemoryError("Use less. " + facts, 1, "cuda:1", numbers, command, facts)

    words = str(raised.value)
    assert words.endswith(facts) and words.startswith('Use weights_memory "') and "Use less" not in words
    cached = float(re.search(r'weights_memory "([\d.]+)"', words)[1]) * 1e9
    has = sum(numbers.get(name, 0) for name in ("weight_bytes", "activation_bytes", "free_bytes"))
    assert check.group.most_resident(cached) <= has - (5e9 if command == "Predict" else 0)
    if command == "Predict":
        width = int(re.search(r"at most (\d+) x \d+ pixels instead of", words)[1])
        assert 0 < width < 1024 and re.search(r"(ulysses|tensor)_degree=2 on the same devices \(about", words)
    else:
        assert "pixels" not in words

    with pytest.raises(errors.WorkerOutOfMemoryError, match="^Use less"), check.explaining():
        raise errors.WorkerOutOfMemoryError("Use less. " + facts, 1, "cuda:1", numbers, "Decode", facts)


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"pipefusion": 2}], ids=str)
def test_the_error_of_a_node_begins_with_what_would_fit_by_the_estimates(comfyui, monkeypatch, degrees):
    model, client = comfyui.ours("sd3", comfyui.config("cpu,cpu", **degrees)), comfyui.groups.client(("cpu", "cpu"))
    numbers = {"activation_bytes": 3e9, "requested_bytes": 2e9, "free_bytes": 0.5e9}
    error = comfyui.errors.WorkerOutOfMemoryError

    def run_out(*args, **kwargs):
        raise error("Use less. Facts.", 1, "cpu", numbers, "Predict", "Facts.")
    monkeypatch.setattr(client, "wait", run_out)

    with pytest.raises(error, match=r"^Use at most \d+ x \d+ pixels instead of 128 x 128.* Facts\.$"):
        comfyui.sample(model, "sd3", steps=3, latent=comfyui.latent("sd3", size=(16, 16)))
