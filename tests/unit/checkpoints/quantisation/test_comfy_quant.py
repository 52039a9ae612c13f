"""Files of ComfyUI's quantised formats, as its own quantiser writes them: our model equals ComfyUI's own of the same
file, layer by layer to the bit, and holds what the file holds."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.comfy_quants import SMOOTHED, WRITTEN, save_comfy_quant
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import families
from tests.support.tolerances import close, relative_error, within
from tests.unit.checkpoints.offload.test_offloaded_files import loaded_of, prediction
from tests.unit.checkpoints.quantisation.test_layerwise_casting import native_model, native_prediction, ours
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.quantisation import kitchen_layers
from xdit_backend.checkpoints.quantisation.layer_formats import FORMATS as FORMATS_READ
from xdit_backend.checkpoints.quantisation.quantised_weights import packed_weights
from xdit_backend.checkpoints.weight_deltas import change_weights
from xdit_backend.protocol.errors import CheckpointError
from xdit_backend.protocol.shared_memory import SegmentStore
from xdit_backend.protocol.specs import Change, LowRank
from xdit_backend.worker.weight_residency import Residency

CPU = torch.device("cpu")
# inputs, on any device
ROUNDING = "int8_tensorwise", "int8_per_row", "int8_convrot", "convrot_w4a4", "asym_w4a8_int8", "mixed"
FORMATS, KINDS = [*WRITTEN, "mixed"], ("sd3", "flux", "wan", "pixart", "sdxl")
# whose feed-forwards begin with two matrices, which MiniMax H3's files have as one
HALVED = [*(("ovis-image", format_) for format_ in FORMATS), ("minimax-h3", "int8_convrot"),
          ("minimax-h3-curve", "int8_convrot"), ("minimax-h3", "nvfp4"), ("minimax-h3", "float8_e4m3fn")]
DEFAULT = {("sd3", "mixed"), ("sd3", "nvfp4"), ("flux", "mxfp8"), ("flux", "int8_convrot"), ("wan", "convrot_w4a4"),
           ("sd3", "asym_w4a8_int8"), *HALVED}
# two numbers a byte, by which ComfyUI does not recognise a U-Net
PACKED = "nvfp4", "convrot_w4a4", "asym_w4a8_int8", "mixed"
WHOLE = [(kind, format_) for kind in KINDS for format_ in FORMATS
         if (kind != "sdxl" or format_ not in PACKED)
         and (kind == "sd3" or format_ in ("mixed", "int8_per_row") or (kind, format_) in DEFAULT)] + HALVED
LAYERS = [(kind, format_) for kind, family in families().items() for format_ in FORMATS
          if not (family.plan.takes_unet_patches and format_ in PACKED)]


def moved(seed):
    """A function: latent -> the same but for the sixth digit."""
    return lambda latent: latent * (1 + 1e-6 * torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("case", by_default(DEFAULT.__contains__, WHOLE), ids="-".join)
def test_a_prediction_equals_comfyuis(file_of, tmp_path, case):
    """A product whose inputs are rounded makes steps of them: where one falls to the other side, all that follows does.
    So ComfyUI's own prediction of a latent that differs in the sixth digit says how far off two can be."""
    (kind, format_), path = case, tmp_path / "quantised.safetensors"
    family = families()[kind]
    save_comfy_quant(path, file_of(kind), format_)
    with torch.inference_mode():
        model = native_model(path, None)
        want = native_prediction(model, path, family)
        result, exact = (ours(file, family, "float32") for file in (path, file_of(kind)))
        apart = max(relative_error(native_prediction(model, path, family, changed=moved(seed)), want)
                    for seed in range(3 if format_ in ROUNDING else 0)) if format_ in ROUNDING else 0

    within(relative_error(result, want), max(1e-4, 1.5 * apart))
    assert relative_error(result, exact) > max(1e-3, apart)


def check_layers(path, family, min_layers):
    """Each quantised layer of ours gives what ComfyUI's gives of the same inputs, to the bit."""
    model, checkpoint = native_model(path, None), open_checkpoint(path)
    seen = seen_of(model, lambda module: getattr(module, "quant_format", None) is not None)
    with torch.inference_mode():
        native_prediction(model, path, family)
        own = load_transformer(checkpoint.spec("float32", "float32"), CPU).model
        packed = packed_weights(checkpoint, checkpoint.meta_model())

        assert {how.source for how in packed.values()} == checkpoint.layers.keys()
        assert check_same(own, packed, seen) >= min_layers


def seen_of(model, is_chosen):
    """{name of a layer of ComfyUI's model: (inputs, outputs)}, which is filled when the model runs."""
    seen = {}

    def see(name, module, inputs, output):
        seen[name] = inputs[0].clone(), output.clone()

    for name, module in model.diffusion_model.named_modules():
        if is_chosen(module):
            module.register_forward_hook(functools.partial(see, name))
    return seen


def check_same(own, packed, seen):
    """How many layers were compared. Files may have a name more in front than ComfyUI's modules."""
    compared = 0
    for name, how in packed.items():
        layer = how.source.removesuffix(".weight")
        layer = layer if layer in seen else layer.partition(".")[2]
        if layer in seen:
            compared += 1
            tensor, output = seen[layer]
            result = own.get_submodule(name.removesuffix(".weight"))(tensor)
            assert torch.equal(result, how.take(output.movedim(-1, 0)).movedim(0, -1)), name
    return compared


@pytest.mark.parametrize("case", by_default(DEFAULT.__contains__, LAYERS), ids="-".join)
def test_layers_equal_comfyuis_to_the_bit(file_of, tmp_path, case):
    (kind, format_), path = case, tmp_path / "quantised.safetensors"
    _, quantised = save_comfy_quant(path, file_of(kind), format_, more=SMOOTHED if format_ == "nvfp4" else None)

    check_layers(path, families()[kind], len(quantised) * 2 // 3)


@pytest.fixture
def with_gpus(monkeypatch):
    """Devices are taken for cards that multiply every format, here and in ComfyUI. What the CPU cannot multiply,
    comfy-kitchen unpacks when the inputs have been rounded."""
    import comfy.model_management
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this PyTorch lacks types of these products")
    for type_ in ("fp8", "nvfp4", "mxfp8"):
        monkeypatch.setattr(comfy.model_management, f"supports_{type_}_compute", lambda device=None: True)
    monkeypatch.setattr(kitchen_layers, "has_products", lambda layer, device: True)


@pytest.mark.parametrize("format_", by_default({"float8_e4m3fn", "nvfp4"},
                                               ["float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8"]))
@pytest.mark.parametrize("more", [{}, SMOOTHED], ids=["", "smoothed"])
@pytest.mark.parametrize("kind", ["sd3", "ovis-image"])
def test_products_of_gpus_equal_comfyuis_to_the_bit(file_of, tmp_path, monkeypatch, with_gpus, kind, format_, more):
    """Of inputs that are rounded, by a scale of the file for each layer or without."""
    path, family = tmp_path / "quantised.safetensors", families()[kind]
    _, quantised = save_comfy_quant(path, file_of(kind), format_, more=more)

    try:
        check_layers(path, family, len(quantised) * 2 // 3)
    except ValueError as error:
        if "CPU does not support swizzle" not in str(error):
            raise
        pytest.skip("this PyTorch's own product says no to CPUs in a way that comfy-kitchen does not take for that")
    rounded = ours(path, family, "float32")
    monkeypatch.setattr(kitchen_layers, "has_products", lambda layer, device: False)
    assert relative_error(rounded, ours(path, family, "float32")) > 1e-3


def test_fast_float8_equals_comfyuis_to_the_bit(file_of, with_gpus):
    """Of a plain file, whose weights are rounded to float8 when they are loaded; as fp8_e4m3fn_fast says."""
    import comfy.ops
    import comfy.sd
    checkpoint, path = open_checkpoint(file_of("sd3")), file_of("sd3")
    options = {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True}
    model = comfy.sd.load_diffusion_model(str(path), model_options=options).model
    seen = seen_of(model, lambda module: isinstance(module, comfy.ops.fp8_ops.Linear))
    with torch.inference_mode():
        native_prediction(model, path, checkpoint.family)
        own = load_transformer(checkpoint.spec("float8_e4m3fn", "float32", fast=True), CPU).model
        slow = load_transformer(checkpoint.spec("float8_e4m3fn", "float32"), CPU).model

        assert len(seen) > 30
        check_same(own, packed_weights(checkpoint, checkpoint.meta_model(), "int8"), seen)
        tensor, layer = torch.randn(5, 256), "transformer_blocks.0.attn.to_q"
        assert relative_error(own.get_submodule(layer)(tensor), slow.get_submodule(layer)(tensor)) > 1e-3


@pytest.mark.parametrize("format_", ["float8_e4m3fn", "mxfp8", "int8_per_row"])
def test_layers_that_are_to_be_exact_are_as_comfyuis(file_of, tmp_path, with_gpus, format_):
    """ComfyUI unpacks them on cards too, but for int8, of which it does not heed the word."""
    path = tmp_path / "quantised.safetensors"
    save_comfy_quant(path, file_of("sd3"), format_, {"full_precision_matrix_mult": True})

    check_layers(path, families()["sd3"], 20)
    layers = open_checkpoint(path).layers.values()
    assert {kitchen_layers.multiplies(layer, CPU) for layer in layers} == {format_ == "int8_per_row"}


def test_each_format_that_comfyui_reads_is_read(file_of):
    from comfy.quant_ops import QUANT_ALGOS

    assert len(QUANT_ALGOS) > 3 and QUANT_ALGOS.keys() <= FORMATS_READ.keys()


def test_a_file_of_nunchakus_is_refused_as_comfyui_itself_does_not_take_it(file_of, tmp_path):
    """Flux.1 in SVDQuant: its queries, keys and values in one, a matrix of low rank beside."""
    import comfy.sd
    path, rows, columns = tmp_path / "svdq-int4_r32-flux.1-dev.safetensors", 192, 64
    half = functools.partial(torch.zeros, dtype=torch.bfloat16)
    layer = {"qweight": torch.zeros(rows, columns // 2, dtype=torch.int8), "wscales": half(columns // 64, rows),
             "smooth_factor": half(columns), "proj_down": half(columns, 32), "proj_up": half(rows, 32)}
    plain = {"x_embedder.weight": half(columns, 64), "x_embedder.bias": half(columns)}
    save_file(plain | {f"transformer_blocks.0.qkv_proj.{name}": tensor for name, tensor in layer.items()}, path)

    with pytest.raises(RuntimeError, match="Could not detect model type"):
        comfy.sd.load_diffusion_model(str(path))
    with pytest.raises(CheckpointError, match=r"^Use the bf16, .*svdq-int4_r32.*transformer_blocks.0.qkv_proj.qweight: "
                                              r"SVDQuant, .*nunchaku's nodes run such a file, on one GPU"):
        open_checkpoint(path)


def test_an_all_in_one_checkpoint_says_of_its_model_alone(file_of, tmp_path):
    """In its metadata, beside what it says of a text encoder in the same way."""
    path, whole = tmp_path / "quantised.safetensors", tmp_path / "all.safetensors"
    save_comfy_quant(path, file_of("sd3"), "nvfp4")
    prefix, tensors = "model.diffusion_model.", load_file(path)
    marks = {name: tensors.pop(name) for name in list(tensors) if name.endswith(".comfy_quant")}
    said = {prefix + name.removesuffix(".comfy_quant"): json.loads(mark.numpy().tobytes())
            for name, mark in marks.items()}
    others = {"text_encoders.t5xxl.fc.weight": torch.zeros(32, 32, dtype=torch.float8_e4m3fn),
              "text_encoders.t5xxl.fc.weight_scale": torch.ones(())}
    said["text_encoders.t5xxl.fc"] = {"format": "float8_e4m3fn"}
    save_file({prefix + name: tensor for name, tensor in tensors.items()} | others, whole,
              {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": said})})

    assert open_checkpoint(whole).layers == open_checkpoint(path).layers
    with torch.inference_mode():
        close(*(ours(file, families()["sd3"], "float32") for file in (path, whole)), 1e-5)


@pytest.mark.parametrize("format_", by_default({"nvfp4", "mixed"}, FORMATS))
def test_a_rank_holds_what_the_file_holds(file_of, tmp_path, format_):
    """But for what stands around a matrix of scales, and the scales of parts of fused weights."""
    path = tmp_path / "quantised.safetensors"
    save_comfy_quant(path, file_of("sd3"), format_)
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec("float32", "float32")

    model = load_transformer(spec, CPU).model

    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert held == checkpoint.weight_table(spec).resident_bytes
    in_file = sum(tensor.nbytes for name, tensor in load_file(path).items() if not name.endswith("comfy_quant"))
    assert 0.99 < held / in_file < 1.01


@pytest.fixture
def store():
    store = SegmentStore()
    yield store
    store.close()


QKV = "joint_blocks.0.x_block.attn.qkv.weight"


@pytest.mark.parametrize("format_", by_default({"int8_convrot", "convrot_w4a4", "nvfp4"}, WRITTEN))
def test_a_lora_is_added_beside_a_quantised_weight(file_of, store, tmp_path, format_):
    """The product of the factors, of inputs that are not rounded; without it, every bit is as before, and with it
    again (hooks change a weight and back within a step); a merged weight is plain numbers."""
    path = tmp_path / "quantised.safetensors"
    save_comfy_quant(path, file_of("sd3"), format_)
    loaded = load_transformer(open_checkpoint(path).spec("float32", "float32"), CPU)
    linear, tensor = loaded.model.transformer_blocks[0].attn.to_k, torch.randn(5, 256)
    before, up, down = linear(tensor), torch.randn(768, 2), torch.randn(2, 256)

    added = {QKV: Change(None, (LowRank(store.share(up), store.share(down), 0.5),), "float32", "float32")}

    change_weights(loaded, added)

    with_it = linear(tensor)
    close(with_it - before, 0.5 * tensor @ down.T @ up[256:512].T, 1e-5)
    for changes, want in (({QKV: Change(None, ())}, before), (added, with_it)):
        change_weights(loaded, changes)
        assert torch.equal(linear(tensor), want)
    whole = torch.randn(768, 256)
    change_weights(loaded, {QKV: Change(store.share(whole), ())})
    close(linear(tensor) - linear.bias, tensor @ whole[256:512].T, 1e-5)
    change_weights(loaded, {QKV: Change(None, ())})
    assert torch.equal(linear(tensor), before)


@pytest.mark.parametrize("format_", by_default({"mixed"}, FORMATS))
def test_parked_weights_are_what_the_file_has_and_come_back(file_of, store, tmp_path, format_):
    path = tmp_path / "quantised.safetensors"
    save_comfy_quant(path, file_of("sd3"), format_)
    loaded = loaded_of(open_checkpoint(path).spec("float32", "float32"))
    model, before = loaded.transformer.model, prediction(loaded)
    residency = Residency(model, {}, torch.Tensor.clone, lambda weight, home: home.copy_(weight))
    held = int(residency.numbers["weight_bytes"])

    residency.park([held], 0, store.create((held,), torch.uint8)[0])

    assert residency.device_bytes == 0 and residency.parked_bytes == held
    # each begins at a multiple of 64 bytes
    assert held < 1.05 * sum(tensor.nbytes for name, tensor in load_file(path).items() if "comfy_quant" not in name)
    residency.restore()
    assert torch.equal(prediction(loaded), before)
