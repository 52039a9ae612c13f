"""Distributed VAE Encode equals VAE Encode, for every VAE it takes."""

import pytest
import torch

from tests.support.tolerances import close

# kind, shape of the picture: sizes that are no multiple of the VAE's scale are cropped as VAE Encode crops them
CASES = [("vae-sd", (1, 64, 64, 3)), ("vae-sd", (2, 77, 100, 3)), ("vae-sd3", (1, 16, 40, 4)),
         ("vae-flux2", (1, 80, 50, 3)),
         ("vae-taesd", (2, 64, 50, 3)), ("vae-hunyuanimage", (2, 96, 64, 3)),
         ("vae-wan", (1, 48, 40, 3)), ("vae-wan", (9, 41, 56, 3)), ("vae-wan", (6, 24, 16, 4)),
         ("vae-wan22", (1, 48, 40, 3)),
         ("vae-wan22", (5, 33, 64, 3)), ("vae-ltx", (1, 64, 96, 3)), ("vae-ltx", (12, 100, 64, 3)),
         ("vae-hunyuan", (1, 40, 24, 3)),
         ("vae-hunyuan15", (10, 40, 35, 3)), ("vae-mochi", (9, 25, 40, 3)), ("vae-svd", (2, 24, 40, 3)),
         ("vae-hunyuan", (14, 24, 40, 3)), ("vae-cosmos", (1, 40, 24, 3)), ("vae-cosmos", (9, 33, 40, 3)),
         ("vae-cosmos", (14, 24, 16, 3)), ("vae-cogvideox", (1, 40, 24, 3)), ("vae-cogvideox", (9, 33, 40, 3)),
         ("vae-cogvideox", (12, 24, 40, 3)), ("vae-ltx095", (1, 64, 96, 3)),
         ("vae-ltx095", (17, 96, 70, 3))]


def image(shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(2))


def vae_with_encoder(vae_of, kind):
    return vae_of(kind, **({"encoder": True} if kind in ("vae-sd", "vae-sd3", "vae-flux2") else {}))


@pytest.mark.parametrize("kind, shape, devices", [
    *(pytest.param(*case, "cpu,cpu", marks=[] if case[1][0] < 9 else pytest.mark.slow) for case in CASES),
    *(pytest.param(*case, "cpu,cpu,cpu", marks=pytest.mark.slow) for case in (
        ("vae-sd", (2, 77, 100, 3)), ("vae-wan", (9, 41, 56, 3))))], ids=str)
def test_latents_equal_native_vae_encode(comfyui, vae_of, kind, devices, shape):
    vae = vae_with_encoder(vae_of, kind)
    with torch.inference_mode():
        want = comfyui.nodes.VAEEncode().encode(vae, image(shape))[0]["samples"]
        latent = comfyui.vae_encode.execute(image(shape), vae, comfyui.config(devices)).args[0]["samples"]

    assert latent.shape == want.shape and latent.dtype == want.dtype
    close(latent, want, 2e-5)
    assert want.std() > 0.01


@pytest.mark.slow
def test_decoder_and_encoder_are_on_the_workers_side_by_side(comfyui, vae_of):
    vae, config = vae_with_encoder(vae_of, "vae-wan"), comfyui.config("cpu,cpu")

    latent = comfyui.vae_encode.execute(image((5, 32, 32, 3)), vae, config).args[0]["samples"]
    video = comfyui.vae_decode.execute({"samples": latent}, vae, config).args[0]

    with torch.inference_mode():
        want = comfyui.nodes.VAEDecode().decode(vae, comfyui.nodes.VAEEncode().encode(vae, image((5, 32, 32, 3)))[0])[
            0]
    assert video.shape == (5, 32, 32, 3)
    close(video, want, 1e-4)


def test_a_image_smaller_than_a_latents_row_is_refused(comfyui, vae_of):
    with pytest.raises(comfyui.errors.UnsupportedError, match="at least 8 x 8 pixels"):
        comfyui.vae_encode.execute(image((1, 7, 30, 3)), vae_with_encoder(vae_of, "vae-wan"),
                                   comfyui.config("cpu,cpu"))


def test_other_vaes_are_refused_by_name(comfyui, vae_of):
    import copy

    import comfy.ldm.cascade.stage_a
    vae = copy.copy(vae_of("vae-sd3"))
    vae.first_stage_model = comfy.ldm.cascade.stage_a.StageA()

    with pytest.raises(comfyui.errors.UnsupportedError, match="^Use VAE Encode for this VAE .StageA"):
        comfyui.vae_encode.execute(image((1, 32, 32, 3)), vae, comfyui.config("cpu,cpu"))
