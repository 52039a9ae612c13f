"""Distributed VAE: decode and encode with ComfyUI's VAE object on the worker group."""

import functools
import time

import torch

from ....xdit_backend.autoencoders import supported
from ....xdit_backend.planner.planner import is_long_work
from ....xdit_backend.protocol.errors import UnsupportedError
from ..workers.worker_groups import GROUPS, check_packages, show_text
from .vae_class_check import check_vae_class
from .vae_detection import kind_of, name_of
from .vae_patcher import half_of


def decode(vae, latent, config):
    """Decode a LATENT's samples with a VAE object; returns (B, H * scale, W * scale, 3) in [0, 1].

    latent: (B, C, H, W), or (B, C, F, H, W) for a video VAE, whose frames are concatenated along B.
    Raises UnsupportedError for VAEs that the workers do not support, and for latents that do not fit the VAE.
    """
    kind = _kind_of(vae, "Decode")
    if latent.is_nested:                                       # video and audio: decode the video, as VAE Decode does
        latent = latent.unbind()[0]
    if latent.ndim == 5 and vae.latent_dim == 2:               # (B, C, F, H, W): an image VAE decodes the first frame
        latent = latent[:, :, 0]
    if latent.shape[1] != vae.latent_channels or latent.ndim != vae.latent_dim + 2:
        raise UnsupportedError(f"Connect the VAE that belongs to the model: the latent has {latent.shape[1]} "
                               f"channels and {latent.ndim} dims, and this VAE decodes {vae.latent_channels} "
                               f"channels and {vae.latent_dim + 2} dims.")
    least = kind.least_side(vae.first_stage_model)
    scale = vae.spacial_compression_decode() if kind.side is None else kind.side(vae)
    if min(latent.shape[-2:]) < least:                         # ComfyUI's own node fails with an error of torch
        rows, columns = latent.shape[-2:]
        raise UnsupportedError(f"Use an image of at least {least * scale} x {least * scale} pixels: the latent has "
                               f"{rows} x {columns} rows and columns, and this VAE decodes {least} x {least} or more.")
    frames = [kind.decoded_frames(vae, latent.shape[2])] if latent.ndim == 5 else []
    shape = (latent.shape[0], *frames, latent.shape[-2] * scale, latent.shape[-1] * scale,
             # Wan's upscaling VAE outputs the pixels of a larger image as channels
             getattr(vae, "conv_out_channels", vae.output_channels))
    client = GROUPS.client_for_decode(config)
    half = half_of(vae, kind.family.decoder, kind.settings(vae.first_stage_model), client)
    inner = kind.before_decode(vae, latent.to(torch.float32))
    if kind.batch_is_video:
        inner, shape = inner.movedim(0, 1)[None], (1, *shape)
    image = _transformed("decoded", client.autoencoders.decode, half, config, inner, shape, 1)
    return image.reshape(-1, *image.shape[-3:]).to(vae.output_device)


def encode(vae, pixels, config):
    """Encode an IMAGE (B, H, W, C) in [0, 1] with a VAE object; returns a LATENT's samples, the means, as VAE Encode
    does.

    A video VAE encodes the batch as frames. Pixels beyond a multiple of the VAE's scale are cropped on both sides.
    """
    kind = _kind_of(vae, "Encode")
    pixels = vae.vae_encode_crop_pixels(pixels)
    scale = vae.spacial_compression_encode() if kind.side is None else kind.side(vae)
    if any(side % scale for side in pixels.shape[1:3]):
        raise UnsupportedError(f"Use an image whose sides are multiples of {scale} pixels, the scale of this VAE: the "
                               f"image has {pixels.shape[1]} x {pixels.shape[2]}.")
    least = kind.least_encoded * scale
    if min(pixels.shape[1:3]) < least or 0 in pixels.shape:
        raise UnsupportedError(f"Use an image of at least {least} x {least} pixels, the minimum of this VAE: the image "
                               f"has {pixels.shape[1]} x {pixels.shape[2]}.")
    pixels = pixels.movedim(-1, 1)
    if vae.latent_dim == 3:
        pixels = pixels.movedim(1, 0).unsqueeze(0)             # the batch is a video: (1, C, F, H, W)
    pixels = kind.before_encode(vae.first_stage_model, pixels)
    frames = [kind.encoded_frames(vae, pixels.shape[2])] if pixels.ndim == 5 else []
    patch = kind.latent_patch
    shape = (pixels.shape[0], vae.latent_channels // patch ** 2, *frames,
             *(size // scale * patch for size in pixels.shape[-2:]))
    client = GROUPS.client_for_decode(config)
    half = half_of(vae, kind.family.encoder, kind.settings(vae.first_stage_model), client)
    inner = vae.process_input(pixels.to(torch.float32))
    latent = _transformed("encoded", client.autoencoders.encode, half, config, inner, shape,
                          inner.shape[-1] // shape[-1])
    return kind.after_encode(vae.first_stage_model, latent).to(vae.output_device)


def _transformed(done, how, half, config, tensor, shape, scale):
    """Return the workers' result of this shape for a tensor. done: the verb to show. how: the client's method.
    scale: see make_ready."""
    client = half.client
    try:
        num_ranks, first_rank = half.make_ready(tensor.shape, scale, functools.partial(_machine, client, half, config))
        started_s = time.perf_counter()
        GROUPS.runs.begin_alone(client.devices)
        result = how(half, tensor, shape, num_ranks=num_ranks, first_rank=first_rank)
    except BaseException as error:
        show_text(GROUPS.runs.describe_interruption(error))                 # replaces the progress
        raise
    _show_done(done, started_s, half, num_ranks)
    return result


def _machine(client, half, config, work):
    """Return the measured Machine of a group, for the number of devices to use in auto mode; None: use all. Devices are
    measured once, before the first work that is long enough to justify it."""
    if config.mode != "auto":
        return None
    return GROUPS.machine(client.devices, half.dtype,
                          may_measure=is_long_work(work, torch.device(client.devices[0]).type))


def _show_done(done, started_s, half, num_ranks):
    client = half.client
    count = len(client.devices)
    devices = "1 device" if count == 1 else f"{count} devices"
    if num_ranks < count:
        devices = f"{num_ranks} of {devices}, estimated to be as fast as all"
    GROUPS.runs.collect(client, client.report_if_idle)
    if half.from_host:
        devices = f"{devices}, VAE weights streamed from system RAM"
    show_text(f"{done} in {time.perf_counter() - started_s:.1f} s on {devices}")


def _kind_of(vae, what):
    check_packages()
    vae.throw_exception_if_invalid()
    kind = kind_of(vae.first_stage_model)
    if kind is None:
        raise UnsupportedError(f"Use VAE {what} for this VAE ({name_of(vae.first_stage_model)}): Distributed "
                               f"VAE {what} does not support it. It supports the VAEs of {supported()}.")
    check_vae_class(vae, kind)
    return kind
