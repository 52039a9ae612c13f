"""LTX-2's reference sound (ID-LoRA): tokens before the sound's own, without noise. Our MODEL makes what the native one
makes, with the node's call without the reference too."""

import types

import pytest
import torch

from tests.integration.models.test_video import audio
from tests.programs.model_nodes import model_nodes, run_node
from tests.support.tolerances import close, relative_error

TOLERANCE, LENGTH = 2e-5, 5


def audio_vae(turned=False):
    """What stands for the VAE: it encodes any sound as these numbers."""
    latent = torch.randn(1, 8, LENGTH, 16, generator=torch.Generator().manual_seed(4))
    return types.SimpleNamespace(audio_sample_rate=16000, encode=lambda wave: latent.flip(2) if turned else latent)


def sampled(comfyui, model, kind, latent, scale=1.5, **vae):
    nodes = model_nodes(comfyui)
    given = {"positive": comfyui.conditioning(kind, 1), "negative": comfyui.conditioning(kind, 2),
             "reference_audio": {"waveform": torch.zeros(1, 2, 1600), "sample_rate": 16000},
             "audio_vae": audio_vae(**vae), "identity_guidance_scale": scale, "start_percent": 0.0, "end_percent": 1.0}
    changed, positive, negative = run_node(nodes["LTXVReferenceAudio"], {"model": model, **given})[:3]
    return comfyui.sample(changed, kind, positive=positive, negative=negative, latent=latent)


def masked(comfyui, kind):
    """Of whose sound some stays."""
    model_nodes(comfyui)
    video = {"samples": comfyui.latent(kind)["samples"].unbind()[0]}
    join = comfyui.nodes.NODE_CLASS_MAPPINGS["LTXVConcatAVLatent"]
    return run_node(join, {"video_latent": video, "audio_latent": audio()})[0]


@pytest.mark.parametrize("kind, degrees", [
    ("ltx-2.3", {"ulysses": 2}), *(pytest.param(kind, degrees, marks=pytest.mark.slow) for kind, degrees in (
        ("ltx-2", {"cfg": 2}), ("ltx-2.3", {"ring": 2}), ("ltx-2.3", {"tensor": 2}), ("ltx-2.3", {"cfg": 2}),
        ("ltx-2.3", {"pipefusion": 2, "num_patches": 2, "warmup_steps": 100}),
        ("ltx-2.3", {"displaced": 2, "warmup_steps": 100})))], ids=str)
def test_a_reference_audio_equals_native_ksampler(comfyui, kind, degrees):
    latent, native = masked(comfyui, kind), comfyui.native(kind)

    result = sampled(comfyui, comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees)), kind, latent)

    want = sampled(comfyui, native, kind, latent)
    for ours, theirs, turned, without in zip(
            result.unbind(), want.unbind(), sampled(comfyui, native, kind, latent, turned=True).unbind(),
            comfyui.sample(native, kind, latent=latent).unbind(), strict=True):
        close(ours, theirs, TOLERANCE)
        assert min(relative_error(turned, theirs), relative_error(without, theirs)) > 50 * TOLERANCE


@pytest.mark.slow
def test_a_reference_audio_of_a_latent_without_audio_equals_native_ksampler(comfyui):
    latent = {"samples": comfyui.latent("ltx-2.3", batch=2)["samples"].unbind()[0]}

    result = sampled(comfyui, comfyui.ours("ltx-2.3", comfyui.config("cpu,cpu", data=2)), "ltx-2.3", latent, scale=0.0)

    close(result, sampled(comfyui, comfyui.native("ltx-2.3"), "ltx-2.3", latent, scale=0.0), TOLERANCE)


def test_a_reference_of_another_vae_is_refused(comfyui):
    positive = comfyui.conditioning("ltx-2.3", 1)
    positive[0][1]["ref_audio"] = {"tokens": torch.zeros(1, 4, 64)}

    with pytest.raises(comfyui.errors.ConfigError, match="^Encode the reference audio with LTX-2's audio VAE"):
        comfyui.sample(comfyui.ours("ltx-2.3", comfyui.config("cpu")), "ltx-2.3", positive=positive)
