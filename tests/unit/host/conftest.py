"""Tiny models as diffusers saves them, and running worker groups to try them on."""

import os
from pathlib import Path

import pytest
import torch

from tests.support.model_zoo import example, save_transformer
from xdit_backend.checkpoints.build_vae import load_autoencoder
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.host import torchrun
from xdit_backend.host.autoencoders import Autoencoder
from xdit_backend.host.calls import Call
from xdit_backend.host.client import Client
from xdit_backend.host.workers import Workers
from xdit_backend.models import FAMILIES
from xdit_backend.protocol.specs import Layout
from xdit_backend.tools.bench.vae import random_decoder


@pytest.fixture(scope="package")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("diffusers")


@pytest.fixture(scope="package")
def spec_of(folders):
    def spec(name, dtype="float64", stages=None):
        folder = folders / f"{name}-{dtype}"
        if not folder.exists():
            save_transformer(example(name, getattr(torch, dtype)).model, folder)
        header = open_checkpoint(folder / "model.safetensors" if FAMILIES[name].is_comfyuis else folder)
        return header.spec(dtype, dtype, stages)
    return spec


class CountingWorkers(Workers):
    """They can count what lives in them (tests/unit/host/counting), those too that take the place of others."""

    @property
    def group(self):
        if self.running:
            return super().group
        counting, environment = Path(__file__).parent / "counting", torchrun.environment_of
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torchrun, "environment_of",
                          lambda *of: environment(*of) | {
                              "PYTHONPATH": os.pathsep.join(map(str, (counting, torchrun.ROOT)))})
            return super().group


@pytest.fixture(scope="package")
def client(supervisor):
    """Two workers."""
    client = Client(("cpu", "cpu"), supervisor=supervisor)
    client.workers.__class__ = CountingWorkers
    yield client
    client.close()


def decode(client):
    """A picture of a random VAE, (1, 96, 96, 3), from these workers."""
    vae = Autoencoder("vae", "float64", lambda: random_decoder(32))
    return client.autoencoders.decode(vae, small_latent(), (1, 96, 96, 3)).clone()


def decoded():
    """What `decode` should give."""
    vae = load_autoencoder(random_decoder(32), torch.float64, torch.device("cpu"), {})
    with torch.no_grad():
        return vae.decode(small_latent().double()).sample.add(1).div(2).clamp(0, 1).movedim(1, -1)


def small_latent():
    return torch.randn(1, 4, 12, 12, generator=torch.Generator().manual_seed(0))


def layout(**degrees):
    return Layout(**{f"{name}_degree": value for name, value in degrees.items()})


def call_of(one):
    return Call(one.latent, one.timestep, one.conditioning)
