"""What a MODEL may carry: what ComfyUI carries out around the model is honoured;
the rest is refused by name, the unknown too."""

import copy
import importlib
import random
import types

import pytest
import torch
from safetensors.torch import load_file

from tests.programs.half_precision import computing_in
from tests.programs.model_nodes import (
    TABLE,
    TOLERANCE,
    UNCOMPILED,
    Matrix,
    equal_on,
    model_nodes,
    run_node,
    write_table,
)
from tests.support.tolerances import close, relative_error


@pytest.fixture
def model(comfyui):
    return comfyui.ours("sd3", comfyui.config("cpu,cpu"))


@pytest.fixture(scope="package")
def matrix(comfyui, vae_of):
    return Matrix(comfyui, comfyui.config("cpu,cpu"), vae_of)


def sample(comfyui, model, **arguments):
    """KSampler's latents: what a node of ComfyUI does with a MODEL, ours or native."""
    with torch.inference_mode():
        return comfyui.nodes.KSampler().sample(model, 7, 3, 4.0, "euler", "simple", comfyui.conditioning("sd3", 1),
                                               comfyui.conditioning("sd3", 2), comfyui.latent("sd3"), 1.0,
                                               **arguments)[0]["samples"]


def embedder(model):
    return model.model.diffusion_model.x_embedder


def inject(model):
    from comfy.patcher_extension import PatcherInjection
    model.set_injections("bypass_lora", [PatcherInjection(lambda patcher: None, lambda patcher: None)])


def add_wrapper(kind):
    return lambda model: model.add_wrapper_with_key(kind, "a_pack",
                                                    lambda executor, *args, **kwargs: executor(*args, **kwargs))


def wrapper_of_a_pack(executor, *args, **kwargs):
    return executor(*args, **kwargs)


CHANGES = {
    "injections": (inject, "injections such as a LoRA in bypass mode \\(bypass_lora\\)"),
    "weight-wrapper":
    (lambda model: model.add_weight_wrapper("diffusion_model.x_embedder.proj.weight", lambda weight: 2 * weight),
     "weight wrappers \\(diffusion_model.x_embedder.proj.weight\\)"),
    "object-patch-inside": (lambda model: model.add_object_patch("diffusion_model.depth", 2),
                            "a replaced diffusion_model.depth"),
    "attention-of-a-lora": (
        lambda model: model.add_object_patch("diffusion_model.joint_blocks.0.comfy_attention", object()),
        "an attention backend for one module \\(joint_blocks.0; attention in xDiT Parallel Config is for all"),
    "another-model-inside": (lambda model: model.add_object_patch("diffusion_model", torch.nn.Linear(1, 1)),
                             "a replaced diffusion_model"),
    "compute-dtype": (lambda model: model.set_model_compute_dtype(torch.float8_e4m3fn),
                      "the compute dtype float8_e4m3fn .supported: "),
    "compute-dtype-of-the-model": (lambda model: setattr(model.model, "manual_cast_dtype", torch.float16),
                                   "the compute dtype float16 that was set on the model itself \\(it computes in "
                                   "float32\\)"),
    "compute-dtype-of-a-callback": (
        lambda model: model.add_callback("on_pre_run",
                                         lambda patcher: setattr(patcher.model, "manual_cast_dtype", torch.bfloat16)),
        "the compute dtype bfloat16 that was set on the model itself"),
    "device": (lambda model: setattr(model, "load_device", torch.device("cpu", 0)),
               "another device, such as Select Model Device's"),
    "attachment": (lambda model: model.set_attachments("a_pack", object()), "attachments \\(a_pack\\)"),
    "additional-models": (lambda model: model.set_additional_models("a_pack", [model.clone()]),
                          "additional models \\(a_pack\\)"),
    "attribute": (lambda model: setattr(model, "pack_state", object()),
                  "an attribute that ComfyUI does not know, pack_state"),
    "model-option": (lambda model: model.model_options.update(multigpu_clones={"cuda:1": 3}),
                     "multigpu_clones in its model_options"),
    "transformer-option": (lambda model: model.model_options["transformer_options"].update(block_index=False),
                           "block_index in its transformer_options"),
    "function-option": (lambda model: model.model_options.update(pack_option={"calls": [print]}),
                        "a function in its model_options \\(pack_option: print\\)"),
    "rotary-scale": (lambda model: model.set_model_rope_options(2.0, 0, 2.0, 0, 1.0, 0), "a changed rotary scale"),
    "attention": (lambda model: model.model_options["transformer_options"].update(optimized_attention_override=print),
                  "an attention override"),
    "model-patch": (lambda model: model.set_model_double_block_patch(print), "model patches \\(double_block\\)"),
    "replaced-block": (lambda model: model.set_model_patch_replace(print, "dit", "joint_block", 0),
                       "model patches that replace parts of the model"),
    "diffusion-model-wrapper": (add_wrapper("diffusion_model"), "nodes that wrap the diffusion model \\(a_pack\\)"),
    "wrapper-without-a-key": (lambda model: model.add_wrapper("diffusion_model", wrapper_of_a_pack),
                              "nodes that wrap the diffusion model \\(.*test_model_nodes.wrapper_of_a_pack\\)"),
    "wrapper": (add_wrapper("pack_wrapper"), "wrappers of pack_wrapper \\(a_pack\\)"),
    "callback": (lambda model: model.add_callback_with_key("pack_event", "a_pack", print),
                 "callbacks of pack_event \\(a_pack\\)"),
    "hook-inside": (lambda model: embedder(model).register_forward_hook(lambda *_: None),
                    "hooks on diffusion_model.x_embedder"),
    "pre-hook-inside": (lambda model: embedder(model).proj.register_forward_pre_hook(lambda *_: None),
                        "hooks on diffusion_model.x_embedder.proj"),
    "forward-inside": (lambda model: setattr(embedder(model), "forward", lambda x: x),
                       "a changed diffusion_model.x_embedder.forward"),
    "method": (lambda model: setattr(model.model.diffusion_model, "forward_core_with_concat", print),
               "a changed diffusion_model.forward_core_with_concat"),
    "forward": (lambda model: setattr(model.model.diffusion_model, "forward", print),
                "a changed diffusion_model.forward"),
    "weight": (lambda model: setattr(embedder(model).proj, "bias", torch.nn.Parameter(torch.zeros(256))),
               "a changed diffusion_model.x_embedder.proj.parameters"),
    "module": (lambda model: setattr(embedder(model), "proj", torch.nn.Identity()),
               "a changed diffusion_model.x_embedder.modules"),
    "weight-function": (lambda model: setattr(embedder(model).proj, "weight_function", [print]),
                        "a changed diffusion_model.x_embedder.proj.weight_function"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_workers_would_not_honour_is_refused_by_name(comfyui, model, change):
    add, words = CHANGES[change]
    add(model)

    with pytest.raises(comfyui.errors.UnsupportedError,
                       match=f"^Remove the node that adds it, .* does not support .*{words}"):
        sample(comfyui, model)


def test_a_change_for_the_time_of_a_call_is_refused(comfyui, model):
    """As nodes do that cache blocks: they swap a method of the model while their wrapper runs."""
    def swap(apply_model, arguments):
        module = embedder(model)
        module.forward = types.MethodType(lambda self, x: x, module)
        try:
            return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])
        finally:
            del module.forward
    model.set_model_unet_function_wrapper(swap)

    with pytest.raises(comfyui.errors.UnsupportedError, match="a changed diffusion_model.x_embedder.forward"):
        sample(comfyui, model)


def test_an_option_that_is_added_during_a_run_is_refused(comfyui, model):
    def add(apply_model, arguments):
        arguments["c"]["transformer_options"]["block_index"] = 3
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])
    model.set_model_unet_function_wrapper(add)

    with pytest.raises(comfyui.errors.UnsupportedError, match="block_index in its transformer_options"):
        sample(comfyui, model)


def test_a_model_option_that_is_added_during_a_run_is_refused(comfyui, model):
    """By a wrapper of the guidance, when the run has long begun."""
    model.add_wrapper("calc_cond_batch",
                      lambda executor, *args: executor(*args[:-1], {**args[-1], "multigpu_clones": 3}))

    with pytest.raises(comfyui.errors.UnsupportedError, match="multigpu_clones in its model_options"):
        sample(comfyui, model)


def test_what_comfyui_carries_out_itself_is_honoured(comfyui, model):
    """Everything that a node can hang around a model, on ours and on ComfyUI's own."""
    from comfy.model_sampling import CONST, ModelSamplingDiscreteFlow
    from comfy.patcher_extension import CallbacksMP, WrappersMP
    called = set()

    def hang(model):
        model = model.clone()
        for kind in ("OUTER_SAMPLE", "PREPARE_SAMPLING", "SAMPLER_SAMPLE", "PREDICT_NOISE", "CALC_COND_BATCH",
                     "APPLY_MODEL"):
            def wrapper(executor, *args, kind=kind, **kwargs):
                called.add(kind)
                result = executor(*args, **kwargs)
                return 0.9 * result if kind in ("PREDICT_NOISE", "APPLY_MODEL") else result
            model.add_wrapper_with_key(getattr(WrappersMP, kind), "a_pack", wrapper)
        for kind in ("ON_PRE_RUN", "ON_PREPARE_STATE", "ON_CLEANUP"):
            model.add_callback_with_key(getattr(CallbacksMP, kind), "a_pack", lambda *_, kind=kind: called.add(kind))
        sampling = type("Sampling", (ModelSamplingDiscreteFlow, CONST), {})(model.model.model_config)
        sampling.set_parameters(shift=5.0)
        model.add_object_patch("model_sampling", sampling)
        model.set_model_sampler_cfg_function(lambda args: args["uncond"] + 3 * (args["cond"] - args["uncond"]),
                                             disable_cfg1_optimization=True)
        model.set_model_sampler_pre_cfg_function(lambda args: [0.95 * out for out in args["conds_out"]])
        model.set_model_sampler_post_cfg_function(lambda args: args["denoised"].clamp(-2, 2))
        model.set_model_unet_function_wrapper(lambda apply_model, args: 1.1
                                              * apply_model(args["input"], args["timestep"], **args["c"]))
        return model

    hook = model.model.diffusion_model.register_forward_hook(lambda module, args, output: 0.8 * output)
    native = comfyui.native("sd3")
    native_hook = native.model.diffusion_model.register_forward_hook(lambda module, args, output: 0.8 * output)
    try:
        result = sample(comfyui, hang(model))
        seen = set(called)
        reference = sample(comfyui, hang(native))
    finally:
        hook.remove()
        native_hook.remove()

    assert len(seen) == 9
    close(result, reference, TOLERANCE)
    assert relative_error(result, comfyui.reference("sd3")) > 0.01


def test_the_same_compute_dtype_is_honoured(comfyui, model):
    close(sample(comfyui, computing_in(model, "fp32")), comfyui.reference("sd3"), TOLERANCE)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_another_compute_dtype_is_honoured_and_left_again(comfyui, model, dtype):
    """The workers then round as ComfyUI's own model does, and hold what they held before, once."""
    comfyui.unload_all()                                       # no other test's MODEL needs the workers' weights
    exact, native = comfyui.reference("sd3"), sample(comfyui, computing_in(comfyui.native("sd3"), dtype))
    before, client = sample(comfyui, model), comfyui.groups.client(("cpu", "cpu"))
    weights, name = model.model_size(), model.model.remote.spec.name
    half = computing_in(model, dtype)

    result = sample(comfyui, half)

    assert relative_error(native, exact) > 5 * TOLERANCE       # it does round
    assert 0.5 < relative_error(result, exact) / relative_error(native, exact) < 1.5
    assert half.model_size() == weights
    in_half = half.model.remote.spec.name
    assert in_half in client.models.names and name not in client.models.names
    assert torch.equal(sample(comfyui, model), before)
    assert name in client.models.names and in_half not in client.models.names


def test_the_default_compute_dtype_is_the_weights_own_type(comfyui):
    """As ComfyUI has it: on a CPU, without the node, both compute in float32."""
    import comfy.sd
    path = str(comfyui.base / "diffusion_models" / comfyui.file("sd3"))
    models = (comfyui.ours("sd3", comfyui.config("cpu,cpu"), "bf16"),
              comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.bfloat16}))
    exact = sample(comfyui, models[1])

    ours, native = (relative_error(sample(comfyui, computing_in(each, "default")), exact) for each in models)

    close(sample(comfyui, models[0]), exact, TOLERANCE)
    assert native > 5 * TOLERANCE
    assert 0.5 < ours / native < 1.5


def test_a_compute_dtype_that_a_familys_numbers_do_not_fit_in_is_refused(comfyui):
    model = computing_in(comfyui.ours("cosmos-predict2", comfyui.config()), "fp16")

    with pytest.raises(comfyui.errors.UnsupportedError,
                       match="the compute dtype float16, whose range is too small for Cosmos-Predict2"):
        comfyui.sample(model, "cosmos-predict2", steps=1)


def test_a_weight_patch_is_honoured_under_another_compute_dtype(comfyui, model):
    difference = 0.3 * torch.randn(768, 256, generator=torch.Generator().manual_seed(5))
    patch = {"diffusion_model.joint_blocks.1.x_block.attn.qkv.weight": (difference,)}

    def changed(model):
        model = computing_in(model, "bf16")
        model.add_patches(patch)
        return model
    exact = comfyui.native("sd3").clone()
    exact.add_patches(patch)
    exact = sample(comfyui, exact)

    ours, native = (relative_error(sample(comfyui, changed(each)), exact) for each in (model, comfyui.native("sd3")))

    assert relative_error(exact, comfyui.reference("sd3")) > 0.02
    assert 0.5 < ours / native < 1.5


@pytest.mark.parametrize("form", [*(pytest.param(form, marks=pytest.mark.slow)           # a minute to compile
                                    for form in ("node", "fullgraph", "blocks")), "object patch"])
def test_a_compiled_model_gives_what_it_gives_uncompiled(comfyui, matrix, model, monkeypatch, form):
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    compiled = model.clone()
    if form == "node":
        compiled, = run_node(matrix.nodes["TorchCompileModel"], {"model": model, "backend": "inductor"})
    elif form == "fullgraph":
        set_torch_compile_wrapper(compiled, "inductor", fullgraph=True)
    elif form == "blocks":
        set_torch_compile_wrapper(compiled, "inductor",
                                  keys=["diffusion_model.joint_blocks.0", "diffusion_model.joint_blocks.1"])
    else:
        compiled.add_object_patch("diffusion_model",
                                  torch.compile(model.get_model_object("diffusion_model"), backend="inductor"))
    torch._dynamo.utils.counters.clear()
    requested = _asked_to_compile(monkeypatch, compiled)

    try:
        result = sample(comfyui, compiled)
    except RuntimeError as error:
        if form != "fullgraph" or "found no compiled frames" not in str(error):
            raise
        pytest.skip("from 2.14 on PyTorch refuses fullgraph where there is nothing to trace")

    close(result, comfyui.reference("sd3"), TOLERANCE)
    assert not torch._dynamo.utils.counters["frames"], "something of a call to workers was traced"
    assert requested == {"" if form == "object patch" else "inductor"}


def _asked_to_compile(monkeypatch, model):
    """A set that gets what the workers are asked to compile by in each call."""
    client, requested = model.model.remote._client(), set()
    submit = type(client).submit

    def noted(self, spec, layout, num_channels, calls, *more, **options):
        requested.update(call.options.compile_backend for call in calls)
        return submit(self, spec, layout, num_channels, calls, *more, **options)
    monkeypatch.setattr(type(client), "submit", noted)
    return requested


# --- weights ---

def test_saved_models_have_the_files_own_weights(comfyui, matrix, model, tmp_path):
    """ModelSave and CheckpointSave; what they write is loaded by ComfyUI's own loader and draws the same."""
    import comfy.sd
    from comfy_extras.nodes_model_merging import save_checkpoint
    save_checkpoint(model, vae=matrix.vae("sd3"), filename_prefix="ours", output_dir=str(tmp_path))
    saved, = tmp_path.glob("ours*.safetensors")

    tensors = load_file(saved)
    own = load_file(comfyui.base / "diffusion_models" / comfyui.file("sd3"))
    assert own and all(torch.equal(tensors[f"model.diffusion_model.{name}"], tensor) for name, tensor in own.items())
    loaded = comfy.sd.load_diffusion_model(str(saved))
    assert torch.equal(sample(comfyui, loaded), comfyui.reference("sd3"))


@pytest.mark.parametrize("kind, weight_dtype", [("sd3", "fp8_e4m3fn"), ("wan", "default")])
def test_what_would_be_saved_is_what_a_native_model_saves(comfyui, kind, weight_dtype):
    """Every bit, as the model holds it, with a patch and without."""
    models = (comfyui.load_model.execute(comfyui.file(kind), weight_dtype, comfyui.config()).args[0],
              comfyui.nodes.UNETLoader().load_unet(comfyui.file(kind), weight_dtype)[0].clone())
    name, shape = next((name, tensor.shape) for name, tensor in models[1].model.state_dict().items()
                       if tensor.ndim == 2)
    for _ in range(2):
        ours, native = ({key: tensor.to("cpu") for key, tensor in model.state_dict_for_saving().items()}
                        for model in models)

        assert ours.keys() == native.keys()
        assert all(ours[key].dtype == native[key].dtype and torch.equal(ours[key].float(), native[key].float())
                   for key in native)
        for model in models:
            model.add_patches({name: ("diff", (torch.ones(shape),))}, 0.5)


def test_merged_into_a_native_model_it_gives_its_weights(comfyui, matrix, model):
    merge = matrix.nodes["ModelMergeSimple"]
    native = comfyui.native("sd3")

    merged, = run_node(merge, {"model1": native, "model2": model, "ratio": 0.25})
    reference, = run_node(merge, {"model1": native, "model2": native, "ratio": 0.25})

    assert merged.patches.keys() == reference.patches.keys() and len(merged.patches) > 50
    close(sample(comfyui, merged), sample(comfyui, reference), TOLERANCE)


def test_a_controlnet_that_is_a_difference_gets_the_models_own_weights(comfyui, matrix):
    """Or none, where a LoRA has changed them: ComfyUI's loader would add the changed ones."""
    ours, native = comfyui.ours("sd15", matrix.config), comfyui.native("sd15")

    def loaded(model):
        net, = run_node(matrix.nodes["DiffControlNetLoader"], {"model": model, "control_net_name": "tiny.safetensors"})
        return net.control_model.state_dict()
    made, reference = loaded(ours), loaded(native)
    assert made.keys() == reference.keys() and all(torch.equal(made[name], reference[name]) for name in made)

    name, shape = next((name, tensor.shape) for name, tensor in native.model.state_dict().items()
                       if ".to_q.weight" in name)
    ours.add_patches({name: ("diff", (torch.ones(shape),))}, 0.5)
    with pytest.raises(comfyui.errors.UnsupportedError, match="reads the weights of this MODEL"):
        loaded(ours)


@pytest.mark.parametrize("use", [
    lambda net: net.x_embedder.proj.weight.to("cpu"),
    lambda net: 2 * net.x_embedder.proj.weight,
    lambda net: net.x_embedder.proj.weight.mul_(2),
    lambda net: net.state_dict()["x_embedder.proj.weight"].cpu(),
    lambda net: type(net).forward(net, torch.zeros(1, 16, 16, 16), torch.ones(1), torch.zeros(1, 20, 96),
                                  torch.zeros(1, 64)),
    lambda net: setattr(net.x_embedder.proj.weight, "data", torch.zeros(1)),
    copy.deepcopy,
    lambda net: torch.empty(net.x_embedder.proj.weight.shape).copy_(net.x_embedder.proj.weight),
], ids=["move", "compute", "in place", "state_dict", "own forward", "data", "copy", "copy of one"])
def test_who_reads_the_weights_is_told_where_they_are(comfyui, model, use):
    with pytest.raises(comfyui.errors.UnsupportedError, match="^Use Load Diffusion Model for the node .* on xDiT"):
        use(model.model.diffusion_model)


# --- calls that no sampler makes ---

@pytest.mark.slow
def test_the_models_forward_before_there_is_a_group_starts_one(comfyui, model):
    """And after the group has gone, another: no caller can be too early or too late."""
    generator = torch.Generator().manual_seed(3)
    arguments = (torch.randn(1, 16, 16, 18, generator=generator), torch.full((1,), 500.0))
    conditioning = {"context": torch.randn(1, 20, 96, generator=generator),
                    "y": torch.randn(1, 64, generator=generator)}
    native = comfyui.module("sd3")

    comfyui.groups.close()
    with torch.inference_mode():
        result = model.model.diffusion_model(*arguments, **conditioning)
        close(result, native(*arguments, **conditioning), TOLERANCE)


@pytest.mark.parametrize("arguments", [(), (torch.ones(1),), ((8, 8), torch.zeros(1, 20, 96))],
                         ids=["latent", "no text", "no timestep"])
def test_a_call_that_is_not_a_samplers_is_told_what_it_lacks(comfyui, model, arguments):
    with pytest.raises(comfyui.errors.ConfigError, match="the latent, timestep and conditioning that SD3 takes"):
        model.model.diffusion_model(torch.zeros(1, 16, 16, 16), *arguments)


# --- ComfyUI's nodes ---

def test_the_table_has_every_node_that_takes_a_model(comfyui):
    version = importlib.import_module("comfyui_version").__version__
    if not version.startswith("0.30."):
        pytest.skip(f"the table is of ComfyUI 0.30, whose nodes are not those of {version}")
    rows = [line.split("|")[1].strip() for line in TABLE.read_text(encoding="utf-8").splitlines()
            if line.startswith("| ")][2:]

    assert rows == list(model_nodes(comfyui)) and len(rows) > 110


@pytest.mark.slow
def test_every_node_that_takes_a_model_is_equal_or_refused_and_the_table_says_so(comfyui, matrix):
    outcomes = [matrix.outcome(name) for name in matrix.nodes]

    assert [(outcome.node, outcome.text) for outcome in outcomes if not outcome.good] == []
    assert write_table(outcomes) == TABLE.read_text(encoding="utf-8"), \
        "run python -m tests.programs.model_nodes --write"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_nodes_one_after_the_other_are_equal(comfyui, matrix, seed):
    """Three nodes that are equal alone, drawn at random, in a row."""
    draw = random.Random(seed)
    names = draw.sample([name for name in equal_on("sd3") if matrix.changes_a_model(name) and name not in UNCOMPILED],
                        3)

    result, reference = (matrix.chain(names, model)
                         for model in (comfyui.ours("sd3", matrix.config), comfyui.native("sd3")))

    close(result, reference, TOLERANCE, names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flux", "hunyuanvideo"])
def test_a_model_without_its_guidance_equals_native(comfyui, kind):
    """FluxDisableGuidance: ComfyUI's model leaves the embedding of the guidance out."""
    from comfy_extras.nodes_flux import FluxDisableGuidance
    positive = FluxDisableGuidance.execute(comfyui.conditioning(kind, 1)).args[0]
    arguments = {"positive": positive, "cfg": 1.0, "steps": 2}
    model = comfyui.ours(kind, comfyui.config("cpu,cpu"))

    reference = comfyui.sample(comfyui.native(kind), kind, **arguments)
    close(comfyui.sample(model, kind, **arguments), reference, TOLERANCE)
    assert relative_error(reference, comfyui.reference(kind, cfg=1.0, steps=2)) > TOLERANCE
