"""Names and shapes of published files of models that work on pixels, which ComfyUI's own modules take. Used by
test_header.py."""

from tests.unit.checkpoints.published_comfyui import blocks, linear, norm

Z_IMAGE_PIXEL = {"x_pad_token": (1, 3840), "cap_pad_token": (1, 3840), "x_embedder.weight": (3840, 3072),
    "x_embedder.bias": (3840,), **blocks("noise_refiner.", 2, {"attention.qkv.weight": (11520, 3840),
    "attention.out.weight": (3840, 3840), "attention.q_norm.weight": (128,), "attention.k_norm.weight": (128,),
    "feed_forward.w1.weight": (10240, 3840), "feed_forward.w2.weight": (3840, 10240),
    "feed_forward.w3.weight": (10240, 3840), "attention_norm1.weight": (3840,), "ffn_norm1.weight": (3840,),
    "attention_norm2.weight": (3840,), "ffn_norm2.weight": (3840,), "adaLN_modulation.0.weight": (15360, 256),
    "adaLN_modulation.0.bias": (15360,)}), **blocks("context_refiner.", 2, {"attention.qkv.weight": (11520, 3840),
    "attention.out.weight": (3840, 3840), "attention.q_norm.weight": (128,), "attention.k_norm.weight": (128,),
    "feed_forward.w1.weight": (10240, 3840), "feed_forward.w2.weight": (3840, 10240),
    "feed_forward.w3.weight": (10240, 3840), "attention_norm1.weight": (3840,), "ffn_norm1.weight": (3840,),
    "attention_norm2.weight": (3840,), "ffn_norm2.weight": (3840,)}), "t_embedder.mlp.0.weight": (1024, 256),
    "t_embedder.mlp.0.bias": (1024,), "t_embedder.mlp.2.weight": (256, 1024), "t_embedder.mlp.2.bias": (256,),
    "cap_embedder.0.weight": (2560,), "cap_embedder.1.weight": (3840, 2560), "cap_embedder.1.bias": (3840,),
    **blocks("layers.", 30, {"attention.qkv.weight": (11520, 3840), "attention.out.weight": (3840, 3840),
    "attention.q_norm.weight": (128,), "attention.k_norm.weight": (128,), "feed_forward.w1.weight": (10240, 3840),
    "feed_forward.w2.weight": (3840, 10240), "feed_forward.w3.weight": (10240, 3840),
    "attention_norm1.weight": (3840,), "ffn_norm1.weight": (3840,), "attention_norm2.weight": (3840,),
    "ffn_norm2.weight": (3840,), "adaLN_modulation.0.weight": (15360, 256), "adaLN_modulation.0.bias": (15360,)}),
    "dec_net.cond_embed.weight": (3840, 3840), "dec_net.cond_embed.bias": (3840,),
    "dec_net.input_embedder.embedder.0.weight": (3840, 3136), "dec_net.input_embedder.embedder.0.bias": (3840,),
    **blocks("dec_net.res_blocks.", 4, {"in_ln.weight": (3840,), "in_ln.bias": (3840,), "mlp.0.weight": (3840, 3840),
    "mlp.0.bias": (3840,), "mlp.2.weight": (3840, 3840), "mlp.2.bias": (3840,),
    "adaLN_modulation.1.weight": (11520, 3840), "adaLN_modulation.1.bias": (11520,)}),
    "dec_net.final_layer.linear.weight": (3072, 3840), "dec_net.final_layer.linear.bias": (3072,)}

PIXELDIT = {"core.y_pos_embedding": (1, 300, 1536), "core.pixel_embedder.proj.weight": (16, 3),
    "core.pixel_embedder.proj.bias": (16,), "core.s_embedder.proj.weight": (1536, 768),
    "core.s_embedder.proj.bias": (1536,), "core.t_embedder.mlp.0.weight": (1536, 256),
    "core.t_embedder.mlp.0.bias": (1536,), "core.t_embedder.mlp.2.weight": (1536, 1536),
    "core.t_embedder.mlp.2.bias": (1536,), "core.y_embedder.proj.weight": (1536, 2304),
    "core.y_embedder.proj.bias": (1536,), "core.y_embedder.norm.weight": (1536,),
    **blocks("core.patch_blocks.", 14, {"norm_x1.weight": (1536,), "norm_y1.weight": (1536,),
    "attn.qkv_x.weight": (4608, 1536), "attn.qkv_y.weight": (4608, 1536), "attn.q_norm_x.weight": (64,),
    "attn.k_norm_x.weight": (64,), "attn.q_norm_y.weight": (64,), "attn.k_norm_y.weight": (64,),
    "attn.proj_x.weight": (1536, 1536), "attn.proj_x.bias": (1536,), "attn.proj_y.weight": (1536, 1536),
    "attn.proj_y.bias": (1536,), "norm_x2.weight": (1536,), "norm_y2.weight": (1536,), "mlp_x.w1.weight": (4096, 1536),
    "mlp_x.w2.weight": (1536, 4096), "mlp_x.w3.weight": (4096, 1536), "mlp_y.w1.weight": (4096, 1536),
    "mlp_y.w2.weight": (1536, 4096), "mlp_y.w3.weight": (4096, 1536), "adaLN_modulation_img.0.weight": (9216, 1536),
    "adaLN_modulation_img.0.bias": (9216,), "adaLN_modulation_txt.0.weight": (9216, 1536),
    "adaLN_modulation_txt.0.bias": (9216,)}),
    **blocks("core.pixel_blocks.", 2, {"compress_to_attn.weight": (1152, 4096), "compress_to_attn.bias": (1152,),
    "expand_from_attn.weight": (4096, 1152), "expand_from_attn.bias": (4096,), "norm1.weight": (16,),
    "attn.qkv.weight": (3456, 1152), "attn.q_norm.weight": (72,), "attn.k_norm.weight": (72,),
    "attn.proj.weight": (1152, 1152), "attn.proj.bias": (1152,), "norm2.weight": (16,), "mlp.fc1.weight": (64, 16),
    "mlp.fc1.bias": (64,), "mlp.fc2.weight": (16, 64), "mlp.fc2.bias": (16,),
    "adaLN_modulation.0.weight": (24576, 1536), "adaLN_modulation.0.bias": (24576,)}),
    "core.final_layer.norm.weight": (16,), "core.final_layer.linear.weight": (3, 16),
    "core.final_layer.linear.bias": (3,)}

PID = {"y_pos_embedding": (1, 300, 1536), "pixel_embedder.proj.weight": (16, 3), "pixel_embedder.proj.bias": (16,),
    "s_embedder.proj.weight": (1536, 768), "s_embedder.proj.bias": (1536,), "t_embedder.mlp.0.weight": (1536, 256),
    "t_embedder.mlp.0.bias": (1536,), "t_embedder.mlp.2.weight": (1536, 1536), "t_embedder.mlp.2.bias": (1536,),
    "y_embedder.proj.weight": (1536, 2304), "y_embedder.proj.bias": (1536,), "y_embedder.norm.weight": (1536,),
    **blocks("patch_blocks.", 14, {"norm_x1.weight": (1536,), "norm_y1.weight": (1536,),
    "attn.qkv_x.weight": (4608, 1536), "attn.qkv_y.weight": (4608, 1536), "attn.q_norm_x.weight": (64,),
    "attn.k_norm_x.weight": (64,), "attn.q_norm_y.weight": (64,), "attn.k_norm_y.weight": (64,),
    "attn.proj_x.weight": (1536, 1536), "attn.proj_x.bias": (1536,), "attn.proj_y.weight": (1536, 1536),
    "attn.proj_y.bias": (1536,), "norm_x2.weight": (1536,), "norm_y2.weight": (1536,), "mlp_x.w1.weight": (4096, 1536),
    "mlp_x.w2.weight": (1536, 4096), "mlp_x.w3.weight": (4096, 1536), "mlp_y.w1.weight": (4096, 1536),
    "mlp_y.w2.weight": (1536, 4096), "mlp_y.w3.weight": (4096, 1536), "adaLN_modulation_img.0.weight": (9216, 1536),
    "adaLN_modulation_img.0.bias": (9216,), "adaLN_modulation_txt.0.weight": (9216, 1536),
    "adaLN_modulation_txt.0.bias": (9216,)}), **blocks("pixel_blocks.", 2, {"compress_to_attn.weight": (1152, 4096),
    "compress_to_attn.bias": (1152,), "expand_from_attn.weight": (4096, 1152), "expand_from_attn.bias": (4096,),
    "norm1.weight": (16,), "attn.qkv.weight": (3456, 1152), "attn.q_norm.weight": (72,), "attn.k_norm.weight": (72,),
    "attn.proj.weight": (1152, 1152), "attn.proj.bias": (1152,), "norm2.weight": (16,), "mlp.fc1.weight": (64, 16),
    "mlp.fc1.bias": (64,), "mlp.fc2.weight": (16, 64), "mlp.fc2.bias": (16,),
    "adaLN_modulation.0.weight": (24576, 1536), "adaLN_modulation.0.bias": (24576,)}),
    "final_layer.norm.weight": (16,), "final_layer.linear.weight": (3, 16), "final_layer.linear.bias": (3,),
    "lq_proj.latent_proj.0.weight": (512, 16, 3, 3), "lq_proj.latent_proj.0.bias": (512,),
    "lq_proj.latent_proj.2.weight": (512, 512, 3, 3), "lq_proj.latent_proj.2.bias": (512,),
    **{f"lq_proj.latent_proj.{number}.block.{name}": shape for number in range(3, 7) for name, shape in (
        ("0.weight", (512,)), ("0.bias", (512,)), ("2.weight", (512, 512, 3, 3)), ("2.bias", (512,)),
        ("3.weight", (512,)), ("3.bias", (512,)), ("5.weight", (512, 512, 3, 3)), ("5.bias", (512,)))},
    **blocks("lq_proj.output_heads.", 7, {"weight": (1536, 512), "bias": (1536,)}),
    **blocks("lq_proj.gate_modules.", 7, {"log_alpha": (), "content_proj.weight": (1536, 3072),
    "content_proj.bias": (1536,)})}

# of the newer, one gate for a token, and one more before the pixels are drawn
PID15 = PID | {
    "lq_proj.pit_head.weight": (1536, 512), "lq_proj.pit_head.bias": (1536,),
    "pit_lq_gate.content_proj.weight": (1, 3072), "pit_lq_gate.content_proj.bias": (1,), "pit_lq_gate.log_alpha": (),
    **blocks("lq_proj.gate_modules.", 7, {"content_proj.weight": (1, 3072), "content_proj.bias": (1,)})}


MERGER = {**linear("linear_fc1", 4608, 4608), **linear("linear_fc2", 4096, 4608)}
# those of Qwen3-VL 8B, with what ComfyUI drops of them
HIDREAM_O1 = {"language_model.embed_tokens.weight": (151936, 4096), "language_model.norm.weight": (4096,),
    **blocks("language_model.layers.", 36, {
        **linear("self_attn.q_proj", 4096, 4096, False), **linear("self_attn.k_proj", 1024, 4096, False),
        **linear("self_attn.v_proj", 1024, 4096, False), **linear("self_attn.o_proj", 4096, 4096, False),
        "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,),
        **linear("mlp.gate_proj", 12288, 4096, False), **linear("mlp.up_proj", 12288, 4096, False),
        **linear("mlp.down_proj", 4096, 12288, False), "input_layernorm.weight": (4096,),
        "post_attention_layernorm.weight": (4096,)}),
    "visual.patch_embed.proj.weight": (1152, 3, 2, 16, 16), "visual.patch_embed.proj.bias": (1152,),
    "visual.pos_embed.weight": (2304, 1152),
    **blocks("visual.blocks.", 27, {
        **norm("norm1", 1152), **norm("norm2", 1152), **linear("attn.qkv", 3456, 1152),
        **linear("attn.proj", 1152, 1152), **linear("mlp.linear_fc1", 4304, 1152),
        **linear("mlp.linear_fc2", 1152, 4304)}),
    **{f"visual.merger.{name}": shape for name, shape in {**norm("norm", 1152), **MERGER}.items()},
    **blocks("visual.deepstack_merger_list.", 3, {**norm("norm", 4608), **MERGER}),
    **linear("t_embedder1.mlp.0", 4096, 256), **linear("t_embedder1.mlp.2", 4096, 4096),
    **linear("x_embedder.proj1", 1024, 3072, False), **linear("x_embedder.proj2", 4096, 1024),
    **linear("final_layer2.linear", 3072, 4096)}
