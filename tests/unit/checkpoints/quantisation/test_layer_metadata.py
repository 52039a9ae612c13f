"""What ComfyUI's loader heeds of a quantised layer beside its format is heeded, in each place and type in which it
takes it, and what it leaves out is left out, or refused by name. On CPUs, and on devices that are taken for cards that
multiply every format."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.comfy_quants import WRITTEN, save_comfy_quant
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import families, metadata_of
from tests.support.tolerances import close, relative_error
from tests.unit.checkpoints.quantisation.test_comfy_quant import check_layers, with_gpus  # noqa: F401
from tests.unit.checkpoints.quantisation.test_layerwise_casting import native, ours
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.protocol.errors import CheckpointError

FLOAT8, HALVES = ("float8_e4m3fn", "float8_e5m2"), (torch.float16, torch.bfloat16)


def below(said, **more):
    """All but the format where ConvRot's older files have it."""
    return {"format": said["format"], "params": {name: said[name] for name in said.keys() - {"format"}} | more}


def auxiliary(name, change):
    """Does this to a tensor beside each weight: change(the tensor, or None) -> another."""
    def do(tensors, layer):
        tensors[f"{layer}.{name}"] = change(tensors.get(f"{layer}.{name}"))
    return do


def smoothed(dtype):
    """Gives each weight factors of its inputs, in this type."""
    def do(tensors, layer):
        rows = tensors[f"{layer}.weight"]
        tensors[f"{layer}.pre_quant_scale"] = torch.linspace(0.8, 1.25, rows.shape[1] * (
            2 if rows.dtype == torch.uint8 else 1), dtype=dtype)
    return do


def as_before(mark=(2,), inputs=None):
    """As files had it before: a mark of this shape, or none; a scale of inputs."""
    def do(tensors, layer):
        tensors[f"{layer}.scale_weight"] = tensors.pop(f"{layer}.weight_scale")
        del tensors[f"{layer}.comfy_quant"]
        tensors |= {} if mark is None else {"scaled_fp8": torch.zeros(mark, dtype=torch.float8_e4m3fn)}
        tensors |= {} if inputs is None else {f"{layer}.scale_input": torch.tensor(inputs)}
    return do


# (format of WRITTEN, words of its own) -> what its layers say, or what is done to their tensors
SAID = {**{(how, "exact"): lambda said: said | {"full_precision_matrix_mult": True} for how in WRITTEN},
        **{(how, "exact below, which is left out"): lambda said: below(said, full_precision_matrix_mult=True)
           for how in ("float8_e4m3fn", "nvfp4", "int8_convrot")},
        **{(how, "all below"): below for how in ("int8_convrot", "convrot_w4a4")},
        **{(how, "a fraction"): lambda said: said | {"convrot_groupsize": 64.0}
           for how in ("int8_convrot", "convrot_w4a4")},
        ("int8_convrot", "in letters"): lambda said: said | {"convrot_groupsize": "64"},
        ("int8_convrot", "another below"): lambda said: said | {"params": {"convrot_groupsize": 16, "convrot": False}},
        ("int8_convrot", "nothing below"): lambda said: said | {"params": None},
        ("int8_per_row", "not rotated"): lambda said: said | {"convrot": False, "convrot_groupsize": 48},
        ("convrot_w4a4", "int8 products"): lambda said: said | {"linear_dtype": "int8"},
        ("convrot_w4a4", "int8 products below"): lambda said: below(said, linear_dtype="int8"),
        ("convrot_w4a4", "groups, which are left out"): lambda said: said | {"quant_group_size": 32, "group_size": 7}}
DONE = {**{(how, f"a scale of shape {shape}"): auxiliary("weight_scale", lambda scale,
                                                         shape=shape: scale.reshape(shape))
           for how in ("float8_e4m3fn", "int8_tensorwise") for shape in ((), (1,), (1, 1))},
        **{(how, f"a scale of {dtype}"): auxiliary("weight_scale", lambda scale, dtype=dtype: scale.to(dtype))
           for how in (*FLOAT8, "int8_per_row", "int8_convrot", "convrot_w4a4") for dtype in HALVES},
        **{(how, "scales in a row"): auxiliary("weight_scale", lambda scale: scale.reshape(-1))
           for how in ("int8_per_row", "int8_convrot")},
        **{("nvfp4", f"a second scale of {dtype}"): auxiliary("weight_scale_2", lambda scale,
                                                              dtype=dtype: scale.to(dtype))
           for dtype in HALVES},
        ("nvfp4", "scales in bytes"): auxiliary("weight_scale", lambda scale: scale.view(torch.uint8)),
        ("nvfp4", "smoothed"): smoothed(torch.float32),
        ("nvfp4", "smoothed in half precision"): smoothed(torch.float16),
        **{(how, "smoothed, which is left out"): smoothed(torch.float32) for how in ("float8_e4m3fn", "int8_per_row")},
        **{(how, "a scale of inputs"): auxiliary("input_scale", lambda none: torch.tensor(0.03))
           for how in (*FLOAT8, "nvfp4", "mxfp8", "int8_per_row", "convrot_w4a4")},
        **{(how, "a scale of inputs in a row"): auxiliary("input_scale", lambda none: torch.tensor([0.03]))
           for how in ("float8_e4m3fn", "nvfp4")},
        **{("float8_e4m3fn", f"as before, {mark}, {inputs}"): as_before(mark, inputs)
           for mark, inputs in (((2,), None), ((0,), 0.5), ((1,), 1.0))}}
UNMARKED = "float8_e4m3fn", "as before, without the mark"
EMBEDDED = {"anima": "llm_adapter.embed", "ace-step-1.0": "lyric_embs"}
CHOSEN = [("float8_e4m3fn", "exact below, which is left out"), ("int8_convrot", "a fraction")]


def written(folder, source, case):
    """The path of a file of the case."""
    path, made = folder / "whole.safetensors", folder / "other.safetensors"
    save_comfy_quant(path, source, case[0])
    tensors = load_file(path)
    for mark in [name for name in tensors if name.endswith(".comfy_quant")]:
        if case in SAID:
            text = json.dumps(SAID[case](json.loads(tensors[mark].numpy().tobytes())))
            tensors[mark] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        else:
            (DONE | {UNMARKED: as_before(None)})[case](tensors, mark.removesuffix(".comfy_quant"))
    save_file(tensors, made, metadata_of(path))
    return made


@pytest.mark.parametrize("has_gpus", [False, True], ids=["cpu", "card"])
@pytest.mark.parametrize("case", by_default(CHOSEN, [*SAID, *DONE]), ids="-".join)
def test_a_layer_is_as_comfyuis_to_the_bit(file_of, tmp_path, request, case, has_gpus):
    if has_gpus:
        request.getfixturevalue("with_gpus")

    check_layers(written(tmp_path, file_of("sd3"), case), families()["sd3"], 20)


def test_scales_that_comfyui_leaves_out_are_refused_by_name(file_of, tmp_path):
    """It draws what the numbers say without them."""
    import comfy.sd
    path = written(tmp_path, file_of("sd3"), UNMARKED)
    modules = list(comfy.sd.load_diffusion_model(str(path)).model.diffusion_model.modules())

    assert len(modules) > 50 and not any(getattr(module, "quant_format", None) for module in modules)
    with pytest.raises(CheckpointError, match=r"has a scale joint_blocks\.\S+\.scale_weight without a format"):
        open_checkpoint(path)


def test_no_scale_is_read_of_an_older_file_whose_metadata_says_of_others(file_of, tmp_path):
    """ComfyUI then takes the metadata alone."""
    path = tmp_path / "marked.safetensors"
    made = written(tmp_path, file_of("sd3"), ("float8_e4m3fn", "as before, (2,), None"))
    save_file(load_file(made), path, {"_quantization_metadata": json.dumps({"layers": {}})})

    assert open_checkpoint(made).layers
    with pytest.raises(CheckpointError, match=r"has a scale joint_blocks\.\S+\.scale_weight"):
        open_checkpoint(path)


@pytest.mark.parametrize("case", by_default([("anima", "int8_convrot")], [
    (kind, how) for kind in EMBEDDED for how in (*FLOAT8, "int8_tensorwise", "int8_per_row", "int8_convrot")]),
    ids="-".join)
def test_an_embedding_is_looked_up_as_comfyuis(file_of, tmp_path, case):
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
    (kind, how), path = case, tmp_path / "quantised.safetensors"
    format_, options, _ = WRITTEN[how]
    tensors, layer = load_file(file_of(kind)), EMBEDDED[kind]
    weight = tensors.pop(f"{layer}.weight")
    rounded = QuantizedTensor.from_float(weight, QUANT_ALGOS[format_]["comfy_tensor_layout"], **options)
    rotated = {"convrot": True, "convrot_groupsize": 64} if "convrot" in how else {}
    tensors |= rounded.state_dict(f"{layer}.weight") | {f"{layer}.comfy_quant": torch.tensor(
        list(json.dumps({"format": format_} | rotated).encode()), dtype=torch.uint8)}
    save_file(tensors, path, metadata_of(file_of(kind)))

    with torch.inference_mode():
        result, want = (predicted(path, families()[kind]) for predicted in (
            lambda *file: ours(*file, "float32"), lambda *file: native(*file, None)))
        close(result, want, 1e-5)
        assert relative_error(want, ours(file_of(kind), families()[kind], "float32")) > 1e-5
