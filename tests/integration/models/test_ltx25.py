"""LTX-2.5 equals ComfyUI's own: LTX-2 without biases in feed-forwards, and with a marker of single frames."""

import inspect

import pytest
import torch

from tests.integration.conftest import DEGREES
from tests.support import tiny_checkpoints
from tests.support.tiers import by_default
from tests.support.tolerances import close, relative_error

KIND = "ltx-2.5"
CHANGED = {"ff_bias": False, "audio_ff_bias": False, "use_keyframes_abs_pos_embedding": True}
LAYOUTS = {"one": {}, "cfg2": {"cfg": 2}, "data2": {"data": 2}, "ulysses2": {"ulysses": 2}, "ring2": {"ring": 2},
           "tensor2": {"tensor": 2}, "stages2": {"pipefusion": 2, "warmup_steps": 9},
           "displaced2": {"displaced": 2, "warmup_steps": 9}}


@pytest.fixture(autouse=True)
def variant(comfyui, monkeypatch):
    from comfy.ldm.lightricks import av_model
    if "ff_bias" not in inspect.signature(av_model.LTXAVModel).parameters:
        pytest.skip("ComfyUI has LTX-2.5 from 0.32.0 on")
    monkeypatch.setitem(tiny_checkpoints.VARIANTS, KIND, ("ltx-2", CHANGED))
    monkeypatch.setattr(tiny_checkpoints, "SAID", (*tiny_checkpoints.SAID, KIND))


def sampled(comfyui, model, batch=1, **options):
    """options: of the conditioning."""
    prompts = {name: [[tokens, of_text | options] for tokens, of_text in comfyui.conditioning("ltx-2", seed)]
               for name, seed in (("positive", 1), ("negative", 2))}
    return comfyui.sample(model, KIND, steps=2, latent=comfyui.latent("ltx-2", batch), **prompts).unbind()


def keyframes(comfyui, first, count):
    """As ComfyUI's nodes record slots for keyframes that are generated."""
    size = comfyui.latent("ltx-2")["samples"].unbind()[0].shape[3:].numel()
    return {"generated_keyframes": {"tokens_per_frame": size, "first_latent_frame": first, "num_keyframes": count}}


@pytest.mark.parametrize("layout", by_default({"one", "ulysses2", "tensor2"}, list(LAYOUTS)))
def test_generated_keyframes_equal_native(comfyui, layout):
    degrees, marked = LAYOUTS[layout], keyframes(comfyui, 1, 1)
    ours = comfyui.ours(KIND, comfyui.config("cpu,cpu" if set(degrees) & set(DEGREES) else "cpu", **degrees))
    batch = 2 if layout == "data2" else 1

    result, want = (sampled(comfyui, model, batch, **marked) for model in (ours, comfyui.native(KIND)))

    for part, of_native in zip(result, want, strict=True):
        close(part, of_native, 1e-4)
    assert relative_error(want[0], sampled(comfyui, comfyui.native(KIND), batch)[0]) > 1e-3


def test_without_keyframes_the_first_frame_alone_is_marked(comfyui):
    model = comfyui.native(KIND)
    want = sampled(comfyui, model)

    for part, of_native in zip(sampled(comfyui, comfyui.ours(KIND, comfyui.config())), want, strict=True):
        close(part, of_native, 1e-4)
    marker = model.model.diffusion_model.keyframes_abs_pos_embedding
    before = marker.detach().clone()
    try:
        with torch.no_grad():
            marker.zero_()
        assert relative_error(want[0], sampled(comfyui, model)[0]) > 1e-3
    finally:
        with torch.no_grad():
            marker.copy_(before)


def test_keyframes_of_another_size_are_rejected(comfyui):
    model, marked = comfyui.ours(KIND, comfyui.config()), keyframes(comfyui, 1, 1)
    marked["generated_keyframes"]["tokens_per_frame"] += 1

    with pytest.raises(comfyui.errors.ConfigError, match="^Separate the generated keyframes before"):
        sampled(comfyui, model, **marked)
