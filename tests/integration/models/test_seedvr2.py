"""SeedVR2 as a MODEL: the latents of ComfyUI's own KSampler from what Apply SeedVR2 Conditioning gives, in one step and
in several, with guidance and without; what is refused."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from tests.support.tolerances import close, relative_error
from tests.unit.checkpoints.test_header import write_header

KIND = "seedvr2"
TOLERANCE = 2e-5                           # relative, float32 on both sides
LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}),
           "tensor2": ("cpu,cpu", {"tensor": 2}), "ulysses2": ("cpu,cpu", {"ulysses": 2}),
           "ulysses2-tensor2": (",".join(["cpu"] * 4), {"ulysses": 2, "tensor": 2})}
SIZES = (((3, 6, 10), 1), ((1, 14, 4), 3), ((2, 8, 6), 2))     # frames, rows, columns; videos


def video(size, batch=1, seed=5):
    return {"samples": torch.randn(batch, 16, *size, generator=torch.Generator().manual_seed(seed))}


def prompts(model, latent):
    """As Apply SeedVR2 Conditioning gives them: of texts that are in the file, of other lengths."""
    from comfy_extras.nodes_seedvr import SeedVR2Conditioning
    return SeedVR2Conditioning.execute(model, latent).args


def sampled(comfyui, model, size, batch=1, given=None, **arguments):
    latent = video(size, batch)
    positive, negative = prompts(model, latent) if given is None else given
    return comfyui.sample(model, KIND, positive=positive, negative=negative, latent=latent, **arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latents_equal_native_ksampler(comfyui, layout):
    """One step without guidance, as it is mostly used; then with it."""
    devices, degrees = LAYOUTS[layout]
    model, native = comfyui.ours(KIND, comfyui.config(devices, **degrees)), comfyui.native(KIND)
    for size, batch in SIZES:
        for arguments in (*[{"steps": 1, "cfg": 1.0}] * ("cfg" not in degrees),
                          {"steps": 2, "cfg": 3.5, "sampler": "euler_ancestral"}):
            result = sampled(comfyui, model, size, batch, **arguments)

            want = sampled(comfyui, native, size, batch, **arguments)
            assert result.shape == want.shape and want.std() > 0.1
            close(result, want, TOLERANCE)


def test_each_layout_has_its_own_share_of_heads(comfyui):
    """One after the other on a model that workers hold."""
    native = comfyui.native(KIND)
    for layout in ("ulysses2", "cfg2", "ulysses2"):
        devices, degrees = LAYOUTS[layout]
        model = comfyui.ours(KIND, comfyui.config(devices, **degrees))

        close(*(sampled(comfyui, each, *SIZES[0], steps=1, cfg=3.5) for each in (model, native)), TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_of_one_length_equal_native_ksampler(comfyui, layout, monkeypatch):
    """Where ComfyUI evaluates both branches in one batch, its class gives the second one queries and keys of the first
    one's text: the latents are those of branches apart, as ComfyUI has them where memory is short."""
    devices, degrees = LAYOUTS[layout]
    model, native = comfyui.ours(KIND, comfyui.config(devices, **degrees)), comfyui.native(KIND)
    latent = video((3, 6, 10), 2)
    [[positive, options]], [[negative, _]] = prompts(native, latent)
    given = [[positive[:, :50], options]], [[negative[:, :50], options]]
    arguments = {"steps": 2, "cfg": 3.5, "given": given, "batch": 2}

    result = sampled(comfyui, model, (3, 6, 10), **arguments)

    together = sampled(comfyui, native, (3, 6, 10), **arguments)
    assert relative_error(together, result) > 100 * TOLERANCE
    monkeypatch.setattr("comfy.samplers.can_concat_cond", lambda one, other: one is other)
    close(result, sampled(comfyui, native, (3, 6, 10), **arguments), TOLERANCE)
    swapped = sampled(comfyui, native, (3, 6, 10), **arguments | {"given": given[::-1]})
    assert relative_error(swapped, result) > 100 * TOLERANCE


def test_the_video_and_the_text_of_the_file_are_given(comfyui):
    native, model = comfyui.native(KIND), comfyui.ours(KIND, comfyui.config("cpu"))
    latent = video((1, 4, 6))
    for theirs, ours in zip(prompts(native, latent), prompts(model, latent)):
        assert ours[0][0].dtype == theirs[0][0].dtype and torch.equal(ours[0][0], theirs[0][0])
        assert torch.equal(ours[0][1]["condition"], theirs[0][1]["condition"])

    one = sampled(comfyui, model, (1, 4, 6), steps=1, cfg=1.0)
    other = sampled(comfyui, model, (1, 4, 6), steps=1, cfg=1.0, given=prompts(model, video((1, 4, 6), seed=6)))
    assert relative_error(other, one) > 100 * TOLERANCE


def test_videos_of_a_batch_are_not_shared_out(comfyui):
    with pytest.raises(comfyui.errors.ConfigError, match="first text's queries and keys for all videos"):
        comfyui.ours(KIND, comfyui.config("cpu,cpu", data=2))


@pytest.mark.parametrize("degrees", [{"ring": 2}, {"displaced": 2}, {"pipefusion": 2}])
def test_methods_that_part_a_windows_tokens_are_refused_with_the_reason(comfyui, degrees):
    with pytest.raises(comfyui.errors.ConfigError, match="attends within windows of the full video"):
        comfyui.ours(KIND, comfyui.config("cpu,cpu", **degrees))


@pytest.mark.parametrize("what", ["Decode", "Encode"])
def test_its_vae_is_refused_by_name(comfyui, what, tmp_path):
    """With what to use instead; Run on all GPUs leaves VAE Decode as it is where the file is here."""
    from comfy.ldm.seedvr.vae import VideoAutoencoderKLWrapper
    with torch.device("meta"):
        vae = SimpleNamespace(first_stage_model=VideoAutoencoderKLWrapper(), throw_exception_if_invalid=lambda: None)
    given = {"samples": video((1, 4, 6))} if what == "Decode" else {"pixels": torch.zeros(1, 1, 32, 48, 3)}
    node = comfyui.vae_decode if what == "Decode" else comfyui.vae_encode

    with pytest.raises(comfyui.errors.UnsupportedError, match=f"^Use VAE {what} for this VAE .SeedVR2's.: "):
        node.execute(vae=vae, parallel=comfyui.config("cpu"), **given)
    write_header(tmp_path / "vae.safetensors", {
        name: tuple(tensor.shape) for name, tensor in vae.first_stage_model.state_dict().items()})
    check = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.server.vae_check")
    assert check.refused_vae("vae.safetensors", str(tmp_path / "vae.safetensors")).startswith(
        "The VAE in vae.safetensors (SeedVR2's) is not one of ")


def test_odd_sides_are_refused(comfyui):
    model = comfyui.ours(KIND, comfyui.config("cpu"))

    with pytest.raises(comfyui.errors.ConfigError, match="SeedVR2 takes latents with even sides"):
        sampled(comfyui, model, (1, 5, 6), steps=1, cfg=1.0)


def test_a_prompt_without_a_video_is_refused(comfyui):
    model = comfyui.ours(KIND, comfyui.config("cpu"))
    given = [[[torch.zeros(1, 58, 5120), {}]]] * 2

    with pytest.raises(comfyui.errors.ConfigError, match="Apply SeedVR2 Conditioning"):
        sampled(comfyui, model, (1, 4, 6), steps=1, cfg=1.0, given=given)
