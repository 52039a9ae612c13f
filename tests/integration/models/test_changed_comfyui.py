"""A ComfyUI whose classes differ from those that the pack was written for gives ComfyUI's own result, or a sentence
before sampling."""

import importlib

import pytest

from tests.support.mutations import mutate
from tests.support.tolerances import close, relative_error


@pytest.fixture(autouse=True)
def variants(comfyui):
    """The module that recognises versions of ComfyUI, which looks once a process."""
    module = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.compatibility.comfyui_variants")
    module._norms_video_again.cache_clear()
    yield module
    module._norms_video_again.cache_clear()


def sampled(comfyui, model, kind):
    return comfyui.sample(model, kind, steps=2).unbind()


AFTER_AUDIO = "ax_scaled = ax_norm3 * (1 + scale_ca_audio_hidden_states_v2a)"


@pytest.mark.parametrize("layout", [{}, {"ulysses": 2}])
def test_ltx2_norms_the_video_again_where_comfyui_does(comfyui, monkeypatch, layout):
    """As ComfyUI 0.31 does, before its video-to-audio attention."""
    from comfy.ldm.lightricks import av_model
    before = comfyui.reference("ltx-2", steps=2).unbind()
    if "vx_norm3" not in av_model.BasicAVTransformerBlock.forward.__code__.co_varnames:
        pytest.skip("this ComfyUI does so itself: tests/integration/models/test_video.py")
    mutate(monkeypatch, av_model.BasicAVTransformerBlock, "forward", AFTER_AUDIO,
           f"vx_norm3 = comfy.ldm.common_dit.rms_norm(vx); {AFTER_AUDIO}")

    want = sampled(comfyui, comfyui.native("ltx-2"), "ltx-2")
    result = sampled(comfyui, comfyui.ours("ltx-2", comfyui.config("cpu,cpu" if layout else "cpu", **layout)), "ltx-2")

    for part, of_native in zip(result, want, strict=True):
        close(part, of_native, 1e-4)
    assert relative_error(want[1], before[1]) > 1e-3


def test_ltx2_is_rejected_where_its_block_reads_another_video(comfyui, monkeypatch):
    from comfy.ldm.lightricks import av_model
    mutate(monkeypatch, av_model.BasicAVTransformerBlock, "forward", AFTER_AUDIO,
           f"vx_norm3 = vx = vx * 0.5 + 1; {AFTER_AUDIO}")

    with pytest.raises(comfyui.errors.UnsupportedError, match=r"^Update xDiT, or use Load Diffusion Model: this "
                       r"ComfyUI \([\d.]+\) is newer than the pack knows, and in its model of LTX-2 its attention"):
        sampled(comfyui, comfyui.ours("ltx-2", comfyui.config()), "ltx-2")
