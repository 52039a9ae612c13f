"""Headers of quantised files as data: names, types and shapes of layers at full size, as published files have them (of
which the first block's are here, and those outside blocks), or, where the name is no file's, as ComfyUI's writer makes
them of published models. Each is read, or refused by the name of what it is."""

import json
import math

import pytest

from xdit_backend.checkpoints.quantisation.layer_formats import layers_of
from xdit_backend.protocol.errors import CheckpointError

FP8, INT8, BYTES, FLOAT = "F8_E4M3", "I8", "U8", "F32"
FLUX2 = {"double_blocks.0.img_attn.qkv": (18432, 6144), "double_blocks.0.img_attn.proj": (6144, 6144),
         "double_blocks.0.img_mlp.0": (36864, 6144), "double_blocks.0.img_mlp.2": (6144, 18432),
         "double_blocks.0.txt_mlp.2": (6144, 18432), "single_blocks.0.linear1": (55296, 6144),
         "single_blocks.0.linear2": (6144, 24576)}
FLUX2_MIXED = {"double_blocks.0.img_mlp.0": (36864, 6144), "double_blocks.0.img_mlp.2": (6144, 18432),
               "double_blocks.0.txt_mlp.0": (36864, 6144), "double_blocks.0.txt_mlp.2": (6144, 18432),
               "single_blocks.0.linear1": (55296, 6144), "single_blocks.0.linear2": (6144, 24576)}
KLEIN_4B = {"double_blocks.0.img_attn.qkv": (9216, 3072), "double_blocks.0.txt_attn.proj": (3072, 3072),
            "double_blocks.0.img_mlp.0": (18432, 3072), "double_blocks.0.txt_mlp.2": (3072, 9216),
            "single_blocks.0.linear1": (27648, 3072), "single_blocks.0.linear2": (3072, 12288)}
KLEIN_9B = {"double_blocks.0.img_attn.qkv": (12288, 4096), "double_blocks.0.img_mlp.2": (4096, 12288),
            "single_blocks.0.linear1": (36864, 4096), "single_blocks.0.linear2": (4096, 16384)}
FLUX = {"double_blocks.0.img_attn.qkv": (9216, 3072), "double_blocks.0.img_mod.lin": (18432, 3072),
        "double_blocks.0.txt_mlp.2": (3072, 12288), "single_blocks.0.linear2": (3072, 15360),
        "single_blocks.0.modulation.lin": (9216, 3072)}
WAN = {"blocks.0.self_attn.q": (5120, 5120), "blocks.0.cross_attn.o": (5120, 5120), "blocks.0.ffn.0": (13824, 5120),
       "blocks.0.ffn.2": (5120, 13824)}
WAN_WHOLE = WAN | {"text_embedding.0": (5120, 4096), "time_embedding.0": (5120, 256), "time_embedding.2": (5120, 5120),
                   "time_projection.1": (30720, 5120), "head.head": (64, 5120)}
KREA2 = {"blocks.0.attn.wq": (6144, 6144), "blocks.0.attn.wk": (1536, 6144), "blocks.0.attn.gate": (6144, 6144),
         "blocks.0.mlp.up": (16384, 6144), "blocks.0.mlp.down": (6144, 16384)}
ANIMA = {"blocks.24.self_attn.q_proj": (2048, 2048), "blocks.24.cross_attn.k_proj": (2048, 1024),
         "blocks.24.mlp.layer1": (8192, 2048), "blocks.24.mlp.layer2": (2048, 8192)}
Z_IMAGE = {"layers.0.attention.qkv": (11520, 3840), "layers.0.attention.out": (3840, 3840),
           "layers.0.feed_forward.w1": (10240, 3840), "layers.0.feed_forward.w2": (3840, 10240)}
Z_IMAGE_WHOLE = Z_IMAGE | {"x_embedder": (3840, 64), "cap_embedder.1": (3840, 2560), "t_embedder.mlp.0": (1024, 256),
                           "layers.0.adaLN_modulation.0": (15360, 256), "final_layer.linear": (64, 3840)}
QWEN = {"transformer_blocks.0.attn.to_q": (3072, 3072), "transformer_blocks.0.img_mlp.net.0.proj": (12288, 3072),
        "transformer_blocks.0.img_mlp.net.2": (3072, 12288)}
LTX2 = {"transformer_blocks.0.attn1.to_q": (4096, 4096), "transformer_blocks.0.ff.net.2": (4096, 16384),
        "transformer_blocks.0.audio_attn1.to_q": (2048, 2048)}
MINIMAX = {"blocks.0.attn.qkv_proj": (21504, 5376), "blocks.0.attn.out_proj": (5376, 7168),
           "blocks.0.mlp.fc1": (28672, 5376), "blocks.0.mlp.fc2": (5376, 14336)}
PREFIX = "model.diffusion_model."


def scaled(rows, columns):
    return {"weight": (FP8, (rows, columns)), "weight_scale": (FLOAT, ())}


def scaled_with_inputs(rows, columns):
    return scaled(rows, columns) | {"input_scale": (FLOAT, ())}


def scaled_as_before(rows, columns):
    return {"weight": (FP8, (rows, columns)), "scale_weight": (FLOAT, ()), "scale_input": (FLOAT, ())}


def scaled_by_others(rows, columns):
    return {"weight": (FP8, (rows, columns)), "scale_weight": (FLOAT, (1,))}


def nvfp4(rows, columns):
    return {"weight": (BYTES, (rows, columns // 2)), "weight_scale": (FP8, (rows, columns // 16)),
            "weight_scale_2": (FLOAT, ())}


def nvfp4_with_inputs(rows, columns):
    return nvfp4(rows, columns) | {"input_scale": (FLOAT, ())}


def mxfp8(rows, columns):
    return {"weight": (FP8, (rows, columns)), "weight_scale": (BYTES, (rows, columns // 32))}


def int8_by_one_scale(rows, columns):
    return {"weight": (INT8, (rows, columns)), "weight_scale": (FLOAT, ())}


def int8(rows, columns):
    return {"weight": (INT8, (rows, columns)), "weight_scale": (FLOAT, (rows, 1))}


def w4a4(rows, columns):
    return {"weight": (INT8, (rows, columns // 2)), "weight_scale": (FLOAT, (rows,))}


def w4a8(rows, columns):
    """Packed integers with scales of groups in float8, of channels, and a codebook."""
    return {"weight": (BYTES, (rows, columns // 2)), "weight_scale": (FP8, (rows, columns // 64)),
            "channel_scale": (FLOAT, (rows,)), "codebook": (FLOAT, (16,))}


CONVROT = {"convrot": True, "convrot_groupsize": 256}
FLOAT8 = {"format": "float8_e4m3fn"}
# file -> (layers, tensors of a layer, where it says what they are, what it says, the format, bits of a number)
READ = {
    # "scaled_fp8" marks the file; its shape says whether products are to be exact
    "wan2.2_t2v_low_noise_14B_fp8_scaled": (WAN_WHOLE, scaled_as_before, "mark", (0,), "float8_e4m3fn", 8),
    "zImageTurboFP8Kijai_fp8ScaledE4m3fn": (Z_IMAGE_WHOLE, scaled_by_others, "mark", (2,), "float8_e4m3fn", 8),
    "Qwen-Image in float8": (QWEN, scaled, "tensors", FLOAT8, "float8_e4m3fn", 8),
    # the attentions are in 16 bits
    "flux2_dev_fp8mixed": (FLUX2_MIXED, scaled_with_inputs, "metadata", FLOAT8, "float8_e4m3fn", 8),
    "flux-2-klein-4b-fp8": (KLEIN_4B, scaled_with_inputs, "metadata", FLOAT8, "float8_e4m3fn", 8),
    "anima-preview_tcfp8_mixed": (ANIMA, scaled_with_inputs, "both", FLOAT8 | {"full_precision_matrix_mult": False},
                                  "float8_e4m3fn", 8),
    "LTX-2 in float8": (LTX2, scaled_with_inputs, "metadata", FLOAT8, "float8_e4m3fn", 8),
    "LTX-2 in nvfp4": (LTX2, nvfp4, "metadata", {"format": "nvfp4"}, "nvfp4", 4.5),
    # not rotated
    "flux-2-klein-9b-int8-convrot": (KLEIN_9B, int8_by_one_scale, "tensors", {"format": "int8_tensorwise"},
                                     "int8_tensorwise", 8),
    "flux1-dev-int8-convrot": (FLUX, int8, "tensors", {"format": "int8_tensorwise", "per_row": True} | CONVROT,
                               "int8_tensorwise", 8),
    "krea2_turbo_int8_convrot": (KREA2, int8, "tensors", {"format": "int8_tensorwise"} | CONVROT, "int8_tensorwise", 8),
    "flux2-dev-nvfp4": (FLUX2, nvfp4_with_inputs, "metadata", {"format": "nvfp4"}, "nvfp4", 4.5),
    "flux2-dev-nvfp4-mixed": (FLUX2, nvfp4, "metadata", {"format": "nvfp4"}, "nvfp4", 4.5),
    # 180 layers of its 30 blocks, each with a scale of its inputs; in int8 there are 202
    "z_image_turbo_nvfp4": (Z_IMAGE, nvfp4_with_inputs, "metadata", {"format": "nvfp4"}, "nvfp4", 4.5),
    "z_image_turbo_int8_convrot": (Z_IMAGE, int8, "tensors", {"format": "int8_tensorwise"} | CONVROT, "int8_tensorwise",
                                   8),
    # 200 layers, and 250 where it is not pruned: a modulation of each block
    "minimax_h3_fl2va_pruned_int8_convrot": (MINIMAX, int8, "tensors", {"format": "int8_tensorwise"} | CONVROT,
                                             "int8_tensorwise", 8),
    "Z-Image in mxfp8": (Z_IMAGE, mxfp8, "tensors", {"format": "mxfp8"}, "mxfp8", 8.25),
    "Wan 2.2 in int8 with ConvRot": (WAN, int8, "tensors", {"format": "int8_tensorwise"} | CONVROT, "int8_tensorwise",
                                    8),
    "Z-Image in int4 with ConvRot": (Z_IMAGE, w4a4, "tensors", {"format": "convrot_w4a4"} | CONVROT, "convrot_w4a4", 4)}
REFUSED = {
    "int3 weights, int8 inputs": (QWEN, w4a8, "tensors", {"format": "asym_w3a8_int8"},
                        r"in the format asym_w3a8_int8 \(transformer_blocks.0.attn.to_q\).* It reads float8_e4m3fn"),
    "a format to come": (WAN, nvfp4, "metadata", {"format": "nvfp3"}, r"in the format nvfp3 \(blocks.0.self_attn.q\)"),
    "svdq-int4_r32-flux.1-dev": (
        {"transformer_blocks.0.qkv_proj": (9216, 3072)},
        lambda rows, columns: {"qweight": (INT8, (rows, columns // 2)), "wscales": ("BF16", (columns // 64, rows)),
                               "proj_down": ("BF16", (columns, 32)), "proj_up": ("BF16", (rows, 32)),
                               "smooth_factor": ("BF16", (columns,))}, "mark", None,
        r"transformer_blocks.0.qkv_proj.qweight: SVDQuant, .*nunchaku's kernels read.*nunchaku's nodes run such"),
    "AWQ": ({"transformer_blocks.0.norm1.linear": (18432, 3072)},
            lambda rows, columns: {"qweight": ("I32", (rows // 4, columns // 2)),
                                   "wzeros": ("BF16", (columns // 64, rows)),
                                   "wscales": ("BF16", (columns // 64, rows))}, "mark", None,
            r"transformer_blocks.0.norm1.linear.qweight: AWQ, .*ComfyUI's own loader does not read"),
    "GPTQ": ({"transformer_blocks.0.attn.to_q": (3072, 3072)},
             lambda rows, columns: {"qweight": ("I32", (columns // 8, rows)), "scales": ("F16", (columns // 128, rows)),
                                    "qzeros": ("I32", (columns // 128, rows // 8)), "g_idx": ("I32", (columns,))},
             "mark", None, r"\(transformer_blocks.0.attn.to_q.q\w+: GPTQ or AWQ\)"),
    "flux1-dev-bnb-nf4": ({"double_blocks.0.img_attn.qkv": (9216, 3072)},
                          lambda rows, columns: {"weight": (BYTES, (rows * columns // 2, 1)),
                                                 "weight.absmax": (FLOAT, (rows * columns // 64,)),
                                                 "weight.quant_map": (FLOAT, (16,))}, "mark", None,
                          r"double_blocks.0.img_attn.qkv.weight.\S+: bitsandbytes"),
    "in tiles of 128": (WAN, lambda rows, columns: {"weight": (FP8, (rows, columns)), "weight_scale_inv": (
        FLOAT, (rows // 128, columns // 128))}, "mark", None, "blocks.0.self_attn.q.weight_scale_inv: scales of tiles")}


def layers(case):
    """layers_of the header that a publisher writes."""
    shapes_of, tensors_of, where, said, *_ = case
    here = {f"{layer}.{name}": entry for layer, size in shapes_of.items() for name, entry in tensors_of(*size).items()}
    metadata, text = {}, json.dumps(said).encode()
    if where in ("metadata", "both"):
        every = dict.fromkeys([PREFIX + layer for layer in shapes_of] + ["text_encoders.t5.fc"], said)
        metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": every})}
    if where in ("tensors", "both"):
        here |= {f"{layer}.comfy_quant": (BYTES, (len(text),)) for layer in shapes_of}
    if where == "mark" and said is not None:
        here["scaled_fp8"] = FP8, said
    dtypes, shapes = ({name: entry[index] for name, entry in here.items()} for index in (0, 1))
    return layers_of(shapes, dtypes, metadata, lambda name: text, "file.safetensors", PREFIX), here


@pytest.mark.parametrize("file", READ)
def test_a_published_header_is_read(file):
    case = READ[file]
    (found, auxiliary), here = layers(case)
    sizes, _, _, said, format_, bits = case

    assert {name.removesuffix(".weight"): layer.shape for name, layer in found.items()} == sizes
    assert {layer.format for layer in found.values()} == {format_}
    assert auxiliary == {name for name in here if not name.endswith(".weight")}
    rotated = said.get("convrot_groupsize", 0) if isinstance(said, dict) else 0
    assert {layer.rotated for layer in found.values()} == {rotated}
    for layer in found.values():                               # what a rank holds of it
        matrices = [(layer.stored_shape, layer.how.held), *layer.auxiliary_as_stored(layer.shape[0]).values()]
        held = sum(math.prod(shape) * dtype.itemsize for shape, dtype in matrices)
        assert 8 * held / math.prod(layer.shape) == pytest.approx(bits, rel=0.005)


def test_what_metadata_says_is_heeded_where_a_tensor_says_something_else():
    """As ComfyUI writes what they say over these tensors."""
    case = (ANIMA, scaled, "both", FLOAT8 | {"full_precision_matrix_mult": False})
    _, here = layers(case)
    dtypes, shapes = ({name: entry[index] for name, entry in here.items()} for index in (0, 1))
    metadata = json.dumps({"layers": dict.fromkeys(ANIMA, FLOAT8 | {"full_precision_matrix_mult": True})})

    def read(name):
        return json.dumps(case[3]).encode()

    found, _ = layers_of(shapes, dtypes, {"_quantization_metadata": metadata}, read, "file")

    assert {layer.exact for layer in found.values()} == {True}
    found, _ = layers_of(shapes, dtypes, {}, read, "file")
    assert {layer.exact for layer in found.values()} == {False}


def test_a_scale_of_inputs_may_be_left_of_a_layer_that_is_plain():
    """As flux2-dev-nvfp4-mixed has of layers that it holds in 16 bits."""
    shapes = {"single_blocks.0.linear1.weight": (55296, 6144), "single_blocks.0.linear1.input_scale": ()}

    found, auxiliary = layers_of(shapes, dict.fromkeys(shapes, "BF16"), {}, None, "file.safetensors")

    assert found == {} and auxiliary == {"single_blocks.0.linear1.input_scale"}


@pytest.mark.parametrize("file", REFUSED)
def test_another_header_is_refused_by_name(file):
    with pytest.raises(CheckpointError, match=REFUSED[file][4]) as refused:
        layers(REFUSED[file])

    assert str(refused.value).startswith("Use the bf16, fp16, fp8 (plain or scaled), int8 or GGUF file of the same mod")
