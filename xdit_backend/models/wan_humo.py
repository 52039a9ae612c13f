"""Wan HuMo, ComfyUI's own module: Wan whose tokens read the audio of their frame. Reference images are frames after
the last."""

import dataclasses
from types import MethodType

from ..protocol.errors import ConfigError
from .common.family import SmallConfig
from .common.inputs import config_of, from_conditioning, has, num_tokens_of, only_prefixes
from .common.native_module import full_sizes, native_arguments
from .common.plan import ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.rope_scaling import moves
from .common.tp_plan import COLWISE, ROWWISE, styled
from .common.wan import ARGUMENTS, RULES, SMALL, even_with, read_own_frame
from .wan import LATENT, MODULES
from .wan_camera import HEAD, WAN_CAMERA

ALL, TABLE = ("image", "reference"), TokenArgument(1, ("image",))
OWN = Cut(TABLE, full_sizes)


def _positions(module, forward, rows, tokens, args, kwargs):
    """Positions of a patch, and of references, which come after the last frame of the full latent."""
    if "t_start" not in kwargs:
        return OWN(module, forward, rows, tokens, args, kwargs)
    return forward(*args, **kwargs | ({"t_start": rows.whole_rows} if rows.axis == 0 else {}))


def _adapt(model, config):
    """Make tokens that are not full frames read the audio of their frame."""
    for block in model.blocks:
        attention = block.audio_cross_attn_wrapper.audio_cross_attn
        attention.forward = MethodType(_of_frames, attention)
        block.forward = MethodType(_with_token_indices, block)


def _with_token_indices(self, x, e, freqs, context, audio=None, token_indices=None, **others):
    read = audio if audio is None or token_indices is None else (audio, *token_indices)
    return type(self).forward(self, x, e, freqs, context, audio=read, **others)


def _of_frames(self, x, context, transformer_options={}, **others):
    if not isinstance(context, tuple):
        return type(self).forward(self, x, context, transformer_options=transformer_options, **others)
    audio, token_indices, num_tokens = context
    num_frames, heads = audio.shape[1] // 16, (self.num_heads, self.head_dim)
    query, key, value = (each.unflatten(2, heads).transpose(1, 2) for each in (
        self.norm_q(self.q(x)), self.norm_k(self.k(audio)), self.v(audio)))
    frame_size, rest = divmod(num_tokens, num_frames)
    if rest:
        raise ConfigError(f"Encode audio of the video's length: it has {num_frames} frames, which do not divide the "
                          f"{num_tokens} tokens of the video and its reference.")
    return self.o(read_own_frame(query, key, value, token_indices // frame_size, 16).transpose(1, 2).flatten(2))


WAN_HUMO = dataclasses.replace(
    WAN_CAMERA, name="Wan HuMo", title="Wan HuMo", transformer="comfy.ldm.wan.model:HumoWanModel", adapt_model=_adapt,
    activation_factors={"alone": 9.55, "residual": 4.15, "whole": 5.85, "outside": 4.5, "held": 1.2, "block": 9.85,
                        "exchange": 14.0, "own": 0.0},
    detection=dataclasses.replace(
        WAN_CAMERA.detection,
        recognise=has(HEAD, "head.modulation", "audio_proj.audio_proj_glob_1.layer.weight"),
        refusals=(only_prefixes(MODULES | {"audio_proj"}),), config=config_of(**RULES, model_type="humo")),
    inputs=dataclasses.replace(
        WAN_CAMERA.inputs,
        conditioning={"context": "text_dim", "rope_scales": None, "audio_embed": None, "reference_latent": None},
        ignored=("clip_fea", "denoise_mask"),
        arguments=native_arguments(even_with(LATENT, "Wan HuMo", "reference_latent"), "context",
                                   audio_embed=from_conditioning("audio_embed"),
                                   reference_latent=from_conditioning("reference_latent"),
                                   transformer_options=moves),
        lengths={"reference": num_tokens_of(LATENT, "reference_latent")}),
    plan=ModelPlan(
        blocks=tuple(dataclasses.replace(each, returns=(ALL,)) for each in WAN_CAMERA.plan.blocks),
        streams={"x": ALL}, attention={"self_attn": ALL},
        tp_plan=WAN_CAMERA.plan.tp_plan | styled(COLWISE, *(f"*.audio_cross_attn.{name}" for name in "qkv"))
        | {"*.audio_cross_attn.o": ROWWISE},
        tokens={"freqs": TokenArgument(1, ALL)}, positions={"rope_encode": _positions},
        token_index_argument=("token_indices", ALL),
        cacheable_outside={"text_embedding": "run"}),
    testing=SmallConfig(
        SMALL | {"model_type": "humo"}, "comfy.ldm.wan.model:HumoWanModel", ARGUMENTS | {"model_type": "humo"},
        input_shapes={"audio_embed": lambda config, shape, tokens: (shape[0], shape[2], 8, 5, 1280),
                      "reference_latent": lambda config, shape, tokens: (shape[0], config["in_dim"], 1, *shape[3:])}))
