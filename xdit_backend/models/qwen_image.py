"""Qwen-Image, Qwen-Image-Edit and Qwen-Image-Layered (layers are frames): two streams, joint attention, text first;
rotary positions around the centre of the image."""

import torch

from .common.family import Detection, Family, FolderRules, Inputs, SmallConfig
from .common.forward_state import ForwardValue
from .common.inputs import Packed, blocks, config_of, from_conditioning, has, needs_diffusers, size, text_mask, timestep
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut, full_shapes
from .common.reference_latents import AT_ZERO, at_zero, method_of, reference_positions
from .mage_flow import is_mage_flow

LATENT, IMAGE = Packed((1, 2, 2)), ("image", "reference")
TABLE, TEXT = TokenArgument(0, IMAGE), TokenArgument(0, ("text",))
METHODS = {**{word: word for word in ("index", "negative_index", "offset", AT_ZERO)}, "uxo": "offset"}
LAYERED = "time_text_embed.addition_t_embedding.weight"
NAMES = has("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight")
HEAD_SIZE = size("transformer_blocks.0.attn.norm_q.weight", 0)


def _adapt(model, config):
    """Follow ComfyUI: rows and columns count from the centre, with odd sizes rounded down; references are positioned
    as the workflow says, and are at the latent's timestep or at timestep zero."""
    rope, forward, starts_of, on_devices = model.pos_embed, model.forward, [], {}
    takes_at_zero = ForwardValue(model, False)
    for module in (model, *model.transformer_blocks):
        module.zero_cond_t = takes_at_zero

    def with_references(*, reference_starts=(), at_zero=False, **inputs):
        starts_of[:] = reference_starts
        takes_at_zero.set(at_zero)
        return forward(**inputs)

    def tables(img_shapes, max_txt_seq_len, device):
        if device not in on_devices:                           # not buffers; 4 MB
            on_devices[device] = torch.cat([rope.neg_freqs, rope.pos_freqs]).to(device)
        table, zero, sizes = on_devices[device], len(rope.neg_freqs), img_shapes[0]
        by_axis = table.split([width // 2 for width in rope.axes_dim], 1)
        rotations = []
        for (frame, row, column), (frames, rows, columns) in zip([(0, 0, 0), *starts_of], sizes):
            starts = (zero + frame, zero + row - rows // 2, zero + column - columns // 2)
            grids = torch.meshgrid(*(torch.arange(start, start + length, device=device)
                                     for start, length in zip(starts, (frames, rows, columns))), indexing="ij")
            rotations.append(torch.cat([part[grid.flatten()] for part, grid in zip(by_axis, grids)], 1))
        return torch.cat(rotations), table[zero + max(sizes[0][1] // 2, sizes[0][2] // 2):][:max_txt_seq_len]
    rope.forward, model.forward = tables, with_references


def _default(call):
    """Default method for reference positions: Qwen-Image-Edit 2511 marks it in its files, and Qwen-Image-Layered
    counts downwards."""
    if call.config["zero_cond_t"]:
        return AT_ZERO
    return "negative_index" if call.config["use_additional_t_cond"] else LATENT.method


def _reference_starts(call):
    return reference_positions(call, LATENT.patch[-1], method_of(call.conditioning, _default(call)))


def _at_zero(call):
    return at_zero(call.conditioning, _default(call))


def _no_addition(call):
    """Index of the additional timestep embedding, (1,) for all images: Qwen-Image-Layered has two, and ComfyUI
    always uses the first."""
    return call.latent.new_zeros(1, dtype=torch.long) if call.config["use_additional_t_cond"] else None


QWEN_IMAGE = Family(
    name="Qwen-Image", title="Qwen-Image, Qwen-Image-Edit, Qwen-Image-Layered",
    transformer="QwenImageTransformer2DModel", adapt_model=_adapt,
    activation_factors={"alone": 15.0, "residual": 7.2, "whole": 10.2, "outside": 2.6, "held": 1.3, "block": 14.0,
                        "exchange": 16.9, "own": 0.75},
    detection=Detection(
        recognise=lambda shapes: NAMES(shapes) and not is_mage_flow(shapes), refusals=(needs_diffusers("0.37"),),
        config=config_of(
            patch_size=2, in_channels=size("img_in.weight", 1), out_channels=size("proj_out.weight", 0, 4),
            num_layers=blocks("transformer_blocks."), attention_head_dim=HEAD_SIZE,
            joint_attention_dim=size("txt_in.weight", 1),
            num_attention_heads=lambda shapes: shapes["img_in.weight"][0] // HEAD_SIZE(shapes),
            axes_dims_rope=lambda shapes: (HEAD_SIZE(shapes) // 8, HEAD_SIZE(shapes) * 7 // 16,
                                           HEAD_SIZE(shapes) * 7 // 16),
            zero_cond_t=has("__index_timestep_zero__"), use_additional_t_cond=has(LAYERED),
            use_layer3d_rope=has(LAYERED)),
        convert=table((r"^__index_timestep_zero__$", None)),
        folder=FolderRules({"zero_cond_t": "__index_timestep_zero__"})),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0,
        conditioning={"context": "joint_attention_dim", "attention_mask": None, "ref_latents": None,
                      "ref_latents_method": None},
        choices={"ref_latents_method": METHODS}, lengths={"reference": LATENT.num_reference_tokens},
        arguments={"hidden_states": LATENT, "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"),
                   "encoder_hidden_states_mask": text_mask, "img_shapes": LATENT.shapes,
                   "reference_starts": _reference_starts, "at_zero": _at_zero, "additional_t_cond": _no_addition}),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks.", returns=("text", IMAGE), image_fraction=0.5,
                          control="input", patched="double", added="double_block"),),
        streams={"hidden_states": IMAGE, "encoder_hidden_states": "text"}, attention={"attn": ("text", *IMAGE)},
        needs_text=True, tokens={"image_rotary_emb": (TABLE, TEXT), "modulate_index": TokenArgument(1, IMAGE)},
        masks={"encoder_hidden_states_mask": ("text",)}, positions={"pos_embed": Cut((TABLE, TEXT), full_shapes)},
        full_precision_inputs={"time_text_embed": (("timestep",), 1.0)},
        cacheable={"img_mod": "step", "txt_mod": "step"},
        cacheable_outside={"txt_in": "run"}),
    testing=SmallConfig(
        {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 4, "attention_head_dim": 16,
         "num_attention_heads": 4, "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6), "zero_cond_t": False,
         "use_additional_t_cond": False, "use_layer3d_rope": False},
        "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel",
        {"in_channels": 64, "out_channels": 16, "num_layers": 3, "attention_head_dim": 32, "num_attention_heads": 4,
         "joint_attention_dim": 64, "axes_dims_rope": (4, 14, 14)}, frames=1, detected="QwenImage",
        more={"use_additional_t_cond": True}))
