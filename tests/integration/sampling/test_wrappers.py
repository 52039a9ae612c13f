"""Nodes that wrap or change the sampling, and guiders with two MODELs:
what they see and give is as with ComfyUI's own model."""

import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.sampling.test_pipefusion import EXACT, STALE, oracle, sample_oracle, staged
from tests.support.tolerances import close, relative_error

STAGED = {"pipefusion": 2, "num_patches": 4}
WRAPPED = ("outer_sample", "sampler_sample", "predict_noise", "calc_cond_batch", "apply_model",
           "model_function_wrapper")


def looking_at_all(model, where):
    """The MODEL with a wrapper that adds something of the whole latent, and of all branches, to what it wraps."""
    model = model.clone()

    def changed(out):
        if isinstance(out, list):                              # of branches
            return [part + 0.1 * (out[0] - out[-1]).std() for part in out]
        return out + 0.1 * out.std()

    if where == "model_function_wrapper":
        model.set_model_unet_function_wrapper(
            lambda apply_model, given: changed(apply_model(given["input"], given["timestep"], **given["c"])))
    else:
        model.add_wrapper(where, lambda executor, *args, **kwargs: changed(executor(*args, **kwargs)))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("where", WRAPPED)
def test_wrappers_that_look_at_the_whole_latent_see_it(comfyui, said, where):
    want = comfyui.sample(looking_at_all(comfyui.native("sd3"), where), "sd3")

    for model in (staged(comfyui, "sd3"), comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2))):
        close(comfyui.sample(looking_at_all(model, where), "sd3"), want, EXACT)
    assert any("every step synchronous, because this workflow uses a node that wraps the" in text for text in said)


@pytest.mark.parametrize("name, options", [
    ("CFGOverride", {"cfg": 2.0, "start_percent": 0.3, "end_percent": 1.0}),
    ("LazyCache", {"reuse_threshold": 0.5, "start_percent": 0.15, "end_percent": 0.95, "verbose": False})])
def test_nodes_that_wrap_each_step_equal_native(comfyui, said, name, options):
    extras = {"CFGOverride": "nodes_custom_sampler", "LazyCache": "nodes_easycache"}
    node = getattr(__import__(f"comfy_extras.{extras[name]}", fromlist=["x"]),
                   {"LazyCache": "LazyCacheNode"}.get(name, name))
    sample = lambda model: comfyui.sample(node.execute(model=model, **options).args[0], "sd3", steps=6)  # noqa: E731

    result = sample(staged(comfyui, "sd3"))

    close(result, sample(comfyui.native("sd3")), EXACT)
    assert relative_error(result, comfyui.reference("sd3", steps=6)) > 10 * EXACT
    assert any("every step synchronous" in text and name.lower() in text.lower() for text in said)


EVERY_METHOD = [("flux", {"cfg": 2}), ("wan", {"ulysses": 2}), ("flux", {"ring": 2}), ("wan", {"tensor": 2}),
                ("qwen-image", STAGED), ("sdxl", {"displaced": 2}), ("flux", {"data": 2}), ("sd3", {"cfg": 2})]


@pytest.mark.slow
@pytest.mark.parametrize("node, kind, degrees", [
    *(("EasyCache", *one) for one in EVERY_METHOD), *(("LazyCache", *one) for one in EVERY_METHOD[1::2])], ids=str)
def test_caches_take_the_steps_they_take_with_comfyuis_own_model_and_wait_for_nothing(comfyui, node, kind, degrees,
                                                                                      monkeypatch):
    """They decide once, in ComfyUI's process, by what the host has anyway: a step is asked of all workers, or of none.

    EasyCache wraps the diffusion model: those of ComfyUI that let themselves be wrapped (SD3's does not).
    """
    extras = __import__("comfy_extras.nodes_easycache", fromlist=["x"])
    reused, requested, apply = [], [], getattr(extras, f"{node}Holder").apply_cache_diff
    monkeypatch.setattr(getattr(extras, f"{node}Holder"), "apply_cache_diff",
                        lambda self, x, *given, **more: reused.append(len(x)) or apply(self, x, *given, **more))
    client = comfyui.groups.client(("cpu", "cpu"))
    submit = client.submit
    monkeypatch.setattr(client, "submit", lambda *given, **more: requested.append(1) or submit(*given, **more))

    def sample(model, is_cached=True):
        reused.clear(), requested.clear()
        if is_cached:
            model = getattr(extras, f"{node}Node").execute(model=model, reuse_threshold=0.9, start_percent=0.1,
                                                           end_percent=0.95, verbose=False).args[0]
        return comfyui.sample(model, kind, steps=8), list(reused), len(requested)

    want, reused_natively, _ = sample(comfyui.native(kind))
    ours = comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees | {"warmup_steps": 99}))      # nothing stale
    _, _, asked_without = sample(ours, is_cached=False)
    result, reused_here, asked_here = sample(ours)

    close(result, want, EXACT)
    assert reused_here == reused_natively and bool(reused_here) == ((node, kind) != ("EasyCache", "sd3"))
    assert asked_here == asked_without // 8 * (8 - len(reused_here))


def test_other_wrappers_of_the_diffusion_model_are_refused_by_name(comfyui):
    """Also one that goes by EasyCache's name."""
    for key in ("seams", "easycache"):
        model = comfyui.ours("flux", comfyui.config()).clone()
        model.add_wrapper_with_key("diffusion_model", key, lambda executor, *args, **kwargs: executor(*args, **kwargs))
        with pytest.raises(comfyui.errors.UnsupportedError, match=f"nodes that wrap the diffusion model .{key}."):
            comfyui.sample(model, "flux", steps=1)


def test_guidance_that_looks_at_the_whole_latent_gets_it_from_patches(comfyui, said):
    """One sampler for the whole latent; each call of the model runs as stale patches inside."""
    def with_guidance(model):
        model = model.clone()
        model.set_model_sampler_post_cfg_function(lambda given: given["denoised"] / given["denoised"].std())
        return model

    result = comfyui.sample(with_guidance(staged(comfyui, "sd3")), "sd3", steps=4)

    close(result, sample_oracle(comfyui, "sd3", 4, 1, with_guidance, steps=4), STALE)
    assert any("4 patches, steps not overlapped, because this workflow uses a node that changes guidance" in text
               for text in said)


def test_a_sampler_that_nobody_knows_runs_once_for_the_whole_latent(comfyui, said, monkeypatch):
    import comfy.k_diffusion.sampling as k_sampling
    euler = k_sampling.sample_euler

    def unknown(model, x, sigmas, **options):
        return euler(model, x / x.std(), sigmas, **options)

    monkeypatch.setattr(k_sampling, "sample_lcm", unknown)
    arguments = {"sampler": "lcm", "steps": 4}

    result = comfyui.sample(staged(comfyui, "sd3"), "sd3", **arguments)

    close(result, sample_oracle(comfyui, "sd3", 4, 1, **arguments), STALE)
    assert any("a sampler that is not known to work elementwise" in text for text in said)


@pytest.mark.parametrize("degrees", [{"cfg": 2}, {"pipefusion": 2, "num_patches": 4}], ids=str)
def test_a_wrapper_that_changes_the_model_for_a_call_finds_it_as_it_left_it(comfyui, degrees):
    """As the node that compiles the model does: two calls that run inside of each other would leave it changed."""
    model, inside = comfyui.ours("sd3", comfyui.config("cpu,cpu", **degrees)), []

    def wrapper(executor, *args, **kwargs):
        inside.append(1)
        assert len(inside) == 1
        try:
            return executor(*args, **kwargs)
        finally:
            inside.pop()

    model.add_wrapper_with_key("apply_model", "torch.compile", wrapper)

    result = comfyui.sample(model, "sd3", positive=comfyui.conditioning("sd3", 1, tokens=31))

    if "cfg" in degrees:
        want = comfyui.sample(comfyui.native("sd3"), "sd3", positive=comfyui.conditioning("sd3", 1, tokens=31))
        close(result, want, EXACT)
    else:
        want = sample_oracle(comfyui, "sd3", 4, 1, positive=comfyui.conditioning("sd3", 1, tokens=31))
        close(result, want, STALE)


# --- guiders with two MODELs ---

@pytest.fixture(scope="module")
def other_file(comfyui):
    """A second checkpoint of the same family."""
    tensors = load_file(comfyui.base / "diffusion_models" / comfyui.file("sd3"))
    generator = torch.Generator().manual_seed(9)
    tensors = {name: tensor + 0.2 * tensor.std() * torch.randn(tensor.shape, generator=generator)
               for name, tensor in tensors.items()}
    save_file(tensors, comfyui.base / "diffusion_models" / "sd3-other.safetensors")
    return "sd3-other.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, {"cfg": 2}, {"pipefusion": 2, "num_patches": 1}], ids=str)
def test_each_model_of_a_guider_answers_for_itself(comfyui, other_file, degrees):
    config = comfyui.config("cpu,cpu", **degrees)
    model, other = comfyui.ours("sd3", config), comfyui.load_model.execute(other_file, "fp32", config).args[0]
    native, native_other = comfyui.native("sd3"), comfyui.nodes.UNETLoader().load_unet(other_file, "default")[0]
    want = comfyui.sample_dual(native, native_other)

    close(comfyui.sample_dual(model, other), want, EXACT)
    close(comfyui.sample_dual(native, other), want, EXACT)
    close(comfyui.sample_dual(model, native_other), want, EXACT)
    assert relative_error(comfyui.sample_dual(model, model), want) > 10 * EXACT


def test_two_models_of_one_file_keep_their_own_keys_and_values(comfyui):
    """The same prompt for both, so that nothing but the model tells their conditioning apart."""
    model, other = staged(comfyui, "sd3"), staged(comfyui, "sd3", num_patches=2)

    result = comfyui.sample_dual(model, other, seeds=(1, 1))

    want = comfyui.sample_dual(oracle(comfyui, "sd3", 4, 1), oracle(comfyui, "sd3", 2, 1), seeds=(1, 1))
    close(result, want, STALE)


def test_a_finished_run_says_what_it_took(comfyui, said):
    comfyui.sample(comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2, warmup="auto")), "sd3", steps=3)
    comfyui.sample(staged(comfyui, "sd3"), "sd3", steps=1)

    assert said[0] == "running on cpu, cpu: CFG 2"
    assert said[1].startswith("3 steps in ") and said[1].endswith(" s a step, CFG 2")
    assert said[3].startswith("1 step in ") and said[3].endswith(" s a step, PipeFusion 2, 4 patches")


def test_a_run_that_is_cancelled_says_so_in_place_of_the_seconds_left(comfyui, said):
    model, management = comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2)), comfyui.management
    model.add_callback("on_cleanup", lambda _: management.interrupt_current_processing(False))
    model.set_model_sampler_post_cfg_function(lambda given: management.interrupt_current_processing()
                                              or given["denoised"])

    with pytest.raises(management.InterruptProcessingException):
        comfyui.sample(model, "sd3", steps=9)

    assert said[-1] == "cancelled after 1 of 9 steps"


@pytest.mark.parametrize("total, words",
                         [(10 ** 7, "loading weights 5 of 10 MB"), (10 ** 10, "loading weights 5.0 of 10.0 GB")])
def test_what_is_loaded_is_said_in_units_of_its_size(comfyui, total, words):
    runs = sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.workers.progress"].Runs()
    messages = sys.modules[f"{comfyui.pack.__name__}.xdit_backend.protocol.messages"]

    assert runs.describe_phase(messages.Phase(0, "loading weights", total // 2, total, True)).startswith(words)
