"""A ComfyUI whose classes differ from those that the pack was written for gives ComfyUI's own result, or a sentence
before sampling."""

import importlib

import pytest
import torch

from tests.integration.conftest import in_parts
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


@pytest.mark.parametrize("layout", [{}, {"ulysses": 2}, {"tensor": 2}, {"pipefusion": 2, "warmup_steps": 2},
                                    *(pytest.param(each, marks=pytest.mark.slow) for each in (
                                        {"cfg": 2}, {"data": 2}, {"ring": 2}))], ids=str)
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


def newer(family, what):
    return (r"^Update xDiT, or use Load Diffusion Model: this ComfyUI \([\d.]+\) is newer than the pack knows, and in "
            f"its model of {family} {what}")


def test_a_new_key_of_a_payload_is_named(comfyui, monkeypatch):
    from comfy import conds, model_base
    native = model_base.MiniMaxH3.extra_conds

    def extra_conds(self, **kwargs):
        out = native(self, **kwargs)
        out["minimax_payload"] = conds.CONDConstant(out["minimax_payload"].cond | {"tempo": 2.0})
        return out
    monkeypatch.setattr(model_base.MiniMaxH3, "extra_conds", extra_conds)
    latent = {"samples": in_parts(torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 3))}

    with pytest.raises(comfyui.errors.UnsupportedError, match=newer(
            "MiniMax H3", "the conditioning has minimax_payload.tempo, which xDiT does not read")):
        comfyui.sample(comfyui.ours("minimax-h3", comfyui.config()), "minimax-h3", latent=latent,
                       positive=[[torch.zeros(1, 5, 24), {}]], negative=[[torch.zeros(1, 5, 24), {}]])


@pytest.mark.parametrize("is_read", [True, False])
def test_new_conditioning_is_comfyuis_where_its_model_reads_it(comfyui, monkeypatch, is_read):
    """Else a node has added it."""
    import comfy.ldm.modules.diffusionmodules.mmdit as mmdit
    from comfy import conds, model_base
    native, native_forward = model_base.SD3.extra_conds, mmdit.OpenAISignatureMMDITWrapper.forward
    monkeypatch.setattr(model_base.SD3, "extra_conds", lambda self, **kwargs: native(self, **kwargs) | {
        "tempo": conds.CONDConstant(2.0)})
    if is_read:
        def forward(self, x, timesteps, context=None, tempo=None, **kwargs):
            return native_forward(self, x, timesteps, context, **kwargs)
        forward.__module__ = mmdit.__name__
        monkeypatch.setattr(mmdit.OpenAISignatureMMDITWrapper, "forward", forward)
    words = (newer("SD3", "the conditioning has tempo") if is_read
             else "^Remove the node that adds tempo to the conditioning")

    with pytest.raises(comfyui.errors.UnsupportedError, match=words):
        comfyui.sample(comfyui.ours("sd3", comfyui.config()), "sd3", steps=1)


def keys_of_nodes(comfyui, source):
    return importlib.import_module(
        f"{comfyui.pack.__name__}.nodes.bridge.compatibility.comfyui_version").keys_of_nodes(source)


def test_keys_that_a_node_sets_are_read_from_the_source(comfyui):
    source = """
class Model(BaseModel):
    def extra_conds(self, **kwargs):
        out = super().extra_conds(**kwargs)
        noise, payload = kwargs.get("noise", None), {}
        if noise is not None and kwargs["device"] is not None:
            out["of every call"] = noise
        mask = kwargs.get("mask", None)
        if mask is not None:
            out["mask"] = mask
            if noise.ndim == 4:
                out["mask of images"] = mask
        adm = self.encode_adm(**kwargs)
        if adm is not None:
            out["y"] = adm
        for reference in kwargs.get("references", ()):
            payload["references"] = reference
        if "time" in kwargs:
            pass
        else:
            out["other"] = 1
        out["rate"], out["payload"] = kwargs.get("rate", 25), payload
        out["rate"] = kwargs.get("rate", 25)
        return out

    def encode_adm(self, **kwargs):
        if kwargs.get("size"):
            kwargs["no conditioning"] = 1
"""

    assert keys_of_nodes(comfyui, source) == {"mask", "mask of images", "y", "references", "other"}


def test_keys_that_nodes_of_this_comfyui_set_are_found(comfyui):
    import inspect

    import comfy.model_base
    found = keys_of_nodes(comfyui, inspect.getsource(comfy.model_base))

    assert found >= {
        "attention_mask", "clip_fea", "context_latents", "guidance", "guiding_frame_index", "local_add_cond",
        "audio_cond_noise_aug", "visual_cond_noise_aug", "ref_audio", "ref_contexts", "ref_latent", "ref_latents",
        "ref_mask_flag", "ref_mask_latents", "reference_latent", "sam_latents", "siglip_feats", "time_context",
        "time_dim_concat", "time_dim_replace", "txt_byt5", "y"}
    assert not found & {"num_video_frames", "frame_rate", "effnet", "minimax_payload"}


@pytest.mark.parametrize("name", ["FLOW_AV", "FLOW_OF_TOMORROW"])
def test_a_model_type_that_the_family_does_not_know_is_rejected_when_it_is_loaded(comfyui, monkeypatch, name):
    from types import SimpleNamespace

    from comfy import supported_models
    native = supported_models.SD3.get_model

    def get_model(self, *args, **kwargs):
        model = native(self, *args, **kwargs)
        model.model_type = SimpleNamespace(name=name)
        return model
    monkeypatch.setattr(supported_models.SD3, "get_model", get_model)

    with pytest.raises(comfyui.errors.UnsupportedError, match=newer("SD3", f"the model type is {name}")):
        comfyui.ours("sd3", comfyui.config())


def carried(native):
    """MiniMaxH3Model.forward of ComfyUI 0.31, around that of 0.30 without the slope."""
    def forward(self, x, timestep, context, transformer_options={}, minimax_payload=None, **kwargs):
        from comfy.ldm.minimax import model
        scale = minimax_payload["audio_scale"]
        of_video, of_audio = self.sigma_shift_video, self.sigma_shift_audio
        sigma = (timestep.flatten()[0] / 1000).float().clamp(min=1e-6)
        sigma_audio = model.time_shift_sigma(sigma, of_video, of_audio)
        audio = x[1] * (sigma_audio / sigma if scale != 1 else 1)
        out = native(self, [x[0], audio], timestep, context, transformer_options, minimax_payload, **kwargs)
        velocity = out[1] / model.time_shift_slope(sigma, of_video, of_audio)
        out[1] = (1 - scale) * audio + (1 + (scale - 1) * sigma_audio) * velocity
        return out
    return forward


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_audio_that_the_sampler_scales_equals_native(comfyui, monkeypatch, scale):
    """As ComfyUI 0.31 and newer scale MiniMax H3's, on an older one whose class is changed to."""
    from comfy import conds, model_base
    from comfy.ldm.minimax.model import MiniMaxH3Model
    if "audio_scale" in vars(model_base.MiniMaxH3):
        pytest.skip("this ComfyUI does so itself: tests/integration/models/test_minimax.py")
    native = model_base.MiniMaxH3.extra_conds

    def extra_conds(self, **kwargs):
        out = native(self, **kwargs)
        out["minimax_payload"] = conds.CONDConstant(out["minimax_payload"].cond | {"audio_scale": scale})
        return out
    generator = torch.Generator().manual_seed(1)
    prompts = {name: [[torch.randn(1, 5, 24, generator=generator), {}]] for name in ("positive", "negative")}
    latent = {"samples": in_parts(torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 3))}
    run = {"steps": 2, "latent": latent, **prompts}
    before = comfyui.sample(comfyui.native("minimax-h3"), "minimax-h3", **run).unbind()
    monkeypatch.setattr(model_base.MiniMaxH3, "extra_conds", extra_conds)
    ours = comfyui.sample(comfyui.ours("minimax-h3", comfyui.config()), "minimax-h3", **run).unbind()
    monkeypatch.setattr(MiniMaxH3Model, "forward", carried(MiniMaxH3Model.forward))

    want = comfyui.sample(comfyui.native("minimax-h3"), "minimax-h3", **run).unbind()

    for part, of_native in zip(ours, want, strict=True):
        close(part, of_native, 1e-4)
    assert relative_error(want[1], before[1]) > 1e-2
