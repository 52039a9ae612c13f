"""Lens, ComfyUI's own module: two streams with joint attention, image first. The text is hidden states of several
layers of a language model; positions count from the centre of the image."""

from types import MethodType

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, blocks, config_of, has, optional_size, size, text_mask
from .common.native_module import native_arguments, same_names
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.tp_plan import COLWISE, QKV, ROWWISE

LATENT, ALL = Unpacked((1, 1)), ("image", "text")
NATIVE, NORM = "comfy.ldm.lens.model:LensTransformer2DModel", "transformer_blocks.0.attn.norm_q.weight"


def _positions(module, forward, rows, tokens, args, kwargs):
    """Positions of a patch in the full image: rows count from its centre, and text begins half a side from it."""
    ids, own = args[0].clone(), tokens.counts["image"]
    own_rows, columns = own * rows.whole_token_rows // rows.num_tokens, rows.num_tokens // rows.whole_token_rows
    first_row, num_rows = rows.first_token // columns, rows.whole_token_rows
    ids[:, :own, 1] += first_row - (num_rows - num_rows // 2) + (own_rows - own_rows // 2)
    ids[:, own:] += max(num_rows // 2, columns // 2) - max(own_rows // 2, columns // 2)
    return forward(ids, *args[1:], **kwargs)


def _mask(call):
    """Mask of the real text tokens; a mask of zero tokens where nothing is masked, for which ComfyUI's forward would
    create one."""
    mask = text_mask(call)
    return call.latent.new_zeros(len(call.latent), 0, dtype=torch.bool) if mask is None else mask


def _adapt(model, config):
    """Pass the mask of the text tokens to the blocks, which make ComfyUI's bias of it: a mask can be sharded, the
    bias cannot."""
    bias = model._build_joint_attention_mask
    model._build_joint_attention_mask = lambda text, num_image_tokens: text if text.shape[1] else None
    for block in model.transformer_blocks:
        block.bias_of, block.forward = bias, MethodType(_with_bias, block)


def _with_bias(self, hidden_states, encoder_hidden_states, temb, freqs_cis, attention_mask=None,
               transformer_options=None):
    if attention_mask is not None:
        attention_mask = self.bias_of(attention_mask, hidden_states.shape[1])
    return type(self).forward(self, hidden_states, encoder_hidden_states, temb, freqs_cis, attention_mask,
                              transformer_options)


def _text_norms(shapes):
    return len([name for name in shapes if name.startswith("txt_norm.") and name.count(".") == 2])


SMALL = {"in_channels": 16, "out_channels": 4, "num_layers": 4, "attention_head_dim": 12, "num_attention_heads": 4,
         "enc_hidden_dim": 24, "axes_dims_rope": (4, 4, 4), "multi_layer_encoder_feature": True,
         "selected_layer_index": (0, 1, 2), "_text_width": 72}

LENS = Family(
    name="Lens", title="Lens", transformer=NATIVE, unsupported_dtypes=("float16",), adapt_model=_adapt,
    num_channels=lambda config: config["in_channels"], pixels=lambda config: (1, 16, 16),
    activation_factors={"alone": 11.1, "residual": 5.95, "whole": 7.95, "outside": 5.5, "held": 1.35, "block": 10.6,
                        "exchange": 15.55, "own": 0.55},
    detection=Detection(
        recognise=has(NORM, "transformer_blocks.0.attn.img_qkv.weight", "transformer_blocks.0.img_mlp.w1.weight"),
        config=config_of(
            in_channels=size("img_in.weight", 1), out_channels=size("proj_out.weight", 0, 4),
            num_layers=blocks("transformer_blocks."), attention_head_dim=size(NORM, 0),
            num_attention_heads=lambda shapes: shapes["img_in.weight"][0] // shapes[NORM][0],
            enc_hidden_dim=lambda shapes: (optional_size("txt_norm.0.weight", 0)(shapes)
                                           or shapes["txt_norm.weight"][0]),
            axes_dims_rope=lambda shapes: (8, 28, 28) if shapes[NORM][0] == 64 else (shapes[NORM][0] // 3,) * 3,
            multi_layer_encoder_feature=lambda shapes: _text_norms(shapes) > 0,
            selected_layer_index=lambda shapes: tuple(range(_text_norms(shapes) or 1)),
            _text_width=size("txt_in.weight", 1)),
        convert=same_names),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, conditioning={"context": "_text_width", "attention_mask": None},
        arguments=native_arguments(LATENT, "context", attention_mask=_mask)),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks.", returns=("text", "image"), image_fraction=0.5,
                          patched="double"),),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"}, attention={"attn": ALL},
        tokens={"freqs_cis": TokenArgument(2, ALL)}, masks={"attention_mask": ("text",)},
        positions={"pos_embed": _positions}, cacheable={"img_mod.1": "step", "txt_mod.1": "step"},
        tp_plan={"attn.*_qkv": QKV, "*_mlp.w1": COLWISE, "*_mlp.w3": COLWISE, "*_mlp.w2": ROWWISE},
        cacheable_outside={"txt_in": "run"}),
    testing=SmallConfig(SMALL, NATIVE, {name: value for name, value in SMALL.items() if not name.startswith("_")}
                        | {"in_channels": 128, "out_channels": 32, "attention_head_dim": 96,
                           "axes_dims_rope": (32, 32, 32)},
                        detected="Lens"))
