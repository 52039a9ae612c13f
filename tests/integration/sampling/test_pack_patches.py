"""Patches of popular packs that act inside a model, or only on its memory: the latents equal those of the native MODEL
under every method, and functions that compute something else are rejected."""

import functools

import pytest
import torch

from tests.support.pack_patches import chunked, guided, perturbed, slowed
from tests.support.tolerances import close, relative_error

TOLERANCE = 1e-5                           # relative, float32 on both sides
ACTS = 2e-3
METHODS = {"one": ("cpu", {}), "cfg": ("cpu,cpu", {"cfg": 2}), "ulysses": ("cpu,cpu", {"ulysses": 2}),
           "ring": ("cpu,cpu", {"ring": 2}), "tensor": ("cpu,cpu", {"tensor": 2}), "data": ("cpu,cpu", {"data": 2}),
           "pipefusion": ("cpu,cpu", {"pipefusion": 2, "num_patches": 2, "warmup_steps": 9}),
           "displaced": ("cpu,cpu", {"displaced": 2, "warmup_steps": 9})}
FAST = "cfg", "ulysses", "pipefusion"
EVERY = [pytest.param(method, marks=() if method in FAST else pytest.mark.slow) for method in METHODS]


def compare(comfyui, kind, method, change, acts=True, **task):
    """Sample both MODELs with the change and compare them, and the native one without it."""
    devices, degrees = METHODS[method]
    task = {"steps": 2, **task}
    native, ours = (comfyui.sample(change(model), kind, **task) for model in (
        comfyui.native(kind), comfyui.ours(kind, comfyui.config(devices, **degrees))))

    close(ours, native, TOLERANCE)
    assert (relative_error(native, comfyui.sample(comfyui.native(kind), kind, **task)) > ACTS) == acts


@pytest.mark.parametrize("kind, path", [("wan", "blocks.{}.ffn"), ("ltx-video", "transformer_blocks.{}.ff"),
                                        pytest.param("lumina-2", "layers.{}.feed_forward", marks=pytest.mark.slow)])
def test_feed_forward_in_chunks_changes_nothing(comfyui, said, kind, path):
    compare(comfyui, kind, "cfg", functools.partial(chunked, path=path), acts=False)

    assert any("with a node's lower memory use unchanged" in text for text in said)


def test_feed_forward_in_chunks_leaves_stale_patches_alone(comfyui, said):
    model = comfyui.ours("wan", comfyui.config("cpu,cpu", pipefusion=2, num_patches=2, warmup_steps=1))

    comfyui.sample(chunked(model, "blocks.{}.ffn"), "wan", steps=2)

    assert not any("every step synchronous" in text for text in said)


@pytest.mark.parametrize("change", [
    lambda out: 1.001 * out, lambda out: out.roll(1, 1), lambda out: out + (out.shape[1] > 9000), lambda out: None,
    lambda out: out[:, :3], lambda out: out - out.mean(1, keepdim=True)], ids=range(6))
def test_feed_forward_that_computes_something_else_is_rejected(comfyui, change):
    model = comfyui.ours("wan", comfyui.config())

    with pytest.raises(comfyui.errors.UnsupportedError, match="a replaced diffusion_model.blocks.0.ffn.forward"):
        comfyui.sample(chunked(model, "blocks.{}.ffn", change=change), "wan", steps=1)


def test_a_memory_factor_set_while_sampling_is_prepared_changes_nothing(comfyui, said):
    def factor(executor, model, *args, **kwargs):
        model.model.memory_usage_factor *= 3
        try:
            return executor(model, *args, **kwargs)
        finally:
            model.model.memory_usage_factor /= 3
    model = comfyui.ours("wan", comfyui.config("cpu,cpu", pipefusion=2, num_patches=2, warmup_steps=9)).clone()
    model.add_wrapper_with_key("prepare_sampling", "a_pack", factor)

    close(comfyui.sample(model, "wan", steps=2), comfyui.reference("wan", steps=2), TOLERANCE)
    assert not any("every step synchronous" in text for text in said)


def test_blocks_that_a_node_moves_between_devices_stay_with_the_workers(comfyui):
    """As nodes do that swap blocks, in a callback of the loading."""
    from comfy.patcher_extension import CallbacksMP

    def swap(model, *args):
        for block in model.model.diffusion_model.blocks:
            block.to("cpu")
            block.to(torch.device("cpu"), non_blocking=True)
    model = comfyui.ours("wan", comfyui.config("cpu,cpu", cfg=2)).clone()
    model.add_callback_with_key(CallbacksMP.ON_LOAD, "a_pack", swap)
    swap(model)

    close(comfyui.sample(model, "wan", steps=2), comfyui.reference("wan", steps=2), TOLERANCE)


def guide(comfyui, kind="wan", **settings):
    return functools.partial(guided, conditioning=comfyui.conditioning(kind, 3, tokens=21), **settings)


@pytest.mark.parametrize("method", EVERY)
def test_attention_guided_from_a_second_text_equals_native(comfyui, method):
    compare(comfyui, "wan", method, guide(comfyui))


@pytest.mark.parametrize("kind, method, settings, task", [
    ("wan-i2v", "cfg", {}, {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("wan-i2v", "tensor", {}, {}), ("wan", "ulysses", {}, {"cfg": 1.0}),
        ("wan", "data", {"input_type": "batch", "tau": 1.1}, {"cfg": 1.0, "batch": 2})))])
def test_guided_attention_of_images_batches_and_distilled_models_equals_native(comfyui, kind, method, settings, task):
    task = dict(task)

    compare(comfyui, kind, method, guide(comfyui, kind, **settings),
            latent=comfyui.latent(kind, batch=task.pop("batch", 1)), **task)


def test_guided_attention_that_the_workers_would_compute_otherwise_is_rejected(comfyui):
    ours, rejected = comfyui.ours("wan", comfyui.config()), comfyui.errors.UnsupportedError
    for result in ("2 * out", "out.flip(0) if len(out) > 1 else out", "torch.relu(out)"):
        with pytest.raises(rejected, match="a replaced diffusion_model.blocks.0.cross_attn.forward"):
            comfyui.sample(guide(comfyui, result=result)(ours), "wan", steps=1)
    with pytest.raises(rejected, match="^Use one node that guides attention to the text, in all blocks: .* 1 of them "
                                       "in 2 of 3"):
        comfyui.sample(guide(comfyui, blocks=(0, 2))(ours), "wan", steps=1)
    with pytest.raises(rejected, match="^Set batch_size to 1, or input_type of WanVideoNAG to batch .* has 4"):
        comfyui.sample(guide(comfyui)(ours), "wan", steps=1, latent=comfyui.latent("wan", batch=2))


def test_a_model_without_the_node_is_as_before(comfyui):
    """ComfyUI leaves the forward that it puts back as an attribute."""
    ours = comfyui.ours("wan", comfyui.config("cpu,cpu", cfg=2))
    comfyui.sample(chunked(guide(comfyui)(ours), "blocks.{}.ffn"), "wan", steps=1)

    close(comfyui.sample(ours, "wan", steps=2), comfyui.reference("wan", steps=2), TOLERANCE)


def test_a_module_that_a_node_calls_computes_with_the_files_weights(comfyui):
    text = comfyui.conditioning("wan", 3)[0][0]
    with torch.no_grad():
        ours, native = (model.get_model_object("diffusion_model").text_embedding(text) for model in (
            comfyui.ours("wan", comfyui.config()), comfyui.native("wan")))

    close(ours, native, 1e-6)


MIDDLE = [("middle", 0)]
SEVERAL = [("input", 1, 0), ("input", 3, 0), ("middle", 0), ("output", 1), ("input", 77)]


@pytest.mark.parametrize("kind, method, blocks, sigma", [
    ("sdxl", "cfg", SEVERAL, None), ("sdxl", "cfg", SEVERAL, 1.3), ("sdxl", "data", MIDDLE, -1.0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sd15", "cfg", MIDDLE, None), ("sd15", "displaced", SEVERAL, None), ("sd15", "one", SEVERAL, -1.0),
        ("sd2", "cfg", SEVERAL, 0.4)))])
def test_perturbed_and_blurred_self_attention_equals_native(comfyui, kind, method, blocks, sigma):
    compare(comfyui, kind, method, functools.partial(perturbed, blocks=blocks, sigma=sigma))


def test_self_attention_that_computes_something_else_is_rejected(comfyui):
    ours, rejected = comfyui.ours("sd15", comfyui.config()), comfyui.errors.UnsupportedError
    for change in ({"values": "2 * v if torch.is_tensor(v) else (v,)"}, {"sigma": 1.0, "queries": "2 * q"},
                   {"sigma": -1.0, "queries": "q.flip(1) + q"}):
        with pytest.raises(rejected, match="model patches that replace parts of the model .attn1"):
            comfyui.sample(perturbed(ours, MIDDLE, **change), "sd15", steps=1)
    displaced = comfyui.ours("sd15", comfyui.config("cpu,cpu", displaced=2))
    with pytest.raises(rejected, match="^Use cfg_degree or data_degree instead of displaced_degree: Smoothed Energy"):
        comfyui.sample(perturbed(displaced, MIDDLE, sigma=1.0), "sd15", steps=1)


@pytest.mark.parametrize("kind, method", [
    ("wan", "ulysses"), ("wan", "pipefusion"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("wan", "cfg"), ("wan", "ring"), ("wan-i2v", "tensor"), ("wan-vace", "cfg"), ("hunyuanvideo", "cfg"),
        ("hunyuanvideo", "ulysses"), ("hunyuanvideo", "pipefusion")))])
def test_a_lowered_frequency_of_the_positions_equals_native(comfyui, kind, method):
    if kind == "wan-vace":                                     # of diffusers' class too, without this argument
        with pytest.raises(comfyui.errors.UnsupportedError, match="a replaced diffusion_model.rope_embedder"):
            comfyui.sample(slowed(comfyui.ours(kind, comfyui.config())), kind, steps=1)
    else:
        compare(comfyui, kind, method, slowed)


def test_other_positions_are_rejected(comfyui):
    ours, rejected = comfyui.ours("wan", comfyui.config()), comfyui.errors.UnsupportedError
    for change in ({"part": 0.8}, {"k": 40}):
        with pytest.raises(rejected, match="a replaced diffusion_model.rope_embedder"):
            comfyui.sample(slowed(ours, **change), "wan", steps=1)
    scaled = slowed(ours)
    scaled.set_model_rope_options(2.0, 0, 2.0, 0, 1.0, 0)
    with pytest.raises(rejected, match="^Remove RifleX, or the node that scales positions, .* for Wan xDiT"):
        comfyui.sample(scaled, "wan", steps=1)
    comfyui.sample(slowed(ours), "wan", steps=1)

    close(comfyui.sample(ours, "wan", steps=2), comfyui.reference("wan", steps=2), TOLERANCE)
