"""What the cost model knows of a family's model is what its config says:
sizes of published models, and every family's tiny one."""

import inspect

import diffusers
import pytest
import torch

from tests.support.tolerances import within
from xdit_backend.checkpoints.build_transformer import build_empty
from xdit_backend.checkpoints.model_dims import dims_of, job_of
from xdit_backend.models import FAMILIES
from xdit_backend.tools.bench.published_runs import MODELS


def usual_config(family):
    """Of a class of diffusers: most classes' defaults are the published model's."""
    arguments = inspect.signature(getattr(diffusers, family.transformer).__init__).parameters
    return {name: argument.default for name, argument in arguments.items()
            if argument.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("name, published, sums", [
    ("Flux.1", "flux.1-dev", (2 * 19 + 38) / 57), ("PixArt-Sigma", "pixart-alpha", 3),
    ("HunyuanVideo", "hunyuanvideo", (2 * 20 + 40) / 60),
    ("Qwen-Image", "qwen-image", 2), ("Wan", "wan2.1-14b", 3)])
def test_published_sizes(name, published, sums):
    """sums: of docs/design/tensor.md."""
    dims, known = dims_of(FAMILIES[name], build_empty(FAMILIES[name], usual_config(FAMILIES[name]))), MODELS[published]

    assert (dims.blocks, dims.width, dims.heads, dims.joint) == (known.blocks, known.width, known.heads, known.joint)
    within(abs(dims.sums - sums), 1e-12)
    within(abs(dims.elements / known.elements - 1), 0.01)
    within(abs(dims.parameters / known.parameters - 1), 0.01)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.plan.is_unet])
def test_every_family_has_a_net(name):
    family = FAMILIES[name]
    dims = dims_of(family, build_empty(family, family.testing.config))

    assert dims.blocks > 0 and dims.width > 0 and 0 < dims.key_heads <= dims.heads and dims.elements > 1


@pytest.mark.parametrize("name, shape, expected", [
    ("Stable Audio Open", (1, 8, 100), 101), ("Stable Audio 3", (1, 8, 100), 164),
    ("ACE-Step 1.0", (1, 8, 16, 100), 100)])
def test_tokens_of_a_models_own_are_among_those_of_a_job(name, shape, expected):
    """They pass the blocks as the sound's do; text that is read by cross-attention does not."""
    family = FAMILIES[name]
    dims = dims_of(family, build_empty(family, family.testing.config))

    job = job_of(family, dims, shape, {"context": torch.empty(1, 7, 1, device="meta")}, 20)

    assert (job.tokens, job.text) == (expected, 7)
