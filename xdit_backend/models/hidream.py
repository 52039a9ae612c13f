"""HiDream-I1: two streams, image first, then one of both; blocks have experts, and each is given a text of its own
beside the first. HiDream-E1 is given a picture, which is tokens to the right of the image's."""

import dataclasses

import torch

from ..protocol.errors import ConfigError
from .common.family import Family, SmallConfig
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

LATENT, HEAD_SIZE, LAYERS, PICTURE = Unpacked((2, 2)), 128, "encoder_hidden_states_llama3", "image_cond"
IMAGE, PLACES = ("image", "reference"), Packed(LATENT.patch)
BOTH = (*IMAGE, "text")
LAYER_WIDTH = size("caption_projection.0.linear.weight", 1)


def _adapt(model, config):
    """diffusers pads pictures that are not square, and attends to the padding; ComfyUI does not. A block's own text is
    cut as the first text is.
    """
    def forward(*, latent, picture, timesteps, pooled, text, layers, places):
        counts, tokens = [side // 2 for side in latent.shape[2:]], _tokens(latent)
        num_own = tokens.shape[1]
        if picture is not None:
            tokens = torch.cat([tokens, _tokens(picture)], 1)
        image, place = model.x_embedder(tokens), model.pe_embedder(places[None])
        time = model.t_embedder(timesteps, latent.dtype) + model.p_embedder(pooled)
        *own, last = model.caption_projection
        texts = [project(layers[:, layer]) for project, layer in zip(own, config["llama_layers"])]
        text = torch.cat([last(text), texts[-1]], 1)
        for block, more in zip(model.double_stream_blocks, texts):
            image, text = block(hidden_states=image, encoder_hidden_states=text, more=more, temb=time,
                                image_rotary_emb=place)
        both = torch.cat([image, text], 1)
        for block, more in zip(model.single_stream_blocks, texts[len(model.double_stream_blocks):]):
            both = block(hidden_states=both, more=more, temb=time, image_rotary_emb=place)
        return (model.unpatchify(model.final_layer(both[:, :num_own], time), [counts] * len(latent), False),)
    model.forward = lambda return_dict, **given: forward(**given)
    for block in (*model.double_stream_blocks, *model.single_stream_blocks):
        block.forward = _with_own_text(block.block)


def _tokens(latent):
    """(B, C, n, p, m, q) -> (B, n * m, p * q * C)"""
    return latent.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def _picture(call):
    """Padded as the latent is; None where there is none."""
    picture = from_conditioning(PICTURE)(call)
    if picture is None:
        return None
    *_, rows, columns = full_shape(call)
    if picture.shape[2] != rows or columns % 2 or picture.shape[3] % 2:
        raise ConfigError("Make the picture and the latent of one height, and both of an even number of latent columns "
                          f"(16 pixels): HiDream-E1 puts them side by side, and they have {picture.shape[2]} x "
                          f"{picture.shape[3]} and {rows} x {columns} latent pixels.")
    return LATENT.padded(picture)


def _places(call):
    """(T, 3): of the latent's tokens, and of the picture's, to the right of them."""
    places, picture = PLACES.positions(call), call.conditioning.get(PICTURE)
    if picture is None:
        return places
    right = PLACES.positions(dataclasses.replace(call, latent=picture, patch=None))
    right[:, 2] += full_shape(call)[3] // 2
    return torch.cat([places, right])


def _with_own_text(block):
    """A block's forward, for tokens with a text that it takes, between the image and the first text,
    and does not give on."""
    def forward(hidden_states, more, temb, image_rotary_emb, encoder_hidden_states=None):
        num_image, is_single = image_rotary_emb.shape[1], encoder_hidden_states is None
        image, text = ((hidden_states[:, :num_image], hidden_states[:, num_image:]) if is_single
                       else (hidden_states, encoder_hidden_states))
        texts = torch.cat([more, text], 1)
        at_zero = torch.eye(2, dtype=image_rotary_emb.dtype, device=image_rotary_emb.device).expand(
            len(image_rotary_emb), texts.shape[1], *image_rotary_emb.shape[2:])
        places = torch.cat([image_rotary_emb, at_zero], 1)
        if is_single:
            both = block(hidden_states=torch.cat([image, texts], 1), temb=temb, image_rotary_emb=places)
            return torch.cat([both[:, :num_image], both[:, num_image + more.shape[1]:]], 1)
        image, texts = block(hidden_states=image, encoder_hidden_states=texts, temb=temb, image_rotary_emb=places)
        return image, texts[:, more.shape[1]:]
    return forward


def _layer_texts(shapes):
    """Of each block, the layer of the second text encoder whose text it is given;
    blocks beyond its 32 layers get the last."""
    return [min(block, 31) for block in range(blocks("caption_projection.")(shapes) - 1)]


def _text_width(shapes):
    """Of the first text encoder, whose projection is the last."""
    return shapes[f"caption_projection.{len(_layer_texts(shapes))}.linear.weight"][1]


HIDREAM = Family(
    name="HiDream-I1", title="HiDream-I1, HiDream-E1", transformer="HiDreamImageTransformer2DModel",
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
    convert=lambda tensors, config: tensors, latent=LATENT, sign=-1.0, adapt_model=_adapt,
    config_from_tensors=("_text_width", "_layer_width", "llama_layers", "max_resolution"),
    conditioning={"context": "_text_width", "y": "text_emb_dim", LAYERS: "_layer_width", PICTURE: None},
    lengths={"text": lambda conditioning: conditioning["context"].shape[1] + conditioning[LAYERS].shape[2],
             "more": lambda conditioning: conditioning[LAYERS].shape[2],
             "reference": num_tokens_of(LATENT, PICTURE)},
    arguments={"latent": LATENT, "picture": _picture, "timesteps": timestep(), "pooled": from_conditioning("y"),
               "text": from_conditioning("context"), "layers": from_conditioning(LAYERS), "places": _places},
    activation_factors={"alone": 23.3, "residual": 6.3, "whole": 13.2, "held": 4.95, "block": 18.7, "exchange": 17.95,
          "given": 1.5, "own": 0.0},
    plan=ModelPlan(                                            # of four experts, a token meets two
        blocks=(BlockList("double_stream_blocks", "double_stream_blocks.", returns=(IMAGE, "text"), image_fraction=0.38,
                          streams={"hidden_states": IMAGE, "encoder_hidden_states": "text"}),
                BlockList("single_stream_blocks", "single_stream_blocks.", "num_single_layers", returns=(BOTH,),
                          image_fraction=0.52)),
        streams={"hidden_states": BOTH}, attention={"block.attn1": (*IMAGE, "more", "text")}, needs_text=True,
        tokens={"image_rotary_emb": TokenArgument(1, IMAGE), "more": TokenArgument(1, ("more",))},
        graph_breaks=("block.ff_i",),
        cacheable={"block.adaLN_modulation": "step"}, cacheable_outside={"caption_projection": "run"}),
    test_config=SmallConfig(
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2,
         "attention_head_dim": 16,
         "num_attention_heads": 4, "axes_dims_rope": (8, 4, 4), "caption_channels": [24, 20], "text_emb_dim": 16,
         "llama_layers": [0, 1, 2, 3], "_text_width": 24, "_layer_width": 20},
        "comfy.ldm.hidream.model:HiDreamImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 2, "num_single_layers": 1,
         "attention_head_dim": 128,
         "num_attention_heads": 2, "axes_dims_rope": [64, 32, 32], "max_resolution": [128, 128],
         "caption_channels": [48, 32], "text_emb_dim": 64, "llama_layers": [0, 1, 2]}, detected="HiDream"),
)
