"""LoRA and other weight patches: our MODEL with ComfyUI's own loader nodes draws what the native MODEL draws with
them."""

import functools
import itertools
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.programs.model_nodes import model_nodes
from tests.support.comfy_quants import save_comfy_quant
from tests.support.lora_zoo import adapters, makers
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import VARIANTS, families, save_dequantised, save_gguf, save_scaled
from tests.support.tolerances import close, relative_error, within
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.quantisation.quantise_on_load import TYPES
from xdit_backend.planner.cost_model import Job

TOLERANCE = 2e-5                           # relative, float32 on both sides
NAMINGS = {"publisher": "diffusion_model.", "kohya": "lora_unet_", "diffusers": "transformer."}


class Loras:
    """LoRA files for tiny models, and ComfyUI's node that loads them."""

    def __init__(self, comfyui):
        self.comfyui, self.folder = comfyui, comfyui.base / "loras"
        self.folder.mkdir(exist_ok=True)
        comfyui.folder_paths.add_model_folder_path("loras", str(self.folder), is_default=True)

    def file(self, kind, naming="publisher", adapter=None, part="", seed=9):
        """The name of a LoRA for all matrices of a model, but for the end of its head; adapter: None: each is of
        another kind.

        part: what the names of the layers contain.
        """
        name = f"{kind}-{naming}-{adapter}-{part}-{seed}.safetensors"
        if not (self.folder / name).exists():
            shapes = self.shapes(kind, NAMINGS[naming], part)
            kinds = itertools.cycle([adapter] if adapter else makers())
            tensors = {}
            for index, (layer, shape) in enumerate(shapes.items()):
                maker = next(kinds) if len(shape) == 2 else "locon" if len(shape) == 4 else "lora"
                tensors |= adapters(maker, {layer: shape}, seed + index)
            save_file(tensors, self.folder / name, metadata={"ss_network_dim": "4"})
        return name

    def shapes(self, kind, prefix, part=""):
        """{name of a layer in a LoRA file: shape of the weight, or of the slice of a weight, that it is for}."""
        import comfy.lora
        model = self.comfyui.native(kind).model
        state, shapes, seen = model.state_dict(), {}, set()
        for name, key in sorted(comfy.lora.model_lora_keys_unet(model, {}).items()):      # which has some from sets
            key, offset = (key, None) if isinstance(key, str) else (key[0], key[1])
            if key not in state or (key, offset) in seen or not name.startswith(prefix) or part not in name:
                continue
            shape = list(state[key].shape)
            if offset is not None and sum(offset[1:]) > shape[offset[0]]:
                # ComfyUI takes Lumina 2's grouped keys for as many as Z-Image's
                continue
            if offset is not None:
                shape[offset[0]] = offset[2]
            if len(shape) >= 2 and key.endswith(".weight") and shape[0] % 8 == 0 and shape[1] % 2 == 0:
                shapes[name] = shape
                seen.add((key, offset))
        return shapes

    def load(self, model, name, strength=1.0):
        return self.comfyui.nodes.LoraLoaderModelOnly().load_lora_model_only(model, name, strength)[0]


@pytest.fixture(scope="package")
def loras(comfyui):
    return Loras(comfyui)


def compare(comfyui, loras, kind, config, names, steps=2, weight_dtype="fp32", native=None, **arguments):
    """Sample both with the same LoRAs, [(name, strength)]."""
    ours, native = comfyui.ours(kind, config, weight_dtype), native or comfyui.native(kind)
    for name, strength in names:
        ours, native = loras.load(ours, name, strength), loras.load(native, name, strength)
    result, reference = (comfyui.sample(model, kind, steps=steps, **arguments) for model in (ours, native))

    close(result, reference, TOLERANCE, names)
    assert relative_error(reference,
                          comfyui.reference(kind, steps=steps, **arguments)) > 1e-3, "a LoRA that changes nothing"


# kinds that are tried with names of every kind, others with one
ALL_NAMINGS = ("sd3", "flux", "wan", "sdxl")
KINDS = [pytest.param(kind, naming, marks=() if kind == "sd3" else pytest.mark.slow)
         for number, kind in enumerate(kind for kind in families() if kind not in VARIANTS)
         for naming in (NAMINGS if kind in ALL_NAMINGS else [list(NAMINGS)[number % 2]])]


@pytest.mark.parametrize("kind, naming", KINDS)
def test_every_kind_of_adapter_equals_native(comfyui, loras, kind, naming):
    """Each layer has another kind of adapter; slices of fused matrices where the file is in diffusers' names."""
    if naming == "diffusers" and not loras.shapes(kind, NAMINGS[naming]):
        pytest.skip("ComfyUI knows no such names for this family")

    compare(comfyui, loras, kind, comfyui.config(),
            [(loras.file(kind, naming), 0.7), (loras.file(kind, naming, "lora", seed=40), -0.4)])


@pytest.mark.parametrize("degrees",
                         by_default([{"cfg": 2}], [{"cfg": 2}, {"tensor": 2}, {"pipefusion": 2, "warmup_steps": 9},
                                            {"pipefusion": 2, "ulysses": 2, "warmup_steps": 9}]), ids=str)
def test_layouts_equal_native(comfyui, loras, degrees):
    devices = "cpu,cpu,cpu,cpu" if "ulysses" in degrees and "pipefusion" in degrees else "cpu,cpu"

    compare(comfyui, loras, "sd35", comfyui.config(devices, **degrees), [(loras.file("sd35", "diffusers"), 0.7)])


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype, dtype", [("bf16", torch.bfloat16), ("fp8_e4m3fn", torch.float8_e4m3fn)])
def test_weights_of_small_types_equal_native(comfyui, loras, weight_dtype, dtype):
    """Rounded as ComfyUI rounds them: float8 at random, from the seed that the weight's name gives."""
    import comfy.sd
    path = comfyui.base / "diffusion_models" / comfyui.file("sd3")
    native = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": dtype})

    compare(comfyui, loras, "sd3", comfyui.config(),
            [(loras.file("sd3"), 0.7), (loras.file("sd3", "diffusers", "lora"), 0.5)],
            weight_dtype=weight_dtype, native=native)


STAGES, TENSOR = {"pipefusion": 2, "warmup_steps": 9}, {"tensor": 2}


@pytest.mark.parametrize("format_, degrees",
                         [("scaled", {}), ("Q4_K", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
                             ("scaled", STAGES), ("Q4_K", STAGES), ("Q8_0", TENSOR), ("nvfp4", TENSOR),
                             ("mxfp8", STAGES))),
pytest.param("nf4", TENSOR, marks=pytest.mark.quantisers)], ids=str)
def test_quantised_weights_are_not_rounded_again(comfyui, loras, format_, degrees):
    """As on the dequantised weights: plain LoRAs, slices of fused matrices, and every other kind;
    without them, bit for bit as before."""
    folder, source = comfyui.base / "diffusion_models", comfyui.base / "diffusion_models" / comfyui.file("sd3")
    name, plain = (f"lora-{format_}{'.gguf' if format_.startswith('Q') else '.safetensors'}",
                   f"lora-{format_}-plain.safetensors")
    if format_ in TYPES:                                       # when it is loaded
        save_dequantised(folder / plain, source, format_)
        name = source.name
    else:
        made = (save_scaled(folder / name, source, per_row=True) if format_ == "scaled"
                else save_gguf(folder / name, source, format_) if format_.startswith("Q")
                else save_comfy_quant(folder / name, source, format_)[0])
        save_file(made, folder / plain)
    native = comfyui.nodes.UNETLoader().load_unet(plain, "default")[0]
    config = comfyui.config("cpu,cpu" if degrees else "cpu", **degrees)
    ours = comfyui.load_model.execute(name, format_ if format_ in TYPES else "default", config).args[0]
    before = comfyui.sample(ours, "sd3", steps=2)
    memory, run = ours.model.remote.memory, (Job(16, 4, 2), ours.model.remote.setup.layout(1))
    weight_bytes, extrapolation = memory.weight_bytes[0], memory.estimate_of_run(*run)

    for files in ([("publisher", "lora", 0.7), ("diffusers", "lora", -0.4)], [("publisher", None, 0.7)]):
        changed, reference = ours, native
        for naming, adapter, strength in files:
            lora = loras.file("sd3", naming, adapter)
            changed, reference = loras.load(changed, lora, strength), loras.load(reference, lora, strength)
        result, want = (comfyui.sample(model, "sd3", steps=2) for model in (changed, reference))
        close(result, want, TOLERANCE, files)
        assert relative_error(want, before) > 1e-3
        if not degrees:                                        # what it takes is known before workers tell it
            within(abs(memory.weight_bytes[0] - weight_bytes - memory.added_bytes) / memory.added_bytes, 0.01)
            assert memory.estimate_of_run(*run) > extrapolation
    assert torch.equal(comfyui.sample(ours, "sd3", steps=2), before)
    assert memory.added_bytes == 0


def test_a_published_types_file_equals_native(comfyui, loras):
    """A file of bfloat16, held as ComfyUI chooses, with factors of half precision."""
    native = comfyui.native("sd3", dtype=torch.bfloat16)
    name = loras.file("sd3", "kohya", "lora")
    half = {key: tensor.half() for key, tensor in load_file(loras.folder / name).items()}
    save_file(half, loras.folder / "half.safetensors")
    ours = comfyui.ours("sd3", comfyui.config(), "default", dtype=torch.bfloat16)

    result, reference = (comfyui.sample(loras.load(model, "half.safetensors", -0.8), "sd3", steps=2)
                         for model in (ours, native))

    close(result, reference, TOLERANCE)
    assert relative_error(reference, comfyui.sample(native, "sd3", steps=2)) > 1e-3


def test_one_file_with_and_without_a_lora(comfyui, loras):
    """MODELs of one file in turn, from one loader node and from two:
    each draws its own, and the one without, bit for bit."""
    plain, other = (comfyui.ours("sd3", comfyui.config()) for _ in range(2))
    patched = loras.load(plain, loras.file("sd3", "publisher", "lora"), 0.7)
    stronger = loras.load(plain, loras.file("sd3", "publisher", "lora"), 1.4)
    narrower = loras.load(other, loras.file("sd3", "publisher", "lora", "joint_blocks.1"), 0.7)
    models = {"plain": plain, "patched": patched, "stronger": stronger, "other": other, "narrower": narrower}

    first = {name: comfyui.sample(model, "sd3", steps=2) for name, model in models.items()}
    again = {name: comfyui.sample(models[name], "sd3", steps=2)
             for name in ("other", "patched", "narrower", "plain", "stronger", "plain")}

    assert all(torch.equal(first[name], result) for name, result in again.items())
    assert torch.equal(first["plain"], first["other"])
    close(first["plain"], comfyui.reference("sd3", steps=2), TOLERANCE)
    assert min(relative_error(first[name], first["plain"]) for name in ("patched", "stronger", "narrower")) > 1e-3


@pytest.mark.parametrize("degrees",
                         by_default([{"cfg": 2}], [{"cfg": 2}, {"tensor": 2}, {"pipefusion": 2, "warmup_steps": 9}]),
                         ids=str)
def test_another_strength_changes_weights_and_loads_nothing(comfyui, loras, monkeypatch, degrees):
    """By the messages that the workers get: after the first prompt none of them loads the model; those that change it
    are as many for every strength, none where it stays as it is, and without the LoRA the file's weights are back."""
    config = comfyui.config("cpu,cpu", **degrees)
    client, sent, model = comfyui.groups.client(("cpu", "cpu")), [], comfyui.ours("sd35", config)
    request = client.workers.request
    monkeypatch.setattr(client.workers, "request", lambda make, *more, **named: (
        sent.append(type(make(0)).__name__), request(make, *more, **named))[1])
    lora = loras.file("sd35", "publisher", "lora")

    models = {strength: [loras.load(each, lora, strength) for each in (model, comfyui.native("sd35"))]
              for strength in (0.7, 0.3, -0.4)}
    models[None] = [model, comfyui.native("sd35")]

    results, messages = [], []
    for strength in (0.7, 0.7, 0.3, -0.4, None):
        ours, native = models[strength]
        results.append(comfyui.sample(ours, "sd35", steps=2))
        close(results[-1], comfyui.sample(native, "sd35", steps=2), TOLERANCE, strength)
        messages.append([name for name in sent if name in ("LoadModel", "RestoreModel", "ChangeWeights", "DropModel")])
        sent.clear()

    assert messages[0][-1:] == ["ChangeWeights"]               # it may be there from a test before
    assert messages[1:] == [[], ["ChangeWeights"], ["ChangeWeights"], ["ChangeWeights"]]
    assert (torch.equal(results[0], results[1])
            and min(relative_error(results[0], result) for result in results[2:]) > 1e-3)


@pytest.mark.parametrize("degrees", [{"displaced": 2, "displaced_mode": "full_sync"}], ids=str)
def test_two_models_of_one_file_in_one_guider_have_their_own_weights(comfyui, loras, degrees):
    """In turn, several times a step: as on one device, and not as of the weights that were loaded last."""
    def drawn(config):
        plain, other = (comfyui.ours("sd3", config) for _ in range(2))
        patched = loras.load(other, loras.file("sd3", "publisher", "lora"), 1.4)
        return [comfyui.sample_dual(*models)
                for models in ((plain, patched), (patched, plain), (plain, plain), (patched, patched))]

    results, want = drawn(comfyui.config("cpu,cpu", **degrees)), drawn(comfyui.config())

    for number, (result, reference) in enumerate(zip(results, want)):
        close(result, reference, TOLERANCE, number)
        assert number == 0 or relative_error(result, results[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("event", ["unload", "workers end"])
def test_a_lora_outlives_the_weights(comfyui, loras, event):
    """Weights that went to host memory, or with their workers, come back with the LoRA."""
    model = loras.load(comfyui.ours("sd3", comfyui.config()), loras.file("sd3", "publisher", "lora"))
    before = comfyui.sample(model, "sd3", steps=2)

    if event == "unload":
        comfyui.management.unload_all_models()
    else:
        comfyui.groups.client(("cpu",)).close()

    assert torch.equal(comfyui.sample(model, "sd3", steps=2), before)


@pytest.mark.parametrize("kind", ["sd3", *(pytest.param(kind, marks=pytest.mark.slow)
                                           for kind in ("flux", "pixart", "wan"))])
def test_a_diffusers_folder_equals_native(comfyui, loras, kind):
    """Its matrices are parts of those that ComfyUI's names mean, some with halves in other places:
    they go where their rows are."""
    path = comfyui.base / "diffusion_models" / comfyui.file(kind)
    transformer = load_transformer(open_checkpoint(path).spec("float32", "float32"), torch.device("cpu")).model
    comfyui.folder_paths.add_model_folder_path("diffusers", str(comfyui.base / "diffusers"), is_default=True)
    transformer.save_pretrained(comfyui.base / "diffusers" / f"lora-{kind}" / "transformer", max_shard_size="2MB")
    ours, native = comfyui.load_model.execute(f"lora-{kind}", "fp32", comfyui.config()).args[0], comfyui.native(kind)
    name = loras.file(kind)

    result, reference = (comfyui.sample(loras.load(model, name, 0.7), kind, steps=2) for model in (ours, native))

    close(result, reference, TOLERANCE)
    close(comfyui.sample(ours, kind, steps=2), comfyui.reference(kind, steps=2), TOLERANCE)


@pytest.mark.parametrize("nodes", [
    {"ModelMergeSimple": {"ratio": 0.3}}, {"ModelAdd": {}, "ModelSubtract": {"multiplier": 0.5}},
    {"ModelMergeBlocks": {"input": 0.2, "middle": 0.6, "out": 0.9}}], ids=",".join)
def test_merges_of_two_of_ours_equal_native(comfyui, loras, nodes):
    """The second model has a LoRA of its own, and the merge gets another one."""
    import comfy_extras.nodes_model_merging
    results = []
    for make in (functools.partial(comfyui.ours, config=comfyui.config()), comfyui.native):
        second = loras.load(make("sd3", dtype=torch.float16), loras.file("sd3", "kohya", "lora"), 0.5)
        merged = make("sd3")
        for node, arguments in nodes.items():
            merged = getattr(comfy_extras.nodes_model_merging, node)().merge(merged, second, **arguments)[0]
        results.append(comfyui.sample(loras.load(merged, loras.file("sd3", "diffusers", "lora"), 0.7), "sd3", steps=2))

    close(*results, TOLERANCE)


def test_a_saved_model_has_its_loras(comfyui, loras, tmp_path):
    from comfy_extras.nodes_model_merging import save_checkpoint
    saved = []
    for name, model in (("ours", comfyui.ours("sd3", comfyui.config())), ("native", comfyui.native("sd3"))):
        save_checkpoint(loras.load(model, loras.file("sd3"), 0.7), filename_prefix=name, output_dir=str(tmp_path))
        saved.append(load_file(next(tmp_path.glob(f"{name}*"))))

    assert saved[0].keys() == saved[1].keys()
    for name in saved[0]:
        close(saved[0][name].float(), saved[1][name].float(), 1e-6, name)


# --- bad input ---

@pytest.mark.slow
def test_a_file_that_was_replaced_is_loaded_anew(comfyui, loras):
    """ComfyUI keeps a MODEL whose widgets are the same. A LoRA on it would be added to the other file's weights."""
    load, name, lora = comfyui.load_model, "replaced.safetensors", loras.file("sd3", adapter="lora")
    path, tensors = comfyui.base / "diffusion_models" / name, load_file(
        comfyui.base / "diffusion_models" / comfyui.file("sd3"))
    save_file(tensors, path)
    made = [load.fingerprint_inputs(model_name=name, weight_dtype="fp32", parallel=None) for _ in range(2)]
    model = load.execute(name, "fp32", comfyui.config("cpu")).args[0]
    close(comfyui.sample(model, "sd3"), comfyui.reference("sd3"), TOLERANCE)

    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)

    assert made[0] == made[1] != load.fingerprint_inputs(model_name=name, weight_dtype="fp32")
    close(comfyui.sample(model, "sd3"), comfyui.reference("sd3"), TOLERANCE)                    # nothing is read for it
    with pytest.raises(comfyui.errors.XDiTError,
                       match="replaced.safetensors has changed on disk since Load xDiT Model read it"):
        comfyui.sample(loras.load(model, lora), "sd3")
    model = loras.load(load.execute(name, "fp32", comfyui.config("cpu")).args[0], lora)
    close(comfyui.sample(model, "sd3"), comfyui.sample(loras.load(comfyui.native("sd3"), lora), "sd3"), TOLERANCE)


def test_a_lora_for_another_family_is_refused(comfyui, loras):
    with pytest.raises(comfyui.errors.UnsupportedError, match="Use a LoRA that was made for SD3"):
        loras.load(comfyui.ours("sd3", comfyui.config()), loras.file("wan", "publisher", "lora"))


@pytest.mark.parametrize("adapter", ["lora", "loha", "diff"])
def test_a_lora_of_another_shape_is_refused_and_nothing_is_half_applied(comfyui, loras, adapter, caplog):
    """Its last layer is too wide: the ones before it fit.
    Of which ComfyUI logs something, where its log is to have errors alone too."""
    caplog.set_level(logging.CRITICAL)
    layers = loras.shapes("sd3", NAMINGS["publisher"], "joint_blocks")
    last = max(layers)
    save_file(adapters(adapter, layers | {last: [layers[last][0] + 8, layers[last][1]]}),
              loras.folder / "wide.safetensors")
    model = comfyui.ours("sd3", comfyui.config())

    with pytest.raises(comfyui.errors.UnsupportedError, match=f"^Use a LoRA, .* made for this model: .*{last}.weight"):
        comfyui.sample(loras.load(model, "wide.safetensors"), "sd3", steps=2)

    close(comfyui.sample(model, "sd3", steps=2), comfyui.reference("sd3", steps=2), TOLERANCE)


@pytest.mark.parametrize("up, down", [((), (4, 256)), ((256,), (4, 256)), ((256, 0), (0, 256))], ids=str)
def test_factors_that_are_no_matrices_are_refused_by_name(comfyui, loras, up, down):
    name = "diffusion_model.joint_blocks.0.x_block.attn.proj"
    save_file({f"{name}.lora_up.weight": torch.ones(up), f"{name}.lora_down.weight": torch.ones(down),
               f"{name}.alpha": torch.tensor(2.0)},
              loras.folder / "no-matrices.safetensors")

    with pytest.raises(comfyui.errors.UnsupportedError,
                       match=f"does not fit {name}.weight .its factors have the shapes"):
        comfyui.sample(loras.load(comfyui.ours("sd3", comfyui.config("cpu")), "no-matrices.safetensors"), "sd3",
                       steps=1)


def hooked(comfyui, loras, prompt, name, strength=0.8, keyframes=()):
    """A prompt with a LoRA of its own, as ComfyUI's nodes make it.
    keyframes: [(part of the steps at which it begins, strength)]."""
    import comfy.hooks
    hooks = comfy.hooks.create_hook_lora(load_file(loras.folder / name), strength, strength)
    group = comfy.hooks.HookKeyframeGroup()
    for start, each in keyframes:
        group.add(comfy.hooks.HookKeyframe(strength=each, start_percent=start))
    if keyframes:
        hooks.set_keyframes_on_hooks(group)
    return comfy.hooks.set_hooks_for_conditioning(prompt, hooks)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, {"cfg": 2}, {"pipefusion": 2}, {"displaced": 2}], ids=str)
def test_lora_hooks_equal_native_and_leave_nothing(comfyui, loras, degrees):
    """A LoRA of the positive prompt for a range of steps, beside one of the whole MODEL; then the MODEL without any."""
    first, second = loras.file("sd3", "publisher", "lora", seed=40), loras.file("sd3", "publisher")
    keyframes = [(0.0, 1.0), (0.4, 0.3), (0.7, 0.0)]
    arguments = {"positive": hooked(comfyui, loras, comfyui.conditioning("sd3", 1), first, keyframes=keyframes),
                 "steps": 4}
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu" if degrees else "cpu", **degrees))

    for name in (None, second):
        ours, native = (each if name is None else loras.load(each, name, 0.5)
                        for each in (model, comfyui.native("sd3").clone()))
        result, reference = (comfyui.sample(each, "sd3", **arguments) for each in (ours, native))
        close(result, reference, TOLERANCE)
        assert relative_error(reference, comfyui.sample(native, "sd3", steps=4)) > 1e-3, "a hook that changes nothing"
    synchronous = {"warmup_steps": 9} if {"pipefusion", "displaced"} & {*degrees} else {}
    plain = comfyui.ours("sd3", comfyui.config("cpu,cpu" if degrees else "cpu", **degrees, **synchronous))
    close(comfyui.sample(plain, "sd3", steps=2), comfyui.reference("sd3", steps=2), TOLERANCE)


@pytest.mark.parametrize("adapter", ["lora", "loha"])
def test_a_hook_changes_weights_once_in_a_run_and_not_in_every_step(comfyui, loras, monkeypatch, adapter):
    """Workers keep both versions: the changes that are sent are as many for more steps, and results are as native.
    Where the file's tensors went is found once: for a model of Flux.1's size that takes half a second."""
    client, sent, looked, places = comfyui.groups.client(("cpu",)), [], [], comfyui.proxy.weight_sources
    monkeypatch.setattr(comfyui.proxy, "weight_sources", lambda *of: looked.append(of) or places(*of))
    send = client.models._send_changes
    monkeypatch.setattr(client.models, "_send_changes",
                        lambda spec, batch, *rest: (sent.append(len(batch)), send(spec, batch, *rest)))
    arguments = {"positive": hooked(comfyui, loras, comfyui.conditioning("sd3", 1),
                                    loras.file("sd3", "publisher", adapter))}
    model, counts = comfyui.ours("sd3", comfyui.config("cpu")), []

    # the first may find the workers with what another MODEL had changed
    for steps in (2, 2, 5):
        result = comfyui.sample(model, "sd3", steps=steps, **arguments)
        counts.append(len(sent))
        sent.clear()

    assert counts[1] == counts[2] > 0 and len(looked) == 1
    close(result, comfyui.sample(comfyui.native("sd3"), "sd3", steps=5, **arguments), TOLERANCE)
    close(comfyui.sample(model, "sd3", steps=2), comfyui.reference("sd3", steps=2), TOLERANCE)


@pytest.mark.slow
def test_a_hook_leaves_alone_what_the_text_is_prepared_with(comfyui, loras):
    """ComfyUI's Anima prepares the text once, when no hook is in effect yet. The MODEL's own LoRA is."""
    name, own = loras.file("anima", adapter="lora"), loras.file("anima", adapter="lora", seed=40)
    assert any("llm_adapter" in layer for layer in loras.shapes("anima", "diffusion_model."))
    positive = hooked(comfyui, loras, comfyui.conditioning("anima", 1), name)
    ours, native = (loras.load(model, own, 0.5)
                    for model in (comfyui.ours("anima", comfyui.config()), comfyui.native("anima").clone()))

    close(*(comfyui.sample(model, "anima", positive=positive, steps=2) for model in (ours, native)), TOLERANCE)


def test_what_comfyui_leaves_alone_stays_where_text_is_prepared(comfyui, loras):
    """Its loader changes no parameter beside submodules, such as the registers of LTX-2's connectors."""
    part, generator = "diffusion_model.video_embeddings_connector.", torch.Generator().manual_seed(5)
    registers = dict(comfyui.native("ltx-2").model.named_parameters())[f"{part}learnable_registers"]
    changed = {f"{part}learnable_registers.diff": torch.randn(registers.shape, generator=generator)}
    changed |= adapters("lora", loras.shapes("ltx-2", part))
    save_file(changed, loras.folder / "registers.safetensors")

    compare(comfyui, loras, "ltx-2", comfyui.config("cpu"), [("registers.safetensors", 0.7)])


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype, dtype", [("bf16", torch.bfloat16), ("fp8_e4m3fn", torch.float8_e4m3fn)])
@pytest.mark.parametrize("adapter", ["lora", None])
def test_hooks_on_weights_of_small_types_equal_native(comfyui, loras, weight_dtype, dtype, adapter):
    """The MODEL's own LoRA is rounded before the hook's is added to it, and that again:
    in bits the two are not one sum."""
    import comfy.sd
    lasting, passing = loras.file("sd3", "publisher", adapter), loras.file("sd3", "diffusers", adapter, seed=40)
    path = comfyui.base / "diffusion_models" / comfyui.file("sd3")
    ours, native = (loras.load(model, lasting, 0.5) for model in (
        comfyui.ours("sd3", comfyui.config(), weight_dtype),
        comfy.sd.load_diffusion_model(str(path), model_options={"dtype": dtype})))
    arguments = {"positive": hooked(comfyui, loras, comfyui.conditioning("sd3", 1), passing), "steps": 2}

    result, reference = (comfyui.sample(model, "sd3", **arguments) for model in (ours, native))

    close(result, reference, TOLERANCE)
    assert relative_error(reference, comfyui.sample(native, "sd3", steps=2)) > 1e-3


def test_hooks_that_do_not_fit_are_refused_by_name(comfyui, loras):
    import comfy.hooks
    model, prompt = comfyui.ours("sd3", comfyui.config()), comfyui.conditioning("sd3", 1)
    whole = comfyui.native("sd3").model_state_dict("diffusion_model.")

    with pytest.raises(comfyui.errors.UnsupportedError, match="Use a LoRA that was made for SD3"):
        comfyui.sample(model, "sd3", positive=hooked(comfyui, loras, prompt, loras.file("wan", "publisher", "lora")))
    hooks = comfy.hooks.create_hook_model_as_lora(whole, None, 1.0, 1.0)
    with pytest.raises(comfyui.errors.UnsupportedError, match="Create Hook Model as LoRA"):
        comfyui.sample(model, "sd3", positive=comfy.hooks.set_hooks_for_conditioning(prompt, hooks))


@pytest.mark.parametrize("kind, adapter, degrees", [
    ("sd3", "lora", {"cfg": 2}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("flux", "lokr", {"pipefusion": 2, "warmup_steps": 9}), ("wan", "loha", {"tensor": 2}),
        ("sdxl", "lora", {"data": 2}), ("z-image", "lora without alpha", {"ring": 2})))], ids=str)
def test_a_lora_in_bypass_mode_equals_native(comfyui, loras, kind, adapter, degrees):
    """Over one that is in the weights; a second one in bypass mode takes the place of the first, as in ComfyUI."""
    name, latent = loras.file(kind, adapter=adapter), comfyui.latent(kind)
    node = model_nodes(comfyui)["LoraLoaderBypassModelOnly"]
    models = comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees)), comfyui.native(kind)
    changed = [loras.load(model, loras.file(kind, adapter="lora", seed=40), -0.4) for model in models]
    for other, strength in ((loras.file(kind, adapter="lora", seed=41), 0.9), (name, 0.7)):
        changed = [node().load_lora_model_only(model, other, strength)[0] for model in changed]

    result, reference, under = (comfyui.sample(model, kind, steps=2, latent=latent) for model in (
        *changed, loras.load(models[1], loras.file(kind, adapter="lora", seed=40), -0.4)))

    close(result, reference, TOLERANCE)
    assert relative_error(reference, under) > 1e-3, "a LoRA in bypass mode that changes nothing"
    close(comfyui.sample(models[0], kind, steps=2, latent=latent), comfyui.reference(kind, steps=2), TOLERANCE)


def test_a_lora_in_bypass_mode_that_is_for_weights_alone_is_refused_by_name(comfyui, loras):
    node = model_nodes(comfyui)["LoraLoaderBypassModelOnly"]
    for adapter, weight_dtype, words in (("dora", "fp32", "with layers of DoRA or similar types .LoRAAdapter"),
                                         ("oft", "fp32", "with layers of DoRA or similar types .OFTAdapter"),
                                         ("lora", "fp8_e4m3fn", "on weights of float8_e4m3fn, which Load LoRA ")):
        model = comfyui.ours("sd3", comfyui.config(), weight_dtype)
        model = node().load_lora_model_only(model, loras.file("sd3", adapter=adapter), 1.0)[0]
        with pytest.raises(comfyui.errors.UnsupportedError, match=words):
            comfyui.sample(model, "sd3", steps=1)
