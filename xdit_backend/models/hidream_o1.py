"""HiDream-O1-Image, ComfyUI's own module: a language model over one row of text, a timestep token, and image tokens
of 32 x 32 pixels. Text attends causally, all other tokens to everything."""

from functools import partial
from math import inf
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.forward_state import ForwardValue
from .common.inputs import Unpacked, blocks, config_of, from_conditioning, has, size, token_range
from .common.key_mapping import table
from .common.native_module import native_arguments, number
from .common.plan import BlockList, ModelPlan, TokenArgument

SIDE = 32                                  # pixels of a token's side
LATENT, TEXT, ALL = Unpacked((SIDE, SIDE)), ("text",), ("text", "time", "image", "reference")
NATIVE, LAYERS = "comfy.ldm.hidream_o1.model:HiDreamO1Transformer", "language_model.layers."
ATTENTION, VISION, SEEING = f"{LAYERS}0.self_attn.", "visual.blocks.0.mlp.linear_fc1.weight", "vision_"


def _adapt(model, config):
    """Pass the number of text tokens to each layer as the shape of a fourth, empty rotary table. The class's cache
    of reference images is cleared at each call."""
    num_text, forward, tables = ForwardValue(model), model.forward, model.language_model.compute_freqs_cis
    for layer in model.language_model.layers:
        layer.self_attn.causal, layer.self_attn.full = _attention(True), _attention(False)
        layer.forward = MethodType(_layer, layer)
        layer.register_forward_hook(_keeps_nothing)

    def with_text(**inputs):
        model.clear_kv_cache()
        with num_text.holding(inputs["ar_len"]):
            return forward(**inputs)

    def with_fourth(positions, device):
        return *tables(positions, device), torch.empty(1, num_text.get(), 0, device=device)
    model.forward, model.language_model.compute_freqs_cis = with_text, with_fourth


def _attention(is_causal):
    """Create one of the two attention modules of a layer, each for its own streams. ComfyUI's function computes both
    in one."""
    module = nn.Module()
    module.is_causal, module.forward = is_causal, MethodType(_attends, module)
    return module


def _attends(self, query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal, enable_gqa=True)


def _layer(self, x, freqs_cis, attention_mask=None, optimized_attention=None, past_key_value=None):
    attends = partial(_two_passes, self.self_attn, freqs_cis[3].shape[1])
    return type(self).forward(self, x, None, freqs_cis[:3], attends)[0]


def _keeps_nothing(layer, args, output):
    """Return what the class's forward unpacks: hidden states, and no cached keys and values."""
    return output, None


def _two_passes(attention, num_text, query, key, value, heads, **options):
    """ComfyUI's make_two_pass_attention for the tokens of a rank. (B, N, T, H) to (B, T, N H)."""
    text, others = query.split([num_text, query.shape[2] - num_text], 2)
    before = attention.causal(text, key[:, :, :num_text], value[:, :, :num_text])
    return torch.cat([before, attention.full(others, key, value)], 2).transpose(1, 2).flatten(2)


def _latent(call):
    """The latent. Raises ConfigError for sizes at which ComfyUI's forward fails."""
    rows, columns = call.latent.shape[-2:]
    if rows % SIDE or columns % SIDE:
        raise ConfigError(f"Use a width and a height that are multiples of {SIDE} pixels, as HiDream-O1 needs: this "
                          f"latent has {rows} x {columns}.")
    return LATENT(call)


def _positions(call):
    """Positions (B, 3, T) of all tokens; for a patch, with those of its own image tokens."""
    positions, num_text = from_conditioning("position_ids")(call), call.conditioning["input_ids"].shape[1]
    first, count, num_image = token_range(call, LATENT)
    return torch.cat([positions[..., :num_text], positions[..., num_text + first:num_text + first + count],
                      positions[..., num_text + num_image:]], 2)


def _without_kv_cache(call):
    """transformer_options that disable the class's text KV cache, which it uses unless a node replaces a block."""
    return {"patches_replace": {"dit": {"none of its blocks": None}}}


def _heads(name):
    return lambda shapes: shapes[f"{ATTENTION}{name}.weight"][0] // shapes[f"{ATTENTION}q_norm.weight"][0]


def _num_references(conditioning):
    return conditioning["ref_patches"].shape[1] if "ref_patches" in conditioning else 0


def _of_class(config):
    return {"text_config_overrides": {name: value for name, value in config.items() if not name.startswith(SEEING)},
            "vision_config_overrides": {name.removeprefix(SEEING): value for name, value in config.items()
                                        if name.startswith(SEEING)}}


def _positions_shape(config, shape, tokens):
    return shape[0], 3, tokens + 1 + LATENT.num_tokens(shape) + 3


SMALL = {"vocab_size": 151936, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vision_hidden_size": 64,
         "vision_intermediate_size": 48, "vision_depth": 1, "vision_num_position_embeddings": 16}


class _Plan(ModelPlan):
    cross_attention = {"self_attn.full": (ALL[1:], ALL)}

    def window(self, attention):
        return (inf, 0) if attention.is_causal else None


class _HiDreamO1(Family):
    def class_arguments(self, config):
        return _of_class(config)


HIDREAM_O1 = _HiDreamO1(
    name="HiDream-O1", title="HiDream-O1-Image", transformer=NATIVE, adapt_model=_adapt,
    unsupported_dtypes=("float16",), num_key_heads=lambda config: config["num_key_value_heads"],
    width=lambda config: config["hidden_size"], num_channels=lambda config: 3, in_channels=lambda config: 3,
    pixels=lambda config: (1, 1, 1),
    # the peak is where the forward has all tokens, before and after the blocks
    activation_factors={"alone": 16.23, "residual": 7.24, "whole": 11.07, "outside": 11.07, "held": 1.5,
                        "exchange": 14.0, "own": 0.0},
    detection=Detection(
        recognise=has("t_embedder1.mlp.0.weight", "x_embedder.proj1.weight", f"{ATTENTION}q_norm.weight"),
        config=config_of(
            vocab_size=size("language_model.embed_tokens.weight", 0), num_hidden_layers=blocks(LAYERS),
            hidden_size=size("language_model.embed_tokens.weight", 1), head_dim=size(f"{ATTENTION}q_norm.weight", 0),
            intermediate_size=size(f"{LAYERS}0.mlp.gate_proj.weight", 0), num_attention_heads=_heads("q_proj"),
            num_key_value_heads=_heads("k_proj"), vision_hidden_size=size(VISION, 1),
            vision_depth=blocks("visual.blocks."),
            vision_intermediate_size=size(VISION, 0),
            vision_num_position_embeddings=size("visual.pos_embed.weight", 0)),
        # ComfyUI drops these modules
        convert=table((r"^visual\.deepstack_merger_list\.", None))),
    inputs=Inputs(
        latent=LATENT, ignored=("context", "token_types", "vinput_mask"),
        conditioning=dict.fromkeys(("input_ids", "position_ids", "ar_len", "ref_pixel_values", "ref_image_grid_thw",
                                    "ref_patches")),
        counts=("ar_len",),
        arguments=native_arguments(_latent, "input_ids", "ref_pixel_values", "ref_image_grid_thw", "ref_patches",
                                   times="timesteps", position_ids=_positions, ar_len=number("ar_len"),
                                   transformer_options=_without_kv_cache),
        lengths={"text": lambda conditioning: conditioning["ar_len"].shape[0],
                 "time": lambda conditioning: conditioning["input_ids"].shape[1] - conditioning["ar_len"].shape[0],
                 "reference": _num_references}),
    plan=_Plan(
        blocks=(BlockList("language_model.layers", LAYERS, "num_hidden_layers", returns=(ALL,)),),
        streams={"x": ALL}, attention={"self_attn.causal": TEXT},
        tokens={"freqs_cis": (*[TokenArgument(1, ALL)] * 3, TokenArgument(1, TEXT))},
        rereads_latent=True,
        cacheable_outside={"visual": "run"}),
    testing=SmallConfig(SMALL, NATIVE, _of_class(SMALL), detected="HiDreamO1", input_shapes={
        "input_ids": lambda config, shape, tokens: (shape[0], tokens + 1), "position_ids": _positions_shape,
        "ar_len": lambda config, shape, tokens: (tokens,),
        "ref_patches": lambda config, shape, tokens: (shape[0], 3, 3 * SIDE ** 2)}))
