"""Our MODEL of a quantised file draws what ComfyUI draws with the dequantised weights, under every kind of layout."""

import contextlib
import functools
import importlib.util

import pytest
import torch
from safetensors.torch import save_file

from tests.programs.model_nodes import model_nodes, run_node
from tests.support.comfy_quants import WRITTEN, save_comfy_quant
from tests.support.tiny_checkpoints import metadata_of, save_dequantised, save_gguf, save_scaled
from tests.support.tolerances import close, relative_error, within

LAYOUTS = {"one": {}, "cfg2": {"cfg": 2}, "tensor2": {"tensor": 2}, "ulysses2": {"ulysses": 2},
           "stale-patches": {"pipefusion": 2, "num_patches": 2, "warmup_steps": 1}}
FORMATS = {"scaled": lambda path, source: save_scaled(path, source, per_row=True),
           **{format_: functools.partial(lambda format_, path, source: save_comfy_quant(path, source, format_)[0],
                                         format_) for format_ in WRITTEN},
           **{type_: functools.partial(save_gguf, type_=type_) for type_ in ("Q4_K", "Q8_0", "IQ2_XS")}}

WHEN_LOADED = ("int8", "nf4")                                  # of weight_dtype


def ours(comfyui, files, format_, config):
    return comfyui.load_model.execute(files[0], format_ if format_ in WHEN_LOADED else "default", config).args[0]


@pytest.fixture(scope="module")
def files_of(comfyui):
    """files_of(kind, format): names of the quantised file, or of that to quantise,
    and of one with the same weights as plain numbers."""
    def files(kind, format_):
        folder, source = comfyui.base / "diffusion_models", comfyui.base / "diffusion_models" / comfyui.file(kind)
        if format_ in WHEN_LOADED:
            plain = f"{kind}-{format_}-plain.safetensors"
            if not (folder / plain).exists():
                save_dequantised(folder / plain, source, format_)
            return comfyui.file(kind), plain
        end = "gguf" if format_.startswith(("Q", "IQ")) else "safetensors"
        quantised, plain = f"{kind}-{format_}.{end}", f"{kind}-{format_}-plain.safetensors"
        if not (folder / plain).exists():
            save_file(FORMATS[format_](folder / quantised, source), folder / plain, metadata_of(source))
        return quantised, plain
    return files


CASES = [("scaled", "one"), ("Q4_K", "one"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
    ("int8", "tensor2"),                                       # by comfy-kitchen
    ("scaled", "stale-patches"), ("Q8_0", "tensor2"), ("IQ2_XS", "one"),
    ("Q4_K", "cfg2"), ("Q4_K", "ulysses2"), ("Q4_K", "stale-patches"))),
         *(pytest.param(*case, marks=pytest.mark.quantisers) for case in (("int8", "cfg2"), ("nf4", "stale-patches")))]


@pytest.mark.parametrize("format_, layout", CASES)
def test_latents_equal_those_of_the_dequantised_weights(comfyui, files_of, format_, layout):
    """Stale patches are compared with our own of those, the rest with ComfyUI's.
    Weights that were parked are the same."""
    quantised, plain = files_of("sd3", format_)
    config = comfyui.config("cpu,cpu" if LAYOUTS[layout] else "cpu", **LAYOUTS[layout])
    model = ours(comfyui, (quantised, plain), format_, config)
    result = comfyui.sample(model, "sd3")
    comfyui.unload_all()
    assert torch.equal(comfyui.sample(model, "sd3"), result)

    if "pipefusion" in LAYOUTS[layout]:
        reference = comfyui.sample(comfyui.load_model.execute(plain, "default", config).args[0], "sd3")
    else:
        reference = comfyui.sample(comfyui.nodes.UNETLoader().load_unet(plain, "default")[0], "sd3")
    close(result, reference, 1e-5)
    assert relative_error(result, comfyui.reference("sd3")) > 1e-3


@pytest.mark.parametrize("kind", ["hidream-i1", "sd3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (
    "hunyuan3d-2.1", "wan-animate", "hunyuanvideo-1.5", "anima", "stable-audio-open", "ace-step-1.0"))])
def test_a_scale_that_comfyui_leaves_out_is_refused(comfyui, kind):
    """HiDream and Hunyuan3D choose experts by a parameter that is no layer, so ComfyUI takes its numbers without their
    scale; of Wan Animate it is what reads faces, of HunyuanVideo 1.5 an embedding that is none of ComfyUI's own, of
    Stable Audio Open the waves of a time, and of Anima and ACE-Step 1.0 one of ComfyUI's that has a scale for each
    row."""
    name = f"{kind}-all-scaled.safetensors"
    save_scaled(comfyui.base / "diffusion_models" / name, comfyui.base / "diffusion_models" / comfyui.file(kind),
                per_row=kind in ("anima", "ace-step-1.0"))

    with pytest.raises(comfyui.errors.CheckpointError, match=r"has a scale for \S+\.weight, which ComfyUI "
                                                             r"ignores") \
            if kind != "sd3" else contextlib.nullcontext():
        comfyui.load_model.execute(name, "default", comfyui.config("cpu"))


def test_a_package_that_is_missing_is_named_on_the_node(comfyui, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))

    with pytest.raises(comfyui.errors.ConfigError, match="pip install -U bitsandbytes .*: nf4 needs the package "
                                                         "bitsandbytes"):
        comfyui.ours("sd3", comfyui.config(), "nf4")


def test_files_of_every_folder_are_listed_and_load(comfyui, files_of, tmp_path, monkeypatch):
    """GGUF files of models/diffusion_models and of the folder that another pack registers, safetensors files called
    .sft, and what extra_model_paths.yaml names, by the older name of a folder too."""
    from utils.extra_config import load_extra_path_config
    name, plain = files_of("sd3", "Q4_K")
    here, folders = comfyui.base / "diffusion_models", comfyui.folder_paths.folder_names_and_paths
    places = {"below/other.gguf": tmp_path / "unet_gguf" / "below" / "other.gguf",
              "flux1-dev.sft": tmp_path / "shared" / "flux1-dev.sft",
              "sub/sd3.safetensors": tmp_path / "older" / "sub" / "sd3.safetensors",
              "whole.safetensors": tmp_path / "all" / "whole.safetensors",
              "shared.gguf": tmp_path / "shared" / "shared.gguf"}
    for path in places.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(here / (name if path.suffix == ".gguf" else plain))
    (tmp_path / "extra_model_paths.yaml").write_text(
        f"other:\n    base_path: {tmp_path}\n    diffusion_models: shared\n    unet: older\n    checkpoints: all\n")
    for folder in ("diffusion_models", "checkpoints"):         # which the file of paths adds to
        monkeypatch.setitem(folders, folder, ([*folders[folder][0]], folders[folder][1]))
    monkeypatch.setattr(comfyui.folder_paths, "filename_list_cache", {})
    monkeypatch.setitem(folders, "unet_gguf", ([str(tmp_path / "unet_gguf")], {".gguf"}))
    load_extra_path_config(str(tmp_path / "extra_model_paths.yaml"))

    options = comfyui.load_model.define_schema().inputs[0].options
    models = {listed: comfyui.load_model.execute(listed, "default", comfyui.config("cpu")).args[0] for listed in places}

    assert {name, *places} <= set(options)
    assert {listed: model.remote.spec.path
            for listed, model in models.items()} == {listed: str(path) for listed, path in places.items()}
    own = ours(comfyui, (name, plain), "Q4_K", comfyui.config("cpu"))
    assert torch.equal(*(comfyui.sample(model, "sd3", steps=1) for model in (models["below/other.gguf"], own)))


@pytest.mark.parametrize("format_", ["scaled", "Q4_K", "nvfp4", pytest.param("int8", marks=pytest.mark.quantisers)])
def test_a_quantised_file_is_not_saved_and_says_so(comfyui, files_of, tmp_path, format_):
    """With a LoRA or without; nothing is written. Nor is it what is mixed into another model."""
    nodes = model_nodes(comfyui)
    save = nodes["ModelSave"]()
    save.output_dir = str(tmp_path)
    model = ours(comfyui, files_of("sd3", format_), format_, comfyui.config())
    changed = model.clone()
    changed.add_patches({"diffusion_model.joint_blocks.0.x_block.attn.proj.weight": ("diff", (torch.ones(256, 256),))},
                        0.5)
    reason = "was quantised as it was loaded" if format_ == "int8" else "has quantised weights"

    for each in (model, changed):
        with pytest.raises(comfyui.errors.UnsupportedError, match="ModelSave, CheckpointSave.*" + reason):
            save.save(each, "sub/ours")
        with pytest.raises(comfyui.errors.UnsupportedError, match=reason):
            run_node(nodes["ModelMergeSimple"], {"model1": comfyui.native("sd3"), "model2": each, "ratio": 0.5})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_quantised_file_is_not_quantised_again(comfyui, files_of):
    for format_, type_ in (("scaled", "F8_E4M3"), ("Q4_K", "Q4_K")):
        with pytest.raises(comfyui.errors.ConfigError, match=f"weight_dtype nf4 would quantise .* whose weights are "
                                                             f"{type_} already"):
            comfyui.load_model.execute(files_of("sd3", format_)[0], "nf4", comfyui.config())


# but for those that round inputs to integers, where rounding decides more than this does
@pytest.mark.parametrize("format_", ["nvfp4", *(pytest.param(each, marks=pytest.mark.slow) for each in WRITTEN
                                                if each != "nvfp4" and not each.startswith(("int8", "convrot")))])
def test_of_a_quantised_file_float8_rounds_what_is_of_no_linear_layer(comfyui, files_of, format_):
    """As ComfyUI's own loader does it; the picture is another than of the file as it is."""
    name, words = files_of("sd3", format_)[0], ("fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2")
    with torch.inference_mode():                               # from the loader on, as ComfyUI runs nodes
        models = {word: comfyui.nodes.UNETLoader().load_unet(name, word)[0] for word in ("default", *words)}
        linears = [module for module in models[words[0]].model.diffusion_model.modules()
                   if isinstance(module, torch.nn.Module) and hasattr(module, "in_features")]
        want = {word: comfyui.sample(model, "sd3", steps=2) for word, model in models.items()}

        assert {module.weight.dtype for module in linears} == {torch.float32}
        for word in words:
            model = comfyui.load_model.execute(name, word, comfyui.config("cpu,cpu", cfg=2)).args[0]
            close(comfyui.sample(model, "sd3", steps=2), want[word], 1e-4)
            within(1e-3, relative_error(want["default"], want[word]))


def test_a_file_whose_layers_are_quantised_has_no_lighter_type(comfyui, files_of):
    model, of_gguf = (comfyui.load_model.execute(file, word, comfyui.config("cpu")).args[0]
                      for file, word in ((files_of("sd3", "nvfp4")[0], "default"),
                                         (files_of("sd3", "Q4_K")[0], "fp8_e4m3fn")))
    assert not model.model.remote.memory._lighter_bytes() and of_gguf.model.remote.memory._lighter_bytes()


@pytest.mark.parametrize("format_", ["Q4_K", "nvfp4", *(pytest.param(each, marks=pytest.mark.slow) for each in WRITTEN
                                                        if each != "nvfp4"),
                                     pytest.param("int8", marks=pytest.mark.quantisers)])
def test_another_model_is_merged_into_one_of_a_quantised_file(comfyui, files_of, format_):
    _, plain = files_of("sd3", format_)
    merge = model_nodes(comfyui)["ModelMergeSimple"]
    models = (ours(comfyui, files_of("sd3", format_), format_, comfyui.config("cpu")),
              comfyui.nodes.UNETLoader().load_unet(plain, "default")[0])

    merged = [run_node(merge, {"model1": model, "model2": comfyui.native("sd3"), "ratio": 0.3})[0] for model in models]
    result, reference = (comfyui.sample(model, "sd3", steps=2) for model in merged)

    close(result, reference, 1e-5)
    assert relative_error(reference, comfyui.sample(models[1], "sd3", steps=2)) > 1e-3
