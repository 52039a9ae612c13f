"""HunyuanVideo's VAE: LDM's structure with 3D convolutions.

ComfyUI runs the levels of the latent's size on all frames at once, and larger ones in chunks of frames. Norms compute
their statistics over a chunk, so the chunks must be the same here. The modules are diffusers'; the frames that a
convolution reads from the previous chunk are cached.
"""

# Tensors are (B, C, F, H, W): F frames

import re
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F

from .kl import kl_config
from .vae_family import TorchFunctions, VaeFamily, concatenated, replaced

LATENT_FRAMES = 2              # per chunk in the decoder
FRAMES = 8                     # per chunk in the encoder, except the first, which has one frame


def _config(shapes, settings):
    """Configuration of LDM's structure with 3D convolutions."""
    config = kl_config({_without_conv(name): shape[:2] + shape[3:] for name, shape in shapes.items()})
    num_levels = len(config["block_out_channels"])
    return {**{name: config[name] for name in ("in_channels", "out_channels", "latent_channels", "block_out_channels",
                                               "layers_per_block", "norm_num_groups", "mid_block_add_attention")},
            "down_block_types": ("HunyuanVideoDownBlock3D",) * num_levels,
            "up_block_types": ("HunyuanVideoUpBlock3D",) * num_levels}


def _convert(tensors, config):
    """Rename tensors with diffusers' converter for LDM, to which a 3D convolution is presented as a 2D one."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
    weights = convert_ldm_vae_checkpoint({_without_conv(name): tensor for name, tensor in tensors.items()}, config)

    def renamed(name):
        layer, _, leaf = name.rpartition(".")
        is_conv = layer.rpartition(".")[2] in ("conv", "conv1", "conv2", "conv_in", "conv_out", "conv_shortcut")
        return f"{layer}.conv.{leaf}" if is_conv else name
    return {renamed(name): tensor.flatten(1) if ".attentions." in name and tensor.ndim > 1 else tensor
            for name, tensor in weights.items()}


def _without_conv(name):
    """Name of the layer in an image VAE."""
    return re.sub(r"\.conv\.(weight|bias)$", r".\1", name)


def _decode_frames(vae, latent, emit):
    decoder, frame_cache = vae.decoder, FrameCache()
    with frame_cache.used_by(decoder):
        hidden = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latent)))
        frame_cache.forget()
        for frames in frame_cache.each([*decoder.up_blocks, decoder.conv_norm_out, decoder.conv_act, decoder.conv_out],
                                       hidden.split(LATENT_FRAMES, 2)):
            emit(frames)


def _encode(vae, image):
    """Encode 1 + a multiple of temporal_compression_ratio frames; further ones are dropped."""
    encoder, frame_cache = vae.encoder, FrameCache()
    with frame_cache.used_by(encoder):
        hidden = frame_cache.through([encoder.conv_in, *encoder.down_blocks],
                                     chunks_of(image, vae.temporal_compression_ratio))
        frame_cache.forget()
        hidden = encoder.conv_act(encoder.conv_norm_out(encoder.mid_block(hidden)))
        return vae.quant_conv(encoder.conv_out(hidden)).chunk(2, 1)[0]


def chunks_of(image, compression):
    """Split frames into ComfyUI's chunks for encoding: the first frame, then FRAMES at a time."""
    num_further = (image.shape[2] - 1) // compression * compression
    return [image[:, :, :1], *(image[:, :, 1:1 + num_further].split(FRAMES, 2) if num_further else ())]


class FrameCache:
    """The last input frames of each 3D convolution, in the order of execution, for the next chunk.

    In the first chunk, padding repeats the first frame as diffusers does; in later ones it inserts the cached frames.
    """

    def __init__(self):
        self.forget()

    def forget(self):
        """Clear the cache: the next chunk is a first one."""
        self._cached, self._read, self._first, self._extra = [], [], True, 0

    def next_chunk(self):
        self._cached, self._read, self._first = self._read, [], False

    def each(self, layers, chunks):
        """Run each chunk of frames through all layers; yields the results."""
        for chunk in chunks:
            for layer in layers:
                chunk = layer(chunk)
            yield chunk
            self.next_chunk()

    def through(self, layers, chunks):
        """Run each chunk of frames through all layers; returns the concatenated results."""
        return torch.cat([*self.each(layers, chunks)], 2)

    @property
    def is_first(self):
        """Whether this is the first chunk."""
        return self._first

    @contextmanager
    def padded(self):
        """Context in which torch's pad inserts the previous chunk's frames before those of a chunk."""
        def pad(input, pad, mode="constant", value=None):
            if len(pad) < 6 or not pad[4]:
                return F.pad(input, pad, mode, value)
            before = input[:, :, :1].expand(-1, -1, pad[4], -1, -1) if self._first else self._cached.pop(0)
            frames = torch.cat([before, input[:, :, self._extra:]], 2)
            self._extra = 0
            self._read.append(frames[:, :, -pad[4]:].clone())
            return F.pad(frames, (*pad[:4], 0, 0), mode)

        with TorchFunctions(pad=pad):
            yield

    @contextmanager
    def used_by(self, half):
        """Context in which HunyuanVideo's encoder or decoder works on chunks, with attention between all frames of a
        chunk."""
        from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as hunyuan

        def with_extra_frame(module, args):
            """Prepend a frame in later chunks, since the upsampler does not double its first input frame; pad drops the
            extra output."""
            if self._first:
                return args
            self._extra = 1
            return torch.cat([args[0][:, :, :1], args[0]], 2)

        with ExitStack() as stack:
            stack.enter_context(self.padded())
            # ComfyUI's attention has no mask, which as a matrix over all pixels would not fit into memory anyway
            stack.enter_context(replaced(hunyuan, prepare_causal_attention_mask=lambda *_, **__: None))
            for module in half.modules():
                if isinstance(module, hunyuan.HunyuanVideoUpsampleCausal3D):
                    stack.callback(module.register_forward_pre_hook(with_extra_frame).remove)
            yield


HUNYUAN_VIDEO = VaeFamily(
    models=("HunyuanVideo",),
    autoencoder="AutoencoderKLHunyuanVideo",
    markers=("coder.mid.block_1.conv1.conv.",),
    decoder=("decoder.", "post_quant_conv."),
    encoder=("encoder.", "quant_conv."),
    config=_config,
    convert=_convert,
    decode=concatenated(_decode_frames),
    decode_frames=_decode_frames,
    encode=_encode,
)
