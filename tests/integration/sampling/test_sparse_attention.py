"""sparse_attention of xDiT Parallel Config is ComfyUI's own model with the oracle as its attention, under every method;
ComfyUI's node is rejected by name."""

import itertools

import pytest
import torch

from tests.integration.sampling.test_pipefusion import EXACT
from tests.support.sparse_oracle import sparse_oracle
from tests.support.tolerances import close, relative_error
from xdit_backend.protocol.specs import SparseOptions

BLOCKS = "blocks", "double_blocks", "single_blocks", "transformer_blocks"
SHORTEST, SIZE = 100, {"minimax-h3": (22, 24), "ltx-2": (16, 15)}
SETTINGS = "tau=0.5, keep_percent=20, start_percent=0.3, sink_conditioning=off, min_tokens=100, dense_blocks=1"
OPTIONS = {name: SparseOptions(name, 0.5, 20.0, 0.3, dense_blocks=(1,), min_tokens=SHORTEST, sink_conditioning="off")
           for name in ("sol-attn", "sla")}


def latent_of(comfyui, kind, **options):
    return comfyui.latent(kind, size=SIZE.get(kind, (24, 20)), **options)


def native_with(comfyui, kind, options, sparse):
    """The native MODEL with an attention override, as ComfyUI's BlockSparseAttention sets it. sparse: receives
    the blocks in which it was sparse."""
    model = comfyui.native(kind).clone()
    start, end = (float(model.get_model_object("model_sampling").percent_to_sigma(percent))
                  for percent in (options.start_percent, options.end_percent))
    module, calls = model.model.diffusion_model, itertools.count()
    num_blocks = sum(len(getattr(module, name, ())) for name in BLOCKS)

    def override(func, q, k, v, heads, mask=None, **others):
        by_heads = others.get("skip_reshape")
        q, k, v = (each if torch.is_tensor(each) else each.take() for each in (q, k, v))
        if mask is not None or q.shape != k.shape or q.shape[2 if by_heads else 1] < SHORTEST:
            return func(q, k, v, heads, mask=mask, **others)
        block, sigma = next(calls) % num_blocks, others["transformer_options"]["sigmas"].max().item()
        if not end <= sigma <= start or block in options.dense_blocks:
            return func(q, k, v, heads, mask=mask, **others)
        sparse.append(block)
        parts = [each if by_heads else each.unflatten(2, (heads, -1)).transpose(1, 2) for each in (q, k, v)]
        positions = torch.arange(parts[0].shape[2])
        out = sparse_oracle(*parts, positions, positions, options, scale=others.get("scale"))
        return out if others.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)

    model.model_options["transformer_options"]["optimized_attention_override"] = override
    return model


@pytest.fixture(scope="module")
def references(comfyui):
    found = {}

    def reference(kind, method):
        if (kind, method) not in found:
            sparse: list = []
            found[kind, method] = comfyui.sample(native_with(comfyui, kind, OPTIONS[method], sparse), kind,
                                                 latent=latent_of(comfyui, kind))
            assert sparse
        return found[kind, method]
    return reference


@pytest.mark.parametrize("kind, method, devices, settings", [
    ("wan", "sol-attn", 1, {"ulysses": 1}), ("wan", "sla", 2, {"ulysses": 2}), ("wan", "sol-attn", 2, {"ring": 2}),
    ("wan", "sla", 2, {"cfg": 2}), ("wan", "sol-attn", 2, {"tensor": 2}),
    ("wan", "sla", 2, {"pipefusion": 2, "num_patches": 1}),
    ("wan", "sol-attn", 2, {"ring": 2, "weights_memory": "0.021"}),
    ("wan", "sla", 2, {"ulysses": 2, "compile": "blocks"}),
    ("hunyuanvideo", "sol-attn", 2, {"ulysses": 2}), ("hunyuanvideo", "sla", 2, {"ring": 2}),
    ("ltx-2", "sla", 2, {"ring": 2}), ("minimax-h3", "sol-attn", 2, {"ring": 2}),
    ("minimax-h3", "sla", 2, {"ulysses": 2})], ids=str)
def test_the_option_equals_comfyui_with_sparse_attention(comfyui, references, said, kind, method, devices, settings):
    config = comfyui.config(",".join(["cpu"] * devices), sparse_attention=method, sparse_settings=SETTINGS, **settings)
    found = comfyui.sample(comfyui.ours(kind, config), kind, latent=latent_of(comfyui, kind))

    close(found, references(kind, method), EXACT)
    assert any(f"sparse ({method})" in text for text in said)


def test_the_option_changes_the_image_only_where_it_is_set(comfyui, references):
    dense = comfyui.sample(comfyui.native("wan"), "wan", latent=latent_of(comfyui, "wan"))
    assert relative_error(references("wan", "sla"), dense) > 10 * EXACT

    for settings in ("min_tokens=100000", "start_percent=1", "dense_blocks=0-9, min_tokens=0"):
        config = comfyui.config("cpu", ulysses=1, sparse_attention="sla", sparse_settings=settings)
        close(comfyui.sample(comfyui.ours("wan", config), "wan", latent=latent_of(comfyui, "wan")), dense, EXACT)


def test_models_without_long_self_attention_are_rejected_by_name(comfyui):
    with pytest.raises(comfyui.errors.ConfigError, match="Set sparse_attention to off: .* no self-attention over all"):
        comfyui.ours("sd15", comfyui.config("cpu", cfg=1, sparse_attention="sla"))


def test_comfyuis_node_is_rejected_by_name(comfyui):
    model = comfyui.ours("wan", comfyui.config("cpu", ulysses=1)).clone()

    def override(func, *args, **kwargs):
        return func(*args, **kwargs)
    override.__module__ = "comfy_extras.nodes_sparse_attention"
    model.model_options["transformer_options"]["optimized_attention_override"] = override
    with pytest.raises(comfyui.errors.UnsupportedError, match="BlockSparseAttention.: set sparse_attention in xDiT"):
        comfyui.sample(model, "wan", steps=1)
