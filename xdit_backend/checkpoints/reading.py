"""The tensors of a file or folder in any format, as maps of it or as plain numbers.
Called by the loader on each rank."""

import torch

from .gguf import read_tensors
from .packed import unpacked


def read_file(checkpoint, wanted):
    """{name: tensor of the file, a map of it}; what is not wanted(name) is on the meta device."""
    from safetensors import safe_open
    if checkpoint.stored:
        return read_tensors(checkpoint, wanted)
    tensors = {}
    for path in checkpoint.files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                short = checkpoint.name_of(name, path)
                if short is not None:
                    tensors[short] = (file.get_tensor(name) if wanted(short)
                                      else torch.empty(checkpoint.shapes[short], device="meta"))
    return tensors


def read_scales(checkpoint, tensors):
    """{name of a scaled weight: its scale, (1, 1) or (rows, 1)}; on the meta device for a weight that is there."""
    from safetensors import safe_open
    with safe_open(checkpoint.files[0], "pt") as file:
        return {name: (torch.empty(count, device="meta") if tensors[name].is_meta
                       else file.get_tensor(checkpoint.prefix + scale)
                       ).to(torch.float32).view(-1, 1) for name, (scale, count) in checkpoint.scales.items()}


def read_plain(checkpoint, tensors, without=()):
    """These tensors of a file as plain numbers, but for those of the names `without`, which are on the meta device."""
    scales, plain = read_scales(checkpoint, tensors) if checkpoint.scales else {}, dict(tensors)
    for name in checkpoint.quantised | set(without):
        shape, tensor = checkpoint.shapes[name], tensors[name]
        plain[name] = torch.empty(shape, device="meta") if name in without or tensor.is_meta else \
            unpacked(tensor, checkpoint.dtypes[name], scales.get(name), torch.float32).view(shape)
    return plain
