"""Models are recognised, and their configs inferred, from the header alone: for the published models' real shapes."""

import dataclasses
import json
import re
import struct

import pytest

from tests.unit.checkpoints import (
    published_3d,
    published_cascade,
    published_comfyui,
    published_newbie,
    published_pixels,
    published_seedvr2,
    published_sound,
    published_wan,
)
from xdit_backend.checkpoints.checkpoint import PREFIXES, open_checkpoint
from xdit_backend.checkpoints.closest_family import _RecordedShapes
from xdit_backend.checkpoints.detection import recognise
from xdit_backend.models import FAMILIES
from xdit_backend.protocol.errors import CheckpointError


def blocks(prefix, count, tensors):
    return {f"{prefix}{index}.{name}": shape for index in range(count) for name, shape in tensors.items()}


SEEDVR2 = {"norm_eps": 1e-5, "num_layers": 32, "mlp_type": "swiglu", "vid_in_channels": 33, "vid_out_channels": 16,
           "vid_dim": 2560, "txt_in_dim": 5120, "heads": 20, "head_dim": 128, "mm_layers": 10, "expand_ratio": 4,
           "rope_dim": 126, "rope_type": "mmrope3d", "vid_out_norm": True}
SEEDVR2_7B = {"num_layers": 36, "vid_dim": 3072, "heads": 24, "rope_dim": 60, "rope_type": "rope3d",
              "vid_out_norm": None}
SD35_LARGE = {
    "x_embedder.proj.weight": (2432, 16, 2, 2), "pos_embed": (1, 36864, 2432), "final_layer.linear.weight": (64, 2432),
    "context_embedder.weight": (2432, 4096), "y_embedder.mlp.0.weight": (2432, 2048),
    **blocks("joint_blocks.", 38, {"context_block.attn.qkv.weight": (7296, 2432), "x_block.attn.ln_q.weight": (64,)})}
SD35_MEDIUM = {
    "x_embedder.proj.weight": (1536, 16, 2, 2), "pos_embed": (1, 147456, 1536), "final_layer.linear.weight": (64, 1536),
    "context_embedder.weight": (1536, 4096), "y_embedder.mlp.0.weight": (1536, 2048),
    **blocks("joint_blocks.", 24, {"context_block.attn.qkv.weight": (4608, 1536), "x_block.attn.ln_q.weight": (64,)}),
    **blocks("joint_blocks.", 13, {"x_block.attn2.qkv.weight": (4608, 1536)})}
FLUX_SCHNELL = {
    "img_in.weight": (3072, 64), "txt_in.weight": (3072, 4096), "vector_in.in_layer.weight": (3072, 768),
    "final_layer.linear.weight": (64, 3072),
    **blocks("double_blocks.", 19, {"img_attn.norm.key_norm.scale": (128,), "img_mod.lin.weight": (18432, 3072)}),
    **blocks("single_blocks.", 38, {"linear1.weight": (21504, 3072)})}
FLUX_DEV = {**FLUX_SCHNELL, "guidance_in.in_layer.weight": (3072, 256)}


def flux_without_pooled_text(text_width, num_double, num_single, mlp):
    """mlp: how wide linear1's part of the feed-forward is."""
    return {"img_in.weight": (3072, 64), "txt_in.weight": (3072, text_width), "final_layer.linear.weight": (64, 3072),
            **blocks("double_blocks.", num_double,
                     {"img_attn.norm.key_norm.scale": (128,), "img_mod.lin.weight": (18432, 3072)}),
            **blocks("single_blocks.", num_single, {"linear1.weight": (9216 + mlp, 3072)})}


LONGCAT = flux_without_pooled_text(3584, 10, 20, 12288)
OVIS = {**flux_without_pooled_text(2048, 6, 27, 24576), "txt_norm.scale": (2048,),
        **blocks("double_blocks.", 6, {"img_mlp.gate_proj.weight": (12288, 3072)})}
FLUX_FILL = {**FLUX_DEV, "img_in.weight": (3072, 384)}
FLUX_CANNY = {**FLUX_DEV, "img_in.weight": (3072, 128)}


def wan(width, feed_forward, num_blocks, in_channels=16, out_channels=16):
    return {"patch_embedding.weight": (width, in_channels, 1, 2, 2), "text_embedding.0.weight": (width, 4096),
            "time_embedding.0.weight": (width, 256), "head.head.weight": (out_channels * 4, width),
            "head.modulation": (1, 2, width),
            **blocks("blocks.", num_blocks, {"self_attn.norm_q.weight": (width,), "ffn.0.weight": (feed_forward, width),
                                             "norm3.weight": (width,)})}


WAN_14B, WAN_1B, WAN22_5B = wan(5120, 13824, 40), wan(1536, 8960, 30), wan(3072, 14336, 30, 48, 48)
WAN_I2V = {**wan(5120, 13824, 40, 36), "img_emb.proj.0.bias": (1280,), "img_emb.proj.1.weight": (1280, 1280),
           **blocks("blocks.", 40, {"cross_attn.k_img.weight": (5120, 5120)})}
WAN_VACE = {**WAN_14B, "vace_patch_embedding.weight": (5120, 96, 1, 2, 2),
            **blocks("vace_blocks.", 8, {"norm3.weight": (5120,)}), "vace_blocks.0.before_proj.weight": (5120, 5120)}
WAN_FLF = {**WAN_I2V, "img_emb.emb_pos": (1, 514, 1280)}
PIXART_SIGMA = {
    "x_embedder.proj.weight": (1152, 4, 2, 2), "final_layer.linear.weight": (32, 1152),
    "t_block.1.weight": (6912, 1152),
    "y_embedder.y_proj.fc1.weight": (1152, 4096), **blocks("blocks.", 28, {"attn.qkv.weight": (3456, 1152)})}
PIXART_ALPHA = {**PIXART_SIGMA, "ar_embedder.mlp.0.weight": (384, 256), "csize_embedder.mlp.0.weight": (384, 256)}
QWEN_IMAGE = {
    "img_in.weight": (3072, 64), "txt_in.weight": (3072, 3584), "txt_norm.weight": (3584,),
    "proj_out.weight": (64, 3072),
    **blocks("transformer_blocks.", 60, {"attn.norm_q.weight": (128,), "img_mod.1.weight": (18432, 3072)})}
MAGE_FLOW = {
    **{name: shape for name, shape in QWEN_IMAGE.items() if not name.startswith("transformer_blocks.")},
    "img_in.weight": (3072, 128), "txt_in.weight": (3072, 2560), "txt_norm.weight": (2560,),
    "proj_out.weight": (128, 3072),
    **blocks("transformer_blocks.", 12, {"attn.norm_q.weight": (128,), "img_mod.1.weight": (18432, 3072)})}
def flux2(width, num_double, num_single, text_width):
    return {
        "img_in.weight": (width, 128), "txt_in.weight": (width, text_width), "final_layer.linear.weight": (128, width),
        "double_stream_modulation_img.lin.weight": (6 * width, width),
        **blocks("double_blocks.", num_double,
                 {"img_attn.norm.key_norm.scale": (128,), "img_attn.qkv.weight": (3 * width, width)}),
        **blocks("single_blocks.", num_single, {"linear1.weight": (9 * width, width)})}


CHROMA = {
    "img_in.weight": (3072, 64), "txt_in.weight": (3072, 4096), "final_layer.linear.weight": (64, 3072),
    "distilled_guidance_layer.in_proj.weight": (5120, 64),
    **blocks("distilled_guidance_layer.norms.", 5, {"scale": (5120,)}),
    **blocks("double_blocks.", 19, {"img_attn.norm.key_norm.scale": (128,), "img_attn.qkv.weight": (9216, 3072)}),
    **blocks("single_blocks.", 38, {"linear1.weight": (21504, 3072)})}
CHROMA_RADIANCE = {
    **{name: shape for name, shape in CHROMA.items() if name not in ("img_in.weight", "final_layer.linear.weight")},
    "img_in_patch.weight": (3072, 3, 16, 16), "nerf_image_embedder.embedder.0.weight": (64, 67),
    **blocks("nerf_blocks.", 4, {"param_generator.weight": (49152, 3072), "norm.scale": (64,)}),
    "nerf_final_layer_conv.norm.scale": (64,), "nerf_final_layer_conv.conv.weight": (3, 64, 3, 3)}
LUMINA2 = {
    "x_embedder.weight": (2304, 64), "cap_embedder.1.weight": (2304, 2304), "final_layer.linear.weight": (64, 2304),
    **blocks("noise_refiner.", 2, {"attention.k_norm.weight": (96,)}),
    **blocks("context_refiner.", 2, {"attention_norm1.weight": (2304,)}),
    **blocks("layers.", 26, {"attention.q_norm.weight": (96,), "attention.qkv.weight": (3840, 2304)})}
HIDREAM = {
    "x_embedder.proj.weight": (2560, 64), "final_layer.linear.weight": (64, 2560),
    "p_embedder.pooled_embedder.linear_1.weight": (2560, 2048),
    **blocks("caption_projection.", 49, {"linear.weight": (2560, 4096)}),
    **blocks("double_stream_blocks.", 16, {"block.attn1.to_q_t.weight": (2560, 2560)}),
    **blocks("double_stream_blocks.0.block.ff_i.experts.", 4, {"w1.weight": (6912, 2560)}),
    **blocks("single_stream_blocks.", 32, {"block.attn1.to_q.weight": (2560, 2560)})}
AURAFLOW = {
    "init_x_linear.weight": (3072, 16), "final_linear.weight": (16, 3072), "cond_seq_linear.weight": (3072, 2048),
    "positional_encoding": (1, 4096, 3072), **blocks("double_layers.", 4, {"attn.w1q.weight": (3072, 3072)}),
    **blocks("single_layers.", 32, {"attn.w1q.weight": (3072, 3072)})}
Z_IMAGE = {
    "x_embedder.weight": (3840, 64), "cap_embedder.1.weight": (3840, 2560), "x_pad_token": (1, 3840),
    "cap_pad_token": (1, 3840),
    "t_embedder.mlp.0.weight": (1024, 256), **blocks("noise_refiner.", 2, {"attention.k_norm.weight": (128,)}),
    **blocks("context_refiner.", 2, {"attention_norm1.weight": (3840,)}),
    **blocks("layers.", 30, {"attention.q_norm.weight": (128,), "attention.qkv.weight": (11520, 3840)})}
Z_IMAGE_OMNI = Z_IMAGE | {
    "siglip_embedder.0.weight": (1152,), "siglip_embedder.1.weight": (3840, 1152), "siglip_pad_token": (1, 3840),
    **blocks("siglip_refiner.", 2, {"attention.qkv.weight": (11520, 3840)})}
ERNIE = {
    "x_embedder.proj.weight": (4096, 128, 1, 1), "text_proj.weight": (4096, 3072), "final_linear.weight": (128, 4096),
    **blocks("layers.", 36, {"adaLN_mlp_ln.weight": (4096,), "self_attention.norm_q.weight": (128,),
                             "mlp.linear_fc2.weight": (4096, 12288)})}
KREA2 = {
    "first.weight": (6144, 64), "tmlp.0.weight": (6144, 256), "txtmlp.0.scale": (2560,),
    "txtfusion.projector.weight": (1, 12),
    **blocks("blocks.", 28, {"attn.wq.weight": (6144, 6144), "attn.wk.weight": (1536, 6144),
                             "attn.gate.weight": (6144, 6144),
                             "attn.qknorm.qnorm.scale": (128,), "mlp.gate.weight": (16384, 6144)}),
    **blocks("txtfusion.layerwise_blocks.", 2, {"attn.wq.weight": (2560, 2560), "attn.wk.weight": (2560, 2560),
                                                "attn.qknorm.qnorm.scale": (128,), "mlp.gate.weight": (6912, 2560),
                                                "prenorm.scale": (2560,)}),
    **blocks("txtfusion.refiner_blocks.", 2, {"prenorm.scale": (2560,)})}
HUNYUAN_VIDEO = {
    "img_in.proj.weight": (3072, 16, 1, 2, 2), "txt_in.input_embedder.weight": (3072, 4096),
    "vector_in.in_layer.weight": (3072, 768),
    "guidance_in.in_layer.weight": (3072, 256), "final_layer.linear.weight": (64, 3072),
    **blocks("txt_in.individual_token_refiner.blocks.", 2, {"norm1.weight": (3072,)}),
    **blocks("double_blocks.", 20, {"img_attn.qkv.weight": (9216, 3072)}),
    **blocks("single_blocks.", 40, {"linear1.weight": (21504, 3072)})}
HUNYUAN_IMAGE = {
    "img_in.proj.weight": (3584, 64, 1, 1), "txt_in.input_embedder.weight": (3584, 3584),
    "final_layer.linear.weight": (64, 3584), "byt5_in.fc1.weight": (2048, 1472),
    **blocks("txt_in.individual_token_refiner.blocks.", 2, {"norm1.weight": (3584,)}),
    **blocks("double_blocks.", 20, {"img_attn.qkv.weight": (10752, 3584)}),
    **blocks("single_blocks.", 40, {"linear1.weight": (25088, 3584)})}
HUNYUAN_IMAGE_REFINER = {
    "img_in.proj.weight": (3328, 128, 1, 1, 1), "txt_in.input_embedder.weight": (3328, 3584),
    "final_layer.linear.weight": (64, 3328), "guidance_in.in_layer.weight": (3328, 256),
    "time_r_in.in_layer.weight": (3328, 256),
    **blocks("txt_in.individual_token_refiner.blocks.", 2, {"norm1.weight": (3328,)}),
    **blocks("double_blocks.", 20, {"img_attn.qkv.weight": (9984, 3328)}),
    **blocks("single_blocks.", 40, {"linear1.weight": (23296, 3328)})}
HUNYUAN_VIDEO15 = {
    "img_in.proj.weight": (2048, 65, 1, 1, 1), "txt_in.input_embedder.weight": (2048, 3584),
    "final_layer.linear.weight": (32, 2048),
    "byt5_in.fc1.weight": (2048, 1472), "vision_in.proj.0.weight": (1152,), "cond_type_embedding.weight": (3, 2048),
    **blocks("txt_in.individual_token_refiner.blocks.", 2, {"norm1.weight": (2048,)}),
    **blocks("double_blocks.", 54, {"img_attn.qkv.weight": (6144, 2048)})}
# hunyuanvideo1.5_1080p_sr_distilled, and hunyuanimage2.1_distilled
HUNYUAN_VIDEO15_SR = {**HUNYUAN_VIDEO15, "img_in.proj.weight": (2048, 98, 1, 1, 1),
                      "time_r_in.in_layer.weight": (2048, 256)}
HUNYUAN_IMAGE_DISTILLED = {**HUNYUAN_IMAGE, "time_r_in.in_layer.weight": (3584, 256),
                           "guidance_in.in_layer.weight": (3584, 256)}


def cogvideox(width, num_blocks, projection):
    return {"patch_embed.proj.weight": (width, *projection), "patch_embed.text_proj.weight": (width, 4096),
            "proj_out.weight": (64 if len(projection) > 1 else 128, width),
            "time_embedding_linear_1.weight": (512, width),
            **blocks("blocks.", num_blocks, {"norm1.linear.weight": (6 * width, 512)})}


COGVIDEOX_15_I2V = {**cogvideox(3072, 42, (256,)), "ofs_embedding_linear_1.weight": (512, 512)}


def cosmos(width, num_blocks, in_channels=16):
    return {"x_embedder.proj.1.weight": (width, (in_channels + 1) * 4), "final_layer.linear.weight": (64, width),
            **blocks("blocks.", num_blocks, {
                "mlp.layer1.weight": (4 * width, width), "cross_attn.k_proj.weight": (width, 1024),
                "adaln_modulation_self_attn.1.weight": (256, width), "adaln_modulation_mlp.1.weight": (256, width)})}


def cosmos1(width, num_blocks, in_channels=16):
    """With what is of training in the published files."""
    modulation = {f"blocks.{part}.adaLN_modulation.1.weight": (256, width) for part in range(3)}
    return {"x_embedder.proj.1.weight": (width, (in_channels + 1) * 4), "final_layer.linear.weight": (64, width),
            "extra_pos_embedder.pos_emb_t": (128, width), "extra_pos_embedder.pos_emb_h": (120, width),
            "extra_pos_embedder.pos_emb_w": (120, width), "logvar.0.freqs": (128,), "pos_embedder.seq": (256,),
            **blocks("blocks.block", num_blocks, {
                "blocks.0.block.attn.to_q.0.weight": (width, width), "blocks.0.block.attn.to_q.1.weight": (128,),
                "blocks.1.block.attn.to_k.0.weight": (width, 1024), **modulation})}


def kandinsky5(width, time, feed_forward, num_blocks, patch, head=64):
    norm = {f"{attention}.key_norm.weight": (head,) for attention in ("self_attention", "cross_attention")}
    return {"visual_embeddings.in_layer.weight": (width, patch), "visual_embeddings.in_layer.bias": (width,),
            "text_embeddings.in_layer.weight": (width, 3584), "pooled_text_embeddings.in_layer.weight": (time, 768),
            "time_embeddings.in_layer.weight": (time, width), "time_embeddings.in_layer.bias": (time,),
            "out_layer.out_layer.weight": (64, width),
            **blocks("visual_transformer_blocks.", num_blocks,
                     {"feed_forward.in_layer.weight": (feed_forward, width), **norm}),
            **blocks("text_transformer_blocks.", 4 if head == 128 else 2,
                     {"feed_forward.in_layer.weight": (feed_forward, width)})}


ANIMA = {**cosmos(2048, 28), "llm_adapter.embed.weight": (32128, 1024), "llm_adapter.out_proj.weight": (1024, 1024),
         **blocks("llm_adapter.blocks.", 6,
                  {"cross_attn.k_proj.weight": (1024, 1024), "self_attn.q_proj.weight": (1024, 1024)})}
HUNYUAN_VIDEO_I2V = {**HUNYUAN_VIDEO, "img_in.proj.weight": (3072, 33, 1, 2, 2)}


def ltx(width, num_blocks):
    return {"patchify_proj.weight": (width, 128), "adaln_single.emb.timestep_embedder.linear_1.bias": (width,),
            "proj_out.weight": (128, width), "caption_projection.linear_1.weight": (width, 4096),
            **blocks("transformer_blocks.", num_blocks, {"attn2.to_k.weight": (width, width)})}


MOCHI = {"x_embedder.proj.weight": (3072, 12, 2, 2), "t5_yproj.weight": (1536, 4096), "pos_frequencies": (3, 24, 64),
         "t_embedder.mlp.0.weight": (3072, 256), "t5_y_embedder.to_kv.weight": (8192, 4096),
         "final_layer.linear.weight": (48, 3072),
         **blocks("blocks.", 48, {"mod_x.weight": (12288, 3072), "attn.qkv_y.weight": (9216, 1536)})}
LTX_2B, LTX_13B = ltx(2048, 28), ltx(4096, 48)


def ltx2(of_blocks, more):
    """19 billion parameters: of the video 4096 wide, of the sound 2048."""
    names = {"attn1": (4096, 4096, 4096), "audio_attn1": (2048, 2048, 2048), "attn2": (4096, 4096, 4096),
             "audio_attn2": (2048, 2048, 2048), "audio_to_video_attn": (2048, 4096, 2048),
             "video_to_audio_attn": (2048, 2048, 4096)}
    attentions = {f"{name}.to_{kind}.weight": (width, {"q": own, "k": read}[kind])
                  for name, (width, own, read) in names.items()
                  for kind in "qk"}
    return {"patchify_proj.weight": (4096, 128), "audio_patchify_proj.weight": (2048, 128),
            "proj_out.weight": (128, 4096),
            "audio_proj_out.weight": (128, 2048), "adaln_single.emb.timestep_embedder.linear_1.bias": (4096,),
            "av_ca_a2v_gate_adaln_single.linear.weight": (4096, 4096),
            "av_ca_v2a_gate_adaln_single.linear.weight": (2048, 2048),
            "video_embeddings_connector.learnable_registers": (128, 3840),
            "audio_embeddings_connector.learnable_registers": (128, 3840),
            **blocks("transformer_blocks.", 48, attentions | of_blocks), **more}


LTX2_19B = ltx2({"scale_shift_table": (6, 4096), "audio_scale_shift_table": (6, 2048)}, {
    "audio_adaln_single.linear.weight": (12288, 2048), "caption_projection.linear_1.weight": (4096, 3840),
    "caption_projection.linear_2.weight": (4096, 4096), "audio_caption_projection.linear_1.weight": (2048, 3840)})
LTX23_22B = ltx2({"scale_shift_table": (9, 4096), "prompt_scale_shift_table": (2, 4096),
                  "attn1.to_gate_logits.weight": (32, 4096)}, {
                      "audio_adaln_single.linear.weight": (18432, 2048),
                      "prompt_adaln_single.linear.weight": (8192, 4096)})
HUNYUAN_DIT = {"x_embedder.proj.weight": (1408, 4, 2, 2), "mlp_t5.0.weight": (8192, 2048),
               "mlp_t5.2.weight": (1024, 8192),
               "text_embedding_padding": (333, 1024), "pooler.positional_embedding": (257, 2048),
               "pooler.c_proj.weight": (1024, 2048),
               "extra_embedder.0.weight": (5632, 1024), "final_layer.linear.weight": (32, 1408),
               **blocks("blocks.", 40, {"attn1.q_norm.weight": (88,), "attn1.Wqkv.weight": (4224, 1408),
                                        "mlp.fc1.weight": (6144, 1408)})}


def unet(widths, depths, middle, context, vector=None, num_layers=2, linear=True, channels=4, up=None):
    """Of a U-Net in the publisher's names, what tells its shape.
    depths: transformer blocks of a layer of each level; up: of each layer on the way up. middle: -1: no attention
    there; None: nothing."""
    shapes, number, down = {"input_blocks.0.0.weight": (widths[0], channels, 3, 3),
                            "out.2.weight": (4, widths[0], 3, 3)}, 1, []

    def layer(name, width, depth):
        shapes.update({f"{name}.0.in_layers.0.weight": (width,), f"{name}.0.out_layers.3.weight": (width, width, 3, 3)})
        if depth:
            projection = (width, width) if linear else (width, width, 1, 1)
            shapes.update({f"{name}.1.norm.weight": (width,), f"{name}.1.proj_in.weight": projection})
            shapes.update({f"{name}.1.transformer_blocks.{block}.attn2.to_k.weight": (width, context)
                           for block in range(depth)})

    for level, (width, depth) in enumerate(zip(widths, depths)):
        for _ in range(num_layers):
            layer(f"input_blocks.{number}", width, depth)
            number += 1
        down += [(width, depth)] * (num_layers + 1)
        if level + 1 < len(widths):
            shapes[f"input_blocks.{number}.0.op.weight"] = (width, width, 3, 3)
            number += 1
    of_layers = [depth for _, depth in reversed(down)] if up is None else [depth for level in up for depth in level]
    for index, ((width, _), depth) in enumerate(zip(reversed(down), of_layers)):
        layer(f"output_blocks.{index}", width, depth)
    if middle is not None:
        layer("middle_block", widths[-1], max(middle, 0))
    return shapes | ({} if vector is None else {"label_emb.0.0.weight": (4 * widths[0], vector)})


SD_WIDTHS, SD_DEPTHS = (320, 640, 1280, 1280), (1, 1, 1, 0)
SD15 = unet(SD_WIDTHS, SD_DEPTHS, 1, 768, linear=False)
SD15_INPAINTING = unet(SD_WIDTHS, SD_DEPTHS, 1, 768, linear=False, channels=9)
SD21 = unet(SD_WIDTHS, SD_DEPTHS, 1, 1024)
SD_X4 = {**unet((256, 512, 512, 1024), (0, 1, 1, 1), 1, 1024, channels=7), "label_emb.weight": (1000, 1024)}


def of_videos(vector):
    """The same that looks along frames beside each layer."""
    shapes = unet(SD_WIDTHS, SD_DEPTHS, 1, 1024, vector, channels=8)
    return shapes | {name.replace(".0.in_layers.", ".0.time_stack.in_layers."): shape
                     for name, shape in shapes.items()} | {
        name.replace(".transformer_blocks.0.attn2.to_k", f".time_stack.0.{which}"): shape
        for name, shape in shapes.items() if name.endswith(".transformer_blocks.0.attn2.to_k.weight")
        for which in ("attn1.to_q", "attn2.to_q")}


SDXL_BASE = unet((320, 640, 1280), (0, 2, 10), 10, 2048, 2816)
SSD_1B = unet((320, 640, 1280), (0, 2, 4), -1, 2048, 2816, up=((4, 4, 10), (2, 1, 1), (0, 0, 0)))
VEGA = unet((320, 640, 1280), (0, 1, 2), -1, 2048, 2816, up=((2, 2, 2), (1, 1, 1), (0, 0, 0)))
KOALA_700M = unet((320, 640, 1280), (0, 2, 5), None, 2048, 2816, num_layers=1)
SDXL_REFINER = unet((384, 768, 1536, 1536), (0, 4, 4, 0), 4, 1280, 2560)

PIXELDIT = {"hidden_size": 1536, "num_groups": 24, "pixel_hidden_size": 16, "pixel_attn_hidden_size": 1152,
            "pixel_num_groups": 16, "patch_depth": 14, "pixel_depth": 2, "txt_embed_dim": 2304}
PUBLISHED = {
    "sd3.5-large": ("SD3", SD35_LARGE, {"num_layers": 38, "num_attention_heads": 38, "joint_attention_dim": 4096,
                                        "pooled_projection_dim": 2048, "pos_embed_max_size": 192, "qk_norm": "rms_norm",
                                        "out_channels": 16, "dual_attention_layers": ()}),
    "sd3.5-medium": ("SD3", SD35_MEDIUM, {"num_layers": 24, "num_attention_heads": 24, "pos_embed_max_size": 384,
                                          "caption_projection_dim": 1536, "dual_attention_layers": tuple(range(13))}),
    "sd3.5-medium-text": ("SD3", {**SD35_MEDIUM,
                                  **blocks("context_processor.layers.", 2, {"attn.qkv.weight": (12288, 4096)})}, {
                                      "_context_layers": 2, "num_layers": 24}),
    "flux-dev": ("Flux.1", FLUX_DEV,
                 {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24, "in_channels": 64,
                  "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True}),
    "flux-schnell": ("Flux.1", FLUX_SCHNELL, {"num_layers": 19, "guidance_embeds": False}),
    "flux-fill": ("Flux.1", FLUX_FILL, {"in_channels": 384, "out_channels": 64, "guidance_embeds": True}),
    "flux-canny": ("Flux.1", FLUX_CANNY, {"in_channels": 128, "out_channels": 64, "num_layers": 19}),
    "longcat-image": ("LongCat-Image", LONGCAT, {"num_layers": 10, "num_single_layers": 20, "num_attention_heads": 24,
                                                 "joint_attention_dim": 3584, "in_channels": 64}),
    "ovis-image-7b": ("Ovis-Image", OVIS, {"num_layers": 6, "num_single_layers": 27, "num_attention_heads": 24,
                                           "joint_attention_dim": 2048, "out_channels": 64}),
    "wan-14b": ("Wan", WAN_14B, {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824, "text_dim": 4096,
                                     "in_channels": 16, "out_channels": 16, "cross_attn_norm": True,
                                 "image_dim": None}),
    "wan-1.3b": ("Wan", WAN_1B, {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}),
    "wan-i2v-14b": ("Wan", WAN_I2V,
                    {"in_channels": 36, "out_channels": 16, "image_dim": 1280, "added_kv_proj_dim": 5120,
                     "pos_embed_seq_len": None}),
    "wan-flf2v-14b": ("Wan", WAN_FLF, {"in_channels": 36, "image_dim": 1280, "pos_embed_seq_len": 514}),
    "wan-vace-14b": ("Wan VACE", WAN_VACE,
                     {"vace_layers": [0, 5, 10, 15, 20, 25, 30, 35], "vace_in_channels": 96, "num_layers": 40}),
    "wan2.2-i2v-14b": ("Wan", wan(5120, 13824, 40, 36), {"in_channels": 36, "out_channels": 16, "image_dim": None}),
    "wan2.2-ti2v-5b": ("Wan", WAN22_5B,
                       {"in_channels": 48, "out_channels": 48, "num_attention_heads": 24, "num_layers": 30}),
    "qwen-image": ("Qwen-Image", QWEN_IMAGE,
                   {"num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128, "in_channels": 64,
                    "out_channels": 16, "joint_attention_dim": 3584, "axes_dims_rope": (16, 56, 56)}),
    "qwen-image-layered": ("Qwen-Image", {**QWEN_IMAGE, "time_text_embed.addition_t_embedding.weight": (2, 3072)},
                           {"use_additional_t_cond": True, "use_layer3d_rope": True}),
    "qwen-image-edit-2511": ("Qwen-Image", {**QWEN_IMAGE, "__index_timestep_zero__": (0,)},
                             {"zero_cond_t": True, "num_layers": 60}),
    "flux2-dev": ("Flux.2", {**flux2(6144, 8, 48, 15360), "guidance_in.in_layer.weight": (6144, 256)}, {
        "num_layers": 8, "num_single_layers": 48, "num_attention_heads": 48, "joint_attention_dim": 15360,
        "guidance_embeds": True}),
    "flux2-klein-4b": ("Flux.2", flux2(3072, 5, 20, 7680), {"num_attention_heads": 24, "guidance_embeds": False}),
    "chroma": ("Chroma", CHROMA, {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24,
                                  "approximator_hidden_dim": 5120, "approximator_layers": 5}),
    "chroma-radiance": ("Chroma Radiance", CHROMA_RADIANCE, {
        "num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24, "_pixel_width": 64, "_pixel_layers": 4,
        "_ratio": 4, "_convolution": True, "_x0": False, "_sequential": False}),
    "chroma-radiance-x0": ("Chroma Radiance", CHROMA_RADIANCE | {"__x0__": (0,), "__sequential__": (0,)}, {
        "_x0": True, "_sequential": True}),
    "mage-flow": ("Mage-Flow", MAGE_FLOW, {
        "in_channels": 128, "out_channels": 128, "num_layers": 12, "num_attention_heads": 24, "attention_head_dim": 128,
        "joint_attention_dim": 2560, "axes_dims_rope": (16, 56, 56)}),
    "omnigen2": ("OmniGen 2", published_comfyui.OMNIGEN2, {
        "hidden_size": 2520, "num_layers": 32, "num_attention_heads": 21, "num_kv_heads": 7, "multiple_of": 10240,
        "axes_dim_rope": (40, 40, 40), "text_feat_dim": 2048, "in_channels": 16}),
    "boogu": ("Boogu-Image", published_comfyui.BOOGU, {
        "hidden_size": 3360, "num_layers": 32, "num_double_stream_layers": 8, "num_attention_heads": 28,
        "num_kv_heads": 7, "instruction_feat_dim": 4096, "axes_dim_rope": (40, 40, 40)}),
    "lens": ("Lens", published_comfyui.LENS, {
        "num_layers": 48, "num_attention_heads": 24, "attention_head_dim": 64, "axes_dims_rope": (8, 28, 28),
        "enc_hidden_dim": 2880, "selected_layer_index": (0, 1, 2, 3), "out_channels": 32}),
    "ideogram4": ("Ideogram 4", published_comfyui.IDEOGRAM4, {
        "num_layers": 34, "num_attention_heads": 18, "attention_head_dim": 256, "intermediate_size": 12288,
        "adaln_dim": 512, "llm_features_dim": 53248, "mrope_section": (24, 20, 20), "in_channels": 128}),
    "ace-step15": ("ACE-Step 1.5", published_comfyui.ACE_STEP15, {
        "hidden_size": 2048, "num_dit_layers": 24, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128,
        "in_channels": 192, "text_hidden_dim": 1024, "num_lyric_layers": 8, "fsq_dim": 2048}),
    "stable-audio-open-1.0": ("Stable Audio Open", published_sound.STABLE_AUDIO_OPEN, {
        "io_channels": 64, "embed_dim": 1536, "depth": 24, "num_heads": 24, "cond_token_dim": 768,
        "global_cond_dim": 1536, "project_cond_tokens": False}),
    "stable-audio-3-medium": ("Stable Audio 3", published_sound.stable_audio3(1536, 24, True), {
        "io_channels": 256, "embed_dim": 1536, "depth": 24, "num_heads": 24, "cond_token_dim": 768,
        "global_cond_dim": 768, "project_cond_tokens": True, "num_memory_tokens": 64, "local_add_cond_dim": 257,
        "attn_kwargs": {"qk_norm": "rms", "differential": True}, "timestep_features_type": "expo"}),
    "stable-audio-3-small": ("Stable Audio 3", published_sound.stable_audio3(1024, 20, False), {
        "embed_dim": 1024, "depth": 20, "num_heads": 16, "attn_kwargs": {"qk_norm": "rms", "differential": False}}),
    "minimax-music-3": ("MiniMax Music 3", published_sound.MINIMAX_MUSIC3, {"depth": 36, "width": 2048}),
    "ace-step-1.0": ("ACE-Step 1.0", published_sound.ACE_STEP, {
        "in_channels": 8, "out_channels": 8, "num_layers": 24, "inner_dim": 2560, "attention_head_dim": 128,
        "num_attention_heads": 20, "mlp_ratio": 2.5, "text_embedding_dim": 768, "ssl_latent_dims": [1024, 768],
        "lyric_encoder_vocab_size": 6693, "lyric_hidden_size": 1024}),
    "hunyuan3d-2": ("Hunyuan3D 2", published_3d.hunyuan3d(16, 32), {
        "in_channels": 64, "context_in_dim": 1536, "hidden_size": 1024, "num_heads": 16, "depth": 16,
        "depth_single_blocks": 32, "guidance_embed": False}),
    "hunyuan3d-2-mini-turbo": ("Hunyuan3D 2", {
        **published_3d.hunyuan3d(8, 16), "guidance_in.in_layer.weight": (1024, 256)}, {
            "depth": 8, "depth_single_blocks": 16, "guidance_embed": True}),
    "hunyuan3d-2.1": ("Hunyuan3D 2.1", published_3d.HUNYUAN3D21, {
        "in_channels": 64, "hidden_size": 2048, "context_dim": 1024, "depth": 21, "num_heads": 16, "num_moe_layers": 6,
        "num_experts": 8}),
    **{name: ("SeedVR2", shapes, SEEDVR2 | changed) for name, shapes, changed in (
        ("seedvr2-3b", published_seedvr2.SEEDVR2_3B, {}),
        ("seedvr2-7b", published_seedvr2.SEEDVR2_7B, SEEDVR2_7B | {"mlp_type": "normal", "mm_layers": 36}),
        ("seedvr2-7b-shared", published_seedvr2.SEEDVR2_7B_SHARED, SEEDVR2_7B))},
    "triposplat": ("TripoSplat", published_3d.TRIPOSPLAT, {
        "in_channels": 16, "out_channels": 16, "model_channels": 1024, "cond_channels": 1280, "num_blocks": 24,
        "num_refiner_blocks": 2, "num_head_channels": 64, "cam_channels": 5, "cond2_channels": 128, "mlp_ratio": 4}),
    "z-image-pixel": ("Z-Image pixel", published_pixels.Z_IMAGE_PIXEL | {"__x0__": (0,)}, {
        "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "cap_feat_dim": 2560,
        "axes_dims": (32, 48, 48), "multiple_of": 10240, "decoder_hidden_size": 3840, "decoder_num_res_blocks": 4,
        "decoder_max_freqs": 8}),
    "pixeldit": ("PixelDiT", published_pixels.PIXELDIT, PIXELDIT),
    "pid": ("PiD", published_pixels.PID, PIXELDIT | {
        "lq_latent_channels": 16, "lq_hidden_dim": 512, "lq_num_res_blocks": 4, "lq_interval": 2, "rope_ref_h": 1024,
        "latent_spatial_down_factor": 8, "lq_gate_per_token": False, "pit_lq_inject": False}),
    "pid-1.5": ("PiD", published_pixels.PID15, {
        "lq_latent_channels": 16, "lq_gate_per_token": True, "pit_lq_inject": True, "rope_ref_h": 2048,
        "lq_conv_padding_mode": "replicate", "lq_latent_unpatchify_factor": 1}),
    "pid-1.5-flux2": ("PiD", published_pixels.PID15 | {"lq_proj.latent_proj.0.weight": (512, 32, 3, 3)}, {
        "lq_latent_channels": 128, "latent_spatial_down_factor": 16, "lq_latent_unpatchify_factor": 2}),
    "joyimage": ("JoyImage", published_comfyui.JOYIMAGE, {
        "hidden_size": 4096, "num_layers": 40, "num_attention_heads": 32, "in_channels": 16, "text_dim": 4096,
        "mlp_width_ratio": 4.0, "rope_dim_list": (16, 56, 56)}),
    "minimax-h3": ("MiniMax H3", published_comfyui.MINIMAX_H3, {
        "hidden_size": 5376, "num_layers": 50, "num_refiner_layers": 2, "num_attention_heads": 56,
        "attention_head_dim": 128, "ffn_dim": 14336, "in_channels": 24, "audio_in_channels": 32, "text_dim": 5120,
        "time_embed_dim": 2688, "rope_freq_dim": 16}),
    "wan-camera": ("Wan Camera", published_comfyui.WAN_CAMERA, {
        "dim": 5120, "num_heads": 40, "num_layers": 40, "model_type": "camera", "in_dim_control_adapter": 24}),
    "wan-humo": ("Wan HuMo", published_comfyui.WAN_HUMO, {"dim": 5120, "in_dim": 36, "model_type": "humo"}),
    "wan-animate": ("Wan Animate", published_comfyui.WAN_ANIMATE, {"dim": 5120, "in_dim": 36, "_image_dim": 1280}),
    "wan-scail": ("Wan SCAIL", published_wan.WAN_SCAIL, {"dim": 5120, "in_dim": 20, "_image_dim": 1280}),
    "wan-scail-2": ("Wan SCAIL-2", published_wan.WAN_SCAIL2, {"dim": 5120, "in_dim": 20, "mask_in_dim": 28}),
    "wan-s2v": ("Wan S2V", published_wan.WAN_S2V, {"dim": 5120, "in_dim": 16, "audio_dim": 1024}),
    "wandancer": ("WanDancer", published_wan.WAN_DANCER, {"dim": 5120, "in_dim": 36, "in_dim_ref_conv": 16}),
    "wan-fun-control": ("Wan Fun-Control", published_wan.WAN_FUN, {
        "dim": 5120, "in_dim": 48, "in_dim_ref_conv": 16, "_image_dim": 1280}),
    "lumina2": ("Lumina 2", LUMINA2,
                {"hidden_size": 2304, "num_layers": 26, "num_refiner_layers": 2, "num_attention_heads": 24,
                 "num_kv_heads": 8, "cap_feat_dim": 2304, "axes_dim_rope": (32, 32, 32), "in_channels": 16}),
    "newbie-image": ("NewBie-Image", published_newbie.NEWBIE | {"norm_final.weight": (2304,)}, {
        "dim": 2304, "n_layers": 36, "n_refiner_layers": 2, "n_heads": 24, "n_kv_heads": 8, "cap_feat_dim": 2560,
        "clip_text_dim": 1024, "axes_dims": (32, 32, 32), "multiple_of": 9216, "in_channels": 16}),
    "hidream-o1": ("HiDream-O1", published_pixels.HIDREAM_O1, {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vision_hidden_size": 1152,
        "vision_intermediate_size": 4304, "vision_depth": 27, "vision_num_position_embeddings": 2304}),
    "z-image-turbo": ("Z-Image", Z_IMAGE,
                      {"dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "cap_feat_dim": 2560,
                       "axes_dims": [32, 48, 48], "in_channels": 16}),
    "z-image-omni": ("Z-Image-Omni", Z_IMAGE_OMNI,
                     {"dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "cap_feat_dim": 2560,
                      "siglip_feat_dim": 1152}),
    "ernie-image": ("ERNIE-Image", ERNIE, {
        "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 36, "ffn_hidden_size": 12288, "in_channels": 128,
        "out_channels": 128, "text_in_dim": 3072}),
    "krea-2": ("Krea 2", KREA2, {
        "in_channels": 64, "num_layers": 28, "attention_head_dim": 128, "num_attention_heads": 48,
        "num_key_value_heads": 12,
        "intermediate_size": 16384, "text_hidden_dim": 2560, "num_text_layers": 12, "text_num_attention_heads": 20,
        "text_num_key_value_heads": 20, "text_intermediate_size": 6912, "num_layerwise_text_blocks": 2,
        "num_refiner_text_blocks": 2, "axes_dims_rope": (32, 48, 48), "timestep_embed_dim": 256, "_text_width": 30720}),
    "hidream-i1": ("HiDream-I1", HIDREAM, {
        "num_layers": 16, "num_single_layers": 32, "num_attention_heads": 20, "caption_channels": [4096, 4096],
        "text_emb_dim": 2048,
        "num_routed_experts": 4, "llama_layers": [*range(32), *[31] * 16], "in_channels": 16, "out_channels": 16}),
    "hunyuan-dit-1.2": ("HunyuanDiT", HUNYUAN_DIT, {
        "num_layers": 40, "num_attention_heads": 16, "attention_head_dim": 88, "hidden_size": 1408, "mlp_ratio": 4.3637,
        "cross_attention_dim": 1024, "cross_attention_dim_t5": 2048, "pooled_projection_dim": 1024, "text_len": 77,
        "text_len_t5": 256, "in_channels": 4, "use_style_cond_and_image_meta_size": False}),
    "hunyuan-dit-1.1": ("HunyuanDiT",
                        {**HUNYUAN_DIT, "style_embedder.weight": (1, 1408), "extra_embedder.0.weight": (5632, 3968)}, {
                            "use_style_cond_and_image_meta_size": True, "num_layers": 40}),
    "mochi-1-preview": ("Mochi", MOCHI, {
        "num_layers": 48, "num_attention_heads": 24, "attention_head_dim": 128, "pooled_projection_dim": 1536,
        "text_embed_dim": 4096, "in_channels": 12, "time_embed_dim": 256}),
    "cogvideox-2b": ("CogVideoX", cogvideox(1920, 30, (16, 2, 2)), {
        "num_layers": 30, "num_attention_heads": 30, "in_channels": 16, "out_channels": 16, "time_embed_dim": 512,
        "text_embed_dim": 4096, "patch_size_t": None, "ofs_embed_dim": None}),
    "cogvideox-5b": ("CogVideoX", cogvideox(3072, 42, (16, 2, 2)), {"num_layers": 42, "num_attention_heads": 48}),
    "cogvideox-1.5-5b": ("CogVideoX 1.5", cogvideox(3072, 42, (128,)),
                         {"in_channels": 16, "out_channels": 16, "patch_size_t": 2}),
    "cogvideox-1.5-5b-i2v": ("CogVideoX 1.5", COGVIDEOX_15_I2V,
                             {"in_channels": 32, "out_channels": 16, "ofs_embed_dim": 512}),
    "cosmos-predict1-7b": ("Cosmos-Predict1", cosmos1(4096, 28), {
        "num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 128, "in_channels": 16, "out_channels": 16,
        "text_embed_dim": 1024, "adaln_lora_dim": 256, "max_size": (128, 240, 240), "rope_scale": (2.0, 1.0, 1.0),
        "extra_pos_embed_type": "learnable"}),
    "cosmos-predict1-14b": ("Cosmos-Predict1", cosmos1(5120, 36), {
        "num_layers": 36, "num_attention_heads": 40, "rope_scale": (2.0, 2.0, 2.0)}),
    "cosmos-predict1-7b-video": ("Cosmos-Predict1", cosmos1(4096, 28, 17), {"in_channels": 17, "out_channels": 16}),
    "cosmos-predict1-14b-video": ("Cosmos-Predict1", cosmos1(5120, 36, 17),
                                  {"in_channels": 17, "num_attention_heads": 40}),
    "cosmos-predict2-2b": ("Cosmos-Predict2", cosmos(2048, 28), {
        "num_layers": 28, "num_attention_heads": 16, "in_channels": 16, "text_embed_dim": 1024, "adaln_lora_dim": 256,
        "rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None}),
    "cosmos-predict2-14b": ("Cosmos-Predict2", cosmos(5120, 36), {"num_layers": 36, "num_attention_heads": 40}),
    "cosmos-predict2-2b-video": ("Cosmos-Predict2", cosmos(2048, 28, 17),
                                 {"in_channels": 17, "rope_scale": (1.0, 3.0, 3.0)}),
    "cosmos-predict2-14b-video": ("Cosmos-Predict2", cosmos(5120, 36, 17),
                                  {"in_channels": 17, "rope_scale": (5 / 6, 2.0, 2.0)}),
    "anima": ("Anima", ANIMA, {
        "num_layers": 28, "in_channels": 16, "rope_scale": (1.0, 4.0, 4.0), "text_embed_dim": 1024, "_conditioner": {
            "source_dim": 1024, "target_dim": 1024, "model_dim": 1024, "num_layers": 6, "num_attention_heads": 16,
            "target_vocab_size": 32128, "use_self_attention": True}}),
    "kandinsky-5-lite": ("Kandinsky 5", kandinsky5(1792, 512, 7168, 32, 132), {
        "in_visual_dim": 16, "visual_cond": True, "model_dim": 1792, "axes_dims": (16, 24, 24), "num_visual_blocks": 32,
        "num_text_blocks": 2, "out_visual_dim": 16, "in_text_dim": 3584, "in_text_dim2": 768, "time_dim": 512,
        "ff_dim": 7168}),
    "kandinsky-5-pro": ("Kandinsky 5", kandinsky5(4096, 1024, 16384, 60, 132, 128),
                        {"axes_dims": (32, 48, 48), "num_visual_blocks": 60}),
    "kandinsky-5-image": ("Kandinsky 5 Image", kandinsky5(2560, 512, 10240, 50, 64, 128), {
        "in_visual_dim": 16, "visual_cond": False, "axes_dims": (32, 48, 48), "out_visual_dim": 16}),
    "hunyuan-image-2.1": ("HunyuanImage", HUNYUAN_IMAGE, {
        "in_channels": 64, "out_channels": 64, "num_attention_heads": 28, "num_layers": 20, "num_single_layers": 40,
        "patch_size": [1, 1], "num_refiner_layers": 2, "text_embed_dim": 3584, "text_embed_2_dim": 1472}),
    "hunyuan-image-refiner": ("HunyuanImage refiner", HUNYUAN_IMAGE_REFINER, {
        "in_channels": 128, "out_channels": 64, "num_attention_heads": 26, "num_layers": 20, "num_single_layers": 40,
        "patch_size": [1, 1, 1], "num_refiner_layers": 2, "text_embed_dim": 3584, "text_embed_2_dim": None,
        "guidance_embeds": True, "use_meanflow": True, "rope_axes_dim": (16, 56, 56)}),
    "auraflow-0.3": ("AuraFlow", AURAFLOW, {
        "num_mmdit_layers": 4, "num_single_dit_layers": 32, "attention_head_dim": 256, "num_attention_heads": 12,
        "in_channels": 4, "joint_attention_dim": 2048, "caption_projection_dim": 3072, "pos_embed_max_size": 4096}),
    "hunyuan-video": ("HunyuanVideo", HUNYUAN_VIDEO, {
        "num_layers": 20, "num_single_layers": 40, "num_refiner_layers": 2, "num_attention_heads": 24,
        "attention_head_dim": 128,
        "in_channels": 16, "out_channels": 16, "text_embed_dim": 4096, "pooled_projection_dim": 768,
        "guidance_embeds": True}),
    "hunyuan-video-i2v": ("HunyuanVideo", HUNYUAN_VIDEO_I2V, {"in_channels": 33, "out_channels": 16}),
    "hunyuan-video-1.5": ("HunyuanVideo 1.5", HUNYUAN_VIDEO15, {
        "in_channels": 65, "out_channels": 32, "num_attention_heads": 16, "num_layers": 54, "num_refiner_layers": 2,
        "text_embed_dim": 3584, "text_embed_2_dim": 1472, "image_embed_dim": 1152}),
    "cogvideox-5b-i2v": ("CogVideoX-I2V", {
        **cogvideox(3072, 42, (32, 2, 2)), "patch_embed.pos_embedding": (1, 17776, 3072)}, {
        "in_channels": 32, "num_attention_heads": 48, "num_layers": 42, "use_learned_positional_embeddings": True}),
    "hunyuan-video-1.5-sr": ("HunyuanVideo 1.5 distilled", HUNYUAN_VIDEO15_SR, {
        "in_channels": 98, "out_channels": 32, "num_attention_heads": 16, "num_layers": 54, "use_meanflow": True}),
    "hunyuan-image-distilled": ("HunyuanImage distilled", HUNYUAN_IMAGE_DISTILLED, {
        "in_channels": 64, "num_attention_heads": 28, "num_layers": 20, "num_single_layers": 40,
        "guidance_embeds": True, "use_meanflow": True}),
    "ltx-2b": ("LTX-Video", LTX_2B,
               {"num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 64, "in_channels": 128,
                "cross_attention_dim": 2048, "caption_channels": 4096}),
    "ltx-13b": ("LTX-Video", LTX_13B, {"num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096}),
    "ltx-2-19b": ("LTX-2", LTX2_19B, {
        "num_layers": 48, "num_attention_heads": 32, "attention_head_dim": 128, "audio_num_attention_heads": 32,
        "audio_attention_head_dim": 64, "cross_attention_dim": 4096, "audio_cross_attention_dim": 2048,
        "in_channels": 128,
        "audio_in_channels": 128, "caption_channels": 3840, "use_prompt_embeddings": True, "gated_attn": False,
        "cross_attn_mod": False}),
    "ltx-2.3-22b": ("LTX-2", LTX23_22B,
                    {"use_prompt_embeddings": False, "gated_attn": True, "cross_attn_mod": True, "_text_width": 6144}),
    "pixart-sigma": ("PixArt-Sigma", PIXART_SIGMA,
                     {"num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72,
                      "caption_channels": 4096, "out_channels": 8}),
    "pixart-alpha": ("PixArt-Alpha", PIXART_ALPHA,
                     {"num_layers": 28, "use_additional_conditions": True, "caption_channels": 4096}),
    "sd1.5": ("SD 1.5", SD15, {"block_out_channels": SD_WIDTHS, "layers_per_block": 2, "attention_head_dim": (8,) * 4,
                               "in_channels": 4,
                               "cross_attention_dim": 768, "use_linear_projection": False, "class_embed_type": None,
                               "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)}),
    "sd1.5-inpainting": ("SD 1.5", SD15_INPAINTING, {"in_channels": 9, "out_channels": 4}),
    # in the whole file this stands beside the diffusion model
    "stable-zero123": ("SD 1.5", {**unet(SD_WIDTHS, SD_DEPTHS, 1, 768, linear=False, channels=8),
                                  "cc_projection.weight": (768, 772), "cc_projection.bias": (768,)},
                       {"in_channels": 8, "out_channels": 4}),
    "sd2.1": ("SD 2", SD21, {"attention_head_dim": (5, 10, 20, 20), "cross_attention_dim": 1024,
                             "use_linear_projection": True}),
    "sd2.1-unclip": ("SD 2", unet(SD_WIDTHS, SD_DEPTHS, 1, 1024, 2048),
                     {"projection_class_embeddings_input_dim": 2048}),
    "lotus": ("SD 2", unet(SD_WIDTHS, SD_DEPTHS, 1, 1024, 4), {"projection_class_embeddings_input_dim": 4}),
    "sd-x4": ("SD x4 upscaler", SD_X4, {
        "block_out_channels": (256, 512, 512, 1024), "attention_head_dim": (8,) * 4, "in_channels": 7,
        "down_block_types": ("DownBlock2D",) + ("CrossAttnDownBlock2D",) * 3, "num_class_embeds": 1000,
        "only_cross_attention": (True, True, True, False), "class_embed_type": None}),
    "svd": ("Stable Video Diffusion", of_videos(768), {
        "in_channels": 8, "block_out_channels": SD_WIDTHS, "num_attention_heads": (5, 10, 20, 20),
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal",) * 3 + ("DownBlockSpatioTemporal",),
        "projection_class_embeddings_input_dim": 768, "transformer_layers_per_block": (1, 1, 1, 1)}),
    "sv3d-p": ("Stable Video Diffusion", of_videos(1280), {"projection_class_embeddings_input_dim": 1280}),
    "stable-cascade-c": ("Stable Cascade C", published_cascade.STAGE_C, {
        "c_hidden": (2048, 2048), "nhead": (32, 32), "blocks": ((8, 24), (24, 8)), "c_cond": 2048, "c_clip_text": 1280,
        "level_config": ("CTA", "CTA"), "block_repeat": ((1, 1), (1, 1))}),
    "stable-cascade-c-lite": ("Stable Cascade C", published_cascade.STAGE_C_LITE, {
        "c_hidden": (1536, 1536), "nhead": (24, 24), "blocks": ((4, 12), (12, 4)), "c_cond": 1536}),
    "stable-cascade-b": ("Stable Cascade B", published_cascade.STAGE_B, {
        "c_hidden": (320, 640, 1280, 1280), "nhead": (-1, -1, 20, 20), "blocks": ((2, 6, 28, 6), (6, 28, 6, 2)),
        "level_config": ("CT", "CT", "CTA", "CTA"), "block_repeat": ((1, 1, 1, 1), (3, 3, 2, 2)), "c_cond": 1280}),
    "stable-cascade-b-lite": ("Stable Cascade B", published_cascade.STAGE_B_LITE, {
        "c_hidden": (320, 576, 1152, 1152), "nhead": (-1, -1, 18, 18), "blocks": ((2, 4, 14, 4), (4, 14, 4, 2)),
        "block_repeat": ((1, 1, 1, 1), (2, 2, 2, 2))}),
    "sdxl": ("SDXL", SDXL_BASE, {"block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10),
                                 "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048,
                                 "use_linear_projection": True,
                                 "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                                 "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                                 "projection_class_embeddings_input_dim": 2816}),
    "ssd-1b": ("SDXL", SSD_1B, {"transformer_layers_per_block": (1, 2, 4), "mid_block_type": "UNetMidBlock2D",
                                "reverse_transformer_layers_per_block": ((4, 4, 10), (2, 1, 1), 1)}),
    "segmind-vega": ("SDXL", VEGA, {"transformer_layers_per_block": (1, 1, 2), "mid_block_type": "UNetMidBlock2D",
                                    "reverse_transformer_layers_per_block": None}),
    "koala-700m": ("SDXL", KOALA_700M, {"transformer_layers_per_block": (1, 2, 5), "mid_block_type": None,
                                        "reverse_transformer_layers_per_block": None}),
    "sdxl-refiner": ("SDXL", SDXL_REFINER,
                     {"transformer_layers_per_block": (1, 4, 4, 4), "attention_head_dim": (6, 12, 24, 24),
                      "cross_attention_dim": 1280, "projection_class_embeddings_input_dim": 2560}),
}


def write_header(path, shapes, prefix="", metadata=None):
    """A file whose header names these tensors; their bytes are a hole."""
    entries, offset = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, shape in shapes.items():
        num_bytes = 2
        for size in shape:
            num_bytes *= size
        entries[prefix + name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    raw = json.dumps(entries).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + offset)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_recognised_with_any_prefix(tmp_path, name, prefix):
    family_name, shapes, expected = PUBLISHED[name]
    write_header(tmp_path / "model.safetensors", {**shapes}, prefix)

    header = open_checkpoint(tmp_path / "model.safetensors")
    family = header.family

    assert (family.name, header.prefix, header.shapes) == (family_name, prefix, shapes)
    assert expected.items() <= family.detection.config(header.shapes).items()


@pytest.mark.parametrize("config, family", [
    ('{"transformer": {"model_type": "animate2"}}', "Wan Animate 2"), ('{"transformer": {"model_type": "i2v"}}', "Wan"),
    ('{"vae": {}}', "Wan"), (None, "Wan")])
def test_metadata_tells_families_that_have_the_same_tensors(tmp_path, config, family):
    write_header(tmp_path / "model.safetensors", WAN_I2V, metadata={} if config is None else {"config": config})

    header = open_checkpoint(tmp_path / "model.safetensors")

    assert header.family.name == family
    assert family == "Wan" or {"dim": 5120, "in_dim": 36, "_image_dim": 1280}.items() <= header.family.detection.config(
        header.shapes).items()


def test_metadata_that_cannot_be_read_is_refused(tmp_path):
    write_header(tmp_path / "model.safetensors", WAN_I2V, metadata={"config": "{"})

    with pytest.raises(CheckpointError, match="Download .* again: it has metadata that cannot be read"):
        recognise(open_checkpoint(tmp_path / "model.safetensors"))


def needed_of(family, shapes):
    """Names that the family's recognition asks a file for, and that are there."""
    requested = _RecordedShapes(shapes)
    assert FAMILIES[family].detection.recognise(requested)
    return sorted({*requested.found})


# what tells one family from the next, without which a file is as near to the other
TELLING = {"LongCat-Image": "txt_in.weight", "Mage-Flow": "txt_norm.weight", "CogVideoX": "patch_embed.proj.weight",
           "Kandinsky 5": "visual_embeddings.in_layer.weight", "HunyuanImage refiner": "img_in.proj.weight",
           "CogVideoX-I2V": "patch_embed.proj.weight"}


@pytest.mark.parametrize("name", [name for name, (family, _, _) in PUBLISHED.items()
                                  if not FAMILIES[family].plan.takes_unet_patches])
def test_a_file_that_lacks_one_tensor_is_said_to_be_nearly_of_its_family(tmp_path, name):
    family, shapes, _ = PUBLISHED[name]
    for needed in needed_of(family, shapes):
        write_header(tmp_path / "model.safetensors", {key: shape for key, shape in shapes.items() if key != needed})
        header = open_checkpoint(tmp_path / "model.safetensors")
        if needed == TELLING.get(family) or any(
                other.detection.recognise(header.shapes) for other in FAMILIES.values()):
            continue

        with pytest.raises(CheckpointError,
                           match="is nearly an? " + re.escape(f"{family} model, but it lacks {needed}. ")) as caught:
            recognise(header)

        assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("base, name, shape, words", [
    (FLUX_DEV, "img_in.weight", (2, 3, 4), "nearly a Flux.1 model, but its img_in.weight has the shape [2, 3, 4], "
                                           "where 2 dims are needed"),
    (kandinsky5(1792, 512, 7168, 32, 132), "visual_embeddings.in_layer.weight", (1,),
     "has the shape [1], where 2 dims are needed"),
    (cogvideox(1920, 30, (16, 2, 2)), "patch_embed.proj.weight", (1,) * 5,
     "nearly a CogVideoX model, but its patch_embed.proj.weight")])
def test_a_file_of_which_one_shape_is_off_is_said_to_be_nearly_of_its_family(tmp_path, base, name, shape, words):
    write_header(tmp_path / "model.safetensors", {**base, name: shape})

    with pytest.raises(CheckpointError, match=re.escape(words)):
        recognise(open_checkpoint(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("names", [["a.weight", "b.weight"], ["blocks.0.norm.weight", "patch_embedding.weight"], []],
                         ids=str)
def test_a_file_that_is_near_to_no_family_is_not_compared_with_one(tmp_path, names):
    write_header(tmp_path / "model.safetensors", dict.fromkeys(names, (4, 4)))

    with pytest.raises(CheckpointError, match="is not a diffusion model that xDiT runs"):
        recognise(open_checkpoint(tmp_path / "model.safetensors"))


def test_text_encoders_in_the_same_file_are_left_out(tmp_path):
    shapes = {**{f"model.diffusion_model.{name}": shape for name, shape in PIXART_SIGMA.items()},
              "text_encoders.t5xxl.shared.weight": (2, 2)}
    write_header(tmp_path / "model.safetensors", shapes)

    assert open_checkpoint(tmp_path / "model.safetensors").shapes == PIXART_SIGMA


@pytest.mark.parametrize("base, extra, words", [
    (CHROMA_RADIANCE, {"img_in_patch.weight": (3072, 3, 32, 32)}, "its patches are not 16 x 16 pixels"),
    (published_pixels.Z_IMAGE_PIXEL, {"siglip_embedder.0.weight": (1152,)}, "Z-Image-Omni"),
    (published_pixels.PIXELDIT, {"core.s_embedder.proj.weight": (1536, 3072)}, "its patches are not 16 x 16"),
    (published_pixels.Z_IMAGE_PIXEL, {"x_embedder.weight": (3840, 768)}, "its patches are not 32 x 32 pixels"),
    (published_cascade.STAGE_C, {"up_blocks.0.3.mapper.weight": (4096, 64)},
     "its levels do not repeat the same residual, time and attention blocks"),
    (HUNYUAN_VIDEO15, {"guidance_in.in_layer.weight": (2048, 256)}, "it takes guidance as an input"),
    (LTX_2B, {"audio_adaln_single.linear.weight": (1, 1)}, "it lacks the attention layers between video and audio"),
    (LTX_2B, {"prompt_adaln_single.linear.weight": (1, 1)}, "LTX-2 without audio"),
    (LTX_2B, {"transformer_blocks.0.attn1.to_gate_logits.weight": (32, 2048)}, "LTX-2.3 without audio"),
    (LTX23_22B, {"caption_projection.linear_1.weight": (4096, 3840)}, "projects its text by one layer"),
    (WAN_I2V, {"audio_proj.audio_proj_glob_1.layer.bias": (1,)}, "Wan with audio"),
    (WAN_14B, {"more_blocks.0.before_proj.weight": (1, 1)}, "more_blocks"),
    (HUNYUAN_IMAGE_REFINER, {"img_in.proj.weight": (3328, 128, 1, 2, 2)}, "larger patches than the refiner"),
    (HUNYUAN_IMAGE_REFINER, {"byt5_in.fc1.weight": (2048, 1472)}, "it reads glyphs"),
    (SD21, {"input_blocks.1.1.time_stack.0.norm1.weight": (320,)}, "its temporal layers do not read the input image"),
    (unet((320, 640, 1280), (0, 2, 4), 4, 2048, 2816),
     {"input_blocks.5.1.transformer_blocks.2.attn2.to_k.weight": (640, 2048)},
     "that diffusers' U-Net does not support")], ids=lambda value: value if isinstance(value, str) else "")
def test_variants_that_cannot_be_run_are_refused_by_name(tmp_path, base, extra, words):
    write_header(tmp_path / "model.safetensors", {**base, **extra})

    with pytest.raises(CheckpointError, match=words):
        recognise(open_checkpoint(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("said, words", [({"causal_temporal_positioning": True}, None), ({"norm_num_groups": 32}, None),
                                         ({"rope_type": "split"},
                                          "rope_type = 'split', and xDiT runs 'interleaved' only"),
                                         ("nothing", "metadata that cannot be read")], ids=str)
def test_what_the_metadata_says_is_heeded_or_refused_by_name(tmp_path, said, words):
    """Of a family whose model in ComfyUI takes settings from there."""
    write_header(tmp_path / "model.safetensors", LTX_2B)
    header = dataclasses.replace(open_checkpoint(tmp_path / "model.safetensors"),
                                 metadata={"config": json.dumps({"transformer": said})})

    if words is None:
        assert header.config["_causal_temporal_positioning"] == said.get("causal_temporal_positioning", False)
    else:
        with pytest.raises(CheckpointError, match=words):
            _ = header.config


def test_a_spec_changes_with_the_file_and_the_dtype(tmp_path):
    path = tmp_path / "model.safetensors"
    write_header(path, PIXART_SIGMA)
    names = [open_checkpoint(path).spec(dtype, dtype).name for dtype in ("float32", "float32", "bfloat16")]
    write_header(path, {**PIXART_SIGMA, "more": (3,)})
    names.append(open_checkpoint(path).spec("float32", "float32").name)

    assert names[0] == names[1] and len(set(names)) == 3


def test_a_folder_without_a_transformer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is not a diffusers folder with a transformer"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("said", ["{", "7", "[7]"])
def test_a_folder_whose_config_cannot_be_read_is_refused(tmp_path, said):
    write_header(tmp_path / "transformer.safetensors", {"a.weight": (4, 4)})
    (tmp_path / "config.json").write_text(said)

    with pytest.raises(CheckpointError, match="config.json (is not a JSON file that can be read|contains a )"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("said", [None, ["a"], {"config": 5}, {"config": None}])
def test_metadata_that_are_no_texts_are_refused(tmp_path, said):
    """As the library that reads the tensors refuses them."""
    raw = json.dumps({"__metadata__": said,
                      "a.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))

    with pytest.raises(CheckpointError, match="has a header that cannot be read"):
        open_checkpoint(tmp_path / "model.safetensors")
