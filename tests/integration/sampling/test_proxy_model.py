"""Our MODEL equals ComfyUI's: the same latents as the native KSampler, for every family, layout and sampler."""

import gc
import math
import sys
import weakref

import pytest
import torch

from tests.support.model_zoo import ALIKE, takes
from tests.support.tiny_checkpoints import VARIANTS, families
from tests.support.tolerances import close

TOLERANCE = 2e-5                           # relative, float32 on both sides; seen: 1e-7 to 3e-6

# U-Nets: test_unets.py
KINDS = tuple(kind for kind, family in families().items() if kind not in VARIANTS and not family.plan.is_unet)
LAYOUTS = {
    "one": ("cpu", {}),
    "auto2": ("cpu,cpu", {}),
    "cfg2": ("cpu,cpu", {"cfg": 2}),
    "data2": ("cpu,cpu", {"data": 2}),
    "ulysses2": ("cpu,cpu", {"ulysses": 2}),
    "ring2": ("cpu,cpu", {"ring": 2}),
}
SAMPLERS = (("euler", "simple"), ("euler_ancestral", "normal"), ("dpmpp_2m", "karras"), ("heun", "sgm_uniform"),
            ("uni_pc", "beta"))


def other_layouts():
    """(kind, layout): one in turn of those that the kind's family takes; all of them are in test_smoke.py."""
    kinds = [kind for kind in KINDS if families()[kind].name not in ALIKE]
    for number, kind in enumerate(kinds):
        possible = [layout for layout, (_, degrees) in LAYOUTS.items()
                    if layout != "auto2" and takes(families()[kind], degrees)]
        yield kind, possible[number % len(possible)]


@pytest.mark.parametrize("kind, layout", [
    *(pytest.param(kind, "auto2", marks=pytest.mark.everyone) for kind in KINDS),
    *(pytest.param(kind, layout, marks=pytest.mark.slow) for kind, layout in other_layouts())])
def test_latents_equal_native_ksampler(comfyui, kind, layout):
    devices, degrees = LAYOUTS[layout]
    model = comfyui.ours(kind, comfyui.config(devices, **degrees))
    # in turn: that a sampler is right under each layout is for tests of SD3
    several = SAMPLERS[3 + KINDS.index(kind) % 2:][:1]
    for sampler, scheduler in SAMPLERS[1:3] if layout == "one" else several:
        arguments = {"sampler": sampler, "scheduler": scheduler, "steps": 2 if kind.startswith("flux") else 3}

        result = comfyui.sample(model, kind, **arguments)

        # CogVideoX begins with noise alone, thousands of times the picture, which enlarges rounding: one evaluation
        # differs by 2e-7
        close(result, comfyui.reference(kind, **arguments), TOLERANCE * (5 if kind.startswith("cogvideox") else 1),
              sampler)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd35", "sd35-text", "flux-schnell", "cogvideox-1.5-i2v", "ltx-2-plain", "ltx-2.3"])
def test_latents_of_variants_equal_native_ksampler(comfyui, kind):
    result = comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu", ring=2)), kind)

    close(result, comfyui.reference(kind), TOLERANCE)


@pytest.mark.parametrize("layout_name", ["cfg2", "ulysses2", "ring2"])
def test_latents_of_sd3_equal_native_ksampler(comfyui, layout_name):
    """The quick tier's share of the matrix above."""
    devices, degrees = LAYOUTS[layout_name]

    result = comfyui.sample(comfyui.ours("sd3", comfyui.config(devices, **degrees)), "sd3")

    close(result, comfyui.reference("sd3"), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"ring": 2, "ulysses": 2}, {"cfg": 2, "ulysses": 2}, {"cfg": 2, "ring": 2},
                                     {"data": 2, "cfg": 2}, {}], ids=str)
def test_latents_equal_native_ksampler_on_four_workers(comfyui, degrees):
    model = comfyui.ours("sd35", comfyui.config("cpu,cpu,cpu,cpu", **degrees))

    result = comfyui.sample(model, "sd35")

    close(result, comfyui.reference("sd35"), TOLERANCE)


@pytest.mark.parametrize("kind, layout", [
    ("sd3", {"tensor": 2}), *(pytest.param(kind, layout, marks=pytest.mark.slow) for kind, layout in (
        ("flux", {"tensor": 2}), ("wan", {"tensor": 2}), ("sd35", {"cfg": 2, "tensor": 2}),
        ("sd35", {"pipefusion": 2, "tensor": 2}),
        ("sd35", {"displaced": 2, "tensor": 2})))], ids=str)
def test_latents_with_tensor_parallelism_equal_native_ksampler(comfyui, kind, layout):
    """With stages, in one piece; with displaced patches, synchronous."""
    devices = ",".join(["cpu"] * math.prod(layout.values()))

    result = comfyui.sample(
        comfyui.ours(kind, comfyui.config(devices, num_patches=1, displaced_mode="full_sync", **layout)), kind)

    close(result, comfyui.reference(kind), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler_offset", range(9))
def test_every_sampler_and_scheduler_equals_native_ksampler(comfyui, scheduler_offset):
    """All of ComfyUI's samplers, each with one scheduler, all schedulers among them."""
    samplers, schedulers = comfyui.samplers.KSampler.SAMPLERS, comfyui.samplers.KSampler.SCHEDULERS
    assert len(samplers) >= 44 and len(schedulers) >= 9
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu"))
    for index in range(scheduler_offset, len(samplers), 9):
        arguments = {"sampler": samplers[index], "scheduler": schedulers[index % len(schedulers)], "steps": 4,
                     # it makes hundreds of calls from pure noise
                     "denoise": 0.2 if samplers[index] == "dpm_adaptive" else 1.0}

        result = comfyui.sample(model, "sd3", **arguments)

        close(result, comfyui.reference("sd3", **arguments), TOLERANCE, arguments)


@pytest.mark.parametrize("kind, tokens, degrees", [
    ("sd3", 31, {"cfg": 2}), ("sd3", 31, {"tensor": 2}),                        # side by side, and by turns
    # whose picture stands after its text
    pytest.param("ernie-image", 31, {"pipefusion": 2, "warmup_steps": 9}, marks=pytest.mark.slow),
    # of which ComfyUI makes one batch, with 20 tokens twice
    ("cogvideox", 40, {"cfg": 2})], ids=str)
def test_prompts_of_different_length_run_as_two_branches(comfyui, kind, tokens, degrees):
    positive, negative = comfyui.conditioning(kind, 1, tokens=tokens), comfyui.conditioning(kind, 2, tokens=20)
    model = comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees))

    result = comfyui.sample(model, kind, positive=positive, negative=negative)

    reference = comfyui.sample(comfyui.native(kind), kind, positive=positive, negative=negative)
    close(result, reference, TOLERANCE)


def test_auto_runs_both_branches_in_one_prediction(comfyui):
    """CFG parallel is chosen for two branches, and a prediction a step is all that a run asks for."""
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu"))
    requests = []
    predict = type(comfyui.groups.client(("cpu", "cpu"))).predict

    def counted(client, spec, layout, num_channels, calls, **options):
        requests.append(len(calls))
        return predict(client, spec, layout, num_channels, calls, **options)

    client = comfyui.groups.client(("cpu", "cpu"))
    client.predict = counted.__get__(client)
    try:
        comfyui.sample(model, "sd3", steps=3, positive=comfyui.conditioning("sd3", 1, tokens=31))
        with_guidance, requests[:] = list(requests), []
        comfyui.sample(model, "sd3", steps=3, cfg=1.0)
    finally:
        del client.predict

    assert with_guidance == [2, 2, 2]
    assert requests == [1, 1, 1]


@pytest.mark.parametrize("degrees", [{"data": 2}, {"ulysses": 2}, {"cfg": 2}], ids=str)
@pytest.mark.parametrize("batch", [2, 3])
def test_batches_equal_native_ksampler(comfyui, degrees, batch):
    latent = comfyui.latent("sd3", batch=batch)
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", **degrees))

    result = comfyui.sample(model, "sd3", latent=latent)

    close(result, comfyui.sample(comfyui.native("sd3"), "sd3", latent=latent), TOLERANCE)


@pytest.mark.parametrize("size", [(15, 17), (16, 18), (2, 6)], ids=str)
@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_any_latent_size_equals_native_ksampler(comfyui, degrees, size):
    """Odd sizes, token counts and text lengths that two ranks cannot share evenly."""
    latent = comfyui.latent("sd3", size=size)
    positive = comfyui.conditioning("sd3", 1, tokens=21)
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", **degrees))

    result = comfyui.sample(model, "sd3", latent=latent, positive=positive)

    reference = comfyui.sample(comfyui.native("sd3"), "sd3", latent=latent, positive=positive)
    close(result, reference, TOLERANCE)


def test_img2img_with_noise_mask_equals_native_ksampler(comfyui):
    generator = torch.Generator().manual_seed(3)
    latent = {"samples": torch.randn(1, 16, 16, 18, generator=generator), "noise_mask": torch.zeros(1, 128, 144)}
    latent["noise_mask"][:, 40:, 60:] = 1.0
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu"))

    result = comfyui.sample(model, "sd3", latent=latent, denoise=0.6, steps=5)

    reference = comfyui.sample(comfyui.native("sd3"), "sd3", latent=latent, denoise=0.6, steps=5)
    close(result, reference, TOLERANCE)


@pytest.mark.parametrize("degrees", [{}, {"ulysses": 2}], ids=str)
def test_regional_and_timed_prompts_equal_native_ksampler(comfyui, degrees):
    """Several prompts with areas and step ranges: branches ask more than once, and not equally often."""
    left, right = comfyui.conditioning("sd3", 1), comfyui.conditioning("sd3", 4, tokens=33)
    late = comfyui.conditioning("sd3", 5)
    left[0][1]["area"] = (16, 10, 0, 0)
    right[0][1]["area"] = (16, 12, 0, 6)
    late[0][1].update(start_percent=0.5, end_percent=1.0)
    positive = left + right + late
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", **degrees))

    result = comfyui.sample(model, "sd3", positive=positive, steps=4)

    reference = comfyui.sample(comfyui.native("sd3"), "sd3", positive=positive, steps=4)
    close(result, reference, TOLERANCE)


def test_native_ksampler_node_runs_our_model(comfyui):
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu"))

    with torch.inference_mode():
        result = comfyui.nodes.KSampler().sample(
            model, 7, 3, 4.0, "euler", "simple", comfyui.conditioning("sd3", 1), comfyui.conditioning("sd3", 2),
            comfyui.latent("sd3"), 1.0)[0]["samples"]

    close(result, comfyui.reference("sd3"), TOLERANCE)


@pytest.mark.parametrize("options", [{"prefix": "model.diffusion_model."}, {"dtype": torch.float16}],
                         ids=["prefix", "fp16"])
def test_file_formats_equal_native_ksampler(comfyui, options):
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu"), **options)

    result = comfyui.sample(model, "sd3")

    native = comfyui.native("sd3", **options)
    native.set_model_compute_dtype(torch.float32)
    close(result, comfyui.sample(native, "sd3"), TOLERANCE)


@pytest.mark.parametrize("kind", ["sd3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1::3])])
def test_the_diffusion_model_of_an_all_in_one_checkpoint_equals_native_ksampler(comfyui, kind):
    import comfy.sd
    name = comfyui.all_in_one(kind)
    assert name in comfyui.load_model.define_schema().inputs[0].options
    path = comfyui.base / "checkpoints" / name
    native = comfy.sd.load_checkpoint_guess_config(str(path), output_vae=False, output_clip=False)[0]

    result = comfyui.sample(comfyui.load_model.execute(name, "default", comfyui.config()).args[0], kind, steps=2)

    close(result, comfyui.sample(native, kind, steps=2), TOLERANCE)


@pytest.mark.parametrize("kind, weight_dtype, dtype", [
    ("sd3", "bf16", torch.bfloat16), ("sd3", "fp16", torch.float16), ("sd3", "fp8_e4m3fn", torch.float8_e4m3fn),
    ("sd3", "fp8_e5m2", torch.float8_e5m2),
    ("ltx-2", "bf16", torch.bfloat16), ("anima", "fp8_e4m3fn", torch.float8_e4m3fn)])
def test_weight_dtypes_equal_native_ksampler(comfyui, kind, weight_dtype, dtype):
    """On a CPU ComfyUI computes in float32 with weights of any type, cast where they are used.
    So do workers, and who prepares text."""
    import comfy.sd
    path = comfyui.base / "diffusion_models" / comfyui.file(kind)
    reference = comfyui.sample(comfy.sd.load_diffusion_model(str(path), model_options={"dtype": dtype}), kind)

    result = comfyui.sample(comfyui.ours(kind, comfyui.config("cpu,cpu"), weight_dtype), kind)

    close(result, reference, TOLERANCE)


def test_every_word_of_comfyuis_loader_means_the_same(comfyui):
    """Where no card multiplies in float8, fp8_e4m3fn_fast is fp8_e4m3fn."""
    words = comfyui.nodes.UNETLoader.INPUT_TYPES()["required"]["weight_dtype"][0]
    results = {}
    for word in words:
        native = comfyui.nodes.UNETLoader().load_unet(comfyui.file("sd3"), word)[0]
        model = comfyui.ours("sd3", comfyui.config("cpu"), word)
        assert model.model.remote.spec.fast == (word == "fp8_e4m3fn_fast")
        results[word] = comfyui.sample(model, "sd3", steps=1)
        close(results[word], comfyui.sample(native, "sd3", steps=1), TOLERANCE, word)

    assert "fp8_e4m3fn_fast" in words and torch.equal(results["fp8_e4m3fn_fast"], results["fp8_e4m3fn"])


@pytest.mark.parametrize("weight_dtype", ["default", "fp32", "bf16", "fp8_e4m3fn"])
def test_a_float8_file_equals_native_ksampler(comfyui, weight_dtype):
    """Files in which every tensor is float8, as they are published, whatever the weights are then held in."""
    dtype = comfyui.detection.WEIGHT_DTYPES[weight_dtype]
    path = comfyui.base / "diffusion_models" / comfyui.file("sd35", dtype=torch.float8_e4m3fn)
    import comfy.sd
    native = comfy.sd.load_diffusion_model(str(path), model_options={} if dtype is None else {"dtype": dtype})

    result = comfyui.sample(comfyui.ours("sd35", comfyui.config("cpu,cpu"), weight_dtype, dtype=torch.float8_e4m3fn),
                            "sd35")

    close(result, comfyui.sample(native, "sd35"), TOLERANCE)


def test_float8_halves_the_workers_memory(comfyui):
    """And ComfyUI makes room for what the workers on its device hold: here both of them."""
    weights = {}
    for weight_dtype in ("bf16", "fp8_e4m3fn"):
        model = comfyui.ours("sd3", comfyui.config("cpu,cpu"), weight_dtype)
        comfyui.sample(model, "sd3", steps=1)
        weights[weight_dtype] = sum(comfyui.groups.client(("cpu", "cpu")).models.memory(
            model.model.remote.spec.name).weight_bytes)
        assert model.model_size() == weights[weight_dtype]

    assert weights["fp8_e4m3fn"] == weights["bf16"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd3", "wan"])
def test_float8_in_stages_equals_native_ksampler(comfyui, kind):
    """PipeFusion with every step whole. With patches the same weights are cast, once a step where that is enough."""
    import comfy.sd
    path = comfyui.base / "diffusion_models" / comfyui.file(kind)
    native = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float8_e4m3fn})
    whole, patches = (comfyui.ours(kind, comfyui.config("cpu,cpu", pipefusion=2, warmup_steps=steps), "fp8_e4m3fn")
                      for steps in (3, 1))

    close(comfyui.sample(whole, kind), comfyui.sample(native, kind), TOLERANCE)
    assert comfyui.sample(patches, kind).isfinite().all()


def test_diffusers_folder_equals_the_single_file(comfyui):
    """The same weights as diffusers saves them, in a folder of models/diffusers."""
    from xdit_backend.checkpoints.checkpoint import open_checkpoint
    from xdit_backend.checkpoints.loader import load_transformer
    header = open_checkpoint(comfyui.base / "diffusion_models" / comfyui.file("sd3"))
    transformer = load_transformer(header.spec("float32", "float32"), torch.device("cpu")).model
    comfyui.folder_paths.add_model_folder_path("diffusers", str(comfyui.base / "diffusers"), is_default=True)
    transformer.save_pretrained(comfyui.base / "diffusers" / "tiny-sd3" / "transformer")
    assert "tiny-sd3" in comfyui.load_model.define_schema().inputs[0].options

    model = comfyui.load_model.execute("tiny-sd3", "fp32", comfyui.config("cpu,cpu")).args[0]

    close(comfyui.sample(model, "sd3"), comfyui.reference("sd3"), TOLERANCE)


def test_unloading_gives_the_workers_memory_back(comfyui):
    """"Free memory" in ComfyUI's menu reaches the workers, and the next run loads the model again."""
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu"))
    before = comfyui.sample(model, "sd3")
    client = comfyui.groups.client(("cpu", "cpu"))
    held = client.report_memory()[0]["weight_bytes"]

    comfyui.management.unload_all_models()

    assert held > 0 and client.report_memory()[0]["weight_bytes"] < held
    assert torch.equal(comfyui.sample(model, "sd3"), before)


@pytest.mark.parametrize("kind, degrees, is_patched", [
    ("sd3", {"ulysses": 2}, False), ("sd3", {"cfg": 2}, True), ("sd3", {"pipefusion": 2}, False),
    ("sdxl", {"displaced": 2}, False)], ids=str)
def test_a_model_ends_with_its_last_user(comfyui, kind, degrees, is_patched):
    """No circle keeps it: ComfyUI, which has found one, says that memory leaks and looks through all objects before it
    loads a model."""
    gc.collect()
    gc.disable()
    try:
        model = comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees))
        own = weakref.ref(model), weakref.ref(model.model)
        # the host makes the changed weight, of the file and the MODEL
        if is_patched:
            assert model.add_patches(
                {"diffusion_model.joint_blocks.1.x_block.attn.qkv.weight": (0.1 * torch.randn(768, 256),)})
        comfyui.sample(model, kind, latent=comfyui.latent(kind, size=(8, 6)))
        del model

        assert [each() for each in own] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("degrees", [{}, {"pipefusion": 2}, {"displaced": 2}], ids=str)
@pytest.mark.parametrize("is_run", [True, False])
def test_a_run_and_a_call_outside_of_one_leave_no_conditioning_and_no_segment(comfyui, degrees, is_run):
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", **degrees))
    if is_run:
        comfyui.sample(model, "sd3")
    else:
        comfyui.management.load_models_gpu([model])
        (context, options), = comfyui.conditioning("sd3", 1)
        model.model.apply_model(comfyui.latent("sd3")["samples"], torch.tensor([0.5]), c_crossattn=context,
                                y=options["pooled_output"])
    client = comfyui.groups.client(("cpu", "cpu"))

    assert [numbers["num_conditionings"] for numbers in client.report_memory().values()] == [0, 0]
    assert client.group.segments.names() == []


def test_settings_that_are_not_used_are_said_on_the_node(comfyui, monkeypatch):
    texts = []
    monkeypatch.setattr(sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.sampling.remote_model"], "show_text",
                        texts.append)

    for settings in ({}, {"num_patches": 8, "offload_keys_values": True}):
        comfyui.sample(comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2, warmup="auto", **settings)), "sd3", steps=1)

    assert texts == ["running on cpu, cpu: CFG 2",
                     "running on cpu, cpu: CFG 2 (num_patches=8, offload_keys_values=True unused: pipefusion_degree "
                     "is 1)"]
