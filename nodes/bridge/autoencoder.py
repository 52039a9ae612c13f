"""Decode and encode with ComfyUI's ordinary VAE on the worker group. Called by the nodes Distributed VAE Decode and Encode."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange

import comfy.ldm.cogvideo.vae
import comfy.ldm.lightricks.vae.causal_video_autoencoder as ltx
import comfy.ldm.models.autoencoder as autoencoder
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_management
import comfy.taesd.taesd
from comfy.ldm.modules.diffusionmodules.model import Decoder

from ...xdit_backend.protocol.errors import UnsupportedError
from .groups import GROUPS, check_packages
from .vae_weights import half_of

SUPPORTED = "SD, SDXL, SD3, Flux, Flux.2, Wan, Qwen-Image, HunyuanVideo, CogVideoX, LTX-Video and TAESD"


@dataclass(frozen=True)
class Kind:
    """How the workers take a class of ComfyUI's VAEs. What happens to a latent outside the network happens here."""

    recognises: Callable
    decoded_with: tuple[str, ...]          # prefixes of the tensors' names
    encoded_with: tuple[str, ...]
    before_decode: Callable = lambda model, latent: latent
    after_encode: Callable = lambda model, latent: latent
    before_encode: Callable = lambda model, pixels: pixels
    decoded_frames: Callable = lambda vae, frames: vae.upscale_ratio[0](frames)
    settings: Callable = lambda model: {}  # what the tensors do not tell
    latent_patch: int = 1                  # rows of the network's latent to a row of ComfyUI's


def _is_ldm(model):
    return isinstance(model, autoencoder.AutoencodingEngine) and type(model.decoder) is Decoder


def _is_image_kl(model):
    return _is_ldm(model) and not model.decoder.carried and model.decoder.conv_in.weight.ndim == 4


def _is_hunyuan(model):
    return _is_ldm(model) and model.decoder.carried


def _unnormalised_flux2(model, latent):
    """(B, 4 C, H, W), normalised -> (B, C, 2 H, 2 W), as ComfyUI's AutoencoderKL does it."""
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


def _noised_ltx(model, latent):
    if model.timestep_conditioning:                            # its decoder takes a little noise off
        latent = torch.randn_like(latent) * model.decode_noise_scale + (1 - model.decode_noise_scale) * latent
    return model.per_channel_statistics.un_normalize(latent)


def _ltx_settings(model):
    """As VideoVAE itself reads its config."""
    return {"causal_decoder": str(model.decoder.causal), "decode_timestep": str(model.decode_timestep),
            "encoder_padding": model.config.get("spatial_padding_mode", "zeros"),
            "decoder_padding": model.config.get("spatial_padding_mode", "reflect")}


KL_DECODER, KL_ENCODER = ("decoder.", "post_quant_conv."), ("encoder.", "quant_conv.")
KINDS = (
    Kind(lambda model: _is_image_kl(model) and getattr(model, "bn", None) is not None, KL_DECODER, KL_ENCODER,
         _unnormalised_flux2, _normalised_flux2, latent_patch=2),
    Kind(_is_image_kl, KL_DECODER, KL_ENCODER),
    Kind(lambda model: isinstance(model, (comfy.ldm.wan.vae.WanVAE, comfy.ldm.wan.vae2_2.WanVAE)),
         ("decoder.", "conv2."), ("encoder.", "conv1.")),
    Kind(_is_ltx, ("decoder.",), ("encoder.",), _noised_ltx,
         lambda model, latent: model.per_channel_statistics.normalize(latent),
         # Eight frames are one of the latent's, after the first; what is left over is cut off.
         lambda model, pixels: pixels[:, :, :1 + (pixels.shape[2] - 1) // 8 * 8], settings=_ltx_settings),
    Kind(_is_hunyuan, KL_DECODER, KL_ENCODER),
    Kind(lambda model: isinstance(model, comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX), ("decoder.",), ("encoder.",),
         # The first frame is not repeated where their number is odd.
         decoded_frames=lambda vae, frames: 4 * frames - 3 * (frames % 2)),
    Kind(lambda model: isinstance(model, comfy.taesd.taesd.TAESD) and model.taesd_decoder[1].weight.shape[1] != 32,
         ("taesd_decoder.",), ("taesd_encoder.",),
         lambda model, latent: (latent - model.vae_shift.to(latent)) * model.vae_scale.to(latent),
         lambda model, latent: latent / model.vae_scale.to(latent) + model.vae_shift.to(latent)),
)


def decode(vae, latent, config):
    """Decode a LATENT's samples with a VAE object; returns (B, H * scale, W * scale, 3) in [0, 1].

    latent: (B, C, H, W), or (B, C, F, H, W) for a video VAE, whose frames come one after the other in B.
    Raises UnsupportedError for VAEs that the workers cannot run, and for latents that do not fit.
    """
    kind = _kind_of(vae, "Decode")
    if latent.is_nested:
        raise UnsupportedError("Distributed VAE Decode does not support latents of several parts. Use VAE Decode.")
    if latent.ndim == 5 and vae.latent_dim == 2:               # (B, C, F, H, W): an image VAE decodes the first frame
        latent = latent[:, :, 0]
    if latent.shape[1] != vae.latent_channels or latent.ndim != vae.latent_dim + 2:
        raise UnsupportedError(f"The latent has {latent.shape[1]} channels and {latent.ndim} dims, and this VAE decodes "
                               f"{vae.latent_channels} channels and {vae.latent_dim + 2} dims. Connect the VAE that belongs to the "
                               f"model.")
    scale = vae.spacial_compression_decode()
    frames = [kind.decoded_frames(vae, latent.shape[2])] if latent.ndim == 5 else []
    shape = (latent.shape[0], *frames, latent.shape[-2] * scale, latent.shape[-1] * scale, vae.output_channels)
    client = GROUPS.client_for_decode(config)
    half = half_of(vae, kind.decoded_with, kind.settings(vae.first_stage_model))
    half.use_on(client, vae.memory_used_decode(latent.shape, vae.vae_dtype))
    inner = kind.before_decode(vae.first_stage_model, latent.to(torch.float32))
    picture = client.decode(half.name, half.dtype, half.weights, inner, shape, settings=half.settings)
    return picture.reshape(-1, *picture.shape[-3:]).to(vae.output_device)


def encode(vae, pixels, config):
    """Encode an IMAGE (B, H, W, C) in [0, 1] with a VAE object; returns a LATENT's samples, the means, as VAE Encode does.

    A video VAE takes the batch as frames. Pixels beyond a multiple of the VAE's scale are cut off at both sides.
    """
    kind = _kind_of(vae, "Encode")
    pixels = vae.vae_encode_crop_pixels(pixels)
    scale = vae.spacial_compression_encode()
    if 0 in pixels.shape:
        raise UnsupportedError(f"The picture is smaller than {scale} x {scale} pixels, the least that this VAE encodes.")
    pixels = pixels.movedim(-1, 1)
    if vae.latent_dim == 3:
        pixels = pixels.movedim(1, 0).unsqueeze(0)             # the batch is a video: (1, C, F, H, W)
    pixels = kind.before_encode(vae.first_stage_model, pixels)
    frames = [vae.downscale_ratio[0](pixels.shape[2])] if pixels.ndim == 5 else []
    patch = kind.latent_patch
    shape = (pixels.shape[0], vae.latent_channels // patch ** 2, *frames, *(size // scale * patch for size in pixels.shape[-2:]))
    client = GROUPS.client_for_decode(config)
    half = half_of(vae, kind.encoded_with, kind.settings(vae.first_stage_model))
    half.use_on(client, vae.memory_used_encode(pixels.shape, vae.vae_dtype))
    inner = vae.process_input(pixels.to(torch.float32))
    latent = client.encode(half.name, half.dtype, half.weights, inner, shape, settings=half.settings)
    return kind.after_encode(vae.first_stage_model, latent).to(vae.output_device)


def _kind_of(vae, what):
    check_packages()
    vae.throw_exception_if_invalid()
    for kind in KINDS:
        if kind.recognises(vae.first_stage_model):
            return kind
    raise UnsupportedError(f"Distributed VAE {what} does not support this VAE ({type(vae.first_stage_model).__name__}) yet. It works "
                           f"with the VAEs of {SUPPORTED}. Use VAE {what} for this one.")
