"""Names and shapes of published files that ComfyUI's own modules take. Used by test_header.py."""


def blocks(prefix, count, shapes):
    """The tensors of a list of blocks."""
    return {f"{prefix}{number}.{name}": shape for number in range(count) for name, shape in shapes.items()}


def linear(name, outputs, inputs, bias=True):
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


OMNIGEN2 = {"image_index_embedding": (5, 2520), "x_embedder.weight": (2520, 64), "x_embedder.bias": (2520,),
    "ref_image_patch_embedder.weight": (2520, 64), "ref_image_patch_embedder.bias": (2520,),
    "time_caption_embed.timestep_embedder.linear_1.weight": (1024, 256),
    "time_caption_embed.timestep_embedder.linear_1.bias": (1024,),
    "time_caption_embed.timestep_embedder.linear_2.weight": (1024, 1024),
    "time_caption_embed.timestep_embedder.linear_2.bias": (1024,), "time_caption_embed.caption_embedder.0.weight":
    (2048,), "time_caption_embed.caption_embedder.1.weight": (2520, 2048),
    "time_caption_embed.caption_embedder.1.bias": (2520,), "norm_out.linear_1.weight": (2520, 1024),
    "norm_out.linear_1.bias": (2520,), "norm_out.linear_2.weight": (64, 2520), "norm_out.linear_2.bias": (64,),
    **blocks("noise_refiner.", 2, {"attn.to_q.weight": (2520, 2520), "attn.to_k.weight": (840, 2520),
    "attn.to_v.weight": (840, 2520), "attn.norm_q.weight": (120,), "attn.norm_k.weight": (120,),
    "attn.to_out.0.weight": (2520, 2520), "feed_forward.linear_1.weight": (10240, 2520),
    "feed_forward.linear_2.weight": (2520, 10240), "feed_forward.linear_3.weight": (10240, 2520),
    "norm1.linear.weight": (10080, 1024), "norm1.linear.bias": (10080,), "norm1.norm.weight": (2520,),
    "ffn_norm1.weight": (2520,), "norm2.weight": (2520,), "ffn_norm2.weight": (2520,)}),
    **blocks("ref_image_refiner.", 2, {"attn.to_q.weight": (2520, 2520), "attn.to_k.weight": (840, 2520),
    "attn.to_v.weight": (840, 2520), "attn.norm_q.weight": (120,), "attn.norm_k.weight": (120,),
    "attn.to_out.0.weight": (2520, 2520), "feed_forward.linear_1.weight": (10240, 2520),
    "feed_forward.linear_2.weight": (2520, 10240), "feed_forward.linear_3.weight": (10240, 2520),
    "norm1.linear.weight": (10080, 1024), "norm1.linear.bias": (10080,), "norm1.norm.weight": (2520,),
    "ffn_norm1.weight": (2520,), "norm2.weight": (2520,), "ffn_norm2.weight": (2520,)}), **blocks("context_refiner.",
    2, {"attn.to_q.weight": (2520, 2520), "attn.to_k.weight": (840, 2520), "attn.to_v.weight": (840, 2520),
    "attn.norm_q.weight": (120,), "attn.norm_k.weight": (120,), "attn.to_out.0.weight": (2520, 2520),
    "feed_forward.linear_1.weight": (10240, 2520), "feed_forward.linear_2.weight": (2520, 10240),
    "feed_forward.linear_3.weight": (10240, 2520), "norm1.weight": (2520,), "ffn_norm1.weight": (2520,),
    "norm2.weight": (2520,), "ffn_norm2.weight": (2520,)}), **blocks("layers.", 32, {"attn.to_q.weight": (2520, 2520),
    "attn.to_k.weight": (840, 2520), "attn.to_v.weight": (840, 2520), "attn.norm_q.weight": (120,),
    "attn.norm_k.weight": (120,), "attn.to_out.0.weight": (2520, 2520), "feed_forward.linear_1.weight": (10240, 2520),
    "feed_forward.linear_2.weight": (2520, 10240), "feed_forward.linear_3.weight": (10240, 2520),
    "norm1.linear.weight": (10080, 1024), "norm1.linear.bias": (10080,), "norm1.norm.weight": (2520,),
    "ffn_norm1.weight": (2520,), "norm2.weight": (2520,), "ffn_norm2.weight": (2520,)})}

BOOGU = {"image_index_embedding": (5, 3360), "x_embedder.weight": (3360, 64), "x_embedder.bias": (3360,),
    "ref_image_patch_embedder.weight": (3360, 64), "ref_image_patch_embedder.bias": (3360,),
    "time_caption_embed.timestep_embedder.linear_1.weight": (1024, 256),
    "time_caption_embed.timestep_embedder.linear_1.bias": (1024,),
    "time_caption_embed.timestep_embedder.linear_2.weight": (1024, 1024),
    "time_caption_embed.timestep_embedder.linear_2.bias": (1024,), "time_caption_embed.caption_embedder.0.weight":
    (4096,), "time_caption_embed.caption_embedder.1.weight": (3360, 4096),
    "time_caption_embed.caption_embedder.1.bias": (3360,), "norm_out.linear_1.weight": (3360, 1024),
    "norm_out.linear_1.bias": (3360,), "norm_out.linear_2.weight": (64, 3360), "norm_out.linear_2.bias": (64,),
    **blocks("noise_refiner.", 2, {"attn.to_q.weight": (3360, 3360), "attn.to_k.weight": (840, 3360),
    "attn.to_v.weight": (840, 3360), "attn.norm_q.weight": (120,), "attn.norm_k.weight": (120,),
    "attn.to_out.0.weight": (3360, 3360), "feed_forward.linear_1.weight": (13568, 3360),
    "feed_forward.linear_2.weight": (3360, 13568), "feed_forward.linear_3.weight": (13568, 3360),
    "norm1.linear.weight": (13440, 1024), "norm1.linear.bias": (13440,), "norm1.norm.weight": (3360,),
    "ffn_norm1.weight": (3360,), "norm2.weight": (3360,), "ffn_norm2.weight": (3360,)}),
    **blocks("ref_image_refiner.", 2, {"attn.to_q.weight": (3360, 3360), "attn.to_k.weight": (840, 3360),
    "attn.to_v.weight": (840, 3360), "attn.norm_q.weight": (120,), "attn.norm_k.weight": (120,),
    "attn.to_out.0.weight": (3360, 3360), "feed_forward.linear_1.weight": (13568, 3360),
    "feed_forward.linear_2.weight": (3360, 13568), "feed_forward.linear_3.weight": (13568, 3360),
    "norm1.linear.weight": (13440, 1024), "norm1.linear.bias": (13440,), "norm1.norm.weight": (3360,),
    "ffn_norm1.weight": (3360,), "norm2.weight": (3360,), "ffn_norm2.weight": (3360,)}), **blocks("context_refiner.",
    2, {"attn.to_q.weight": (3360, 3360), "attn.to_k.weight": (840, 3360), "attn.to_v.weight": (840, 3360),
    "attn.norm_q.weight": (120,), "attn.norm_k.weight": (120,), "attn.to_out.0.weight": (3360, 3360),
    "feed_forward.linear_1.weight": (13568, 3360), "feed_forward.linear_2.weight": (3360, 13568),
    "feed_forward.linear_3.weight": (13568, 3360), "norm1.weight": (3360,), "ffn_norm1.weight": (3360,),
    "norm2.weight": (3360,), "ffn_norm2.weight": (3360,)}), **blocks("double_stream_layers.", 8,
    {"img_instruct_attn.norm_q.weight": (120,), "img_instruct_attn.norm_k.weight": (120,),
    "img_instruct_attn.to_out.0.weight": (3360, 3360), "img_instruct_attn.processor.img_to_q.weight": (3360, 3360),
    "img_instruct_attn.processor.img_to_k.weight": (840, 3360), "img_instruct_attn.processor.img_to_v.weight": (840,
    3360), "img_instruct_attn.processor.instruct_to_q.weight": (3360, 3360),
    "img_instruct_attn.processor.instruct_to_k.weight": (840, 3360),
    "img_instruct_attn.processor.instruct_to_v.weight": (840, 3360),
    "img_instruct_attn.processor.instruct_out.weight": (3360, 3360), "img_instruct_attn.processor.img_out.weight":
    (3360, 3360), "img_self_attn.to_q.weight": (3360, 3360), "img_self_attn.to_k.weight": (840, 3360),
    "img_self_attn.to_v.weight": (840, 3360), "img_self_attn.norm_q.weight": (120,), "img_self_attn.norm_k.weight":
    (120,), "img_self_attn.to_out.0.weight": (3360, 3360), "img_feed_forward.linear_1.weight": (13568, 3360),
    "img_feed_forward.linear_2.weight": (3360, 13568), "img_feed_forward.linear_3.weight": (13568, 3360),
    "instruct_feed_forward.linear_1.weight": (13568, 3360), "instruct_feed_forward.linear_2.weight": (3360, 13568),
    "instruct_feed_forward.linear_3.weight": (13568, 3360), "img_norm1.linear.weight": (13440, 1024),
    "img_norm1.linear.bias": (13440,), "img_norm1.norm.weight": (3360,), "img_norm2.linear.weight": (13440, 1024),
    "img_norm2.linear.bias": (13440,), "img_norm2.norm.weight": (3360,), "img_norm3.linear.weight": (13440, 1024),
    "img_norm3.linear.bias": (13440,), "img_norm3.norm.weight": (3360,), "instruct_norm1.linear.weight": (13440,
    1024), "instruct_norm1.linear.bias": (13440,), "instruct_norm1.norm.weight": (3360,),
    "instruct_norm2.linear.weight": (13440, 1024), "instruct_norm2.linear.bias": (13440,),
    "instruct_norm2.norm.weight": (3360,), "img_attn_norm.weight": (3360,), "img_self_attn_norm.weight": (3360,),
    "img_ffn_norm1.weight": (3360,), "img_ffn_norm2.weight": (3360,), "instruct_attn_norm.weight": (3360,),
    "instruct_ffn_norm1.weight": (3360,), "instruct_ffn_norm2.weight": (3360,)}), **blocks("single_stream_layers.",
    32, {"attn.to_q.weight": (3360, 3360), "attn.to_k.weight": (840, 3360), "attn.to_v.weight": (840, 3360),
    "attn.norm_q.weight": (120,), "attn.norm_k.weight": (120,), "attn.to_out.0.weight": (3360, 3360),
    "feed_forward.linear_1.weight": (13568, 3360), "feed_forward.linear_2.weight": (3360, 13568),
    "feed_forward.linear_3.weight": (13568, 3360), "norm1.linear.weight": (13440, 1024), "norm1.linear.bias":
    (13440,), "norm1.norm.weight": (3360,), "ffn_norm1.weight": (3360,), "norm2.weight": (3360,), "ffn_norm2.weight":
    (3360,)})}

LENS = {"time_text_embed.timestep_embedder.linear_1.weight": (1536, 256),
    "time_text_embed.timestep_embedder.linear_1.bias": (1536,), "time_text_embed.timestep_embedder.linear_2.weight":
    (1536, 1536), "time_text_embed.timestep_embedder.linear_2.bias": (1536,), "txt_in.weight": (1536, 11520),
    "txt_in.bias": (1536,), "img_in.weight": (1536, 128), "img_in.bias": (1536,), "norm_out.linear.weight": (3072,
    1536), "norm_out.linear.bias": (3072,), "proj_out.weight": (128, 1536), "proj_out.bias": (128,),
    **blocks("txt_norm.", 4, {"weight": (2880,)}), **blocks("transformer_blocks.", 48, {"attn.norm_q.weight": (64,),
    "attn.norm_k.weight": (64,), "attn.norm_added_q.weight": (64,), "attn.norm_added_k.weight": (64,),
    "attn.img_qkv.weight": (4608, 1536), "attn.img_qkv.bias": (4608,), "attn.txt_qkv.weight": (4608, 1536),
    "attn.txt_qkv.bias": (4608,), "attn.to_out.0.weight": (1536, 1536), "attn.to_out.0.bias": (1536,),
    "attn.to_add_out.weight": (1536, 1536), "attn.to_add_out.bias": (1536,), "img_mod.1.weight": (9216, 1536),
    "img_mod.1.bias": (9216,), "img_norm1.weight": (1536,), "img_norm2.weight": (1536,), "img_mlp.w1.weight": (4096,
    1536), "img_mlp.w2.weight": (1536, 4096), "img_mlp.w3.weight": (4096, 1536), "txt_mod.1.weight": (9216, 1536),
    "txt_mod.1.bias": (9216,), "txt_norm1.weight": (1536,), "txt_norm2.weight": (1536,), "txt_mlp.w1.weight": (4096,
    1536), "txt_mlp.w2.weight": (1536, 4096), "txt_mlp.w3.weight": (4096, 1536)})}

IDEOGRAM4 = {"input_proj.weight": (4608, 128), "input_proj.bias": (4608,), "llm_cond_norm.weight": (53248,),
    "llm_cond_proj.weight": (4608, 53248), "llm_cond_proj.bias": (4608,), "t_embedding.mlp_in.weight": (4608, 4608),
    "t_embedding.mlp_in.bias": (4608,), "t_embedding.mlp_out.weight": (4608, 4608), "t_embedding.mlp_out.bias":
    (4608,), "adaln_proj.weight": (512, 4608), "adaln_proj.bias": (512,), "embed_image_indicator.weight": (2, 4608),
    "final_layer.linear.weight": (128, 4608), "final_layer.linear.bias": (128,),
    "final_layer.adaln_modulation.weight": (4608, 512), "final_layer.adaln_modulation.bias": (4608,),
    **blocks("layers.", 34, {"attention.qkv.weight": (13824, 4608), "attention.norm_q.weight": (256,),
    "attention.norm_k.weight": (256,), "attention.o.weight": (4608, 4608), "feed_forward.w1.weight": (12288, 4608),
    "feed_forward.w2.weight": (4608, 12288), "feed_forward.w3.weight": (12288, 4608), "attention_norm1.weight":
    (4608,), "ffn_norm1.weight": (4608,), "attention_norm2.weight": (4608,), "ffn_norm2.weight": (4608,),
    "adaln_modulation.weight": (18432, 512), "adaln_modulation.bias": (18432,)})}

JOYIMAGE = {"img_in.weight": (4096, 16, 1, 2, 2), "img_in.bias": (4096,),
    "condition_embedder.time_embedder.linear_1.weight": (4096, 256),
    "condition_embedder.time_embedder.linear_1.bias": (4096,), "condition_embedder.time_embedder.linear_2.weight":
    (4096, 4096), "condition_embedder.time_embedder.linear_2.bias": (4096,), "condition_embedder.time_proj.weight":
    (24576, 4096), "condition_embedder.time_proj.bias": (24576,),
    "condition_embedder.text_embedder.linear_1.weight": (4096, 4096),
    "condition_embedder.text_embedder.linear_1.bias": (4096,), "condition_embedder.text_embedder.linear_2.weight":
    (4096, 4096), "condition_embedder.text_embedder.linear_2.bias": (4096,), "proj_out.weight": (64, 4096),
    "proj_out.bias": (64,), **blocks("double_blocks.", 40, {"img_mod.modulate_table": (1, 6, 4096),
    "img_mlp.net.0.proj.weight": (16384, 4096), "img_mlp.net.0.proj.bias": (16384,), "img_mlp.net.2.weight": (4096,
    16384), "img_mlp.net.2.bias": (4096,), "txt_mod.modulate_table": (1, 6, 4096), "txt_mlp.net.0.proj.weight":
    (16384, 4096), "txt_mlp.net.0.proj.bias": (16384,), "txt_mlp.net.2.weight": (4096, 16384), "txt_mlp.net.2.bias":
    (4096,), "attn.img_attn_qkv.weight": (12288, 4096), "attn.img_attn_qkv.bias": (12288,),
    "attn.img_attn_q_norm.weight": (128,), "attn.img_attn_k_norm.weight": (128,), "attn.img_attn_proj.weight":
    (4096, 4096), "attn.img_attn_proj.bias": (4096,), "attn.txt_attn_qkv.weight": (12288, 4096),
    "attn.txt_attn_qkv.bias": (12288,), "attn.txt_attn_q_norm.weight": (128,), "attn.txt_attn_k_norm.weight":
    (128,), "attn.txt_attn_proj.weight": (4096, 4096), "attn.txt_attn_proj.bias": (4096,)})}

MINIMAX_H3 = {"video_patch_proj.weight": (5376, 96), "video_patch_proj.bias": (5376,),
    "audio_patch_proj.weight": (5376, 32), "audio_patch_proj.bias": (5376,), "condition_proj.weight": (5376, 5120),
    "condition_proj.bias": (5376,), "time_embedder.proj_in.weight": (5376, 256), "time_embedder.proj_in.bias": (5376,),
    "time_embedder.proj_out.weight": (2688, 5376), "time_embedder.proj_out.bias": (2688,), "rope.inv_freq": (16,),
    "token_refiner.final_norm.weight": (5376,), "final_layer.norm.weight": (5376,),
    "final_layer.adaln_proj.linear.weight": (10752, 2688), "final_layer.adaln_proj.linear.bias": (10752,),
    "final_layer.video_out.weight": (96, 5376), "final_layer.video_out.bias": (96,), "final_layer.audio_out.weight":
    (32, 5376), "final_layer.audio_out.bias": (32,),
    **blocks("token_refiner.blocks.", 2, {"norm1.weight": (5376,), "norm2.weight": (5376,), "attn.qkv_proj.weight":
    (21504, 5376), "attn.q_norm.weight": (128,), "attn.k_norm.weight": (128,), "attn.out_proj.weight": (5376, 7168),
    "mlp.fc1.weight": (28672, 5376), "mlp.fc2.weight": (5376, 14336)}),
    **blocks("blocks.", 50, {"norm1.weight": (5376,), "norm2.weight": (5376,), "attn.qkv_proj.weight": (21504, 5376),
    "attn.q_norm.weight": (128,), "attn.k_norm.weight": (128,), "attn.out_proj.weight": (5376, 7168),
    "mlp.fc1.weight": (28672, 5376), "mlp.fc2.weight": (5376, 14336), "adaln_proj.linear.weight": (96768, 2688),
    "adaln_proj.linear.bias": (96768,)})}

WAN_CAMERA = {"patch_embedding.weight": (5120, 32, 1, 2, 2), "patch_embedding.bias": (5120,),
    "text_embedding.0.weight": (5120, 4096), "text_embedding.0.bias": (5120,), "text_embedding.2.weight": (5120,
    5120), "text_embedding.2.bias": (5120,), "time_embedding.0.weight": (5120, 256), "time_embedding.0.bias": (5120,),
    "time_embedding.2.weight": (5120, 5120), "time_embedding.2.bias": (5120,), "time_projection.1.weight": (30720,
    5120), "time_projection.1.bias": (30720,), "head.modulation": (1, 2, 5120), "head.head.weight": (64, 5120),
    "head.head.bias": (64,), "img_emb.proj.0.weight": (1280,), "img_emb.proj.0.bias": (1280,),
    "img_emb.proj.1.weight": (1280, 1280), "img_emb.proj.1.bias": (1280,), "img_emb.proj.3.weight": (5120, 1280),
    "img_emb.proj.3.bias": (5120,), "img_emb.proj.4.weight": (5120,), "img_emb.proj.4.bias": (5120,),
    "control_adapter.conv.weight": (5120, 1536, 2, 2), "control_adapter.conv.bias": (5120,),
    "control_adapter.residual_blocks.0.conv1.weight": (5120, 5120, 3, 3),
    "control_adapter.residual_blocks.0.conv1.bias": (5120,), "control_adapter.residual_blocks.0.conv2.weight": (5120,
    5120, 3, 3), "control_adapter.residual_blocks.0.conv2.bias": (5120,), **blocks("blocks.", 40, {"modulation": (1,
    6, 5120), "self_attn.q.weight": (5120, 5120), "self_attn.q.bias": (5120,), "self_attn.k.weight": (5120, 5120),
    "self_attn.k.bias": (5120,), "self_attn.v.weight": (5120, 5120), "self_attn.v.bias": (5120,),
    "self_attn.o.weight": (5120, 5120), "self_attn.o.bias": (5120,), "self_attn.norm_q.weight": (5120,),
    "self_attn.norm_k.weight": (5120,), "norm3.weight": (5120,), "norm3.bias": (5120,), "cross_attn.q.weight": (5120,
    5120), "cross_attn.q.bias": (5120,), "cross_attn.k.weight": (5120, 5120), "cross_attn.k.bias": (5120,),
    "cross_attn.v.weight": (5120, 5120), "cross_attn.v.bias": (5120,), "cross_attn.o.weight": (5120, 5120),
    "cross_attn.o.bias": (5120,), "cross_attn.norm_q.weight": (5120,), "cross_attn.norm_k.weight": (5120,),
    "cross_attn.k_img.weight": (5120, 5120), "cross_attn.k_img.bias": (5120,), "cross_attn.v_img.weight": (5120,
    5120), "cross_attn.v_img.bias": (5120,), "cross_attn.norm_k_img.weight": (5120,), "ffn.0.weight": (13824, 5120),
    "ffn.0.bias": (13824,), "ffn.2.weight": (5120, 13824), "ffn.2.bias": (5120,)})}

WAN_HUMO = {"patch_embedding.weight": (5120, 36, 1, 2, 2), "patch_embedding.bias": (5120,), "text_embedding.0.weight":
    (5120, 4096), "text_embedding.0.bias": (5120,), "text_embedding.2.weight": (5120, 5120), "text_embedding.2.bias":
    (5120,), "time_embedding.0.weight": (5120, 256), "time_embedding.0.bias": (5120,), "time_embedding.2.weight":
    (5120, 5120), "time_embedding.2.bias": (5120,), "time_projection.1.weight": (30720, 5120),
    "time_projection.1.bias": (30720,), "head.modulation": (1, 2, 5120), "head.head.weight": (64, 5120),
    "head.head.bias": (64,), "audio_proj.audio_proj_glob_1.layer.weight": (512, 51200),
    "audio_proj.audio_proj_glob_1.layer.bias": (512,), "audio_proj.audio_proj_glob_2.layer.weight": (512, 512),
    "audio_proj.audio_proj_glob_2.layer.bias": (512,), "audio_proj.audio_proj_glob_3.layer.weight": (24576, 512),
    "audio_proj.audio_proj_glob_3.layer.bias": (24576,), "audio_proj.audio_proj_glob_norm.layer.weight": (1536,),
    "audio_proj.audio_proj_glob_norm.layer.bias": (1536,), **blocks("blocks.", 40, {"modulation": (1, 6, 5120),
    "self_attn.q.weight": (5120, 5120), "self_attn.q.bias": (5120,), "self_attn.k.weight": (5120, 5120),
    "self_attn.k.bias": (5120,), "self_attn.v.weight": (5120, 5120), "self_attn.v.bias": (5120,),
    "self_attn.o.weight": (5120, 5120), "self_attn.o.bias": (5120,), "self_attn.norm_q.weight": (5120,),
    "self_attn.norm_k.weight": (5120,), "norm3.weight": (5120,), "norm3.bias": (5120,), "cross_attn.q.weight": (5120,
    5120), "cross_attn.q.bias": (5120,), "cross_attn.k.weight": (5120, 5120), "cross_attn.k.bias": (5120,),
    "cross_attn.v.weight": (5120, 5120), "cross_attn.v.bias": (5120,), "cross_attn.o.weight": (5120, 5120),
    "cross_attn.o.bias": (5120,), "cross_attn.norm_q.weight": (5120,), "cross_attn.norm_k.weight": (5120,),
    "ffn.0.weight": (13824, 5120), "ffn.0.bias": (13824,), "ffn.2.weight": (5120, 13824), "ffn.2.bias": (5120,),
    "audio_cross_attn_wrapper.audio_cross_attn.q.weight": (5120, 5120),
    "audio_cross_attn_wrapper.audio_cross_attn.q.bias": (5120,), "audio_cross_attn_wrapper.audio_cross_attn.k.weight":
    (5120, 1536), "audio_cross_attn_wrapper.audio_cross_attn.k.bias": (5120,),
    "audio_cross_attn_wrapper.audio_cross_attn.v.weight": (5120, 1536),
    "audio_cross_attn_wrapper.audio_cross_attn.v.bias": (5120,), "audio_cross_attn_wrapper.audio_cross_attn.o.weight":
    (5120, 5120), "audio_cross_attn_wrapper.audio_cross_attn.o.bias": (5120,),
    "audio_cross_attn_wrapper.audio_cross_attn.norm_q.weight": (5120,),
    "audio_cross_attn_wrapper.audio_cross_attn.norm_k.weight": (5120,), "audio_cross_attn_wrapper.norm1_audio.weight":
    (5120,), "audio_cross_attn_wrapper.norm1_audio.bias": (5120,)})}

WAN_ANIMATE = {"patch_embedding.weight": (5120, 36, 1, 2, 2), "patch_embedding.bias": (5120,),
    "text_embedding.0.weight": (5120, 4096), "text_embedding.0.bias": (5120,), "text_embedding.2.weight": (5120,
    5120), "text_embedding.2.bias": (5120,), "time_embedding.0.weight": (5120, 256), "time_embedding.0.bias": (5120,),
    "time_embedding.2.weight": (5120, 5120), "time_embedding.2.bias": (5120,), "time_projection.1.weight": (30720,
    5120), "time_projection.1.bias": (30720,), "head.modulation": (1, 2, 5120), "head.head.weight": (64, 5120),
    "head.head.bias": (64,), "img_emb.proj.0.weight": (1280,), "img_emb.proj.0.bias": (1280,),
    "img_emb.proj.1.weight": (1280, 1280), "img_emb.proj.1.bias": (1280,), "img_emb.proj.3.weight": (5120, 1280),
    "img_emb.proj.3.bias": (5120,), "img_emb.proj.4.weight": (5120,), "img_emb.proj.4.bias": (5120,),
    "pose_patch_embedding.weight": (5120, 16, 1, 2, 2), "pose_patch_embedding.bias": (5120,),
    "motion_encoder.enc.net_app.convs.0.0.weight": (32, 3, 1, 1), "motion_encoder.enc.net_app.convs.0.1.bias": (1, 32,
    1, 1), "motion_encoder.enc.net_app.convs.1.conv1.0.weight": (32, 32, 3, 3),
    "motion_encoder.enc.net_app.convs.1.conv1.1.bias": (1, 32, 1, 1),
    "motion_encoder.enc.net_app.convs.1.conv2.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.1.conv2.1.weight":
    (64, 32, 3, 3), "motion_encoder.enc.net_app.convs.1.conv2.2.bias": (1, 64, 1, 1),
    "motion_encoder.enc.net_app.convs.1.skip.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.1.skip.1.weight":
    (64, 32, 1, 1), "motion_encoder.enc.net_app.convs.2.conv1.0.weight": (64, 64, 3, 3),
    "motion_encoder.enc.net_app.convs.2.conv1.1.bias": (1, 64, 1, 1),
    "motion_encoder.enc.net_app.convs.2.conv2.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.2.conv2.1.weight":
    (128, 64, 3, 3), "motion_encoder.enc.net_app.convs.2.conv2.2.bias": (1, 128, 1, 1),
    "motion_encoder.enc.net_app.convs.2.skip.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.2.skip.1.weight":
    (128, 64, 1, 1), "motion_encoder.enc.net_app.convs.3.conv1.0.weight": (128, 128, 3, 3),
    "motion_encoder.enc.net_app.convs.3.conv1.1.bias": (1, 128, 1, 1),
    "motion_encoder.enc.net_app.convs.3.conv2.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.3.conv2.1.weight":
    (256, 128, 3, 3), "motion_encoder.enc.net_app.convs.3.conv2.2.bias": (1, 256, 1, 1),
    "motion_encoder.enc.net_app.convs.3.skip.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.3.skip.1.weight":
    (256, 128, 1, 1), "motion_encoder.enc.net_app.convs.4.conv1.0.weight": (256, 256, 3, 3),
    "motion_encoder.enc.net_app.convs.4.conv1.1.bias": (1, 256, 1, 1),
    "motion_encoder.enc.net_app.convs.4.conv2.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.4.conv2.1.weight":
    (512, 256, 3, 3), "motion_encoder.enc.net_app.convs.4.conv2.2.bias": (1, 512, 1, 1),
    "motion_encoder.enc.net_app.convs.4.skip.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.4.skip.1.weight":
    (512, 256, 1, 1), "motion_encoder.enc.net_app.convs.5.conv1.0.weight": (512, 512, 3, 3),
    "motion_encoder.enc.net_app.convs.5.conv1.1.bias": (1, 512, 1, 1),
    "motion_encoder.enc.net_app.convs.5.conv2.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.5.conv2.1.weight":
    (512, 512, 3, 3), "motion_encoder.enc.net_app.convs.5.conv2.2.bias": (1, 512, 1, 1),
    "motion_encoder.enc.net_app.convs.5.skip.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.5.skip.1.weight":
    (512, 512, 1, 1), "motion_encoder.enc.net_app.convs.6.conv1.0.weight": (512, 512, 3, 3),
    "motion_encoder.enc.net_app.convs.6.conv1.1.bias": (1, 512, 1, 1),
    "motion_encoder.enc.net_app.convs.6.conv2.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.6.conv2.1.weight":
    (512, 512, 3, 3), "motion_encoder.enc.net_app.convs.6.conv2.2.bias": (1, 512, 1, 1),
    "motion_encoder.enc.net_app.convs.6.skip.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.6.skip.1.weight":
    (512, 512, 1, 1), "motion_encoder.enc.net_app.convs.7.conv1.0.weight": (512, 512, 3, 3),
    "motion_encoder.enc.net_app.convs.7.conv1.1.bias": (1, 512, 1, 1),
    "motion_encoder.enc.net_app.convs.7.conv2.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.7.conv2.1.weight":
    (512, 512, 3, 3), "motion_encoder.enc.net_app.convs.7.conv2.2.bias": (1, 512, 1, 1),
    "motion_encoder.enc.net_app.convs.7.skip.0.kernel": (4, 4), "motion_encoder.enc.net_app.convs.7.skip.1.weight":
    (512, 512, 1, 1), "motion_encoder.enc.net_app.convs.8.weight": (512, 512, 4, 4), "motion_encoder.enc.fc.0.weight":
    (512, 512), "motion_encoder.enc.fc.0.bias": (512,), "motion_encoder.enc.fc.1.weight": (512, 512),
    "motion_encoder.enc.fc.1.bias": (512,), "motion_encoder.enc.fc.2.weight": (512, 512),
    "motion_encoder.enc.fc.2.bias": (512,), "motion_encoder.enc.fc.3.weight": (512, 512),
    "motion_encoder.enc.fc.3.bias": (512,), "motion_encoder.enc.fc.4.weight": (20, 512),
    "motion_encoder.enc.fc.4.bias": (20,), "motion_encoder.dec.direction.weight": (512, 20),
    "face_adapter.fuser_blocks.0.linear1_kv.weight": (10240, 5120), "face_adapter.fuser_blocks.0.linear1_kv.bias":
    (10240,), "face_adapter.fuser_blocks.0.linear1_q.weight": (5120, 5120),
    "face_adapter.fuser_blocks.0.linear1_q.bias": (5120,), "face_adapter.fuser_blocks.0.linear2.weight": (5120, 5120),
    "face_adapter.fuser_blocks.0.linear2.bias": (5120,), "face_adapter.fuser_blocks.0.q_norm.weight": (128,),
    "face_adapter.fuser_blocks.0.k_norm.weight": (128,), "face_adapter.fuser_blocks.1.linear1_kv.weight": (10240,
    5120), "face_adapter.fuser_blocks.1.linear1_kv.bias": (10240,), "face_adapter.fuser_blocks.1.linear1_q.weight":
    (5120, 5120), "face_adapter.fuser_blocks.1.linear1_q.bias": (5120,), "face_adapter.fuser_blocks.1.linear2.weight":
    (5120, 5120), "face_adapter.fuser_blocks.1.linear2.bias": (5120,), "face_adapter.fuser_blocks.1.q_norm.weight":
    (128,), "face_adapter.fuser_blocks.1.k_norm.weight": (128,), "face_adapter.fuser_blocks.2.linear1_kv.weight":
    (10240, 5120), "face_adapter.fuser_blocks.2.linear1_kv.bias": (10240,),
    "face_adapter.fuser_blocks.2.linear1_q.weight": (5120, 5120), "face_adapter.fuser_blocks.2.linear1_q.bias":
    (5120,), "face_adapter.fuser_blocks.2.linear2.weight": (5120, 5120), "face_adapter.fuser_blocks.2.linear2.bias":
    (5120,), "face_adapter.fuser_blocks.2.q_norm.weight": (128,), "face_adapter.fuser_blocks.2.k_norm.weight": (128,),
    "face_adapter.fuser_blocks.3.linear1_kv.weight": (10240, 5120), "face_adapter.fuser_blocks.3.linear1_kv.bias":
    (10240,), "face_adapter.fuser_blocks.3.linear1_q.weight": (5120, 5120),
    "face_adapter.fuser_blocks.3.linear1_q.bias": (5120,), "face_adapter.fuser_blocks.3.linear2.weight": (5120, 5120),
    "face_adapter.fuser_blocks.3.linear2.bias": (5120,), "face_adapter.fuser_blocks.3.q_norm.weight": (128,),
    "face_adapter.fuser_blocks.3.k_norm.weight": (128,), "face_adapter.fuser_blocks.4.linear1_kv.weight": (10240,
    5120), "face_adapter.fuser_blocks.4.linear1_kv.bias": (10240,), "face_adapter.fuser_blocks.4.linear1_q.weight":
    (5120, 5120), "face_adapter.fuser_blocks.4.linear1_q.bias": (5120,), "face_adapter.fuser_blocks.4.linear2.weight":
    (5120, 5120), "face_adapter.fuser_blocks.4.linear2.bias": (5120,), "face_adapter.fuser_blocks.4.q_norm.weight":
    (128,), "face_adapter.fuser_blocks.4.k_norm.weight": (128,), "face_adapter.fuser_blocks.5.linear1_kv.weight":
    (10240, 5120), "face_adapter.fuser_blocks.5.linear1_kv.bias": (10240,),
    "face_adapter.fuser_blocks.5.linear1_q.weight": (5120, 5120), "face_adapter.fuser_blocks.5.linear1_q.bias":
    (5120,), "face_adapter.fuser_blocks.5.linear2.weight": (5120, 5120), "face_adapter.fuser_blocks.5.linear2.bias":
    (5120,), "face_adapter.fuser_blocks.5.q_norm.weight": (128,), "face_adapter.fuser_blocks.5.k_norm.weight": (128,),
    "face_adapter.fuser_blocks.6.linear1_kv.weight": (10240, 5120), "face_adapter.fuser_blocks.6.linear1_kv.bias":
    (10240,), "face_adapter.fuser_blocks.6.linear1_q.weight": (5120, 5120),
    "face_adapter.fuser_blocks.6.linear1_q.bias": (5120,), "face_adapter.fuser_blocks.6.linear2.weight": (5120, 5120),
    "face_adapter.fuser_blocks.6.linear2.bias": (5120,), "face_adapter.fuser_blocks.6.q_norm.weight": (128,),
    "face_adapter.fuser_blocks.6.k_norm.weight": (128,), "face_adapter.fuser_blocks.7.linear1_kv.weight": (10240,
    5120), "face_adapter.fuser_blocks.7.linear1_kv.bias": (10240,), "face_adapter.fuser_blocks.7.linear1_q.weight":
    (5120, 5120), "face_adapter.fuser_blocks.7.linear1_q.bias": (5120,), "face_adapter.fuser_blocks.7.linear2.weight":
    (5120, 5120), "face_adapter.fuser_blocks.7.linear2.bias": (5120,), "face_adapter.fuser_blocks.7.q_norm.weight":
    (128,), "face_adapter.fuser_blocks.7.k_norm.weight": (128,), "face_encoder.padding_tokens": (1, 1, 1, 5120),
    "face_encoder.conv1_local.conv.weight": (4096, 512, 3), "face_encoder.conv1_local.conv.bias": (4096,),
    "face_encoder.conv2.conv.weight": (1024, 1024, 3), "face_encoder.conv2.conv.bias": (1024,),
    "face_encoder.conv3.conv.weight": (1024, 1024, 3), "face_encoder.conv3.conv.bias": (1024,),
    "face_encoder.out_proj.weight": (5120, 1024), "face_encoder.out_proj.bias": (5120,), **blocks("blocks.", 40,
    {"modulation": (1, 6, 5120), "self_attn.q.weight": (5120, 5120), "self_attn.q.bias": (5120,),
    "self_attn.k.weight": (5120, 5120), "self_attn.k.bias": (5120,), "self_attn.v.weight": (5120, 5120),
    "self_attn.v.bias": (5120,), "self_attn.o.weight": (5120, 5120), "self_attn.o.bias": (5120,),
    "self_attn.norm_q.weight": (5120,), "self_attn.norm_k.weight": (5120,), "norm3.weight": (5120,), "norm3.bias":
    (5120,), "cross_attn.q.weight": (5120, 5120), "cross_attn.q.bias": (5120,), "cross_attn.k.weight": (5120, 5120),
    "cross_attn.k.bias": (5120,), "cross_attn.v.weight": (5120, 5120), "cross_attn.v.bias": (5120,),
    "cross_attn.o.weight": (5120, 5120), "cross_attn.o.bias": (5120,), "cross_attn.norm_q.weight": (5120,),
    "cross_attn.norm_k.weight": (5120,), "cross_attn.k_img.weight": (5120, 5120), "cross_attn.k_img.bias": (5120,),
    "cross_attn.v_img.weight": (5120, 5120), "cross_attn.v_img.bias": (5120,), "cross_attn.norm_k_img.weight":
    (5120,), "ffn.0.weight": (13824, 5120), "ffn.0.bias": (13824,), "ffn.2.weight": (5120, 13824), "ffn.2.bias":
    (5120,)})}

ACE_STEP15 = {"null_condition_emb": (1, 1, 2048), "decoder.scale_shift_table": (1, 2, 2048),
    "decoder.proj_in.1.weight": (2048, 192, 2), "decoder.proj_in.1.bias": (2048,),
    "decoder.time_embed.linear_1.weight": (2048, 256), "decoder.time_embed.linear_1.bias": (2048,),
    "decoder.time_embed.linear_2.weight": (2048, 2048), "decoder.time_embed.linear_2.bias": (2048,),
    "decoder.time_embed.time_proj.weight": (12288, 2048), "decoder.time_embed.time_proj.bias": (12288,),
    "decoder.time_embed_r.linear_1.weight": (2048, 256), "decoder.time_embed_r.linear_1.bias": (2048,),
    "decoder.time_embed_r.linear_2.weight": (2048, 2048), "decoder.time_embed_r.linear_2.bias": (2048,),
    "decoder.time_embed_r.time_proj.weight": (12288, 2048), "decoder.time_embed_r.time_proj.bias": (12288,),
    "decoder.condition_embedder.weight": (2048, 2048), "decoder.condition_embedder.bias": (2048,),
    "decoder.norm_out.weight": (2048,), "decoder.proj_out.1.weight": (2048, 64, 2), "decoder.proj_out.1.bias": (64,),
    "encoder.text_projector.weight": (2048, 1024), "encoder.lyric_encoder.embed_tokens.weight": (2048, 1024),
    "encoder.lyric_encoder.embed_tokens.bias": (2048,), "encoder.lyric_encoder.norm.weight": (2048,),
    "encoder.timbre_encoder.special_token": (1, 1, 2048), "encoder.timbre_encoder.embed_tokens.weight": (2048, 64),
    "encoder.timbre_encoder.embed_tokens.bias": (2048,), "encoder.timbre_encoder.norm.weight": (2048,),
    "tokenizer.audio_acoustic_proj.weight": (2048, 64), "tokenizer.audio_acoustic_proj.bias": (2048,),
    "tokenizer.attention_pooler.special_token": (1, 1, 2048), "tokenizer.attention_pooler.embed_tokens.weight": (2048,
    2048), "tokenizer.attention_pooler.embed_tokens.bias": (2048,), "tokenizer.attention_pooler.norm.weight": (2048,),
    "tokenizer.quantizer.project_in.weight": (6, 2048), "tokenizer.quantizer.project_in.bias": (6,),
    "tokenizer.quantizer.project_out.weight": (2048, 6), "tokenizer.quantizer.project_out.bias": (2048,),
    "detokenizer.special_tokens": (1, 5, 2048), "detokenizer.embed_tokens.weight": (2048, 2048),
    "detokenizer.embed_tokens.bias": (2048,), "detokenizer.norm.weight": (2048,), "detokenizer.proj_out.weight": (64,
    2048), "detokenizer.proj_out.bias": (64,), **blocks("decoder.layers.", 24, {"scale_shift_table": (1, 6, 2048),
    "self_attn_norm.weight": (2048,), "self_attn.q_proj.weight": (2048, 2048), "self_attn.k_proj.weight": (1024,
    2048), "self_attn.v_proj.weight": (1024, 2048), "self_attn.o_proj.weight": (2048, 2048),
    "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,), "cross_attn_norm.weight": (2048,),
    "cross_attn.q_proj.weight": (2048, 2048), "cross_attn.k_proj.weight": (1024, 2048), "cross_attn.v_proj.weight":
    (1024, 2048), "cross_attn.o_proj.weight": (2048, 2048), "cross_attn.q_norm.weight": (128,),
    "cross_attn.k_norm.weight": (128,), "mlp_norm.weight": (2048,), "mlp.gate_proj.weight": (6144, 2048),
    "mlp.up_proj.weight": (6144, 2048), "mlp.down_proj.weight": (2048, 6144)}),
    **blocks("encoder.lyric_encoder.layers.", 8, {"self_attn.q_proj.weight": (2048, 2048), "self_attn.k_proj.weight":
    (1024, 2048), "self_attn.v_proj.weight": (1024, 2048), "self_attn.o_proj.weight": (2048, 2048),
    "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,), "input_layernorm.weight": (2048,),
    "post_attention_layernorm.weight": (2048,), "mlp.gate_proj.weight": (6144, 2048), "mlp.up_proj.weight": (6144,
    2048), "mlp.down_proj.weight": (2048, 6144)}), **blocks("encoder.timbre_encoder.layers.", 4,
    {"self_attn.q_proj.weight": (2048, 2048), "self_attn.k_proj.weight": (1024, 2048), "self_attn.v_proj.weight":
    (1024, 2048), "self_attn.o_proj.weight": (2048, 2048), "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,), "input_layernorm.weight": (2048,), "post_attention_layernorm.weight": (2048,),
    "mlp.gate_proj.weight": (6144, 2048), "mlp.up_proj.weight": (6144, 2048), "mlp.down_proj.weight": (2048, 6144)}),
    **blocks("tokenizer.attention_pooler.layers.", 2, {"self_attn.q_proj.weight": (2048, 2048),
    "self_attn.k_proj.weight": (1024, 2048), "self_attn.v_proj.weight": (1024, 2048), "self_attn.o_proj.weight":
    (2048, 2048), "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,), "input_layernorm.weight":
    (2048,), "post_attention_layernorm.weight": (2048,), "mlp.gate_proj.weight": (6144, 2048), "mlp.up_proj.weight":
    (6144, 2048), "mlp.down_proj.weight": (2048, 6144)}), **blocks("detokenizer.layers.", 2,
    {"self_attn.q_proj.weight": (2048, 2048), "self_attn.k_proj.weight": (1024, 2048), "self_attn.v_proj.weight":
    (1024, 2048), "self_attn.o_proj.weight": (2048, 2048), "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,), "input_layernorm.weight": (2048,), "post_attention_layernorm.weight": (2048,),
    "mlp.gate_proj.weight": (6144, 2048), "mlp.up_proj.weight": (6144, 2048), "mlp.down_proj.weight": (2048, 6144)})}
