"""Names and shapes of the published file of NewBie-Image. Used by test_header.py."""

from tests.unit.checkpoints.published_comfyui import blocks

BLOCK = {"attention.qkv.weight": (3840, 2304), "attention.out.weight": (2304, 2304),
    "attention.q_norm.weight": (96,), "attention.k_norm.weight": (96,), "feed_forward.w1.weight": (9216, 2304),
    "feed_forward.w2.weight": (2304, 9216), "feed_forward.w3.weight": (9216, 2304), "attention_norm1.weight": (2304,),
    "ffn_norm1.weight": (2304,), "attention_norm2.weight": (2304,), "ffn_norm2.weight": (2304,)}
TIMED = {"adaLN_modulation.1.weight": (9216, 1024), "adaLN_modulation.1.bias": (9216,)}
NEWBIE = {"x_embedder.weight": (2304, 64), "x_embedder.bias": (2304,),
    **blocks("noise_refiner.", 2, BLOCK | TIMED), **blocks("context_refiner.", 2, BLOCK),
    "t_embedder.mlp.0.weight": (1024, 256), "t_embedder.mlp.0.bias": (1024,), "t_embedder.mlp.2.weight": (1024, 1024),
    "t_embedder.mlp.2.bias": (1024,), "cap_embedder.0.weight": (2560,), "cap_embedder.1.weight": (2304, 2560),
    "cap_embedder.1.bias": (2304,), "clip_text_pooled_proj.0.weight": (1024,),
    "clip_text_pooled_proj.1.weight": (1024, 1024), "clip_text_pooled_proj.1.bias": (1024,),
    "time_text_embed.1.weight": (1024, 2048), "time_text_embed.1.bias": (1024,),
    **blocks("layers.", 36, BLOCK | TIMED), "final_layer.linear.weight": (64, 2304),
    "final_layer.linear.bias": (64,), "final_layer.adaLN_modulation.1.weight": (2304, 1024),
    "final_layer.adaLN_modulation.1.bias": (2304,)}
