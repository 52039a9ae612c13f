"""Wan 2.2 S2V, ComfyUI's own module: Wan for speech and song. Some blocks read the audio of their frame. A reference
image and the preceding frames, in increasingly coarse tokens, come after the video."""

import dataclasses
from types import MethodType

import torch
from torch import nn

from ..protocol.errors import ConfigError
from .common.family import SmallConfig
from .common.forward_state import ForwardValue
from .common.inputs import blocks, config_of, from_conditioning, full_shape, has, num_tokens_of, only_prefixes, size
from .common.native_module import full_sizes, native_arguments
from .common.plan import ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.rope_scaling import moves
from .common.wan import ARGUMENTS, RULES, SMALL, even_with, read_own_frame, tokens_of_patch
from .wan import LATENT, MODULES
from .wan_camera import HEAD, WAN_CAMERA

ALL, NATIVE = ("image", "reference", "motion"), "comfy.ldm.wan.model:WanModel_S2V"
MORE = {"trainable_cond_mask", "casual_audio_encoder", "cond_encoder", "audio_injector", "frame_packer"}
LAYERS = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)         # layers that read the audio, as in the class
NUM_REFERENCE_TOKENS = num_tokens_of(LATENT, "reference_latent")
# along time: smallest position of a reference, and its distance from the video's last frame
FIRST_POSITION, AFTER = 30, 9
OWN, OF_VIDEO = Cut(TokenArgument(1, ("image",)), full_sizes), even_with(
    LATENT, "Wan S2V", "control_video", "control video", is_as_long=True)


def _latent(call):
    for name in ("reference_latent", "reference_motion"):
        if name in call.conditioning and any(side % 2 for side in call.conditioning[name].shape[-2:]):
            raise ConfigError("Use a width and a height that are multiples of 16 pixels: Wan S2V takes references with "
                              "even sides, and this one has "
                              f"{' x '.join(map(str, call.conditioning[name].shape[-2:]))}.")
    if "reference_motion" in call.conditioning and min(call.conditioning["reference_motion"].shape[-2:]) < 8:
        raise ConfigError("Use a width and a height of at least 64 pixels: Wan S2V reads preceding frames in squares "
                          "of that size.")
    return OF_VIDEO(call)


def _times(call):
    """Timesteps (B, frames of the full latent)."""
    return call.timestep[:, None].expand(-1, full_shape(call)[2])


def _audio(call):
    """Audio features (B, layers, C, 1, 4 per frame of the full latent). ComfyUI's forward cuts dim 3 to a patch's
    frames, hence the dim of size 1."""
    audio = from_conditioning("audio_embed")(call)
    return None if audio is None else audio[..., :4 * full_shape(call)[2]].unsqueeze(3)


def _positions(module, forward, rows, tokens, args, kwargs):
    """Positions of a patch; of a reference, after the last frame of the full latent; of preceding frames, before its
    first."""
    start = kwargs.get("t_start")
    if start is None:
        return OWN(module, forward, rows, tokens, args, kwargs)
    is_after = start >= FIRST_POSITION and rows.axis == 0
    return forward(*args, **kwargs | ({"t_start": max(FIRST_POSITION, rows.whole_rows + AFTER)} if is_after else {}))


def _of_times(token_indices, num_tokens, num_times):
    """Index of the timestep of tokens: ComfyUI's forward divides the sequence evenly among the timesteps."""
    return token_indices // (num_tokens // num_times + (num_tokens % num_times > 0))


def _last(module, forward, rows, tokens, args, kwargs):
    """Output of a patch's tokens. Tokens after the video are dropped."""
    (x, e), count = args, tokens.counts["image"]
    token_indices = rows.first_token + torch.arange(count, device=x.device)
    return forward(x[:, :count], e[:, _of_times(token_indices, rows.num_tokens + x.shape[1] - count, e.shape[1])])


def _num_motion_tokens(conditioning):
    """Number of tokens of the preceding frames: the last one, the two before it, and 16 more, of which four make a
    token."""
    if "reference_motion" not in conditioning:
        return 0
    rows, columns = conditioning["reference_motion"].shape[-2:]
    return sum(frames * (rows // side) * (columns // side) for frames, side in ((1, 2), (1, 4), (4, 8)))


def _adapt(model, config):
    """Move code that ComfyUI's forward runs after some blocks into these blocks. Tokens that are not the full
    sequence have their own timestep, and read the audio of their frame."""
    block_inputs = ForwardValue(model)
    vars(model).update(block_inputs=block_inputs)
    vars(model.casual_audio_encoder).update(block_inputs=block_inputs)
    for part, forward in ((model.casual_audio_encoder, _store_audio), (model.frame_packer, _packed)):
        part.forward = MethodType(forward, part)
    model.forward_orig = MethodType(_forward_orig, model)
    for block in model.blocks:
        block.forward = MethodType(_with_times, block)
    for number, layer in enumerate(config["audio_inject_layers"]):
        if layer < len(model.blocks):
            block = model.blocks[layer]
            # vars(): not submodules of the block, which would change its tensor names
            vars(block).update(injector=_of_one_block(model.audio_injector, number), block_inputs=block_inputs)
            block.forward = MethodType(_with_audio, block)
    model.audio_injector.forward = lambda x, *others: x


def _of_one_block(injector, number):
    """ComfyUI's injector reduced to one block's layers, so that blocks do not depend on their number."""
    one = type(injector).__new__(type(injector))
    nn.Module.__init__(one)
    one.enable_adain, one.adain_mode, one.injected_block_id = True, "attn_norm", {0: 0}
    for name in ("injector", "injector_pre_norm_feat", "injector_adain_layers"):
        vars(one)[name] = [getattr(injector, name)[number]]
    return one


def _forward_orig(self, x, t, context, reference_latent=None, reference_motion=None, **others):
    latents = {"reference_latent": reference_latent, "reference_motion": reference_motion}
    counted = {name: latent for name, latent in latents.items() if latent is not None}
    self.block_inputs.set((NUM_REFERENCE_TOKENS(counted) + _num_motion_tokens(counted), None, None))
    return type(self).forward_orig(self, x, t, context, **latents, **others)


def _store_audio(self, features):
    full, own = type(self).forward(self, features.squeeze(3))
    self.block_inputs.set((self.block_inputs.get()[0], full, own))
    return full, own


def _packed(self, motion_latents, *others):
    with motion_latents.device:                                # where ComfyUI's code would create zeros on the host
        return type(self).forward(self, motion_latents, *others)


def _are_all(token_indices):
    """Whether these tokens are the full sequence, which ComfyUI's own code assumes."""
    return token_indices is None or len(token_indices[0]) == token_indices[1]


def _with_times(self, x, e, freqs, context, context_img_len=257, transformer_options={}, token_indices=None):
    if not _are_all(token_indices):
        e = e[:, _of_times(*token_indices, e.shape[1])]
    return type(self).forward(self, x, e, freqs, context, context_img_len, transformer_options)


def _with_audio(self, x, e, freqs, context, context_img_len=257, transformer_options={}, token_indices=None):
    x = _with_times(self, x, e, freqs, context, context_img_len, transformer_options, token_indices)
    num_others, full, own = self.block_inputs.get()
    if own is None:
        return x
    if _are_all(token_indices):
        return type(self.injector).forward(self.injector, x, 0, own, full, x.shape[1] - num_others)
    here, num_tokens = token_indices
    frame_size, rest = divmod(num_tokens - num_others, own.shape[1])
    if rest:
        raise ConfigError(f"Encode audio of the video's length: it has {own.shape[1]} frames, which do not divide the "
                          f"{num_tokens - num_others} tokens of the video.")
    return x + _of_frames(self.injector, x, full, own, here, frame_size) * (here < num_tokens - num_others)[:, None]


def _of_frames(injector, x, full_BF1C, own_BFNC, token_indices, frame_size):
    """Audio that tokens which are not full frames read. Tokens after the video read the last frame's; the caller
    drops it."""
    norm, attention = injector.injector_adain_layers[0], injector.injector[0]
    heads, frames = (attention.num_heads,
                     attention.head_dim), (token_indices // frame_size).clamp(max=own_BFNC.shape[1] - 1)
    shift, scale = (each[:, frames] for each in norm.linear(norm.silu(full_BF1C[:, :, 0])).chunk(2, 2))
    x, audio = norm.norm(x) * (1 + scale) + shift, own_BFNC.flatten(1, 2)
    query, key, value = (each.unflatten(2, heads).transpose(1, 2) for each in (
        attention.norm_q(attention.q(x)), attention.norm_k(attention.k(audio)), attention.v(audio)))
    read = read_own_frame(query, key, value, frames, own_BFNC.shape[2])
    return attention.o(read.transpose(1, 2).flatten(2))


WAN_S2V = dataclasses.replace(
    WAN_CAMERA, name="Wan S2V", title="Wan 2.2 S2V", transformer=NATIVE, adapt_model=_adapt,
    activation_factors={"alone": 8.53, "residual": 0.53, "whole": 6.14, "held": 1.15, "block": 16.3, "exchange": 26.1,
                        "entered": 14.1, "own": 0.0},
    detection=dataclasses.replace(
        WAN_CAMERA.detection,
        recognise=has(HEAD, "head.modulation", "casual_audio_encoder.encoder.final_linear.weight"),
        refusals=(only_prefixes(MODULES | MORE),),
        config=config_of(**RULES, model_type="s2v",
                         audio_inject_layers=lambda shapes: LAYERS[:blocks("audio_injector.injector.")(shapes)],
                         audio_dim=size("casual_audio_encoder.encoder.conv1_local.conv.weight", 1))),
    inputs=dataclasses.replace(
        WAN_CAMERA.inputs,
        conditioning={"context": "text_dim", **dict.fromkeys(("rope_scales", "audio_embed", "reference_latent",
                                                              "reference_motion", "control_video"))},
        ignored=("clip_fea", "denoise_mask"),
        arguments=native_arguments(_latent, "context", "reference_latent", "reference_motion", "control_video",
                                   audio_embed=_audio, transformer_options=moves) | {"timestep": _times},
        lengths={"reference": NUM_REFERENCE_TOKENS, "motion": _num_motion_tokens}),
    plan=ModelPlan(
        blocks=tuple(dataclasses.replace(each, returns=(ALL,)) for each in WAN_CAMERA.plan.blocks),
        streams={"x": ALL}, attention={"self_attn": ALL}, tp_plan=WAN_CAMERA.plan.tp_plan,
        tokens={"freqs": TokenArgument(1, ALL)},
        token_index_argument=("token_indices", ALL),
        positions={"rope_encode": _positions, "cond_encoder": tokens_of_patch, "head": _last},
        cacheable_outside={"text_embedding": "run"}),
    testing=SmallConfig(
        SMALL | {"model_type": "s2v", "num_layers": 5, "audio_inject_layers": LAYERS[:2], "audio_dim": 8}, NATIVE,
        ARGUMENTS | {"model_type": "s2v", "num_layers": 5}, input_shapes={
            "audio_embed": lambda config, shape, tokens: (shape[0], 25, config["audio_dim"], 4 * shape[2]),
            "control_video": lambda config, shape, tokens: (shape[0], 16, *shape[2:]),
            "reference_latent": lambda config, shape, tokens: (shape[0], config["in_dim"], 1, *shape[3:]),
            "reference_motion": lambda config, shape, tokens: (
                shape[0], 16, 19, *(max(8, side) for side in shape[3:]))}))
