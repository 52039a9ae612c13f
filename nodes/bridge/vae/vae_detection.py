"""ComfyUI's VAEs: how each class is recognised, of which family it is, and what happens to a latent outside the
network.

Used by distributed_vae.py. A family that ComfyUI gains is one entry here beside its file in xdit_backend/autoencoders.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange

import comfy.ldm.cogvideo.vae
import comfy.ldm.cosmos.vae
import comfy.ldm.genmo.vae.model
import comfy.ldm.hunyuan_video.vae
import comfy.ldm.hunyuan_video.vae_refiner
import comfy.ldm.lightricks.vae.causal_video_autoencoder as ltx
import comfy.ldm.minimax.vae
import comfy.ldm.models.autoencoder as autoencoder
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.taesd.taehv
import comfy.taesd.taesd
from comfy.ldm.modules import temporal_ae
from comfy.ldm.modules.diffusionmodules.model import Decoder

from ....xdit_backend.autoencoders import FAMILIES, minimax_h3
from ....xdit_backend.autoencoders.vae_family import VaeFamily


@dataclass(frozen=True)
class Kind:
    """How the workers run one class of ComfyUI's VAEs, and what is done to a latent outside of the network."""

    family: VaeFamily
    recognises: Callable                   # of a first_stage_model
    before_decode: Callable = lambda vae, latent: latent
    after_encode: Callable = lambda model, latent: latent
    before_encode: Callable = lambda model, pixels: pixels
    decoded_frames: Callable = lambda vae, frames: vae.upscale_ratio[0](frames)
    encoded_frames: Callable = lambda vae, frames: vae.downscale_ratio[0](frames)
    settings: Callable = lambda model: {}  # what the tensors do not tell
    least_side: Callable = lambda model: 1         # rows and columns of a latent that it decodes
    least_encoded: int = 1                 # that it encodes to
    side: Callable | None = None           # (VAE) -> rows of a picture to one of a latent; None: as ComfyUI's VAE says
    latent_patch: int = 1                  # rows of the network's latent to a row of ComfyUI's
    batch_is_video: bool = False           # are the images of a batch frames that the decoder looks along?


def _is_ldm(model):
    return isinstance(model, autoencoder.AutoencodingEngine) and type(model.decoder) is Decoder


def _is_image_kl(model):
    return _is_ldm(model) and not model.decoder.carried and model.decoder.conv_in.weight.ndim == 4


def _is_hunyuan(model):
    return _is_ldm(model) and model.decoder.carried


def _unnormalised_flux2(vae, latent):
    """(B, 4 C, H, W), normalised -> (B, C, 2 H, 2 W), as ComfyUI's AutoencoderKL does it."""
    model = vae.first_stage_model
    mean, variance = (tensor.view(1, -1, 1, 1).to(latent) for tensor in (model.bn.running_mean, model.bn.running_var))
    latent = latent * torch.sqrt(variance + model.bn_eps) + mean
    return rearrange(latent, "b (c pi pj) i j -> b c (i pi) (j pj)", pi=model.ps[0], pj=model.ps[1])


def _normalised_flux2(model, latent):
    latent = rearrange(latent, "b c (i pi) (j pj) -> b (c pi pj) i j", pi=model.ps[0], pj=model.ps[1])
    return torch.nn.functional.batch_norm(latent, model.bn.running_mean.to(latent), model.bn.running_var.to(latent),
                                          momentum=model.bn_momentum, eps=model.bn_eps)


def _is_ltx(model):
    """Of the structures that VideoVAE's config can say, those of LTX-Video's files."""
    return (isinstance(model, ltx.VideoVAE) and model.config["norm_layer"] == "pixel_norm"
            and model.config["latent_log_var"] == "uniform"
            and all(block.residual == (block.out_channels_reduction_factor > 1) for block in model.decoder.up_blocks
                    if isinstance(block, ltx.DepthToSpaceUpsample)))


def _noised_ltx(vae, latent):
    model = vae.first_stage_model
    # its decoder takes a little noise off, drawn where and as ComfyUI draws it
    if model.timestep_conditioning:
        noise = torch.randn_like(latent, device=vae.device, dtype=vae.vae_dtype).to(latent)
        latent = noise * model.decode_noise_scale + (1 - model.decode_noise_scale) * latent
    return model.per_channel_statistics.un_normalize(latent)


def _ltx_settings(model):
    """As VideoVAE itself reads its config."""
    return {"causal_decoder": str(model.decoder.causal), "decode_timestep": str(model.decode_timestep),
            "encoder_padding": model.config.get("spatial_padding_mode", "zeros"),
            "decoder_padding": model.config.get("spatial_padding_mode", "reflect")}


def _cosmos_moments(model, latent):
    """(mean, deviation) of each channel of the latent's frames,
    of which ComfyUI's model knows some and then counts anew."""
    def of_frames(moment):
        each = moment.view(latent.shape[1], -1)
        times = -(-latent.shape[2] // each.shape[1])
        return each.repeat(1, times)[None, :, :latent.shape[2], None, None].to(latent)
    return of_frames(model.latent_mean), of_frames(model.latent_std)


def _unnormalised_cosmos(vae, latent):
    mean, deviation = _cosmos_moments(vae.first_stage_model, latent)
    return latent / vae.first_stage_model.sigma_data * deviation + mean


def _normalised_cosmos(model, latent):
    mean, deviation = _cosmos_moments(model, latent)
    return (latent - mean) / deviation * model.sigma_data


def _is_taesd(model):
    return isinstance(model, comfy.taesd.taesd.TAESD)


def _of_flux2(model):
    return isinstance(model.taesd_decoder, comfy.taesd.taesd.DecoderFlux2)


def _scaled_tiny(vae, latent):
    model = vae.first_stage_model
    return (latent - model.vae_shift.to(latent)) * model.vae_scale.to(latent)


def _unscaled_tiny(model, latent):
    return latent / model.vae_scale.to(latent) + model.vae_shift.to(latent)


def _goes_in_clips(model):
    """Is a TAEHV MiniMax H3's, whose frames ComfyUI's VAE counts (from 0.34 on)?"""
    return getattr(model, "is_h3", False)


def _decoded_taehv(vae, frames):
    model = vae.first_stage_model
    return vae.upscale_ratio[0](frames) if _goes_in_clips(model) else frames * model.t_upscale - model.frames_to_trim


def _encoded_taehv(vae, frames):
    model = vae.first_stage_model
    return vae.downscale_ratio[0](frames) if _goes_in_clips(model) else -(-frames // model.t_downscale)


def _encoded_minimax(vae, frames):
    """The last frame is repeated until the last piece is full, and some of the latent's frames are dropped then."""
    model = vae.first_stage_model
    return 1 if frames == 1 else -(-frames // model.clip_length) * model.tokens_chunk_size - model.token_drop


def name_of(model):
    """What a person knows a first_stage_model as."""
    return NAMES.get(type(model).__name__, type(model).__name__)


def kind_of(model):
    """The Kind of a first_stage_model, or None."""
    return next((kind for kind in KINDS if kind.recognises(model)), None)


# of ComfyUI's classes of other VAEs
NAMES = {"VideoAutoencoderKLWrapper": "SeedVR2's"}
KINDS = (
    Kind(FAMILIES["kl"], lambda model: _is_image_kl(model) and getattr(model, "bn", None) is not None,
         _unnormalised_flux2, _normalised_flux2, latent_patch=2),
    Kind(FAMILIES["kl"], _is_image_kl),
    Kind(FAMILIES["wan"], lambda model: isinstance(model, (comfy.ldm.wan.vae.WanVAE, comfy.ldm.wan.vae2_2.WanVAE))),
    Kind(FAMILIES["ltx"], _is_ltx, _noised_ltx, lambda model, latent: model.per_channel_statistics.normalize(latent),
         # Eight frames are one of the latent's, after the first; what is left over is cut off.
         lambda model, pixels: pixels[:, :, :1 + (pixels.shape[2] - 1) // 8 * 8], settings=_ltx_settings,
         least_side=lambda model: 2 if _ltx_settings(model)["decoder_padding"] == "reflect" else 1),
    Kind(FAMILIES["hunyuan_video"], _is_hunyuan),
    Kind(FAMILIES["hunyuan_video15"], lambda model: isinstance(model, autoencoder.AutoencodingEngine)
         and type(model.decoder) is comfy.ldm.hunyuan_video.vae_refiner.Decoder and model.decoder.refiner_vae),
    Kind(FAMILIES["hunyuan_image"], lambda model: isinstance(model, autoencoder.AutoencodingEngine)
         and type(model.decoder) is comfy.ldm.hunyuan_video.vae.Decoder),
    Kind(FAMILIES["svd"], lambda model: isinstance(model, autoencoder.AutoencodingEngine)
         and type(model.decoder) is temporal_ae.VideoDecoder and model.decoder.time_mode == "conv-only",
         batch_is_video=True),
    Kind(FAMILIES["mochi"], lambda model: isinstance(model, comfy.ldm.genmo.vae.model.VideoVAE)),
    Kind(FAMILIES["cogvideox"], lambda model: isinstance(model, comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX),
         # The first frame is not repeated where their number is odd.
         decoded_frames=lambda vae, frames: 4 * frames - 3 * (frames % 2)),
    Kind(FAMILIES["cosmos"], lambda model: isinstance(model, comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer),
         _unnormalised_cosmos, _normalised_cosmos,
         # The first frame four times, then four make one, then two, the first again before them.
         encoded_frames=lambda vae, frames: (-(-(frames + 3) // 4) + 1) // 2),
    Kind(FAMILIES["tiny_flux2"], lambda model: _is_taesd(model) and _of_flux2(model), _scaled_tiny, _unscaled_tiny,
         side=lambda vae: 16),
    Kind(FAMILIES["tiny"], lambda model: _is_taesd(model) and not _of_flux2(model), _scaled_tiny, _unscaled_tiny),
    Kind(FAMILIES["taehv"], lambda model: isinstance(model, comfy.taesd.taehv.TAEHV),
         lambda vae, latent: vae.first_stage_model.process_in(latent),
         lambda model, latent: model.process_out(latent),
         decoded_frames=_decoded_taehv, encoded_frames=_encoded_taehv,
         side=lambda vae: 8 * vae.first_stage_model.patch_size),
    Kind(FAMILIES["minimax_h3"], lambda model: isinstance(model, comfy.ldm.minimax.vae.MiniMaxH3VideoVAE),
         # so many as frames to fill a piece with would become, were they all
         decoded_frames=lambda vae, frames: vae.first_stage_model._decode_temporal_pad_frames(frames, frames),
         encoded_frames=_encoded_minimax, settings=minimax_h3.settings_of,
         least_encoded=2),                                     # which reflection needs
)
