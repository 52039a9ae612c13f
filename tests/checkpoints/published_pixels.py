"""Names and shapes of published files of models that work on pixels, which ComfyUI's own modules take. Used by
test_header.py."""

from tests.checkpoints.published_comfyui import blocks

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
