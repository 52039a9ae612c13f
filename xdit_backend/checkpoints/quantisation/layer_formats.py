"""Layers that ComfyUI's files hold quantised: in which format, and which tensors beside a weight belong to it. Used by
checkpoint.py; what a rank holds of them is said in quantised_weights.py.

The older mark is a tensor `scaled_fp8`, with `scale_weight` beside each scaled weight; the newer is JSON for each
layer, in a tensor `comfy_quant` or in the metadata. ComfyUI's comfy.utils.convert_old_quants, comfy.quant_ops and
comfy.ops say so.
"""

import contextlib
import math
from dataclasses import dataclass, field

import torch

from ...protocol.bounded_json import MAX_SHOWN, parse_json, shown
from ...protocol.errors import CheckpointError
from ..header_limits import MAX_HEADER_BYTES, MAX_LAYER_BYTES, MAX_LAYER_VALUES
from ..safetensors_header import MAX_VALUES

FRACTIONS = ("F32", "F16", "BF16")
TILE = 128, 4                              # rows and columns of the tiles in which a file has the scales of blocks


@dataclass(frozen=True)
class Format:
    """A format of ComfyUI's (comfy.quant_ops.QUANT_ALGOS).

    stored: the header's types of the weight. held: its type on a rank. numbers: in a column as stored. block: so many
    columns share a scale; 0: a row, or the matrix, has one. scales: {a tensor that belongs to it: its header's types}.
    more: further tensors that may be there. rounds_inputs: do its products round each token's inputs, on any device, by
    the largest of them? agreed: of which inputs the largest number is that ranks can agree on which have some of them:
    those of "each" token, or, where the file has no input_scale, of "all" tokens. capability: of CUDA cards, from which
    on they round inputs too; None: none do.
    """

    stored: tuple[str, ...]
    held: torch.dtype
    scales: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"weight_scale": FRACTIONS})
    numbers: int = 1
    block: int = 0
    more: tuple[str, ...] = ()
    rounds_inputs: bool = False
    agreed: str = ""
    capability: tuple[int, int] | None = None


FORMATS = {
    "float8_e4m3fn": Format(("F8_E4M3",), torch.float8_e4m3fn, more=("input_scale",), capability=(8, 9)),
    "float8_e5m2": Format(("F8_E5M2",), torch.float8_e5m2, more=("input_scale",), capability=(8, 9)),
    "nvfp4": Format(("U8",), torch.uint8, {"weight_scale": ("F8_E4M3", "U8"), "weight_scale_2": FRACTIONS}, numbers=2,
                    block=16, more=("input_scale", "pre_quant_scale"), agreed="all", capability=(10, 0)),
    "mxfp8": Format(("F8_E4M3",), torch.float8_e4m3fn, {"weight_scale": ("F8_E8M0", "U8")}, block=32,
                    capability=(10, 0)),
    "int8_tensorwise": Format(("I8",), torch.int8, rounds_inputs=True, agreed="each"),
    "convrot_w4a4": Format(("I8", "U8"), torch.uint8, numbers=2, rounds_inputs=True)}

ATTENTION_CONFIG = ".comfy_attention.config"   # ends the name of such a tensor: see attention_configs
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}       # type of a header -> format
BESIDE = {"weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "comfy_quant", "scale_weight",
          "scale_input"}
SCALES = {"weight_scale", "weight_scale_2", "pre_quant_scale", "scale_weight"}
IN_PARAMS = "convrot", "convrot_groupsize", "linear_dtype"     # what may be said one level lower
OLD_NAMES = {"weight_scale": "scale_weight", "input_scale": "scale_input"}
ROTATIONS = (4, 16, 64, 256, 1024)         # columns that ConvRot may rotate together
W4A4_COLUMNS = 64                          # its products take as many at a time
# ends of names -> whose quantisation has them, which xDiT does not read
UNKNOWN = {".weight_scale_inv": "scales of tiles", ".absmax": "bitsandbytes", ".quant_map": "bitsandbytes",
           ".qzeros": "GPTQ or AWQ", ".qweight": "GPTQ or AWQ"}
# tensors beside a .qweight -> whose it is: nunchaku's, which has modulations in AWQ
NUNCHAKU = {"smooth_factor": "SVDQuant", "proj_down": "SVDQuant", "lora_down": "SVDQuant", "smooth": "SVDQuant",
            "wzeros": "AWQ"}
NOT_COMFYUI = ("whose 4-bit numbers lie in the order that nunchaku's kernels read. ComfyUI's own loader does not read "
               "them, so there is no picture to agree with; nunchaku's nodes run such a file, on one GPU")


@dataclass(frozen=True)
class Layer:
    """How a file holds the weight of one layer.

    shape: of the matrix. beside: {what a tensor is, such as "weight_scale": its name in the file}. num_scales: of the
    rows: 1 or as many as there are; 0: blocks have them, or there are none. rotated: so many columns are rotated
    together, by ConvRot; 0: none. exact: are products to be those of the unpacked weight, on any device? ComfyUI does
    not heed this of formats that round inputs everywhere. linear_dtype: convrot_w4a4's.
    """

    format: str
    shape: tuple[int, int]
    auxiliary: dict[str, str]
    num_scales: int
    rotated: int = 0
    exact: bool = False
    linear_dtype: str = "int4"

    @property
    def how(self):
        """The Format."""
        return FORMATS[self.format]

    @property
    def type(self):
        """What a Checkpoint says of its weight: a header's type, where the numbers and scales of rows are all there is;
        else the format."""
        return self.how.stored[0] if self.format in FLOAT8.values() else self.format

    @property
    def stored_shape(self):
        """Of the weight in the file."""
        return self.shape[0], self.shape[1] // self.how.numbers

    @property
    def block(self):
        """(numbers, columns as stored) that cannot be cut apart."""
        size = max(self.how.block, self.rotated, W4A4_COLUMNS if self.format == "convrot_w4a4" else 0, 1)
        return size, size // self.how.numbers

    @property
    def rounds_inputs(self):
        """Do its products round each token's inputs, on any device?"""
        return self.how.rounds_inputs

    @property
    def agreed(self):
        """Of "each" token's inputs, or of "all" inputs, ranks are to agree on the largest number; "": of none."""
        return "" if self.how.agreed == "all" and "input_scale" in self.auxiliary else self.how.agreed

    def auxiliary_as_stored(self, num_rows):
        """{what it is: (shape, dtype)} of what a rank that has so many of the rows holds beside them."""
        shapes = {"weight_scale": ((num_rows if self.num_scales > 1 else 1, 1), torch.float32),
                  "weight_scale_2": ((1, 1), torch.float32), "input_scale": ((1, 1), torch.float32),
                  "pre_quant_scale": ((self.shape[1],), torch.float32)}
        if self.how.block:
            shapes["weight_scale"] = (num_rows, self.shape[1] // self.how.block), torch.uint8
        return {name: shapes[name] for name in self.auxiliary}

    def weight(self, tensor):
        """The weight as a rank holds it: the file's bytes."""
        return tensor.view(self.how.held)

    def by_rows(self, tensors):
        """{what it is: tensor} of the file, as held of all rows: scales of blocks without the order of their tiles."""
        held = {}
        for name, (shape, dtype) in self.auxiliary_as_stored(self.shape[0]).items():
            if dtype == torch.uint8:
                from comfy_kitchen.float_utils import from_blocked
                held[name] = from_blocked(tensors[name].view(dtype), *shape).contiguous()
            else:
                held[name] = tensors[name].to(dtype).reshape(shape)
        return held


def layers_of(shapes, dtypes, metadata, read, file_name, prefix=""):
    """({name of a weight: Layer}, names that are no weights of the model). read(name) -> bytes of a tensor.

    prefix: of the names that the metadata says. Raises CheckpointError for other quantisations, and for layers that are
    not whole, by name.
    """
    for name in shapes:
        for end, whose in UNKNOWN.items():
            if name.endswith(end):
                whose = _nunchakus(name.removesuffix(end), shapes) or whose
                raise _refusal(file_name, f"is quantised in a way that xDiT does not read ({name}: {whose})")
    auxiliary = {name for name in shapes if name.rpartition(".")[2] in BESIDE} | ({"scaled_fp8"} & shapes.keys())
    auxiliary |= attention_configs(shapes)
    # without the mark, or beside the newer metadata, ComfyUI leaves such scales out
    is_marked = "scaled_fp8" in shapes and "_quantization_metadata" not in metadata
    said = {name.removesuffix(".scale_weight"): {
                "format": FLOAT8.get(dtypes.get(_weight(name)), "float8_e4m3fn"),
                "full_precision_matrix_mult": math.prod(shapes.get("scaled_fp8", ())) == 2}
            for name in sorted(auxiliary) if name.endswith(".scale_weight") and is_marked}
    try:
        for name in sorted(auxiliary):
            if name.endswith(".comfy_quant"):
                if math.prod(shapes[name]) > MAX_LAYER_BYTES:
                    raise ValueError(f"it has more than {MAX_LAYER_BYTES:,} bytes")
                said[name.removesuffix(".comfy_quant")] = _options(parse_json(read(name), MAX_LAYER_BYTES,
                                                                              MAX_LAYER_VALUES))
        name = "its metadata"                                  # which is heeded where both say something
        layers = parse_json(metadata.get("_quantization_metadata", "{}").encode(), MAX_HEADER_BYTES,
                            MAX_VALUES).get("layers", {})
        said |= {layer.removeprefix(prefix): _options(options) for layer, options in layers.items()
                 if layer.startswith(prefix)}                  # the others are of text encoders
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"Download {file_name} again: what it says of its quantisation cannot be read "
                              f"({name}: {error}).") from error
    found = {f"{layer}.weight": _layer(layer, options, shapes, dtypes, file_name) for layer, options in said.items()}
    lost = sorted(name for name in auxiliary if name.rpartition(".")[2] in SCALES and _weight(name) not in found)
    if lost:
        raise _refusal(file_name, f"has a scale {lost[0]}, and does not say for what format")
    return found, auxiliary


def attention_configs(names):
    """Tensors by which a file names the attention backend of a module, for versions of ComfyUI that read them. xDiT
    attends by the setting of xDiT Parallel Config, so that they are no weights of the model."""
    return {name for name in names if name.endswith(ATTENTION_CONFIG)}


def _nunchakus(layer, shapes):
    """Whose a layer's `qweight` is, where that is nunchaku's, and why it is not read; "" of another's."""
    whose = next((whose for name, whose in NUNCHAKU.items() if f"{layer}.{name}" in shapes), "")
    return whose and f"{whose}, {NOT_COMFYUI}"


def _options(said):
    """What is said of a layer, with what ConvRot's older files say one level lower: of that ComfyUI reads no more."""
    more = said.get("params", {})
    return ({name: more[name] for name in IN_PARAMS if name in more} if isinstance(more, dict) else {}) | said


def _layer(layer, options, shapes, dtypes, file_name):
    weight, format_ = f"{layer}.weight", options.get("format")
    if not isinstance(format_, str) or format_ not in FORMATS:
        raise _refusal(file_name, f"is quantised in the format {str(format_)[:MAX_SHOWN]} ({layer}), which xDiT does "
                                  f"not read. It reads {', '.join(FORMATS)}")
    how, auxiliary = FORMATS[format_], {}
    for name in (*how.scales, *how.more):
        names = f"{layer}.{name}", f"{layer}.{OLD_NAMES.get(name)}"
        there = next((there for there in names if there in shapes), None)
        if there is not None:
            auxiliary[name] = there
    missing = [f"{layer}.{name}" for name in how.scales if name not in auxiliary]
    if weight not in shapes or missing:
        what = f"the scale of {weight} ({missing[0]})" if weight in shapes else weight
        raise CheckpointError(f"Download {file_name} again: it lacks {what}.")
    if dtypes[weight] not in how.stored or len(shapes[weight]) != 2:
        raise _refusal(file_name, f"says that {weight} is {format_}, and it is {dtypes[weight]} of shape "
                                  f"{list(shapes[weight])}")
    shape = shapes[weight][0], shapes[weight][1] * how.numbers
    rotated = _rotated(layer, format_, options, shape, file_name)
    if how.block and shape[1] % how.block:
        raise _refusal(file_name, f"says that {weight} is {format_}, and its {shape[1]} columns are no whole number of "
                                  f"blocks of {how.block}")
    for name, there in auxiliary.items():
        _check_scale(name, how, shape, (there, weight), (shapes[there], dtypes[there]), file_name)
    linear_dtype = options.get("linear_dtype", "int4")
    if linear_dtype not in ("int4", "int8"):
        raise _refusal(file_name, f"says that {weight} is multiplied in {shown(linear_dtype)}, and xDiT knows "
                                  "int4 and int8")
    return Layer(format_, shape, auxiliary, 0 if how.block else math.prod(shapes[auxiliary["weight_scale"]]), rotated,
                 bool(options.get("full_precision_matrix_mult", False)), linear_dtype)


def _rotated(layer, format_, options, shape, file_name):
    """Of how many columns ConvRot rotates together; 0: it does not."""
    if format_ != "convrot_w4a4" and not (format_ == "int8_tensorwise" and options.get("convrot", False)):
        return 0
    size = options.get("convrot_groupsize", 256)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        size = int(size)                                       # ComfyUI takes 64.0 and "64" for 64
    if size not in ROTATIONS or shape[1] % size or format_ == "convrot_w4a4" and shape[1] % W4A4_COLUMNS:
        raise _refusal(file_name, f"says that ConvRot rotates {shown(size)} columns of {layer}.weight together, which "
                                  f"has {shape[1]}. They must be {', '.join(map(str, ROTATIONS))}, and go into them")
    return size


def _check_scale(name, how, shape, names, given, file_name):
    """Refuse a scale of another shape or type than the format has. shape: of the matrix. names: of the scale and the
    weight in the file. given: (the scale's shape, its type)."""
    rows, columns = shape
    needs = (), (1,), (1, 1)
    words, types = "one number", how.scales.get(name, FRACTIONS)
    if name == "pre_quant_scale":
        needs, words = ((columns,),), f"{columns} numbers"
    elif name == "weight_scale" and how.block:
        padded = [-(-size // tile) * tile for size, tile in zip((rows, columns // how.block), TILE)]
        needs, words = (tuple(padded), (math.prod(padded),)), f"{padded[0]} x {padded[1]}"
    elif name == "weight_scale":
        needs, words = (*needs, (rows, 1)), "one number, or one for each row"
        if how.rounds_inputs:
            needs = *needs, (rows,)
    if given[0] not in needs or given[1] not in types:
        raise _refusal(file_name, f"has a scale {names[0]} of {given[1]} and shape {list(given[0])} for {names[1]} of "
                                  f"shape {list(shape)}, and xDiT reads {words}, of {' or '.join(types)}")


def _weight(name):
    return f"{name.rpartition('.')[0]}.weight"


def _refusal(file_name, why):
    return CheckpointError("Use the bf16, fp16, fp8 (plain or scaled), int8 or GGUF file of the same model: "
                           f"{file_name} {why}.")
