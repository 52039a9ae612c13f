"""Video VAEs of Wan 2.1, which Qwen-Image uses too, and of Wan 2.2."""

import re

from .vae_family import VaeFamily, decode_full, replaced, size_of

WAN22_MARKS = ("coder.downsamples.0.downsamples.", "coder.upsamples.0.upsamples.")     # blocks within blocks


def _is_wan22(names):
    return any(mark in name for mark in WAN22_MARKS for name in names)


def _config(shapes, settings):
    """Configuration of any width, with the depths of diffusers' converter."""
    size = size_of(shapes)
    latent_channels = size("decoder.conv1.weight", 1) or size("encoder.head.2.weight", 0) // 2
    config = {"base_dim": size("encoder.conv1.weight", 0) or size("decoder.head.0.gamma", 0),
              "decoder_base_dim": size("decoder.head.0.gamma", 0), "z_dim": latent_channels,
              "in_channels": size("encoder.conv1.weight", 1) or 3,
              "out_channels": size("decoder.head.2.weight", 0) or 3}
    if _is_wan22(shapes):                                      # blocks with shortcuts, on patches of 2 x 2 pixels
        config |= {"is_residual": True, "patch_size": 2, "scale_factor_spatial": 16, "in_channels": 12,
                   "out_channels": 12}
    return config


RESIDUAL = {".residual.0.": ".norm1.", ".residual.2.": ".conv1.", ".residual.3.": ".norm2.", ".residual.6.": ".conv2.",
            ".shortcut.": ".conv_shortcut."}


def _convert(tensors, config):
    """Rename tensors with diffusers' converter, except Wan 2.2's blocks, which are nested one level deeper."""
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
    if not _is_wan22(tensors):
        return convert_wan_vae_to_diffusers(tensors)
    blocks = {name: tensor for name, tensor in tensors.items() if re.match(r"\w+\.(up|down)samples\.", name)}
    weights = convert_wan_vae_to_diffusers({name: tensor for name, tensor in tensors.items() if name not in blocks})
    for name, tensor in blocks.items():
        for old, new in RESIDUAL.items():
            name = name.replace(old, new)
        way = "up" if ".upsamples." in name else "down"
        layer = "upsampler" if way == "up" else "downsampler"
        name = re.sub(r"\.(up|down)samples\.(\d+)\.(up|down)samples\.(\d+)\.(resample|time_conv)\.",
                      rf".{way}_blocks.\2.{layer}.\5.", name)
        weights[re.sub(r"\.(up|down)samples\.(\d+)\.(up|down)samples\.(\d+)\.", rf".{way}_blocks.\2.resnets.\4.",
                       name)] = tensor
    return weights


def _decode_frames(vae, latent, emit):
    """diffusers calls the decoder for one frame of the latent after the other, and concatenates, unpatchifies and
    clamps what it returns."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
    forward = vae.decoder.forward

    def emitting(*args, **kwargs):
        frames = forward(*args, **kwargs)
        patch = vae.config.patch_size
        emit((frames if patch is None else unpatchify(frames, patch_size=patch)).clamp(-1.0, 1.0))
        return frames.new_empty((*frames.shape[:2], 0, *frames.shape[3:]))

    with replaced(vae.decoder, forward=emitting):
        decode_full(vae, latent)


WAN = VaeFamily(
    models=("Wan 2.1", "Wan 2.2", "Qwen-Image"),
    autoencoder="AutoencoderKLWan",
    markers=("coder.middle.0.residual.", *WAN22_MARKS),
    decoder=("decoder.", "conv2."),
    encoder=("encoder.", "conv1."),
    config=_config,
    convert=_convert,
    decode_frames=_decode_frames,
)
