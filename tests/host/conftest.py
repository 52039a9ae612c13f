"""Tiny models as diffusers saves them, and running worker groups to try them on."""

import pytest
import torch

from tests.models.zoo import example
from xdit_backend.checkpoints.header import model_spec, read_header, recognise
from xdit_backend.host.client import Call, Client
from xdit_backend.protocol.messages import Layout


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("diffusers")


@pytest.fixture(scope="session")
def spec_of(folders):
    def spec(name, dtype="float64", stages=None):
        folder = folders / f"{name}-{dtype}"
        if not folder.exists():
            example(name, getattr(torch, dtype)).model.save_pretrained(folder / "transformer")
        header = read_header(folder)
        return model_spec(header, recognise(header), dtype, dtype, stages)
    return spec


@pytest.fixture(scope="session")
def client():
    client = Client(("cpu", "cpu"))
    yield client
    client.close()


def layout(**degrees):
    return Layout(**{f"{name}_degree": value for name, value in degrees.items()})


def call_of(one):
    return Call(one.latent, one.timestep, one.conditioning)
