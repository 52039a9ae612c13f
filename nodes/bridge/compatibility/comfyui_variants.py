"""Variants of ComfyUI's own classes that compute differently, detected so that the workers' classes follow.

A variant is detected by what ComfyUI's class computes, not by the version number."""

import functools

import torch

import comfy.ops
from comfy.ldm.lightricks import av_model

from ....xdit_backend.models.ltx2_block import AGAIN
from .comfyui_version import newer_comfyui
from .weight_creation import weights_at_construction

WIDTH, TOKENS = 8, 3                       # of the block that is computed


def variant_of(family):
    """Return {conditioning: tensor} that tells the family's workers which version of ComfyUI's class to compute as."""
    return {AGAIN: torch.zeros(1)} if AGAIN in family.inputs.conditioning and _norms_video_again() else {}


def constants_of(base_model):
    """Arguments that ComfyUI's BaseModel adds to every call, and without which its class computes something else."""
    # MiniMax H3's, from 0.31 on; 1 where the latent is the video alone
    return {"minimax_payload": {"audio_scale": 4.0}} if hasattr(type(base_model), "audio_scale") else {}


class _Recorder(torch.nn.Module):
    """An attention that returns a constant and records its inputs."""

    def __init__(self, value):
        super().__init__()
        self.value, self.seen, self.context = value, None, None

    def forward(self, x, context=None, **options):
        self.seen, self.context = x.clone(), None if context is None else context.clone()
        return torch.full_like(x, self.value) * torch.arange(1, x.shape[-1] + 1)


@functools.cache
def _norms_video_again():
    """Return whether video-to-audio attention of ComfyUI's LTX-2 reads the video after audio-to-video attention was
    added, as from 0.31 on. Raises UnsupportedError if it reads neither that video nor the one from before."""
    try:
        with torch.no_grad():
            before, after, read = _video_of_block()
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError, KeyError) as error:
        raise newer_comfyui("LTX-2", f"its block of video and audio fails in a test ({error})") from error
    found = [torch.allclose(read, video, rtol=1e-3, atol=1e-3) for video in (before, after)]
    if found not in ([True, False], [False, True]):
        raise newer_comfyui("LTX-2", "its attention from video to audio reads another video")
    return found[1]


def _video_of_block():
    """Return the video before and after audio-to-video attention, normed, and the input of video-to-audio attention."""
    with weights_at_construction():
        block = av_model.BasicAVTransformerBlock(WIDTH, WIDTH, 1, 1, WIDTH, WIDTH, WIDTH, WIDTH, dtype=torch.float32,
                                                 device="cpu", operations=comfy.ops.disable_weight_init)
    for parameter in block.parameters():
        parameter.zero_()
    recorders = {name: _Recorder(float(name == "audio_to_video_attn"))
                 for name in ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn",
                              "video_to_audio_attn")}
    for name, recorder in recorders.items():
        setattr(block, name, recorder)
    video = torch.arange(TOKENS * WIDTH, dtype=torch.float32).view(1, TOKENS, WIDTH).sin()
    times = {f"{kind}_{name}": torch.full((1, 1, count * WIDTH), value) for kind in "va"
             for name, count, value in (("timestep", 6, 0.0), ("cross_scale_shift_timestep", 4, 0.0),
                                        ("cross_gate_timestep", 1, 1.0))}
    block((video.clone(), video.cos()), v_context=video, a_context=video, transformer_options={}, **times)
    added = recorders["audio_to_video_attn"](video)
    return *(torch.nn.functional.rms_norm(each, (WIDTH,), eps=1e-6) for each in (video, video + added)), recorders[
        "video_to_audio_attn"].context
