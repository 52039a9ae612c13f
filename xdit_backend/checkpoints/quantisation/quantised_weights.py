"""Weights that stay quantised in memory, as in the file or as quantised when loaded: which weights of a model these
are, and their dequantisation.

Each row of such a matrix is independent: float8 or int8 numbers with a scale, or blocks of GGUF or NF4. A family's
conversion moves whole rows, so running it on row numbers shows where the bytes and scales of each row go.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from . import gguf, quantise_on_load
from .layer_formats import BY_ROW, Layer

# all other types are blocks, in uint8
SCALED = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "INT8": torch.int8}
# types that can be quantised when they are loaded
NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")

# temporary bytes per element, in addition to the packed weight, while it is unpacked to 16 bits: integer values, scales
# and offsets (ggml_dequant.py), and for NF4 its levels and scales as separate tensors; other types are unpacked in one
# step
UNPACKING, ELSE = {"Q4_0": 3.125, "Q5_0": 3.125, "IQ4_NL": 3.125, "IQ4_XS": 3.125, "Q4_1": 3.25, "Q5_1": 3.25,
                   "Q3_K": 3.25, "Q4_K": 3.25, "Q5_K": 3.25, "Q6_K": 3.25, "Q2_K": 3.5, "Q8_0": 2.125,
                   "NF4": 2.5625}, 2.0
WITH_LORA = 6.0                # the same with a LoRA, for any type: values in float32, and rounded


@dataclass(frozen=True)
class Packed:
    """One quantised matrix of a model, as stored in a file or as quantised when loaded.

    source: name of the file's tensor. runs: its rows in that tensor, (first, last + 1) in order. type: safetensors', a
    ComfyUI format, or one of quantise_on_load.PACKAGES. num_columns: stored columns. auxiliary: {buffer of the module:
    (shape, dtype)}. layer: the file's description of the layer; None if there is none.
    """

    source: str
    runs: tuple[tuple[int, int], ...]
    type: str
    num_columns: int
    auxiliary: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    layer: Layer | None = None

    @property
    def num_rows(self):
        return sum(stop - start for start, stop in self.runs)

    @property
    def is_in_file(self):
        """Whether the file stores it in this type."""
        return self.type not in quantise_on_load.PACKAGES

    def take(self, tensor):
        """These rows of a tensor of the file; a view if they are consecutive."""
        rows = [tensor[start:stop] for start, stop in self.runs]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def take_auxiliary(self, tensors):
        """{buffer: values} from the file's auxiliary tensors; None: the tensors are on the meta device.

        A value common to all rows becomes a separate tensor for each part of a fused weight, since a module's buffers
        are identified by id.
        """
        if tensors is None:
            return {name: torch.empty(shape, dtype=dtype, device="meta")
                    for name, (shape, dtype) in self.auxiliary.items()}
        return {name: self.take(tensor) if name in BY_ROW or name == "weight_scale" and self.layer.num_scales != 1
                else tensor.view_as(tensor) for name, tensor in tensors.items()}

    @property
    def block(self):
        """(elements, stored columns) of a block that cannot be split; (1, 1) if any can."""
        if self.layer is not None:
            return self.layer.block
        return (1, 1) if self.type in SCALED else block_of(self.type)


def packed_weights(checkpoint, model, quantisation=""):
    """{name in the model: Packed} of the weights that stay quantised. model: on the meta device.

    These are weights of the model's nn.Linear whose rows come from a single tensor of the file (families split layers
    that a file stores separately: Family.halved). Other quantised weights are unpacked when they are read, as are those
    of gguf.UNPACKED. quantisation: of quantise_on_load.TYPES, for a file that is not quantised; "": as in the file.
    Layers that the family or diffusers keep in higher precision are not quantised, nor are rows that are not a whole
    number of blocks.
    """
    if quantisation:
        type_, exact = quantise_on_load.TYPES[quantisation], {*checkpoint.family.keep_in_compute_dtype,
                                                      *(getattr(model, "_keep_in_fp32_modules", None) or ())}
        quantised = {name for name, shape in checkpoint.shapes.items() if len(shape) == 2
                     and checkpoint.dtypes[name] in NUMBERS
                     and (type_ in SCALED or shape[1] % block_of(type_)[0] == 0)}
    else:
        type_, exact = None, set()
        quantised = {name for name in checkpoint.quantised
                     if len(checkpoint.shapes[name]) == 2 and checkpoint.dtypes[name] not in gguf.UNPACKED
                     and (name in checkpoint.layers or checkpoint.stored[name][1] == checkpoint.shapes[name])}
    if not quantised:
        return {}
    numbers, starts, first = {}, {}, 0
    for name, shape in checkpoint.shapes.items():
        starts[name] = first
        first += shape[0] if shape else 1
        numbers[name] = (torch.arange(starts[name], first).view(-1, *[1] * (len(shape) - 1))
                         if shape else torch.tensor(starts[name]))
    names, firsts = list(starts), torch.tensor(list(starts.values()))
    linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear
               and not exact & set(name.split("."))}
    found, elsewhere = {}, set()
    for name, rows in checkpoint.under_diffusers_names(numbers).items():
        rows = rows.flatten()
        sources = [names[index] for index in (torch.searchsorted(firsts, rows, right=True) - 1).unique().tolist()]
        if name in linears and len(sources) == 1 and sources[0] in quantised:
            found[name] = sources[0], _runs(rows - starts[sources[0]])
        else:
            elsewhere |= set(sources)
    return {name: _packed(checkpoint, source, runs, type_)
            for name, (source, runs) in found.items() if source not in elsewhere}


def set_packed_parameters(model, packed):
    """Replace parameters of a model on the meta device by packed ones, with scales as buffers.

    `weight_block` is (elements, bytes) of a block of stored columns.
    """
    for name, how in packed.items():
        linear = model.get_submodule(name.removesuffix(".weight"))
        dtype = how.layer.how.held if how.layer else SCALED.get(how.type, torch.uint8)
        linear.weight = nn.Parameter(torch.empty(how.num_rows, how.num_columns, dtype=dtype, device="meta"),
                                     requires_grad=False)
        linear.weight_block = how.block
        linear.unpacking = UNPACKING.get(how.type, ELSE)
        linear.format = how.layer.format if how.layer is not None else ""
        linear.rounds_inputs = how.layer is not None and how.layer.rounds_inputs
        linear.is_exact = how.layer is not None and how.layer.exact
        linear.agreed = how.layer.agreed if how.layer is not None else ""
        for buffer, (shape, dtype) in how.auxiliary.items():
            linear.register_buffer(buffer, torch.empty(shape, dtype=dtype, device="meta"))


def block_of(type_):
    """(elements, bytes) of a block of a type."""
    return quantise_on_load.BLOCK if type_ == "NF4" else gguf.block_of(type_)


def unpacked(tensor, type_, scale, dtype):
    """The values of a quantised tensor in `dtype`, rounded once."""
    if type_ == "NF4":
        return quantise_on_load.dequantised(tensor, dtype)
    if type_ not in SCALED:
        return gguf.dequantised(tensor, type_, dtype)
    if scale is None:
        return tensor.to(dtype)
    if tensor.dtype == torch.int8:                             # torch multiplies int8 directly, but not float8
        scale = scale.to(torch.promote_types(dtype, scale.dtype))
        return torch.mul(tensor, scale, out=torch.empty(tensor.shape, dtype=dtype, device=tensor.device))
    numbers = tensor.to(dtype)
    return torch.mul(numbers, scale, out=numbers)


def _packed(checkpoint, source, runs, type_):
    """The Packed of rows of a tensor of the file. type_: to quantise to; None: as stored."""
    columns, rows = checkpoint.shapes[source][1], sum(stop - start for start, stop in runs)
    if type_ is None and source in checkpoint.layers:
        layer = checkpoint.layers[source]
        return Packed(source, runs, layer.type, layer.stored_shape[1], layer.auxiliary_as_stored(rows), layer)
    if type_ in SCALED:
        return Packed(source, runs, type_, columns, {"weight_scale": ((rows, 1), torch.float32)})
    numbers, num_bytes = block_of(type_ or checkpoint.dtypes[source])
    return Packed(source, runs, type_ or checkpoint.dtypes[source], columns // numbers * num_bytes)


def _runs(rows):
    """Row numbers as runs of consecutive ones."""
    ends = [*(rows.diff() != 1).nonzero()[:, 0].tolist(), len(rows) - 1]
    starts = [0, *[end + 1 for end in ends[:-1]]]
    return tuple((rows[start].item(), rows[end].item() + 1) for start, end in zip(starts, ends))
