"""Qwen-Image: two streams, joint attention, text first; rotary positions around the middle of the picture."""

import torch

from .describe import Packed, because, blocks, config_of, given, has, needs_diffusers, size, text_mask, timestep
from .keys import table
from .plan import BlockList, Family, ModelPlan, Tiny, TokenArgument
from .positions import Cut, whole_shapes

LATENT, IMAGE, TEXT = Packed((1, 2, 2)), TokenArgument(0, ("image",)), TokenArgument(0, ("text",))
HEAD_SIZE = size("transformer_blocks.0.attn.norm_q.weight", 0)


def _amend(model, config):
    """ComfyUI counts rows and columns from the middle with odd sizes rounded down, diffusers with them rounded up."""
    rope = model.pos_embed

    def tables(img_shapes, max_txt_seq_len, device):
        sizes, zero = img_shapes[0][0], len(rope.neg_freqs)
        starts = (zero, zero - sizes[1] // 2, zero - sizes[2] // 2)
        by_axis = torch.cat([rope.neg_freqs, rope.pos_freqs]).to(device).split([width // 2 for width in rope.axes_dim], 1)
        grids = torch.meshgrid(*(torch.arange(start, start + length, device=device) for start, length in zip(starts, sizes)), indexing="ij")
        text = rope.pos_freqs[max(sizes[1] // 2, sizes[2] // 2):].to(device)[:max_txt_seq_len]
        return torch.cat([part[grid.flatten()] for part, grid in zip(by_axis, grids)], 1), text
    rope.forward = tables


QWEN_IMAGE = Family(
    name="Qwen-Image", title="Qwen-Image", transformer="QwenImageTransformer2DModel",
    recognise=has("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"),
    refusals=(needs_diffusers("0.37"),
              because("it makes layers (Qwen-Image-Layered)", has("time_text_embed.addition_t_embedding.weight")),
              because("it edits pictures (Qwen-Image-Edit 2511)", has("__index_timestep_zero__"))),
    config=config_of(
        patch_size=2, in_channels=size("img_in.weight", 1), out_channels=size("proj_out.weight", 0, 4),
        num_layers=blocks("transformer_blocks."), attention_head_dim=HEAD_SIZE, joint_attention_dim=size("txt_in.weight", 1),
        num_attention_heads=lambda shapes: shapes["img_in.weight"][0] // HEAD_SIZE(shapes),
        axes_dims_rope=lambda shapes: (HEAD_SIZE(shapes) // 8, HEAD_SIZE(shapes) * 7 // 16, HEAD_SIZE(shapes) * 7 // 16)),
    convert=table(), latent=LATENT, time_scale=1.0, amend=_amend,
    conditioning={"context": "joint_attention_dim", "attention_mask": None},
    arguments={"hidden_states": LATENT, "timestep": timestep(), "encoder_hidden_states": given("context"),
               "encoder_hidden_states_mask": text_mask, "img_shapes": LATENT.shapes},
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks.", returns=("text", "image"), image_share=0.5),),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"}, attention={"attn": ("text", "image")}, needs_text=True,
        tokens={"image_rotary_emb": (IMAGE, TEXT)}, masks={"encoder_hidden_states_mask": ("text",)},
        positions={"pos_embed": Cut((IMAGE, TEXT), whole_shapes)}, exact={"time_text_embed": (("timestep",), 1.0)},
        once={"img_mod": "step", "txt_mod": "step"}, once_outside={"txt_in": "run"}),
    tiny=Tiny(
        {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 4, "attention_head_dim": 16, "num_attention_heads": 4,
         "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6)},
        "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel",
        {"in_channels": 64, "out_channels": 16, "num_layers": 3, "attention_head_dim": 32, "num_attention_heads": 4,
         "joint_attention_dim": 64, "axes_dims_rope": (4, 14, 14)}, frames=1, detected="QwenImage"),
)
