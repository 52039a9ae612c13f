"""Checks of a report: every method against one device, VAE decode and encode, and two faults."""

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import contextmanager

import psutil
import torch
from safetensors.torch import load_file

from ...checkpoints.checkpoint import open_checkpoint
from ...demo_model.autoencoder import CHANNELS, SIDE
from ...demo_model.text import WEIGHTS
from ...demo_model.transformer import shifted_sigmas
from ...host import logs
from ...host.autoencoders import Autoencoder
from ...host.calls import Call, ForwardPass
from ...partition import cut_patches
from ...planner.planner import warmup_layout
from ...protocol.errors import WorkerDiedError, XDiTError
from ...protocol.specs import Layout, Stages
from ..bench import quality
from ..bench.sampler import Method, Model, Sampling, sample
from ..bench.vae import random_decoder
from .results import Check
from .subjects import CHECKED, small_subject

METHODS = ("cfg", "data", "ulysses", "ring", "tensor", "pipefusion", "displaced")
TOLERANCE = 1e-3               # float32, relative to the largest value; convolutions on GPUs may use TF32
LEAST_DB = 20.0                # PSNR of stale keys and values to one device, by which naive patches fail
DEMO_STEPS, DEMO_PROMPTS = 12, 4
VAE_PIXELS, VAE_WIDTH = 256, 32
DEMO_VAE = WEIGHTS / "vae" / "xdit_demo_vae.safetensors"
COMMAND = "python -m xdit_backend report --no-times --only"


class Cancelled(XDiTError):
    """Raised in the middle of a step, as by ComfyUI's cancel button."""


class WrongResultError(XDiTError):
    """A check's result differs from one device's."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A check to run. run() -> error relative to one device, or None; raises XDiTError if it fails."""

    name: str
    run: Callable


def layouts_of(num_devices):
    """{name: degrees} of every method on all devices, and of the products of two methods of degree 2 on four."""
    found = {f"{method}{num_devices}": {method: num_devices} for method in METHODS}
    if num_devices == 4:
        found |= {f"{one}2-{other}2": {one: 2, other: 2} for index, one in enumerate(METHODS)
                  for other in METHODS[index + 1:] if "displaced" not in (one, other) or one in ("cfg", "data")}
    return found


def layout_of(degrees):
    return Layout(**{f"{method}_degree": degree for method, degree in degrees.items()})


def stages_of(degrees):
    """The Stages of degrees with PipeFusion."""
    return Stages(degrees["pipefusion"], layout_of(degrees).stage_ranks)


def planned_checks(clients, folder):
    """[Planned] for clients {number of devices: Client}, of which 1 is one."""
    many = max(clients)
    checks, made = [], {}

    def subject(name):
        if name not in made:
            made[name] = small_subject(name, folder)
        return made[name]

    for family in CHECKED:
        for name, degrees in layouts_of(many).items():
            if many > 1 and _is_possible(family, degrees):
                checks.append(Planned(f"{family} {name}", lambda family=family, degrees=degrees: difference(
                    clients, subject(family), degrees, many)))
    if many > 1:
        checks += [Planned(f"demo model {name}", lambda method=method: stale_difference(clients, method, many))
                   for name, method in (("pipefusion", "pipefusion"), ("displaced", "displaced"))]
        checks += [Planned(f"VAE {what}", lambda what=what: vae_difference(clients, what, many))
                   for what in ("decode", "encode")]
    checks += [Planned("cancel in a step", lambda: cancel(clients[many], subject("Flux.1"))),
               Planned("killed worker", lambda: kill(clients[many], subject("Flux.1")))]
    return checks


def _is_possible(family, degrees):
    """Whether a small model of the family is large enough for these degrees: a transformer has 4 heads and 4 blocks,
    and the U-Net's latent 32 rows."""
    if family == "SD 1.5":
        return not degrees.keys() - {"cfg", "data", "displaced"} and degrees.get("displaced", 1) <= 4
    heads = degrees.get("ulysses", 1) * degrees.get("tensor", 1)
    return degrees.get("cfg", 1) <= 2 and heads <= 4 and degrees.get("pipefusion", 1) <= 4


def run_check(planned):
    """Run one check; returns its Check."""
    started_s = time.monotonic()
    command = f'{COMMAND} "{planned.name}"'
    try:
        error = planned.run()
    except (XDiTError, RuntimeError, OSError) as failure:
        text = logs.without_private(str(failure)).strip() or type(failure).__name__
        return Check(planned.name, False, time.monotonic() - started_s, command, text.splitlines()[0][:400])
    return Check(planned.name, True, time.monotonic() - started_s, command, "", error)


def difference(clients, subject, degrees, many):
    """Largest difference of a method's predictions from one device's, relative to the largest value."""
    layout, is_staged = layout_of(degrees), degrees.get("pipefusion", 1) > 1
    calls = subject.batch(degrees.get("data", 1))
    stages = stages_of(degrees) if is_staged else None
    spec = subject.spec(stages, degrees.get("tensor", 1))
    forward = ForwardPass(keep=degrees.get("displaced", 1) > 1, displaced_mode="full_sync")
    if is_staged:
        layout = warmup_layout(layout, stages)
    wanted = clients[1].predict(subject.spec(), Layout(), subject.num_channels, calls)
    client = clients[many]
    try:
        handle = client.submit(spec, layout, subject.num_channels, calls, forward, run="report")
        got = client.wait([handle])[1]
    finally:
        if client.running:
            client.end_run("report")
            client.drop(spec.name)
    return relative(got, wanted)


def relative(got, wanted):
    """Largest difference relative to the largest wanted value. Raises WrongResultError above TOLERANCE."""
    largest = max(tensor.abs().max().item() for tensor in wanted)
    error = max((one - other).abs().max().item() for one, other in zip(got, wanted)) / max(largest, 1e-12)
    if not error <= TOLERANCE:                                 # also true of NaN
        raise WrongResultError(f"the result differs from one device's by {error:.2g} of its largest value, and at most "
                               f"{TOLERANCE:g} is allowed")
    return error


def stale_difference(clients, method, many):
    """Raise WrongResultError if images of the demo model with stale keys and values are far from one device's."""
    count = 2 if many % 2 == 0 else many
    checkpoint = open_checkpoint(str(quality.DEMO))
    family, shape = checkpoint.family, (1, CHANNELS, SIDE, SIDE)
    prompts = quality.load_recogniser()[2][:DEMO_PROMPTS]
    sampling = Sampling(shifted_sigmas(DEMO_STEPS).tolist(), 3.0)

    def generate(client, spec, requested):
        noise = quality.noise_of(range(len(prompts)))
        call = Call(noise, torch.zeros(1), quality.conditioning_of(family, prompts))
        latent = sample(client, Model(spec, CHANNELS, family.inputs.time_scale), call, sampling, requested)
        client.end_run()
        return quality.decode(latent)

    one_spec = checkpoint.spec("float32", "float32")
    wanted = generate(clients[1], one_spec, Method(Layout()))
    if method == "pipefusion":
        stages = min(count, 4)
        requested = Method(Layout(pipefusion_degree=stages), 1, cut_patches(shape, (2, 2), 2 * stages), 0.6)
        spec = checkpoint.spec("float32", "float32", Stages(stages, 1))
    else:
        requested, spec = Method(Layout(displaced_degree=count), 1, None, 0.6), one_spec
    got = generate(clients[many], spec, requested)
    psnr = -10 * math.log10(max(1e-10, ((got - wanted) / 2).square().mean().item()))
    if not psnr >= LEAST_DB:
        raise WrongResultError(f"images of the demo model are {psnr:.1f} dB from one device's, and at least "
                               f"{LEAST_DB:g} dB are needed")


def vae_difference(clients, what, many):
    """Largest difference of a decoded image (Stable Diffusion's structure) or an encoded latent (the demo model's VAE)
    from one device's."""
    side, generator = VAE_PIXELS // 8, torch.Generator().manual_seed(0)
    if what == "decode":
        tensors, latent = random_decoder(VAE_WIDTH), torch.randn(1, 4, side, side, generator=generator)

        def run(client):
            return client.autoencoders.decode(Autoencoder("decoder", "float32", lambda: tensors), latent,
                                              (1, VAE_PIXELS, VAE_PIXELS, 3))
    else:
        tensors = {name: tensor for name, tensor in load_file(DEMO_VAE).items() if name.startswith("taesd_")}
        image = torch.rand(1, 3, VAE_PIXELS, VAE_PIXELS, generator=generator) * 2 - 1

        def run(client):
            return client.autoencoders.encode(Autoencoder("encoder", "float32", lambda: tensors), image,
                                              (1, CHANNELS, side, side))
    return relative([run(clients[many])], [run(clients[1])])


@contextmanager
def cancelling(client):
    """Context in which the client's next wait is cancelled once its command has been sent."""
    before, requested = client.workers.check, []

    def check():
        requested.append(True)
        raise Cancelled("cancelled by a check of the report")
    client.workers.check = check
    try:
        yield requested
    finally:
        client.workers.check = before


def cancel(client, subject):
    """Cancel a step, and run the next one."""
    layout = Layout(ring_degree=len(client.devices))
    wanted = client.predict(subject.spec(), layout, subject.num_channels, subject.calls[:1])
    with cancelling(client) as requested:
        try:
            client.predict(subject.spec(), layout, subject.num_channels, subject.calls[:1])
        except Cancelled:
            pass
    if not requested:
        raise WrongResultError("the step could not be cancelled: it was never requested")
    relative(client.predict(subject.spec(), layout, subject.num_channels, subject.calls[:1]), wanted)


def kill(client, subject):
    """End a worker by force: the error names it, and the next run starts a new group."""
    layout = Layout(ring_degree=len(client.devices))
    wanted = client.predict(subject.spec(), layout, subject.num_channels, subject.calls[:1])
    last = max(client.report_memory())
    psutil.Process(int(client.report_memory()[last]["pid"])).kill()
    try:
        client.predict(subject.spec(), layout, subject.num_channels, subject.calls[:1])
    except WorkerDiedError as error:
        if client.devices[last] not in str(error):
            raise WrongResultError(f"the error does not name the killed worker: {error}") from error
    else:
        raise WrongResultError("a killed worker was not noticed")
    relative(client.predict(subject.spec(), layout, subject.num_channels, subject.calls[:1]), wanted)
