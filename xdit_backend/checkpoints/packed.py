"""Weights that a file holds quantised, and that stay so where they are held: which they are in a model, and how numbers are had of them.

A row of such a matrix stands alone: float8 numbers with a scale, or GGUF's blocks. So where a family's conversion puts the rows of a
matrix, it puts its bytes and its scales; running it on row numbers tells where that is. Used by the loader, and by the host to count.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .gguf import UNPACKED, block_of, dequantised, row_bytes

FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}      # by safetensors' names


@dataclass(frozen=True)
class Packed:
    """One matrix of a model, as a file holds it.

    source: name of the file's tensor. runs: the rows of it that these are, (first, last + 1) in order. type: the header's. num_scales: 0
    for none, 1 of the matrix, or as many as rows. num_columns: in what is stored.
    """

    source: str
    runs: tuple[tuple[int, int], ...]
    type: str
    num_scales: int
    num_columns: int

    @property
    def num_rows(self):
        return sum(stop - start for start, stop in self.runs)

    def take(self, tensor):
        """These rows of a tensor of the file, a view where they follow one another."""
        pieces = [tensor[start:stop] for start, stop in self.runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def packed_weights(header, family, config, model):
    """{name in the model: Packed} of the weights that stay as they are stored. model: on the meta device.

    They are those of the model's nn.Linear; other quantised weights are unpacked when they are read, and so are those of gguf.UNPACKED.
    """
    quantised = {name for name in header.quantised if len(header.shapes[name]) == 2 and header.dtypes[name] not in UNPACKED
                 and (name in header.scales or header.stored[name][1] == header.shapes[name])}
    if not quantised:
        return {}
    numbers, starts, first = {}, {}, 0
    for name, shape in header.shapes.items():
        starts[name] = first
        first += shape[0] if shape else 1
        numbers[name] = torch.arange(starts[name], first).view(-1, *[1] * (len(shape) - 1)) if shape else torch.tensor(starts[name])
    names, firsts = list(starts), torch.tensor(list(starts.values()))
    linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
    found, elsewhere = {}, set()
    for name, rows in family.convert(numbers, config).items():
        rows = rows.flatten()
        sources = [names[index] for index in (torch.searchsorted(firsts, rows, right=True) - 1).unique().tolist()]
        if name in linears and len(sources) == 1 and sources[0] in quantised:
            found[name] = sources[0], _runs(rows - starts[sources[0]])
        else:
            elsewhere |= set(sources)
    return {name: Packed(source, runs, header.dtypes[source], *_sizes(header, source, runs))
            for name, (source, runs) in found.items() if source not in elsewhere}


def hold_packed(model, packed):
    """Give a model on the meta device the parameters that it has with these weights; scales are buffers beside them.

    What stores columns in blocks says of how many numbers and bytes: `weight_block`.
    """
    for name, how in packed.items():
        linear = model.get_submodule(name.removesuffix(".weight"))
        linear.weight = nn.Parameter(torch.empty(how.num_rows, how.num_columns, dtype=FLOAT8.get(how.type, torch.uint8), device="meta"),
                                     requires_grad=False)
        if how.type not in FLOAT8:
            linear.weight_block = block_of(how.type)
        if how.num_scales:
            linear.register_buffer("weight_scale", torch.empty(how.num_scales, 1, device="meta"))


def unpacked(tensor, type_, scale, dtype):
    """The numbers of a quantised tensor of a file, in `dtype`, rounded once."""
    if type_ not in FLOAT8:
        return dequantised(tensor, type_).to(dtype)
    numbers = tensor.to(dtype)
    return numbers if scale is None else torch.mul(numbers, scale, out=torch.empty_like(numbers))


def _sizes(header, source, runs):
    if source not in header.scales:
        return 0, row_bytes(header.dtypes[source], header.shapes[source][1])
    num_scales = 1 if header.scales[source][1] == 1 else sum(stop - start for start, stop in runs)
    return num_scales, header.shapes[source][1]


def _runs(rows):
    """Row numbers as runs of consecutive ones."""
    ends = [*(rows.diff() != 1).nonzero()[:, 0].tolist(), len(rows) - 1]
    starts = [0, *[end + 1 for end in ends[:-1]]]
    return tuple((rows[start].item(), rows[end].item() + 1) for start, end in zip(starts, ends))
