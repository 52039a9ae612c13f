"""Names and shapes of published files of Hunyuan3D 2 and 2.1, which ComfyUI's own modules take. Used by
test_header.py."""

from tests.unit.checkpoints.published_comfyui import blocks, linear, norm


def _of_stream(name):
    return {**linear(f"{name}_mod.lin", 6144, 1024), **linear(f"{name}_attn.qkv", 3072, 1024),
            f"{name}_attn.norm.query_norm.scale": (64,), f"{name}_attn.norm.key_norm.scale": (64,),
            **linear(f"{name}_attn.proj", 1024, 1024), **linear(f"{name}_mlp.0", 4096, 1024),
            **linear(f"{name}_mlp.2", 1024, 4096)}


def hunyuan3d(num_double, num_single):
    """Of version 2 (16 and 32 blocks) or 2 mini (8 and 16)."""
    return {**linear("latent_in", 1024, 64), **linear("time_in.in_layer", 1024, 256),
            **linear("time_in.out_layer", 1024, 1024), **linear("cond_in", 1024, 1536),
            **blocks("double_blocks.", num_double, {**_of_stream("img"), **_of_stream("txt")}),
            **blocks("single_blocks.", num_single, {
                **linear("linear1", 7168, 1024), **linear("linear2", 1024, 5120), "norm.query_norm.scale": (64,),
                "norm.key_norm.scale": (64,), **linear("modulation.lin", 3072, 1024)}),
            **linear("final_layer.linear", 64, 1024), **linear("final_layer.adaLN_modulation.1", 2048, 1024)}


def _attention(name, read):
    return {**linear(f"{name}.to_q", 2048, 2048, False), **linear(f"{name}.to_k", 2048, read, False),
            **linear(f"{name}.to_v", 2048, read, False), f"{name}.q_norm.weight": (128,),
            f"{name}.k_norm.weight": (128,), **linear(f"{name}.out_proj", 2048, 2048)}


def _feed_forward(name, first, second):
    return {**linear(f"{name}.{first}", 8192, 2048), **linear(f"{name}.{second}", 2048, 8192)}


def _block(number):
    experts = (*(f"moe.experts.{expert}" for expert in range(8)), "moe.shared_experts")
    skip = {**norm("skip_norm", 2048), **linear("skip_linear", 2048, 4096)} if number > 10 else {}
    last = {"moe.gate.weight": (8, 2048)}
    for expert in experts:
        last |= _feed_forward(expert, "net.0.proj", "net.2")
    block = {**norm("norm1", 2048), **_attention("attn1", 2048), **norm("norm2", 2048), **_attention("attn2", 1024),
             **norm("norm3", 2048), **skip, **(last if number > 14 else _feed_forward("mlp", "fc1", "fc2"))}
    return {f"blocks.{number}.{name}": shape for name, shape in block.items()}


HUNYUAN3D21 = {**linear("x_embedder", 2048, 64), **linear("t_embedder.mlp.0", 8192, 2048),
               **linear("t_embedder.mlp.2", 2048, 8192),
               **{name: shape for number in range(21) for name, shape in _block(number).items()},
               **norm("final_layer.norm_final", 2048), **linear("final_layer.linear", 64, 2048)}


def _of_splats(modulated):
    own = {"shift_table": (1, 6144)} if modulated else {**norm("norm1", 1024), **norm("norm2", 1024)}
    return {**own, **linear("attn.qkv", 3072, 1024), "attn.q_norm.gamma": (16, 64), "attn.k_norm.gamma": (16, 64),
            **linear("attn.out", 1024, 1024), **linear("mlp.mlp.0", 4096, 1024), **linear("mlp.mlp.2", 1024, 4096)}


PLACES = {"freqs_0": (10,), "freqs_1": (10,), "freqs_2": (12,), **norm("norm", 1024),
          **linear("gate_map", 128, 1024, False), **linear("content_map", 128, 1024, False),
          **linear("final_map", 48, 128, False)}
TRIPOSPLAT = {"shift_table": (1, 2, 1024), **linear("t_embedder.mlp.0", 1024, 256),
    **linear("t_embedder.mlp.2", 1024, 1024), **linear("adaLN_modulation.1", 6144, 1024),
    **linear("input_layer", 1024, 16), **linear("cond_embedder", 1024, 1280), **linear("cond_embedder2", 1024, 128),
    **blocks("noise_repo_layers.", 2, PLACES), **blocks("context_repo_layers.", 2, PLACES),
    **blocks("repo_layers.", 24, PLACES), **blocks("noise_refiner.", 2, _of_splats(True)),
    **blocks("context_refiner.", 2, _of_splats(False)), **linear("cam_refiner.mlp.0", 1024, 5),
    **linear("cam_refiner.mlp.2", 1024, 1024), **blocks("blocks.", 24, _of_splats(True)),
    **linear("out_layer", 16, 1024), **linear("cam_out_layer", 5, 1024)}
