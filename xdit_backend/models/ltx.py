"""LTX-Video 0.9: one stream over frames, rows and columns; text by cross-attention; rotary positions in pixels and seconds.

Given frames have times of their own, token by token; guides are frames after the video's, at positions of their own.
"""

import torch

from .describe import Packed, because, blocks, config_of, diffusers_converter, given, has, size, text_mask, token_rows
from .plan import BlockList, Family, ModelPlan, Tiny, TokenArgument

LATENT, TABLE = Packed((1, 1, 1)), TokenArgument(1, ("image",))
PIXELS, FRAME_RATE, NUM_HEADS = (8, 32, 32), 25.0, 32          # of a latent pixel; where no node says one; ComfyUI's


is_ltx = has("patchify_proj.weight", "adaln_single.emb.timestep_embedder.linear_1.bias", "transformer_blocks.0.attn2.to_k.weight")


def bounds(asked):
    """(1 or B, 3, T, 2): second, row and column at which each token begins and ends, in pixels of the video. A causal first frame is one
    pixel frame long.
    """
    starts = LATENT.positions(asked).T[None]
    places = torch.stack([starts, starts + 1], -1) * torch.tensor(PIXELS, device=asked.latent.device)[:, None, None]
    if asked.config["_causal_temporal_positioning"]:
        places[:, 0] = (places[:, 0] + 1 - PIXELS[0]).clamp(min=0)
    guides = asked.conditioning.get("keyframe_idxs")
    if guides is not None:                                     # (B, 3, tokens of guides, 2), which are the last ones
        first, count, whole = token_rows(asked, LATENT)
        guides = guides.to(places.dtype)
        places = torch.cat([places.expand(len(guides), -1, -1, -1)[:, :, :max(0, whole - guides.shape[2] - first)],
                            guides[:, :, max(0, first - (whole - guides.shape[2])):]], 2)[:, :, :count]
    rate = asked.conditioning.get("frame_rate", torch.tensor(FRAME_RATE)).flatten()[0].to(places)
    return torch.cat([places[:, :1] * (1.0 / rate), places[:, 1:]], 1)


def token_times(asked):
    """(B,), or (B, T) where tokens differ; a patch has its own tokens."""
    if asked.timestep.ndim == 1:
        return asked.timestep * 1000
    first, count, _ = token_rows(asked, LATENT)
    return asked.timestep[:, first:first + count] * 1000


def more_than_guides(arguments):
    """What ComfyUI's model does with guides, and diffusers' does not."""
    entries, mask = arguments.get("guide_attention_entries") or (), arguments.get("denoise_mask")
    if any(entry["strength"] != 1.0 or entry.get("pixel_mask") is not None for entry in entries):
        return "guides of a strength other than 1, or with a mask"
    if arguments.get("keyframe_idxs") is not None and mask is None:
        return "guides where the latent has lost the noise mask that came with them"
    if arguments.get("keyframe_idxs") is not None and (mask < 0).any():
        return "guides of a lower resolution than the video's"
    return None


LTX = Family(
    name="LTX-Video", title="LTX-Video 0.9", transformer="LTXVideoTransformer3DModel",
    recognise=lambda shapes: is_ltx(shapes) and not has("audio_adaln_single.linear.weight")(shapes),
    refusals=(because("it shifts its text by time (LTX-2 without sound)", has("prompt_adaln_single.linear.weight")),),
    config=config_of(
        in_channels=size("patchify_proj.weight", 1), out_channels=size("proj_out.weight", 0), num_attention_heads=NUM_HEADS,
        attention_head_dim=size("transformer_blocks.0.attn2.to_k.weight", 0, NUM_HEADS), num_layers=blocks("transformer_blocks."),
        cross_attention_dim=size("transformer_blocks.0.attn2.to_k.weight", 1),
        caption_channels=size("caption_projection.linear_1.weight", 1)),
    settings={"causal_temporal_positioning": (False, True), "num_attention_heads": (NUM_HEADS,), "positional_embedding_theta": (10000.0,),
              "positional_embedding_max_pos": ([20, 2048, 2048],), "timestep_scale_multiplier": (1000,),
              "vae_scale_factors": ([8, 32, 32],), "use_middle_indices_grid": (False,),
              "rope_type": ("interleaved",), "frequencies_precision": ("float32",),
              "caption_proj_before_connector": (False,), "cross_attention_adaln": (False,)},
    convert=diffusers_converter("convert_ltx_transformer_checkpoint_to_diffusers"), latent=LATENT, time_scale=1.0,
    pixels=lambda config: PIXELS,
    conditioning={"context": "caption_channels", "attention_mask": None, "frame_rate": None, "keyframe_idxs": None},
    ignored=("denoise_mask", "guide_attention_entries"), beyond=more_than_guides,
    arguments={"hidden_states": LATENT, "encoder_hidden_states": given("context"), "timestep": token_times,
               "encoder_attention_mask": text_mask, "video_coords": lambda asked: bounds(asked)[..., 0]},
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks.", patched="double"),), streams={"hidden_states": "image"},
        attention={"attn1": ("image",)}, tokens={"image_rotary_emb": TABLE, "temb": TABLE}, of_heads=("image_rotary_emb",),
        once={"attn2.to_k": "run", "attn2.to_v": "run"}, once_outside={"caption_projection": "run"}),
    tiny=Tiny(
        {"in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32, "num_layers": 4,
         "caption_channels": 24, "_causal_temporal_positioning": True},
        "comfy.ldm.lightricks.model:LTXVModel",
        {"in_channels": 128, "cross_attention_dim": 256, "attention_head_dim": 8, "num_layers": 3}),
)
