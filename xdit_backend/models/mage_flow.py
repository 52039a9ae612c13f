"""Mage-Flow and Mage-Flow-Edit, ComfyUI's own module: Qwen-Image's blocks over single latent pixels, with text that
is not rotated. Image positions count from the centre, and reference images follow as further frames."""

from types import MethodType

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, blocks, config_of, has, size
from .common.native_module import batched_references, native_arguments, num_reference_tokens, same_names
from .common.plan import BlockList, ModelPlan, TokenArgument

LATENT, IMAGES, ALL = Unpacked((1, 1)), ("image", "reference"), ("text", "image", "reference")
NATIVE, NORM = "comfy.ldm.mage_flow.model:MageFlowTransformer2DModel", "transformer_blocks.0.attn.norm_q.weight"
NAMES = has("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight", NORM)


def is_mage_flow(shapes):
    """Whether a file with Qwen-Image's names is Mage-Flow, by the width of its text."""
    return shapes["txt_norm.weight"][0] == 2560


def _axes(shapes):
    """Head channels rotated by frames, rows and columns: (16, 56, 56) of 128."""
    head, side = shapes[NORM][0], shapes[NORM][0] * 7 // 32 * 2
    return head - 2 * side, side, side


def _positions(module, forward, rows, tokens, args, kwargs):
    """Positions of the full image, whose rows count from its centre; those of a reference, which has an index, are
    unchanged."""
    tokens_of_it, ids, sizes = forward(*args, **kwargs)
    if not kwargs:
        own, num_rows = sizes[0], rows.whole_token_rows
        first_row = rows.first_token * num_rows // rows.num_tokens
        shift = first_row + (own - own // 2) - (num_rows - num_rows // 2)
        ids = torch.stack([ids[..., 0], ids[..., 1] + shift, ids[..., 2]], -1)
    return tokens_of_it, ids, sizes


def _adapt(model, config):
    """Give blocks a row of positions for a placeholder text."""
    for block in model.transformer_blocks:
        block.forward = MethodType(_with_placeholder, block)


def _with_placeholder(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb,
                      transformer_options=None):
    lacking = hidden_states.shape[1] + encoder_hidden_states.shape[1] - image_rotary_emb.shape[2]
    if lacking:
        image_rotary_emb = torch.cat([image_rotary_emb[:, :, :lacking], image_rotary_emb], 2)
    return type(self).forward(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb,
                              image_rotary_emb, transformer_options=transformer_options)


SMALL = {"in_channels": 4, "out_channels": 4, "num_layers": 4, "attention_head_dim": 16, "num_attention_heads": 4,
         "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6)}

MAGE_FLOW = Family(
    name="Mage-Flow", title="Mage-Flow, Mage-Flow-Edit", transformer=NATIVE, unsupported_dtypes=("float16",),
    adapt_model=_adapt, num_channels=lambda config: config["in_channels"], pixels=lambda config: (1, 16, 16),
    activation_factors={"alone": 11.3, "residual": 3.37, "whole": 5.0, "outside": 2.6, "held": 1.33, "block": 10.67,
                        "exchange": 15.87, "attends": 7.96, "entered": 1.08},
    detection=Detection(
        recognise=lambda shapes: NAMES(shapes) and is_mage_flow(shapes),
        config=config_of(
            in_channels=size("img_in.weight", 1), out_channels=size("proj_out.weight", 0),
            num_layers=blocks("transformer_blocks."), attention_head_dim=size(NORM, 0),
            num_attention_heads=lambda shapes: shapes["img_in.weight"][0] // shapes[NORM][0],
            joint_attention_dim=size("txt_in.weight", 1),
            axes_dims_rope=_axes),
        convert=same_names),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, conditioning={"context": "joint_attention_dim", "ref_latents": None},
        lengths={"reference": num_reference_tokens(LATENT)}, ignored=("ref_latents_method",),
        arguments=native_arguments(LATENT, "context", ref_latents=batched_references)),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks.", returns=("text", IMAGES), image_fraction=0.5,
                          control="input", patched="double"),),
        streams={"hidden_states": IMAGES, "encoder_hidden_states": "text"}, attention={"attn": ALL},
        needs_text=True, tokens={"image_rotary_emb": TokenArgument(2, ALL)}, positions={"process_img": _positions},
        cacheable={"img_mod.1": "step", "txt_mod.1": "step"}, cacheable_outside={"txt_in": "run"}),
    testing=SmallConfig(SMALL, NATIVE, SMALL | {"in_channels": 128, "out_channels": 128,
                                                "joint_attention_dim": 2560},
                        detected="MageFlow"))
