"""Upscale models are loaded from the tensors of a loaded one as from their file, or rejected by name."""

import pytest
import torch

from tests.support.upscale_models import compact, esrgan
from xdit_backend.checkpoints.build_upscaler import facts_of, load_upscaler
from xdit_backend.protocol.errors import UnsupportedError

spandrel = pytest.importorskip("spandrel")
# architectures whose class has defaults of a small model
SMALL = ["Compact", "SwiftSRGAN", "OmniSR", "CRAFT", "DITN", "DCTLSA", "ATD", "SeemoRe", "MixDehazeNet", "HVICIDNet"]


def loaded(tensors):
    return spandrel.ModelLoader().load_from_state_dict(dict(tensors)).eval()


def assert_same(model, size=32):
    again = load_upscaler(model.model.state_dict(), facts_of(model))
    image = torch.rand(1, model.input_channels, size, size, generator=torch.Generator().manual_seed(1))

    assert torch.equal(again(image), model(image))


@pytest.mark.parametrize("file", [esrgan(4), esrgan(2), esrgan(1), compact(2), compact(4, num_convs=3)],
                         ids=["esrgan-4x", "esrgan-2x", "esrgan-1x", "compact-2x", "compact-4x"])
def test_published_formats_are_loaded_again(file):
    [tensors] = file.values()
    assert_same(loaded(tensors))


@pytest.mark.parametrize("name", SMALL)
def test_architectures_are_loaded_again(name):
    architecture = spandrel.MAIN_REGISTRY[name].architecture
    module = __import__(type(architecture).__module__, fromlist=["_"])
    [network] = {cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, torch.nn.Module)}
    torch.manual_seed(1)
    assert_same(loaded(network().state_dict()))


def test_tensors_of_no_upscale_model_are_rejected():
    facts = facts_of(loaded(compact()["params"]))
    with pytest.raises(UnsupportedError, match=r"^Use Upscale Image \(using Model\) for this upscale model: spandrel "
                                               "cannot load it from its tensors"):
        load_upscaler({"weight": torch.zeros(1)}, facts)


@pytest.mark.parametrize("fact, text", [("scale", "3"), ("class", "other.Net"), ("layers", ""),
                                        ("hyperparameters", "{}")])
def test_another_model_of_the_same_tensors_is_rejected(fact, text):
    tensors = compact()["params"]
    with pytest.raises(UnsupportedError, match=f"its {fact} differ from those of a Compact model"):
        load_upscaler(tensors, facts_of(loaded(tensors)) | {fact: text})
