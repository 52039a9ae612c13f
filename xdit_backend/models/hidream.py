"""HiDream-I1: two streams, image first, then one of both. Blocks have experts, and each receives a text of its own
in addition to the first. HiDream-E1 takes a reference image, whose tokens are to the right of the image's."""

import dataclasses

import torch

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import (
    Packed,
    Unpacked,
    blocks,
    config_of,
    from_conditioning,
    full_shape,
    has,
    num_tokens_of,
    size,
    timestep,
)
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.tp_plan import COLWISE, GATHERED, ROWWISE, styled

LATENT, HEAD_SIZE, LAYERS, IMAGE_COND = Unpacked((2, 2)), 128, "encoder_hidden_states_llama3", "image_cond"
IMAGE, TOKENS = ("image", "reference"), Packed(LATENT.patch)
BOTH = (*IMAGE, "text")
LAYER_WIDTH = size("caption_projection.0.linear.weight", 1)


def _adapt(model, config):
    """Replace diffusers' forward, which pads images that are not square and attends to the padding; ComfyUI does
    not. A block's own text is sharded like the first text."""
    def forward(*, latent, reference, timesteps, pooled, text, layers, positions):
        counts, tokens = [side // 2 for side in latent.shape[2:]], _tokens(latent)
        num_own = tokens.shape[1]
        if reference is not None:
            tokens = torch.cat([tokens, _tokens(reference)], 1)
        image, rotations = model.x_embedder(tokens), model.pe_embedder(positions[None])
        time = model.t_embedder(timesteps, latent.dtype) + model.p_embedder(pooled)
        *own, last = model.caption_projection
        texts = [project(layers[:, layer]) for project, layer in zip(own, config["llama_layers"])]
        text = torch.cat([last(text), texts[-1]], 1)
        for block, more in zip(model.double_stream_blocks, texts):
            image, text = block(hidden_states=image, encoder_hidden_states=text, more=more, temb=time,
                                image_rotary_emb=rotations)
        both = torch.cat([image, text], 1)
        for block, more in zip(model.single_stream_blocks, texts[len(model.double_stream_blocks):]):
            both = block(hidden_states=both, more=more, temb=time, image_rotary_emb=rotations)
        return (model.unpatchify(model.final_layer(both[:, :num_own], time), [counts] * len(latent), False),)
    model.forward = lambda return_dict, **arguments: forward(**arguments)
    for block in (*model.double_stream_blocks, *model.single_stream_blocks):
        block.forward = _with_own_text(block.block)


def _tokens(latent):
    """(B, C, n, p, m, q) -> (B, n * m, p * q * C)"""
    return latent.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def _reference(call):
    """The reference image, padded like the latent; None without one."""
    reference = from_conditioning(IMAGE_COND)(call)
    if reference is None:
        return None
    *_, rows, columns = full_shape(call)
    if reference.shape[2] != rows or columns % 2 or reference.shape[3] % 2:
        raise ConfigError("Use an image and a latent with the same height, and an even number of latent columns (16 "
                          f"pixels) each: HiDream-E1 puts them side by side, and they have {reference.shape[2]} x "
                          f"{reference.shape[3]} and {rows} x {columns} latent pixels.")
    return LATENT.padded(reference)


def _positions(call):
    """Positions (T, 3) of the latent's tokens, and of the reference image's, to the right of them."""
    positions, reference = TOKENS.positions(call), call.conditioning.get(IMAGE_COND)
    if reference is None:
        return positions
    right = TOKENS.positions(dataclasses.replace(call, latent=reference, patch=None))
    right[:, 2] += full_shape(call)[3] // 2
    return torch.cat([positions, right])


def _with_own_text(block):
    """Wrap a block's forward for an additional text, which is between the image and the first text and is not passed
    on."""
    def forward(hidden_states, more, temb, image_rotary_emb, encoder_hidden_states=None):
        num_image, is_single = image_rotary_emb.shape[1], encoder_hidden_states is None
        image, text = ((hidden_states[:, :num_image], hidden_states[:, num_image:]) if is_single
                       else (hidden_states, encoder_hidden_states))
        texts = torch.cat([more, text], 1)
        at_zero = torch.eye(2, dtype=image_rotary_emb.dtype, device=image_rotary_emb.device).expand(
            len(image_rotary_emb), texts.shape[1], *image_rotary_emb.shape[2:])
        rotations = torch.cat([image_rotary_emb, at_zero], 1)
        if is_single:
            both = block(hidden_states=torch.cat([image, texts], 1), temb=temb, image_rotary_emb=rotations)
            return torch.cat([both[:, :num_image], both[:, num_image + more.shape[1]:]], 1)
        image, texts = block(hidden_states=image, encoder_hidden_states=texts, temb=temb, image_rotary_emb=rotations)
        return image, texts[:, more.shape[1]:]
    return forward


def _layer_texts(shapes):
    """For each block, the layer of the second text encoder whose hidden states it receives; blocks beyond its 32
    layers receive the last."""
    return [min(block, 31) for block in range(blocks("caption_projection.")(shapes) - 1)]


def _text_width(shapes):
    """Width of the first text encoder, whose projection is the last."""
    return shapes[f"caption_projection.{len(_layer_texts(shapes))}.linear.weight"][1]


FEED_FORWARDS = "block.ff_i.experts.*", "block.ff_i.shared_experts", "block.ff_t", "block.ff_i"
TP_PLAN = (styled(COLWISE, *(f"block.attn1.to_{name}" for name in ("q", "k", "v", "q_t", "k_t", "v_t")),
                  *(f"{module}.{name}" for module in FEED_FORWARDS for name in ("w1", "w3")))
           | styled(ROWWISE, "block.attn1.to_out", "block.attn1.to_out_t", *(f"{name}.w2" for name in FEED_FORWARDS))
           | {"block.adaLN_modulation.*": GATHERED})


class _Plan(ModelPlan):
    graph_breaks = ("block.ff_i",)


HIDREAM = Family(
    name="HiDream-I1", title="HiDream-I1, HiDream-E1", transformer="HiDreamImageTransformer2DModel", adapt_model=_adapt,
    activation_factors={"alone": 23.3, "residual": 6.3, "whole": 13.2, "held": 4.95, "block": 18.7, "exchange": 17.95,
                        "given": 1.5, "own": 0.0},
    detection=Detection(
        recognise=has("caption_projection.0.linear.weight", "double_stream_blocks.0.block.attn1.to_q_t.weight"),
        config=config_of(
            patch_size=2, in_channels=size("x_embedder.proj.weight", 1, 4),
            out_channels=size("final_layer.linear.weight", 0, 4),
            num_layers=blocks("double_stream_blocks."), num_single_layers=blocks("single_stream_blocks."),
            attention_head_dim=HEAD_SIZE,
            num_attention_heads=size("x_embedder.proj.weight", 0, HEAD_SIZE), axes_dims_rope=(64, 32, 32),
            max_resolution=(128, 128),
            caption_channels=lambda shapes: [_text_width(shapes), LAYER_WIDTH(shapes)], num_activated_experts=2,
            text_emb_dim=size("p_embedder.pooled_embedder.linear_1.weight", 1), llama_layers=_layer_texts,
            num_routed_experts=blocks("double_stream_blocks.0.block.ff_i.experts."), _text_width=_text_width,
            _layer_width=LAYER_WIDTH),
        convert=lambda tensors, config: tensors,
        config_from_tensors=("_text_width", "_layer_width", "llama_layers", "max_resolution")),
    inputs=Inputs(
        latent=LATENT, sign=-1.0,
        conditioning={"context": "_text_width", "y": "text_emb_dim", LAYERS: "_layer_width", IMAGE_COND: None},
        lengths={"text": lambda conditioning: conditioning["context"].shape[1] + conditioning[LAYERS].shape[2],
                 "more": lambda conditioning: conditioning[LAYERS].shape[2],
                 "reference": num_tokens_of(LATENT, IMAGE_COND)},
        arguments={"latent": LATENT, "reference": _reference, "timesteps": timestep(), "pooled": from_conditioning("y"),
                   "text": from_conditioning("context"), "layers": from_conditioning(LAYERS), "positions": _positions}),
    plan=_Plan(                                                # each token uses two of four experts
        blocks=(BlockList("double_stream_blocks", "double_stream_blocks.", returns=(IMAGE, "text"), image_fraction=0.38,
                          streams={"hidden_states": IMAGE, "encoder_hidden_states": "text"}),
                BlockList("single_stream_blocks", "single_stream_blocks.", "num_single_layers", returns=(BOTH,),
                          image_fraction=0.52)),
        streams={"hidden_states": BOTH}, attention={"block.attn1": (*IMAGE, "more", "text")}, needs_text=True,
        tokens={"image_rotary_emb": TokenArgument(1, IMAGE), "more": TokenArgument(1, ("more",))},
        tp_plan=TP_PLAN,
        cacheable={"block.adaLN_modulation": "step"}, cacheable_outside={"caption_projection": "run"}),
    testing=SmallConfig(
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2,
         "attention_head_dim": 16, "num_attention_heads": 4, "axes_dims_rope": (8, 4, 4), "caption_channels": [24, 20],
         "text_emb_dim": 16, "llama_layers": [0, 1, 2, 3], "_text_width": 24, "_layer_width": 20},
        "comfy.ldm.hidream.model:HiDreamImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 2, "num_single_layers": 1,
         "attention_head_dim": 128, "num_attention_heads": 2, "axes_dims_rope": [64, 32, 32],
         "max_resolution": [128, 128], "caption_channels": [48, 32], "text_emb_dim": 64,
         "llama_layers": [0, 1, 2]}, detected="HiDream"))
