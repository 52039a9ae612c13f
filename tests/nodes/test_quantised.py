"""Our MODEL of a quantised file draws what ComfyUI draws with the dequantised weights, under every kind of layout."""

import functools

import pytest
from safetensors.torch import save_file

from tests.tiny_checkpoints import metadata_of, save_gguf, save_scaled
from tests.tolerances import close, relative_error

LAYOUTS = {"one": {}, "cfg2": {"cfg": 2}, "ulysses2": {"ulysses": 2},
           "stale-patches": {"pipefusion": 2, "num_patches": 2, "warmup_steps": 1}}
FORMATS = {"scaled": lambda path, source: save_scaled(path, source, per_row=True), "Q4_K": functools.partial(save_gguf, type_="Q4_K")}


@pytest.fixture(scope="module")
def files_of(comfyui):
    """files_of(kind, format): names of the quantised file, and of one with the same weights as plain numbers."""
    def files(kind, format_):
        folder, source = comfyui.base / "diffusion_models", comfyui.base / "diffusion_models" / comfyui.file(kind)
        end = "safetensors" if format_ == "scaled" else "gguf"
        quantised, plain = f"{kind}-{format_}.{end}", f"{kind}-{format_}-plain.safetensors"
        if not (folder / plain).exists():
            save_file(FORMATS[format_](folder / quantised, source), folder / plain, metadata_of(source))
        return quantised, plain
    return files


CASES = [("scaled", "one"), ("Q4_K", "one"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
    ("scaled", "stale-patches"), ("Q4_K", "cfg2"), ("Q4_K", "ulysses2"), ("Q4_K", "stale-patches")))]


@pytest.mark.parametrize("format_, layout", CASES)
def test_latents_equal_those_of_the_dequantised_weights(comfyui, files_of, format_, layout):
    """Stale patches are compared with our own of those, the rest with ComfyUI's."""
    quantised, plain = files_of("sd3", format_)
    config = comfyui.config("cpu,cpu" if LAYOUTS[layout] else "cpu", **LAYOUTS[layout])
    result = comfyui.sample(comfyui.load_model.execute(quantised, "default", config).args[0], "sd3")

    if "pipefusion" in LAYOUTS[layout]:
        reference = comfyui.sample(comfyui.load_model.execute(plain, "default", config).args[0], "sd3")
    else:
        reference = comfyui.sample(comfyui.nodes.UNETLoader().load_unet(plain, "default")[0], "sd3")
    close(result, reference, 1e-5)
    assert relative_error(result, comfyui.reference("sd3")) > 1e-3


def test_gguf_files_are_listed(comfyui, files_of):
    """Of models/diffusion_models, and of the folder that another pack registers."""
    (comfyui.base / "elsewhere" / "below").mkdir(parents=True)
    (comfyui.base / "elsewhere" / "below" / "wan.gguf").touch()
    name, _ = files_of("sd3", "Q4_K")
    comfyui.folder_paths.folder_names_and_paths["unet_gguf"] = ([str(comfyui.base / "elsewhere")], {".gguf"})
    try:
        options = comfyui.load_model.define_schema().inputs[0].options
    finally:
        del comfyui.folder_paths.folder_names_and_paths["unet_gguf"]

    assert name in options and "below/wan.gguf" in options


def test_what_is_not_honoured_of_a_quantised_file_is_refused_by_name(comfyui, files_of):
    model = comfyui.load_model.execute(files_of("sd3", "scaled")[0], "default", comfyui.config()).args[0]
    with pytest.raises(comfyui.errors.UnsupportedError, match="sd3-scaled.safetensors holds quantised weights"):
        model.model_state_dict()
