"""MiniMax H3's VAE through Distributed VAE Decode and Encode is VAE Decode and Encode to the bit: devices share its
tiles."""

import copy
import re

import pytest
import torch

KIND = "vae-minimax"
# batch, frames, rows and columns of the latent; tiles are of 4 x 4: a picture, three pieces, frames that fill no piece
LATENTS = [(1, 1, 7, 6), (1, 12, 5, 4), (2, 3, 4, 9), (1, 2, 1, 1)]
# frames, height, width: those that are no multiple of 16 are cropped, and 18 frames fill two pieces
PICTURES = [(1, 100, 81), (18, 64, 80), (3, 32, 40)]


@pytest.fixture(scope="module", autouse=True)
def attention_as_on_workers(comfyui):
    """Without a GPU ComfyUI's own process has another, which rounds otherwise."""
    import comfy.ldm.minimax.vae as minimax
    from comfy.ldm.modules.attention import attention_pytorch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimax, "optimized_attention", attention_pytorch)
        yield


def latents(shape):
    batch, *sizes = shape
    return {"samples": torch.randn(batch, 24, *sizes, generator=torch.Generator().manual_seed(1))}


def image(shape):
    return torch.rand(*shape, 3, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("shape, devices", [*((shape, "cpu,cpu") for shape in LATENTS), (LATENTS[1], "cpu,cpu,cpu"),
                                            (LATENTS[0], "cpu")], ids=str)
def test_images_are_vae_decodes_to_the_bit(comfyui, vae_of, shape, devices):
    with torch.inference_mode():
        want = comfyui.nodes.VAEDecode().decode(vae_of(KIND), latents(shape))[0]
    result = comfyui.vae_decode.execute(latents(shape), vae_of(KIND), comfyui.config(devices)).args[0]

    assert result.dtype == want.dtype and want.std() > 0.01
    if shape[0] == 1:
        assert torch.equal(result, want)
    else:                                                      # whose batches ComfyUI decodes at once
        torch.testing.assert_close(result, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", PICTURES, ids=str)
def test_latents_are_vae_encodes_to_the_bit(comfyui, vae_of, shape):
    with torch.inference_mode():
        want = comfyui.nodes.VAEEncode().encode(vae_of(KIND), image(shape))[0]["samples"]
    result = comfyui.vae_encode.execute(image(shape), vae_of(KIND), comfyui.config("cpu,cpu")).args[0]["samples"]

    assert torch.equal(result, want) and want.std() > 0.01


def test_tiles_are_as_large_as_the_vae_says(comfyui, vae_of):
    """Another node may have set it."""
    vae = copy.copy(vae_of(KIND))
    vae.first_stage_model = copy.deepcopy(vae.first_stage_model)
    vae.patcher = vae.patcher.clone()
    vae.patcher.model, vae.first_stage_model.tile_size = vae.first_stage_model, 96
    with torch.inference_mode():
        want, other = (comfyui.nodes.VAEDecode().decode(each, latents(LATENTS[0]))[0] for each in (vae, vae_of(KIND)))

    result = comfyui.vae_decode.execute(latents(LATENTS[0]), vae, comfyui.config("cpu,cpu")).args[0]

    assert torch.equal(result, want) and not torch.equal(want, other)


def test_the_file_is_run_in_half_precision_as_comfyui_runs_it(comfyui):
    """Tables that are in no file are in it too."""
    import comfy.sd
    import comfy.utils

    from tests.support.tiny_checkpoints import thin_class
    tensors = comfy.utils.load_torch_file(str(comfyui.base / "vae" / comfyui.file(KIND, "vae")))
    with thin_class(KIND):
        vae = comfy.sd.VAE(sd=tensors, dtype=torch.float16)

    result = comfyui.vae_decode.execute(latents(LATENTS[0]), vae, comfyui.config("cpu,cpu")).args[0]

    with torch.inference_mode():
        assert torch.equal(result, comfyui.nodes.VAEDecode().decode(vae, latents(LATENTS[0]))[0])


def test_a_image_that_reflection_cannot_pad_is_refused(comfyui, vae_of):
    """ComfyUI's own node ends in an error of torch's."""
    with torch.inference_mode(), pytest.raises(RuntimeError, match="[Pp]adding"):
        comfyui.nodes.VAEEncode().encode(vae_of(KIND), image((1, 16, 64)))
    with pytest.raises(comfyui.errors.UnsupportedError, match="at least 32 x 32 pixels"):
        comfyui.vae_encode.execute(image((1, 16, 64)), vae_of(KIND), comfyui.config("cpu,cpu"))


def test_a_cancelled_decode_is_left_between_tiles_and_the_next_is_right(comfyui, vae_of, said):
    given, config = latents((1, 12, 7, 8)), comfyui.config("cpu,cpu")
    first = comfyui.vae_decode.execute(given, vae_of(KIND), config).args[0].clone()
    client = comfyui.groups.client(("cpu", "cpu"))

    with comfyui.cancelled_amid("decoding"):
        comfyui.vae_decode.execute(given, vae_of(KIND), config)

    assert re.fullmatch(r"cancelled, decoding \d+ of \d+", said[-1])
    assert torch.equal(comfyui.vae_decode.execute(given, vae_of(KIND), config).args[0], first)
    assert client.group.segments.names() == []
