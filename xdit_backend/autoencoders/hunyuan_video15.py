"""HunyuanVideo 1.5's video VAE: norms of single pixels, with pixel shuffle and unshuffle for resizing.

ComfyUI runs it in chunks of frames for large images. As norms see one pixel only, chunks change nothing but memory use.
"""

# Tensors are (B, C, F, H, W): F frames

import re
from contextlib import ExitStack, contextmanager
from functools import partial

from ..protocol.errors import CheckpointError
from .hunyuan_video import LATENT_FRAMES, FrameCache, chunks_of
from .vae_family import VaeFamily, concatenated, count_layers, need_diffusers, replaced, size_of

NAMES = (
    (".mid.block_1.", ".mid_block.resnets.0."), (".mid.block_2.", ".mid_block.resnets.1."),
    (".mid.attn_1.", ".mid_block.attentions.0."),
    (".attentions.0.q.", ".attentions.0.to_q."), (".attentions.0.k.", ".attentions.0.to_k."),
    (".attentions.0.v.", ".attentions.0.to_v."),
    (".nin_shortcut.conv.", ".conv_shortcut."), (".upsample.", ".upsamplers.0."), (".downsample.", ".downsamplers.0."))


def _config(shapes, settings):
    """Configuration, with levels in the encoder's order, from the image's size down."""
    need_diffusers("HunyuanVideo 1.5", "0.36")
    decodes, size = any(name.startswith("decoder.") for name in shapes), size_of(shapes)
    level, resize = ("decoder.up", "upsample") if decodes else ("encoder.down", "downsample")
    widths = [size(f"{level}.{index}.block.0.conv2.conv.weight", 0)
              for index in range(count_layers(shapes, level + ".{}.block.0.conv2.conv.weight"))]
    latent = size("decoder.conv_in.conv.weight", 1) or (size("encoder.conv_out.conv.weight", 0) or 0) // 2
    if not widths or not latent:
        raise CheckpointError(f"It lacks tensors that a VAE of HunyuanVideo 1.5 has; its {len(shapes)} tensors begin "
                              f"with {', '.join(list(shapes)[:3])}.")
    resized = [f"{level}.{index}.{resize}.conv.conv.weight"
               for index in range(count_layers(shapes, f"{level}.{{}}.{resize}.conv.conv.weight"))]
    # pixel (un)shuffle factor: 8 positions if the number of frames changes too, else 4
    factors = [size(name, 0) / (widths + widths[-1:])[index + 1]
               if decodes else (widths + widths[-1:])[index + 1] / size(name, 0)
               for index, name in enumerate(resized)]
    return {"in_channels": size("encoder.conv_in.conv.weight", 1) or 3,
            "out_channels": size("decoder.conv_out.conv.weight", 0) or 3,
            "latent_channels": latent, "block_out_channels": tuple(widths[::-1] if decodes else widths),
            # a decoder has one more
            "layers_per_block": count_layers(shapes, level + ".0.block.{}.conv1.conv.weight") - decodes,
            "spatial_compression_ratio": 2 ** len(resized), "temporal_compression_ratio": 2 ** factors.count(8),
            "scaling_factor": 1.0}


def _convert(tensors, config):
    def renamed(name):
        for old, new in NAMES:
            name = name.replace(old, new)
        return re.sub(r"\.(up|down)\.(\d+)\.(?:block\.(\d+)\.)?",
                      lambda match: f".{match[1]}_blocks.{match[2]}." + (f"resnets.{match[3]}." if match[3] else ""),
                      name)
    return {renamed(name): tensor for name, tensor in tensors.items()}


def _decode_frames(vae, latent, emit):
    decoder, frame_cache = vae.decoder, FrameCache()
    with _in_chunks(frame_cache, decoder):
        hidden = decoder.conv_in(latent) + latent.repeat_interleave(decoder.repeat, 1)
        hidden = decoder.mid_block(hidden)
        frame_cache.forget()
        for frames in frame_cache.each([*decoder.up_blocks, decoder.norm_out, decoder.conv_act, decoder.conv_out],
                                       hidden.split(LATENT_FRAMES, 2)):
            emit(frames)


def _encode(vae, image):
    """Encode 1 + a multiple of temporal_compression_ratio frames; further ones are dropped."""
    encoder, frame_cache = vae.encoder, FrameCache()
    with _in_chunks(frame_cache, encoder):
        hidden = frame_cache.through([encoder.conv_in, *encoder.down_blocks],
                                     chunks_of(image, vae.temporal_compression_ratio))
        frame_cache.forget()
        hidden = encoder.mid_block(hidden)
        out = encoder.conv_out(encoder.conv_act(encoder.norm_out(hidden)))
    return (out + hidden.unflatten(1, (out.shape[1], -1)).mean(2)).chunk(2, 1)[0]


@contextmanager
def _in_chunks(frame_cache, half):
    """Context in which the encoder or decoder works on chunks of frames, with unmasked attention as in ComfyUI."""
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as hunyuan

    def resized(first, later):
        """Use diffusers' forward, which treats the first frame specially, only for the first chunk."""
        return lambda hidden: first(hidden) if frame_cache.is_first else later(hidden)

    with ExitStack() as stack:
        stack.enter_context(frame_cache.padded())
        stack.enter_context(replaced(hunyuan.HunyuanVideo15AttnBlock,
                                     prepare_causal_attention_mask=staticmethod(lambda *_, **__: None)))
        for module in half.modules():
            for changes_frames, later in (("add_temporal_upsample", _upsampled),
                                          ("add_temporal_downsample", _downsampled)):
                if getattr(module, changes_frames, False):
                    stack.enter_context(replaced(module, forward=resized(module.forward, partial(later, module))))
        yield


def _upsampled(module, hidden):
    """Double the number of frames."""
    shortcut = hidden.repeat_interleave(module.repeats, 1)
    return module._dcae_upsample_rearrange(module.conv(hidden), 2) + module._dcae_upsample_rearrange(shortcut, 2)


def _downsampled(module, hidden):
    """Halve the number of frames."""
    out = module._dcae_downsample_rearrange(module.conv(hidden), 2)
    return out + module._dcae_downsample_rearrange(hidden, 2).unflatten(1, (out.shape[1], -1)).mean(2)


HUNYUAN_VIDEO15 = VaeFamily(
    models=("HunyuanVideo 1.5",),
    autoencoder="AutoencoderKLHunyuanVideo15",
    markers=("coder.mid.block_1.norm1.gamma",),
    unused=(".temb_proj.",),
    config=_config,
    convert=_convert,
    decode=concatenated(_decode_frames),
    decode_frames=_decode_frames,
    encode=_encode,
)
