"""Each family's class is compared with this ComfyUI's before the first run: where ComfyUI computes something else, a
sentence says so before sampling."""

import functools
import importlib
import json
import re

import pytest
import torch

from tests.integration.lora.test_lora import loras  # noqa: F401
from tests.support.mutations import mutate
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import families
from tests.support.tolerances import close, relative_error

SENTENCE = (r"^Update xDiT, or use Load Diffusion Model: this ComfyUI \([\d.]+\) is newer than the pack knows, and in "
            "its model of {} ")
FEW = ("sd3", "flux", "wan", "ltx-2", "sdxl", "z-image-pixel", "minimax-h3", "wan-causal")


@pytest.fixture
def check(comfyui):
    return importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.model.family_check")


@pytest.fixture
def user(comfyui, tmp_path):
    """A folder of a user who has compared nothing yet."""
    former = comfyui.folder_paths.get_user_directory()
    comfyui.folder_paths.set_user_directory(str(tmp_path))
    yield tmp_path / "xdit" / "classes"
    comfyui.folder_paths.set_user_directory(former)


@pytest.mark.parametrize("kind", by_default(FEW, families()))
@pytest.mark.everyone
def test_every_family_equals_comfyuis_class(comfyui, user, kind):
    """Without and with a LoRA, whichever class of ComfyUI's the file has."""
    remote = comfyui.ours(kind, comfyui.config()).model.remote

    assert remote.comparison.result() == {"prediction": "", "lora": ""}


@pytest.mark.parametrize("kind", FEW[:3])
def test_the_models_are_comfyuis_class_and_the_workers_and_a_lora_changes_them(comfyui, check, kind):
    base_model, family = comfyui.ours(kind, comfyui.config()).model, families()[kind]
    pair = check.build_pair(family, base_model)
    call = check.example_call(family, pair.config, torch.Generator().manual_seed(2))
    before = [check.predict(family, pair.model, pair.config, call), pair.native(call.latent, call.timestep,
                                                                                **call.arguments)]
    assert check._apply_lora(pair)
    after = [check.predict(family, pair.model, pair.config, call), pair.native(call.latent, call.timestep,
                                                                               **call.arguments)]

    assert type(pair.native) is type(base_model.diffusion_model)
    assert type(pair.model).__name__ == family.transformer
    close(before[0], before[1], 1e-5)
    close(after[0], after[1], 1e-5)
    assert relative_error(after[1], before[1]) > 1e-2


def test_a_result_is_stored_and_read_again(comfyui, user, check, monkeypatch):
    comfyui.ours("sd3", comfyui.config()).model.remote.comparison.result()
    [file] = user.iterdir()
    found = json.loads(file.read_text())
    monkeypatch.setattr(check, "build_pair", None)             # nothing is built

    assert comfyui.ours("sd3", comfyui.config()).model.remote.comparison.result() == found["result"]
    assert found["key"].keys() == {"comfyui", "sources", "pack", "diffusers", "torch", "precision"}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"key": 1, "result": 2}', "\0"])
def test_a_broken_file_is_compared_again(comfyui, user, text):
    comfyui.ours("sd3", comfyui.config()).model.remote.comparison.result()
    [file] = user.iterdir()
    sound = file.read_text()
    file.write_text(text)
    comfyui.ours("sd3", comfyui.config()).model.remote.comparison.result()

    assert file.read_text() == sound


def test_a_key_changes_with_the_sources_of_the_class(comfyui, tmp_path, monkeypatch):
    comparisons = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.compatibility.class_comparisons")
    (tmp_path / "comfy" / "ldm" / "flux").mkdir(parents=True)
    files = {name: tmp_path.joinpath(*name.split(".")).with_suffix(".py")
             for name in ("comfy.ops", "comfy.ldm.common", "comfy.ldm.flux.model", "comfy.ldm.flux.layers",
                          "comfy.ldm.other")}
    for file in files.values():
        file.write_text("import torch\n")
    files["comfy.ldm.flux.model"].write_text(
        "import comfy.ops\nfrom .layers import (\n    a,\n    b)\nif True:\n    from .. import common\n")
    monkeypatch.setattr(comparisons, "find_comfyui", lambda: tmp_path)
    before = comparisons.key_of("comfy.ldm.flux.model")

    for name, file in files.items():
        file.write_text(f"{file.read_text()}# changed\n")
        after = comparisons.key_of("comfy.ldm.flux.model")
        assert (after != before) == (name != "comfy.ldm.other"), name
        before = after


def test_a_method_of_another_pack_is_part_of_the_key(comfyui, monkeypatch):
    from comfy.ldm.modules.diffusionmodules import mmdit
    comparisons = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.compatibility.class_comparisons")
    before = comparisons.key_of(mmdit.__name__)
    monkeypatch.setattr(mmdit.MMDiT, "unpatchify", lambda self, x, hw=None: x)

    assert comparisons.key_of(mmdit.__name__) != before


@pytest.mark.parametrize("kind", by_default(("sd3", "minimax-h3"), families()))
def test_no_memory_is_compared_that_nothing_has_written(comfyui, user, check, kind):
    """As SD3's pos_embed, which a file fills."""
    base_model = comfyui.ours(kind, comfyui.config()).model
    pair = check.build_pair(families()[kind], base_model)

    assert not [name for name, tensor in pair.native.state_dict().items() if not tensor.isfinite().all()]


def test_the_random_numbers_of_the_process_are_left_as_they_are(comfyui, user):
    before = torch.get_rng_state()
    comfyui.ours("sd3", comfyui.config()).model.remote.comparison.result()

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", by_default(("sd3", "flux"), ("sd3", "flux", "hunyuan3d-2", "seedvr2", "ace-step-1.0",
                                                              "wan-humo", "triposplat")))
def test_the_attention_of_comfyuis_gpu_is_not_used(comfyui, user, monkeypatch, kind):
    """As xFormers', which has none for CPUs."""
    import sys

    from comfy.ldm.modules import attention

    def none_here(*args, **options):
        raise NotImplementedError("no operator for a CPU")
    remote = comfyui.ours(kind, comfyui.config()).model.remote
    remote.comparison.result()
    for file in user.iterdir():
        file.unlink()
    for name, module in [*sys.modules.items()]:
        for function in ("optimized_attention", "optimized_attention_masked"):
            if name.startswith("comfy.ldm") and hasattr(module, function):
                monkeypatch.setattr(module, function, attention.wrap_attn(none_here))

    assert comfyui.ours(kind, comfyui.config()).model.remote.comparison.result() == {"prediction": "", "lora": ""}


def sampled(comfyui, kind):
    return comfyui.sample(comfyui.ours(kind, comfyui.config()), kind, steps=1)


def mmdit():
    from comfy.ldm.modules.diffusionmodules import mmdit
    return mmdit


def _renamed(monkeypatch):
    native = mmdit().OpenAISignatureMMDITWrapper.forward
    monkeypatch.setattr(mmdit().OpenAISignatureMMDITWrapper, "forward",
                        lambda self, x, timesteps, text=None, y=None, control=None, transformer_options={}:
                        native(self, x, timesteps, text, y, control, transformer_options))


def _scaled(monkeypatch):
    native = mmdit().OpenAISignatureMMDITWrapper.forward
    monkeypatch.setattr(mmdit().OpenAISignatureMMDITWrapper, "forward",
                        functools.wraps(native)(lambda self, *args, **options: 0.5 * native(self, *args, **options)))


def _gone(monkeypatch):
    monkeypatch.delattr(mmdit().MMDiT, "unpatchify")


def _of_another_shape(monkeypatch):
    native = mmdit().OpenAISignatureMMDITWrapper.forward
    monkeypatch.setattr(mmdit().OpenAISignatureMMDITWrapper, "forward", functools.wraps(native)(
        lambda self, *args, **options: native(self, *args, **options)[..., 1:]))


def _replaced(monkeypatch):
    import comfy.model_base

    class NewerMMDiT(mmdit().OpenAISignatureMMDITWrapper):
        def forward(self, x, timesteps, context=None, **options):
            return super().forward(x, timesteps, context.tanh(), **options)
    native = comfy.model_base.BaseModel.__init__
    monkeypatch.setattr(comfy.model_base.SD3, "__init__", lambda self, config, device=None: native(
        self, config, comfy.model_base.ModelType.FLOW, device=device, unet_model=NewerMMDiT))


def _other_arguments(monkeypatch):
    native = mmdit().MMDiT.__init__

    def init(self, *args, depth=28, dtype=None, device=None, operations=None, version=None, **options):
        if version is None and device != "meta":               # as the loader would set it
            raise TypeError("MMDiT.__init__() missing 1 required keyword-only argument: 'version'")
        native(self, *args, depth=depth, dtype=dtype, device=device, operations=operations, **options)
    monkeypatch.setattr(mmdit().MMDiT, "__init__", init)


def _reordered(monkeypatch):
    mutate(monkeypatch, mmdit().DismantledBlock, "post_attention",
           "x = x + gate_msa.unsqueeze(1) * self.attn.post_attention(attn)",
           "x = gate_msa.unsqueeze(1) * (x + self.attn.post_attention(attn))")


def _converted(monkeypatch):
    import comfy.supported_models
    monkeypatch.setattr(comfy.supported_models.SD3, "process_unet_state_dict", lambda self, tensors: {
        name: 2 * tensor if name == "context_embedder.weight" else tensor for name, tensor in tensors.items()})


CLASS = "OpenAISignatureMMDITWrapper"
MUTANTS = {"a renamed argument": (_renamed, f"{CLASS} fails in a test .TypeError: .*context"),
           "a value range": (_scaled, f"{CLASS} predicts another latent in a test than xDiT's workers "
                                      r"\(relative difference 1\)"),
           "a method that is gone": (_gone, f"{CLASS} fails in a test .AttributeError: .*unpatchify"),
           "another shape": (_of_another_shape, f"{CLASS} predicts the shape"),
           "a class that is replaced": (_replaced, "NewerMMDiT predicts another latent"),
           "arguments of the constructor": (_other_arguments, f"a small {CLASS} cannot be built in a test .TypeError: "
                                                              ".*'version'"),
           "an order of operations": (_reordered, f"{CLASS} predicts another latent"),
           "a conversion of weights": (_converted, f"{CLASS} predicts another latent")}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_changed_class_is_rejected_before_sampling(comfyui, user, monkeypatch, mutant):
    change, words = MUTANTS[mutant]
    change(monkeypatch)

    with pytest.raises(comfyui.errors.UnsupportedError, match=SENTENCE.format("SD3") + words):
        sampled(comfyui, "sd3")


def test_a_changed_class_is_rejected_by_what_was_stored_too(comfyui, user, monkeypatch):
    _scaled(monkeypatch)
    for _ in range(2):
        with pytest.raises(comfyui.errors.UnsupportedError, match=SENTENCE.format("SD3")):
            sampled(comfyui, "sd3")
    monkeypatch.undo()
    comfyui.folder_paths.set_user_directory(str(user.parents[1]))

    close(sampled(comfyui, "sd3"), comfyui.reference("sd3", steps=1), 2e-5)


def test_a_mapping_of_lora_names_that_changes_is_followed(comfyui, user, loras, monkeypatch):  # noqa: F811
    """The names are those of this ComfyUI on both sides."""
    import comfy.lora
    native, layer = comfy.lora.model_lora_keys_unet, "joint_blocks.0.x_block.mlp.fc1"
    other = layer.replace("blocks.0", "blocks.1")

    def changed(model, key_map={}):
        found = native(model, key_map)
        return found | {f"diffusion_model.{layer}": found[f"diffusion_model.{other}"]}
    name = loras.file("sd3", adapter="lora", part=layer)
    monkeypatch.setattr(comfy.lora, "model_lora_keys_unet", changed)
    ours, reference = (loras.load(model, name) for model in (comfyui.ours("sd3", comfyui.config()),
                                                             comfyui.native("sd3")))

    want = comfyui.sample(reference, "sd3", steps=1)
    close(comfyui.sample(ours, "sd3", steps=1), want, 2e-5)
    assert relative_error(want, comfyui.reference("sd3", steps=1)) > 1e-3


def test_a_lora_alone_is_rejected_where_it_alone_differs(comfyui, user, loras, check, monkeypatch):  # noqa: F811
    """As where rows of a weight are of another tensor than its name says."""
    native = check.weight_sources

    def elsewhere(checkpoint, base_model):
        found = native(checkpoint, base_model)
        first, second = (f"joint_blocks.{number}.x_block.mlp.fc1.weight" for number in (0, 1))
        return found | {first: found[second]}
    monkeypatch.setattr(check, "weight_sources", elsewhere)
    ours = comfyui.ours("sd3", comfyui.config())

    close(comfyui.sample(ours, "sd3", steps=1), comfyui.reference("sd3", steps=1), 2e-5)
    with pytest.raises(comfyui.errors.UnsupportedError, match=SENTENCE.format("SD3") + re.escape(
            "OpenAISignatureMMDITWrapper predicts another latent in a test with a LoRA in the publisher's names")):
        comfyui.sample(loras.load(ours, loras.file("sd3", adapter="lora")), "sd3", steps=1)


def _as_comfyui_makes_them(monkeypatch):
    """Undo what tests/support/tiny_checkpoints.py has made thin."""
    import comfy.ldm.ace.model as ace
    import comfy.ldm.anima.model as anima
    import comfy.ldm.genmo.joint_model.asymm_models_joint as mochi
    from comfy.ldm.genmo.joint_model.layers import FeedForward
    from comfy.ldm.triposplat.model import LatentSeqMMFlowModel
    monkeypatch.setattr(ace, "LyricEncoder", ace.LyricEncoder.func)
    monkeypatch.setattr(anima, "LLMAdapter", anima.LLMAdapter.func)
    monkeypatch.setattr(mochi, "FeedForward", FeedForward)
    monkeypatch.setattr(LatentSeqMMFlowModel, "_forward", LatentSeqMMFlowModel._forward.__wrapped__)


@pytest.mark.everyone
@pytest.mark.parametrize("kind", by_default(("anima", "triposplat"), ("anima", "triposplat", "mochi", "ace-step-1.0")))
def test_components_of_fixed_size_are_narrowed(comfyui, check, monkeypatch, kind):
    base_model = comfyui.ours(kind, comfyui.config()).model
    _as_comfyui_makes_them(monkeypatch)

    assert check.compare(check.build_pair(families()[kind], base_model)) == {"prediction": "", "lora": ""}
