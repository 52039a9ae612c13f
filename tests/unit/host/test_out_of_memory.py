"""One of two workers runs out of memory, at each place of each method: the error says where and what fits, the group
goes on where no exchange is left over, and else the next run has new workers; either way that run is right."""

import dataclasses
import re
import time

import psutil
import pytest
import torch

from tests.conftest import left_behind, still_there
from tests.support.fault_actions import can_run_out, run_out_of_memory
from tests.support.model_zoo import example
from tests.support.tolerances import within
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.host.autoencoders import Autoencoder
from xdit_backend.host.calls import Call
from xdit_backend.host.client import Client
from xdit_backend.partition import cut_patches
from xdit_backend.protocol.errors import WorkerFailedError
from xdit_backend.protocol.specs import ForwardOptions, Layout, Stages, WeightCopies
from xdit_backend.tools.bench.sampler import Method, Model, Sampling, sample
from xdit_backend.tools.bench.vae import LEVELS, random_decoder

SIGMAS = [1.0, 0.7, 0.4, 0.0]
PROMPT_S = 8.0                             # from the shortage to the error: two heartbeats, and a busy machine
METHODS = {"cfg": Layout(cfg_degree=2), "data": Layout(data_degree=2), "ulysses": Layout(ulysses_degree=2),
           "ring": Layout(ring_degree=2), "pipefusion": Layout(pipefusion_degree=2),
           "displaced": Layout(displaced_degree=2), "tensor": Layout(tensor_degree=2),
           "cfg, shared copies": Layout(cfg_degree=2)}
PLACES = {"load": "loading a model", "block": r"computing a step \(step 2 of 3\), in block \d of 4",
          "exchange": r"(computing a step \(step 2 of 3\)|decoding).*, in a transfer between ranks",
          "decode": "decoding", "encode": "encoding"}
# (method, place, failing rank) -> does the group go on?
CASES = {**{(method, "load", rank): True for method in METHODS for rank in (0, 1)},
         # the last block: its shared weights have come, and nothing is sent to the last stage any more
         **{(method, "block", rank): method.startswith(("cfg", "data")) or (method, rank) == ("pipefusion", 1)
            for method in METHODS for rank in (0, 1)},
         **{(method, "exchange", rank): False
            # a receive that cannot be posted ahead is posted again when its turn comes
            for method in METHODS if method not in ("cfg", "data") for rank in (0, 1)[:2 - (method == "pipefusion")]},
         **{("VAE rows", place, rank): False for place in ("exchange", "decode", "encode") for rank in (0, 1)}}
# each method and each place
QUICK = [("cfg", "block", 1), ("data", "block", 0), ("ulysses", "block", 0), ("ring", "exchange", 1),
         ("pipefusion", "block", 1), ("pipefusion", "exchange", 0), ("displaced", "block", 1), ("tensor", "load", 0),
         ("VAE rows", "decode", 1), ("VAE rows", "encode", 0)]


class Starved:
    """A client whose workers can be made to run out of memory, and what its runs give otherwise."""

    def __init__(self, folder, supervisor):
        self.client, self.folder, self.phases = Client(("cpu", "cpu"), supervisor=supervisor), folder, []
        self.client.workers.on_phase = self.phases.append
        self.one = example("SD3", rows=24, columns=24, batch=2, more={"num_layers": 4})
        self.one.model.save_pretrained(folder / "transformer")
        self._wanted = {}

    def spec(self, method):
        layout = METHODS[method]
        stages = Stages(2, 1) if layout.pipefusion_degree > 1 else None
        return open_checkpoint(self.folder).spec("float64", "float64", stages, layout.tensor_degree,
                                                 weights_memory=int("shared" in method))

    def run(self, method, place):
        if place == "encode":
            vae = Autoencoder("encoder", "float64", random_encoder)
            pixels = torch.rand(1, 3, 192, 192, generator=torch.Generator().manual_seed(0)) * 2 - 1
            return self.client.autoencoders.encode(vae, pixels, (1, 4, 24, 24)).clone()
        if method == "VAE rows":
            vae = Autoencoder("decoder", "float64", lambda: random_decoder(32))
            return self.client.autoencoders.decode(vae, self.one.latent[:1], (1, 192, 192, 3)).clone()
        spec, layout, call = self.spec(method), METHODS[method], Call(
            self.one.latent, self.one.timestep, self.one.conditioning,
            options=ForwardOptions(copies=WeightCopies(is_shared="shared" in method)))
        try:
            if layout.cfg_degree == 1:
                self.client.begin_step("step 2 of 3")
                patches = cut_patches(call.latent.shape, (2, 2), 3) if layout.pipefusion_degree > 1 else None
                return sample(self.client, Model(spec, 4, 1000.0), call, Sampling(SIGMAS), Method(layout, 1, patches))
            x = call.latent
            for sigma, following in zip(SIGMAS, SIGMAS[1:]):
                self.client.begin_step("step 2 of 3")
                requested = dataclasses.replace(call, latent=x,
                                                timestep=torch.full((2,), 1000.0 * sigma, dtype=x.dtype))
                other = dataclasses.replace(requested, conditioning={name: tensor / 2 for name, tensor
                                                                 in call.conditioning.items()})
                x = x + (following - sigma) * sum(self.client.predict(spec, layout, 4, [requested, other])).to(x.dtype)
            return x
        finally:
            self.client.begin_step("")
            self.client.end_run()

    def wanted(self, method, place):
        key = method, place == "encode"
        if key not in self._wanted:
            self._wanted[key] = self.run(method, place)
        return self._wanted[key]

    def seconds_to_error(self, method, place, rank):
        """(the error of a run in which this rank runs out of memory, seconds from then to the error)."""
        file = run_out_of_memory(self.folder, rank, place)
        moments = []

        def check():
            if not moments and not file.exists():
                moments.append(time.monotonic())
        self.client.workers.check = check
        try:
            with pytest.raises(WorkerFailedError) as raised:
                self.run(method, place)
        finally:
            self.client.workers.check = lambda: None
        assert not file.exists(), "memory did not run out"
        return str(raised.value), time.monotonic() - (moments or [time.monotonic()])[0]

    @property
    def pids(self):
        memory = self.client.report_memory()
        return [int(memory[rank]["pid"]) for rank in (0, 1)]


@pytest.fixture(scope="module")
def starved(tmp_path_factory, supervisor):
    folder, before = tmp_path_factory.mktemp("starved"), set(left_behind())
    undo = can_run_out(folder)
    starved = Starved(folder, supervisor)
    try:
        yield starved
    finally:
        starved.client.close()
        undo()
    assert not (left := still_there(before)), f"left behind: {sorted(left)}"


def cases():
    return [pytest.param(*case, id="-".join(map(str, case)), marks=() if case in QUICK else pytest.mark.slow)
            for case in CASES]


@pytest.mark.parametrize("method, place, rank", cases())
def test_a_rank_that_runs_out_of_memory_says_so_and_the_next_run_is_right(starved, method, place, rank):
    goes_on, client = CASES[method, place, rank], starved.client
    wanted, pids = starved.wanted(method, place), starved.pids
    old = list(map(psutil.Process, pids))
    if method in METHODS:
        client.models.load(starved.spec(method))
    if place == "load":
        client.drop(starved.spec(method).name)

    words, took_s = starved.seconds_to_error(method, place, rank)

    assert re.search(rf"Worker rank {rank} \(cpu\) failed with OutOfMemoryError while ({PLACES[place]}).*: out of "
                     r"memory: 2\.0 GB more were requested, and \d", words), words
    assert ("The workers keep running, " if goes_on else "so the workers were ended: the next prompt ") in words
    assert words.startswith("Use pipefusion_degree or" if place == "load" else "Use a smaller ")
    assert took_s < PROMPT_S
    assert client.running is goes_on
    starved.phases.clear()
    within((starved.run(method, place) - wanted).abs().max(), 1e-9)
    assert (starved.pids == pids) is goes_on
    if goes_on and place == "block":
        assert not any(phase.text == "loading weights" for phase in starved.phases)
    if not goes_on:
        assert client.group.why_not_forked == "" and not psutil.wait_procs(old, timeout=5)[1]


def test_every_method_and_every_place_is_in_the_quick_slice():
    assert {method for method, *_ in QUICK} == {method for method, *_ in CASES} - {"cfg, shared copies"}
    assert {place for _, place, _ in QUICK} == set(PLACES) and set(QUICK) <= CASES.keys()


def random_encoder(width=32):
    """An encoder's tensors under LDM's names, as bench.vae.random_decoder gives a decoder's."""
    generator, tensors = torch.Generator().manual_seed(2), {}

    def add(name, *shape):
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * torch.Size(shape[1:]).numel() ** -0.5
        tensors[f"{name}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)

    def add_resnet(name, given, channels):
        for norm, size in (("norm1", given), ("norm2", channels)):
            tensors[f"{name}.{norm}.weight"], tensors[f"{name}.{norm}.bias"] = torch.ones(size), torch.zeros(size)
        add(f"{name}.conv1", channels, given, 3, 3)
        add(f"{name}.conv2", channels, channels, 3, 3)
        if given != channels:
            add(f"{name}.nin_shortcut", channels, given, 1, 1)

    add("encoder.conv_in", width, 3, 3, 3)
    channels = width
    for level, multiple in enumerate(LEVELS):
        for block in range(2):
            add_resnet(f"encoder.down.{level}.block.{block}", channels, width * multiple)
            channels = width * multiple
        if level + 1 < len(LEVELS):
            add(f"encoder.down.{level}.downsample.conv", channels, channels, 3, 3)
    for block in (1, 2):
        add_resnet(f"encoder.mid.block_{block}", channels, channels)
    for name in ("encoder.mid.attn_1.norm", "encoder.norm_out"):
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = torch.ones(channels), torch.zeros(channels)
    for name in ("q", "k", "v", "proj_out"):
        add(f"encoder.mid.attn_1.{name}", channels, channels, 1, 1)
    add("encoder.conv_out", 8, channels, 3, 3)
    add("quant_conv", 8, 8, 1, 1)
    return tensors
