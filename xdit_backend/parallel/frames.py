"""Video autoencoders run in pieces of frames, with ComfyUI's pieces: norms take their statistics from a piece. Used by vae.

The modules are diffusers', and so is their order. What a convolution over time reads of the piece before is kept.
"""

# Tensors are (B, C, F, H, W): F frames

import math
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLCogVideoX, AutoencoderKLHunyuanVideo, AutoencoderKLLTXVideo
from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as hunyuan
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXCausalConv3d

HUNYUAN_LATENT_FRAMES = 2      # of a piece of the decoder
HUNYUAN_FRAMES = 8             # of a piece of the encoder, but the first, which is one frame
COGVIDEOX_LATE_FRAMES = 4      # of a piece of the decoder's last levels, which leave the number of frames as it is
COGVIDEOX_FRAMES = 8           # of a piece of the encoder; the first is what is left over


def decode(vae, latent):
    """vae.decode as ComfyUI does it."""
    if isinstance(vae, AutoencoderKLLTXVideo):
        return _decode_ltx(vae, latent)
    if isinstance(vae, AutoencoderKLHunyuanVideo):
        return _decode_hunyuan(vae, latent)
    if isinstance(vae, AutoencoderKLCogVideoX):
        return _decode_cogvideox(vae, latent)
    return vae.decode(latent, return_dict=False)[0]


def encode(vae, picture):
    """The mean that vae.encode gives, as ComfyUI has it."""
    if isinstance(vae, AutoencoderKLHunyuanVideo):
        return _encode_hunyuan(vae, picture)
    if isinstance(vae, AutoencoderKLCogVideoX):
        return _encode_cogvideox(vae, picture)
    latent = vae.encode(picture, return_dict=False)[0]
    return latent if isinstance(latent, torch.Tensor) else latent.mode()


def _decode_ltx(vae, latent):
    """Its norms are of single pixels, so that pieces would make no difference; some decoders take a last noise off."""
    timestep = [latent.new_full(latent.shape[:1], vae.config.decode_timestep)] if vae.config.timestep_conditioning else []
    return vae.decode(latent, *timestep, return_dict=False)[0]


# --- HunyuanVideo: whole at the latent's size, in pieces where pictures are larger ---


def _decode_hunyuan(vae, latent):
    decoder, carried, pieces = vae.decoder, CarriedFrames(), []
    with carried.used_by(decoder):
        hidden = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latent)))
        carried.forget()
        for piece in hidden.split(HUNYUAN_LATENT_FRAMES, 2):
            for block in decoder.up_blocks:
                piece = block(piece)
            pieces.append(decoder.conv_out(decoder.conv_act(decoder.conv_norm_out(piece))))
            carried.next_piece()
    return torch.cat(pieces, 2)


def _encode_hunyuan(vae, picture):
    """Frames beyond 1 + a multiple of the compression are left out."""
    encoder, carried, pieces = vae.encoder, CarriedFrames(), []
    compression = vae.temporal_compression_ratio
    num_further = (picture.shape[2] - 1) // compression * compression
    with carried.used_by(encoder):
        first, further = picture[:, :, :1], picture[:, :, 1:1 + num_further]
        for piece in [first, *(further.split(HUNYUAN_FRAMES, 2) if num_further else [])]:
            piece = encoder.conv_in(piece)
            for block in encoder.down_blocks:
                piece = block(piece)
            pieces.append(piece)
            carried.next_piece()
        carried.forget()
        hidden = encoder.conv_act(encoder.conv_norm_out(encoder.mid_block(torch.cat(pieces, 2))))
        return vae.quant_conv(encoder.conv_out(hidden)).chunk(2, 1)[0]


class CarriedFrames:
    """The last frames that each convolution over time has read, in the order of the convolutions, for the next piece.

    In the first piece torch's pad repeats the first frame, as diffusers asks for; in the others the kept ones come first.
    """

    def __init__(self):
        self.forget()

    def forget(self):
        """What comes next is a first piece."""
        self._kept, self._read, self._first, self._extra = [], [], True, 0

    def next_piece(self):
        self._kept, self._read, self._first = self._read, [], False

    @contextmanager
    def used_by(self, half):
        """While active, HunyuanVideo's encoder or decoder works on pieces, whose frames all see each other."""
        plain_pad = F.pad

        def pad(input, pad, mode="constant", value=None):
            if len(pad) < 6 or not pad[4]:
                return plain_pad(input, pad, mode, value)
            before = input[:, :, :1].expand(-1, -1, pad[4], -1, -1) if self._first else self._kept.pop(0)
            frames = torch.cat([before, input[:, :, self._extra:]], 2)
            self._extra = 0
            self._read.append(frames[:, :, -pad[4]:].clone())
            return plain_pad(frames, (*pad[:4], 0, 0), mode)

        def with_extra_frame(module, args):
            """The upsampler does not double the first frame it gets: in later pieces that is one too many, dropped by pad."""
            if self._first:
                return args
            self._extra = 1
            return torch.cat([args[0][:, :, :1], args[0]], 2)

        with ExitStack() as stack:
            stack.enter_context(replaced(F, pad=pad))
            # ComfyUI's attention has no mask. As a matrix it would not fit either: it has the square of all pixels.
            stack.enter_context(replaced(hunyuan, prepare_causal_attention_mask=lambda *_, **__: None))
            for module in half.modules():
                if isinstance(module, hunyuan.HunyuanVideoUpsampleCausal3D):
                    stack.callback(module.register_forward_pre_hook(with_extra_frame).remove)
            yield


# --- CogVideoX, whose modules take and give the kept frames themselves ---


def _decode_cogvideox(vae, latent):
    decoder = vae.decoder
    num_early = round(math.log2(vae.config.temporal_compression_ratio))      # levels with more frames than the one before
    hidden = decoder.conv_in(latent)[0]
    for block in (decoder.mid_block, *decoder.up_blocks[:num_early]):
        hidden = block(hidden, None, latent)[0]
    pieces, kept = [], {}
    latents = _repeated_to(hidden.shape[2], latent).split(COGVIDEOX_LATE_FRAMES, 2)
    for piece, own_latent in zip(hidden.split(COGVIDEOX_LATE_FRAMES, 2), latents):
        for index, block in enumerate(decoder.up_blocks[num_early:]):
            piece, kept[index] = block(piece, None, own_latent, conv_cache=kept.get(index))
        piece, kept["norm"] = decoder.norm_out(piece, own_latent, conv_cache=kept.get("norm"))
        piece, kept["out"] = decoder.conv_out(decoder.conv_act(piece), conv_cache=kept.get("out"))
        pieces.append(piece)
    return torch.cat(pieces, 2)


def _repeated_to(num_frames, latent):
    """The latent's frames, as often as the decoder repeats them: the first of an odd number is not repeated."""
    first = latent.shape[2] % 2
    if latent.shape[2] == first:
        return latent
    times = (num_frames - first) // (latent.shape[2] - first)
    return torch.cat([latent[:, :, :first], latent[:, :, first:].repeat_interleave(times, 2)], 2)


def _encode_cogvideox(vae, picture):
    num_left_over = picture.shape[2] % COGVIDEOX_FRAMES
    first, further = picture[:, :, :num_left_over], picture[:, :, num_left_over:]
    pieces, kept = [], None
    with ExitStack() as hooks:
        for module in vae.encoder.modules():
            if isinstance(module, CogVideoXCausalConv3d):
                hooks.callback(module.register_forward_hook(_nothing_kept_of_one_frame, with_kwargs=True).remove)
        for piece in (first, *further.split(COGVIDEOX_FRAMES, 2)):
            if piece.shape[2]:
                piece, kept = vae.encoder(piece, conv_cache=kept)
                pieces.append(piece)
    return torch.cat(pieces, 2).chunk(2, 1)[0]


def _nothing_kept_of_one_frame(module, args, kwargs, output):
    """ComfyUI's convolutions keep nothing of a single first frame, so that the frame after it is a first one again."""
    alone = args[0].shape[2] == 1 and kwargs.get("conv_cache") is None
    return (output[0], None) if alone else output


@contextmanager
def replaced(owner, **functions):
    """While active, attributes of a module, of Python's or of torch's, are these functions."""
    originals = {name: vars(owner)[name] for name in functions if name in vars(owner)}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name in functions:
            if name in originals:
                setattr(owner, name, originals[name])
            else:                                              # it hid its class's
                delattr(owner, name)
