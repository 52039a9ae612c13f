"""HunyuanVideo's autoencoder: LDM's structure with convolutions over time.

ComfyUI runs it whole at the latent's size and in pieces of frames where pictures are larger; norms take their
statistics from a piece, so that the pieces are ComfyUI's here. The modules are diffusers'; what a convolution reads of
the piece before is kept.
"""

# Tensors are (B, C, F, H, W): F frames

import re
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F

from .kl import kl_config
from .vae_family import TorchFunctions, VaeFamily, replaced

LATENT_FRAMES = 2              # of a piece of the decoder
FRAMES = 8                     # of a piece of the encoder, but the first, which is one frame


def _config(shapes, settings):
    """LDM's structure with convolutions over time."""
    config = kl_config({_without_conv(name): shape[:2] + shape[3:] for name, shape in shapes.items()})
    num_levels = len(config["block_out_channels"])
    return {**{name: config[name] for name in ("in_channels", "out_channels", "latent_channels", "block_out_channels",
                                               "layers_per_block", "norm_num_groups", "mid_block_add_attention")},
            "down_block_types": ("HunyuanVideoDownBlock3D",) * num_levels,
            "up_block_types": ("HunyuanVideoUpBlock3D",) * num_levels}


def _convert(tensors, config):
    """By LDM's converter, to which a convolution over time is shown as one of pictures."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
    weights = convert_ldm_vae_checkpoint({_without_conv(name): tensor for name, tensor in tensors.items()}, config)

    def renamed(name):
        layer, _, leaf = name.rpartition(".")
        is_conv = layer.rpartition(".")[2] in ("conv", "conv1", "conv2", "conv_in", "conv_out", "conv_shortcut")
        return f"{layer}.conv.{leaf}" if is_conv else name
    return {renamed(name): tensor.flatten(1) if ".attentions." in name and tensor.ndim > 1 else tensor
            for name, tensor in weights.items()}


def _without_conv(name):
    """The name that the layer has in a VAE of pictures."""
    return re.sub(r"\.conv\.(weight|bias)$", r".\1", name)


def _decode(vae, latent):
    decoder, frame_cache = vae.decoder, FrameCache()
    with frame_cache.used_by(decoder):
        hidden = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latent)))
        frame_cache.forget()
        return frame_cache.through([*decoder.up_blocks, decoder.conv_norm_out, decoder.conv_act, decoder.conv_out],
                               hidden.split(LATENT_FRAMES, 2))


def _encode(vae, image):
    """Frames beyond 1 + a multiple of the compression are left out."""
    encoder, frame_cache = vae.encoder, FrameCache()
    with frame_cache.used_by(encoder):
        hidden = frame_cache.through([encoder.conv_in, *encoder.down_blocks],
                                 pieces_of(image, vae.temporal_compression_ratio))
        frame_cache.forget()
        hidden = encoder.conv_act(encoder.conv_norm_out(encoder.mid_block(hidden)))
        return vae.quant_conv(encoder.conv_out(hidden)).chunk(2, 1)[0]


def pieces_of(image, compression):
    """The pieces of frames that ComfyUI encodes: the first frame, and then FRAMES at a time."""
    num_further = (image.shape[2] - 1) // compression * compression
    return [image[:, :, :1], *(image[:, :, 1:1 + num_further].split(FRAMES, 2) if num_further else ())]


class FrameCache:
    """The last frames that each convolution over time has read, in the order of the convolutions, for the next piece.

    In the first piece torch's pad repeats the first frame, as diffusers asks for; in the others the kept ones come
    first.
    """

    def __init__(self):
        self.forget()

    def forget(self):
        """What comes next is a first piece."""
        self._kept, self._read, self._first, self._extra = [], [], True, 0

    def next_piece(self):
        self._kept, self._read, self._first = self._read, [], False

    def through(self, layers, pieces):
        """Pieces of frames, each through all layers, put together again."""
        done = []
        for piece in pieces:
            for layer in layers:
                piece = layer(piece)
            done.append(piece)
            self.next_piece()
        return torch.cat(done, 2)

    @property
    def is_first(self):
        """Is this the first piece?"""
        return self._first

    @contextmanager
    def padded(self):
        """While active, what torch's pad puts before a piece's frames is those of the piece before."""
        def pad(input, pad, mode="constant", value=None):
            if len(pad) < 6 or not pad[4]:
                return F.pad(input, pad, mode, value)
            before = input[:, :, :1].expand(-1, -1, pad[4], -1, -1) if self._first else self._kept.pop(0)
            frames = torch.cat([before, input[:, :, self._extra:]], 2)
            self._extra = 0
            self._read.append(frames[:, :, -pad[4]:].clone())
            return F.pad(frames, (*pad[:4], 0, 0), mode)

        with TorchFunctions(pad=pad):
            yield

    @contextmanager
    def used_by(self, half):
        """While active, HunyuanVideo's encoder or decoder works on pieces, whose frames all see each other."""
        from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as hunyuan

        def with_extra_frame(module, args):
            """The upsampler does not double the first frame it gets:
            in later pieces that is one too many, dropped by pad."""
            if self._first:
                return args
            self._extra = 1
            return torch.cat([args[0][:, :, :1], args[0]], 2)

        with ExitStack() as stack:
            stack.enter_context(self.padded())
            # ComfyUI's attention has no mask. As a matrix it would not fit either: it has the square of all pixels.
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
    decode=_decode,
    encode=_encode,
)
