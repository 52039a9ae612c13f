"""An autoencoder that runs as ComfyUI's own class is compared with ComfyUI's VAE before it runs: where ComfyUI has
changed it, the node says so."""

import functools
import importlib

import pytest
import torch

from tests.integration.vae.test_vae_decode import fill, latents


@pytest.fixture
def check(comfyui, tmp_path):
    """The module, for a user who has compared nothing yet."""
    former = comfyui.folder_paths.get_user_directory()
    comfyui.folder_paths.set_user_directory(str(tmp_path))
    yield importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.vae.vae_class_check")
    comfyui.folder_paths.set_user_directory(former)


@pytest.fixture
def taehv(comfyui):
    import comfy.sd
    import comfy.taesd.taehv
    model = comfy.taesd.taehv.TAEHV(latent_channels=16)
    fill(model, torch.Generator().manual_seed(1))
    return comfy.sd.VAE(sd=model.state_dict(), metadata={"tae_latent_channels": 16})


def decode(comfyui, vae, kind):
    samples = (torch.randn(1, 16, 3, 5, 4) if kind == "taehv" else latents(kind, 1, 2, 3, 4))
    return comfyui.vae_decode.execute({"samples": samples}, vae, comfyui.config()).args[0]


def test_a_class_is_compared_once(comfyui, vae_of, taehv, check, monkeypatch, tmp_path):
    kind_of = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.vae.vae_detection").kind_of
    vaes = [vae_of("vae-minimax"), taehv]
    for vae in vaes:
        check.check_vae_class(vae, kind_of(vae.first_stage_model))
    monkeypatch.setattr(check, "_difference", None)            # nothing is compared again
    for vae in vaes:
        check.check_vae_class(vae, kind_of(vae.first_stage_model))

    assert len([*(tmp_path / "xdit" / "classes").iterdir()]) == 2


def raised(message):
    def method(self, *args, **kwargs):
        raise TypeError(message)
    return method


MUTANTS = {
    "range of pixels": ("vae-minimax", "decode", lambda native: lambda self, *args, **kwargs: native(
        self, *args, **kwargs) * 0.5 + 0.5, "gives a image of numbers from"),
    "frames of an image": ("vae-minimax", "decode", lambda native: lambda self, *args, **kwargs: native(
        self, *args, **kwargs)[:, :, 1:], "gives a image of shape"),
    "frames of a latent": ("vae-minimax", "encode", lambda native: lambda self, *args, **kwargs: native(
        self, *args, **kwargs)[:, :, 1:], "gives a latent of shape"),
    "an argument": ("vae-minimax", "decode", lambda native: raised("decode() missing 1 required argument"), "fails"),
    "a method that is gone": ("vae-minimax", "_decode_pixels", lambda native: None, "fails in a test"),
    "a tile": ("vae-minimax", "_decode_pixels", lambda native: lambda self, *args: native(self, *args)[..., 1:],
               "fails in a test|a tile of its VAE has the shape"),
    "frames of TAEHV": ("taehv", "decode", lambda native: lambda self, *args, **kwargs: native(
        self, *args, **kwargs)[:, :, 2:], "gives a image of shape")}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_changed_class_is_rejected_before_it_runs(comfyui, vae_of, taehv, check, monkeypatch, mutant):
    kind, method, change, words = MUTANTS[mutant]
    vae = taehv if kind == "taehv" else vae_of(kind)
    native, cls = getattr(type(vae.first_stage_model), method), type(vae.first_stage_model)
    changed = change(native)
    if changed is None:
        monkeypatch.delattr(cls, method)
    else:
        monkeypatch.setattr(cls, method, functools.wraps(native)(changed))
    if mutant == "range of pixels":                            # from [-1, 1] to [0, 1], or from that to [-1, 1]
        is_signed = not hasattr(cls, "decode_output_shape")
        monkeypatch.setattr(vae, "process_output", lambda image: image if is_signed else image.add_(1.0).div_(2.0))

    with pytest.raises(comfyui.errors.UnsupportedError, match="^Update xDiT, or use VAE Decode and VAE Encode: this "
                       rf"ComfyUI \([\d.]+\) is newer than the pack knows, and in its model of .*({words})"):
        decode(comfyui, vae, kind)


def test_a_changed_output_of_comfyuis_vae_is_rejected(comfyui, taehv, check):
    """Whose process_output makes [0, 1] of what the class gives."""
    taehv.process_output = lambda image: image.add_(1.0).div_(2.0)

    with pytest.raises(comfyui.errors.UnsupportedError, match="gives a image of numbers from"):
        decode(comfyui, taehv, "taehv")
