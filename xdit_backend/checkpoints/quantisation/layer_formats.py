"""Formats of quantised layers in ComfyUI's files, and the auxiliary tensors of each weight.

The older marker is a tensor `scaled_fp8`, with `scale_weight` next to each scaled weight; the newer is JSON for each
layer, in a tensor `comfy_quant` or in the metadata. Sources: ComfyUI's comfy.utils.convert_old_quants, comfy.quant_ops
and comfy.ops.
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
TILE = 128, 4                              # rows and columns of the tiles that store block scales in a file


@dataclass(frozen=True)
class Format:
    """A ComfyUI format (comfy.quant_ops.QUANT_ALGOS).

    stored: safetensors types of the weight. `held`: its torch dtype on a rank. numbers: elements per stored column.
    block: columns that share a scale; 0: a scale per row, or per matrix. scales: {auxiliary tensor: its safetensors
    types}. more: optional auxiliary tensors. rounds_inputs: whether matrix multiplications round each token's inputs by
    their maximum, on any device. group: columns that share a relative scale, unless a layer's metadata says otherwise;
    0: the format has none. agreed: inputs whose maximum ranks that have only some of them can agree on: those of
    "each" token, or, if the file has no input_scale, of "all" tokens. capability: CUDA compute capability from which
    inputs are rounded too; None: never.
    """

    stored: tuple[str, ...]
    held: torch.dtype
    scales: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"weight_scale": FRACTIONS})
    numbers: int = 1
    block: int = 0
    more: tuple[str, ...] = ()
    rounds_inputs: bool = False
    group: int = 0
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
    "convrot_w4a4": Format(("I8", "U8"), torch.uint8, numbers=2, rounds_inputs=True),
    "asym_w4a8_int8": Format(("I8", "U8"), torch.uint8, {"weight_s_rel": ("F8_E4M3", "U8", "F32"),
                                                         "weight_s_channel": ("F32",)}, numbers=2,
                             more=("weight_codebook",), rounds_inputs=True, group=16)}

ATTENTION_CONFIG = ".comfy_attention.config"                            # suffix, see attention_configs
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}       # safetensors type -> format
BY_ROW = ("weight_s_rel", "weight_s_channel")                  # auxiliary tensors of asym_w4a8_int8
AUXILIARY = {"weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "comfy_quant", "scale_weight",
             "scale_input", *BY_ROW, "weight_codebook"}
SCALES = {"weight_scale", "weight_scale_2", "pre_quant_scale", "scale_weight", *BY_ROW, "weight_codebook"}
# options that may be nested in "params"
IN_PARAMS = "convrot", "convrot_groupsize", "linear_dtype", "group_size"
OLD_NAMES = {"weight_scale": "scale_weight", "input_scale": "scale_input"}
ROTATIONS = (4, 16, 64, 256, 1024)         # group sizes of ConvRot's rotation, in columns
W4A4_COLUMNS = 64                          # columns of a block in its matrix multiplications
ROTATING = "convrot_w4a4", "asym_w4a8_int8"                    # formats that are always rotated
MIN_GROUP = 4                              # columns that share a relative scale
LEVELS = 16                                # of a 4-bit number, in a codebook
# suffixes of tensor names -> unsupported quantisation methods that use them
UNKNOWN = {".weight_scale_inv": "scales of tiles", ".absmax": "bitsandbytes", ".quant_map": "bitsandbytes",
           ".qzeros": "GPTQ or AWQ", ".qweight": "GPTQ or AWQ"}
# tensors next to a .qweight -> nunchaku's method, with AWQ for modulations
NUNCHAKU = {"smooth_factor": "SVDQuant", "proj_down": "SVDQuant", "lora_down": "SVDQuant", "smooth": "SVDQuant",
            "wzeros": "AWQ"}
NOT_COMFYUI = ("whose 4-bit numbers are in the order that nunchaku's kernels read. ComfyUI's own loader does not read "
               "them either, so xDiT has no reference to match; nunchaku's nodes run such a file, on one GPU")


@dataclass(frozen=True)
class Layer:
    """The quantised weight of one layer in a file.

    shape: of the matrix. auxiliary: {auxiliary tensor, such as "weight_scale": its name in the file}. num_scales: of
    the rows: 1 or the number of rows; 0: scales of blocks, or none. rotated: columns that ConvRot rotates together; 0:
    none. exact: whether matrix multiplications use the unpacked weight on any device, which ComfyUI ignores for formats
    that round inputs everywhere. linear_dtype: of convrot_w4a4. group: columns that share a relative scale; 0: none.
    relative: dtype of these scales.
    """

    format: str
    shape: tuple[int, int]
    auxiliary: dict[str, str]
    num_scales: int
    rotated: int = 0
    exact: bool = False
    linear_dtype: str = "int4"
    group: int = 0
    relative: torch.dtype = torch.float8_e4m3fn

    @property
    def how(self):
        """The Format."""
        return FORMATS[self.format]

    @property
    def type(self):
        """The type of the weight in Checkpoint.dtypes: a safetensors type if there are only numbers and scales of rows,
        otherwise the format."""
        return self.how.stored[0] if self.format in FLOAT8.values() else self.format

    @property
    def stored_shape(self):
        """Shape of the weight in the file."""
        return self.shape[0], self.shape[1] // self.how.numbers

    @property
    def block(self):
        """(elements, stored columns) of a block that cannot be split."""
        size = max(self.how.block, self.rotated, W4A4_COLUMNS if self.format == "convrot_w4a4" else 0, 1)
        return size, size // self.how.numbers

    @property
    def rounds_inputs(self):
        """Whether matrix multiplications round each token's inputs, on any device."""
        return self.how.rounds_inputs

    @property
    def agreed(self):
        """Ranks agree on the maximum of "each" token's inputs, or of "all" inputs; "": of none."""
        return "" if self.how.agreed == "all" and "input_scale" in self.auxiliary else self.how.agreed

    def auxiliary_as_stored(self, num_rows):
        """{auxiliary tensor: (shape, dtype)} on a rank with this many of the rows."""
        shapes = {"weight_scale": ((num_rows if self.num_scales > 1 else 1, 1), torch.float32),
                  "weight_scale_2": ((1, 1), torch.float32), "input_scale": ((1, 1), torch.float32),
                  "pre_quant_scale": ((self.shape[1],), torch.float32)}
        if self.group:
            shapes |= {"weight_s_rel": ((num_rows, self.shape[1] // self.group), self.relative),
                       "weight_s_channel": ((num_rows,), torch.float32), "weight_codebook": ((LEVELS,), torch.float32)}
        if self.how.block:
            shapes["weight_scale"] = (num_rows, self.shape[1] // self.how.block), torch.uint8
        return {name: shapes[name] for name in self.auxiliary}

    def weight(self, tensor):
        """The weight as stored on a rank: the file's bytes."""
        return tensor.view(self.how.held)

    def by_rows(self, tensors):
        """{auxiliary tensor: values} for all rows in the form stored on a rank: block scales without the tiled order of
        the file."""
        stored = {}
        for name, (shape, dtype) in self.auxiliary_as_stored(self.shape[0]).items():
            if dtype == torch.uint8:
                from comfy_kitchen.float_utils import from_blocked
                stored[name] = from_blocked(tensors[name].view(dtype), *shape).contiguous()
            else:
                # float8 may be written as bytes
                tensor = tensors[name].view(dtype) if tensors[name].dtype == torch.uint8 else tensors[name].to(dtype)
                stored[name] = tensor.reshape(shape)
        return stored


def layers_of(shapes, dtypes, metadata, read, file_name, prefix=""):
    """({name of a weight: Layer}, names of auxiliary tensors). read(name) -> bytes of a tensor.

    prefix: of names in the metadata. Raises CheckpointError, with the tensor's name, for other quantisation methods and
    for incomplete layers.
    """
    for name in shapes:
        for end, whose in UNKNOWN.items():
            if name.endswith(end):
                whose = _nunchakus(name.removesuffix(end), shapes) or whose
                raise _refusal(file_name, f"is quantised in a way that xDiT does not read ({name}: {whose})")
    auxiliary = {name for name in shapes if name.rpartition(".")[2] in AUXILIARY} | ({"scaled_fp8"} & shapes.keys())
    auxiliary |= attention_configs(shapes)
    # without the marker, or together with the newer metadata, ComfyUI ignores such scales
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
        name = "its metadata"                                  # which takes precedence
        layers = parse_json(metadata.get("_quantization_metadata", "{}").encode(), MAX_HEADER_BYTES,
                            MAX_VALUES).get("layers", {})
        said |= {layer.removeprefix(prefix): _options(options) for layer, options in layers.items()
                 if layer.startswith(prefix)}                  # others belong to text encoders
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"Download {file_name} again: its quantisation metadata cannot be read "
                              f"({name}: {error}).") from error
    found = {f"{layer}.weight": _layer(layer, options, shapes, dtypes, file_name) for layer, options in said.items()}
    lost = sorted(name for name in auxiliary if name.rpartition(".")[2] in SCALES and _weight(name) not in found)
    if lost:
        raise _refusal(file_name, f"has a scale {lost[0]} without a format")
    return found, auxiliary


def attention_configs(names):
    """Names of tensors by which a file selects the attention backend of a module, for versions of ComfyUI that read
    them. xDiT uses the setting of xDiT Parallel Config, so these are not weights of the model."""
    return {name for name in names if name.endswith(ATTENTION_CONFIG)}


def _nunchakus(layer, shapes):
    """The nunchaku method of a layer's `qweight` and the reason why it is not read; "" for other methods."""
    whose = next((whose for name, whose in NUNCHAKU.items() if f"{layer}.{name}" in shapes), "")
    return whose and f"{whose}, {NOT_COMFYUI}"


def _options(said):
    """The options of a layer, including those that older ConvRot files nest in "params". ComfyUI reads no others from
    there."""
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
    group = _group(layer, how, options, shape, file_name)
    for name, there in auxiliary.items():
        _check_scale(name, how, shape, group, (there, weight), (shapes[there], dtypes[there]), file_name)
    linear_dtype = options.get("linear_dtype", "int4")
    if linear_dtype not in ("int4", "int8"):
        raise _refusal(file_name, f"says that {weight} is multiplied in {shown(linear_dtype)}, and xDiT knows "
                                  "int4 and int8")
    is_wide = group and dtypes[auxiliary["weight_s_rel"]] == "F32"
    return Layer(format_, shape, auxiliary,
                 0 if how.block or group else math.prod(shapes[auxiliary["weight_scale"]]), rotated,
                 bool(options.get("full_precision_matrix_mult", False)), linear_dtype, group,
                 torch.float32 if is_wide else torch.float8_e4m3fn)


def _group(layer, how, options, shape, file_name):
    """Columns of a layer that share a relative scale; 0: the format has none."""
    if not how.group:
        return 0
    size = options.get("group_size", how.group)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        size = int(size)                                       # as for convrot_groupsize
    is_number = isinstance(size, int) and size >= MIN_GROUP
    if not is_number or shape[1] % LEVELS or shape[1] % size or LEVELS % size and size % LEVELS:
        raise _refusal(file_name, f"says that {shown(size)} columns of {layer}.weight share a scale, which has "
                                  f"{shape[1]}. They must be 4, 8 or a multiple of 16, and go into them")
    return size


def _rotated(layer, format_, options, shape, file_name):
    """Columns that ConvRot rotates together; 0: no rotation."""
    if format_ not in ROTATING and not (format_ == "int8_tensorwise" and options.get("convrot", False)):
        return 0
    size = options.get("convrot_groupsize", 256)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        size = int(size)                                       # ComfyUI accepts 64.0 and "64" for 64
    if size not in ROTATIONS or shape[1] % size or format_ == "convrot_w4a4" and shape[1] % W4A4_COLUMNS:
        raise _refusal(file_name, f"says that ConvRot rotates {shown(size)} columns of {layer}.weight together, which "
                                  f"has {shape[1]}. They must be {', '.join(map(str, ROTATIONS))}, and go into them")
    return size


def _check_scale(name, how, shape, group, names, found, file_name):
    """Reject a scale whose shape or type differs from the format's. shape: of the matrix. group: columns that share a
    relative scale. names: of the scale and the weight in the file. found: (the scale's shape, its type)."""
    rows, columns = shape
    needs = (), (1,), (1, 1)
    needed, types = "one number", how.scales.get(name, FRACTIONS)
    if name == "pre_quant_scale":
        needs, needed = ((columns,),), f"{columns} numbers"
    elif name == "weight_s_rel":
        needs, needed = ((rows, columns // group),), f"{rows} x {columns // group}"
    elif name in ("weight_s_channel", "weight_codebook"):
        count = rows if name in BY_ROW else LEVELS
        needs, needed, types = ((count,),), f"{count} numbers", ("F32",)
    elif name == "weight_scale" and how.block:
        padded = [-(-size // tile) * tile for size, tile in zip((rows, columns // how.block), TILE)]
        needs, needed = (tuple(padded), (math.prod(padded),)), f"{padded[0]} x {padded[1]}"
    elif name == "weight_scale":
        needs, needed = (*needs, (rows, 1)), "one number, or one for each row"
        if how.rounds_inputs:
            needs = *needs, (rows,)
    if found[0] not in needs or found[1] not in types:
        raise _refusal(file_name, f"has a scale {names[0]} of {found[1]} and shape {list(found[0])} for {names[1]} of "
                                  f"shape {list(shape)}, and xDiT reads {needed}, of {' or '.join(types)}")


def _weight(name):
    return f"{name.rpartition('.')[0]}.weight"


def _refusal(file_name, why):
    return CheckpointError("Use the bf16, fp16, fp8 (plain or scaled), int8 or GGUF file of the same model: "
                           f"{file_name} {why}.")
