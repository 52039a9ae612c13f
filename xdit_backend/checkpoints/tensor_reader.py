"""Tensors of a file or folder in any format, as regions of its memory map or as plain numbers."""

import torch

from .memory_map import map_tensors
from .quantisation import kitchen_layers
from .quantisation.gguf import read_tensors
from .quantisation.quantised_weights import SCALED, unpacked

META = torch.empty(0, device="meta")


def read_file(checkpoint, wanted):
    """{name: tensor of the file, a region of its map}; those that are not wanted(name) are on the meta device."""
    if checkpoint.stored:
        return read_tensors(checkpoint, wanted)
    tensors = {}
    for path in checkpoint.files:
        for name, mapped in map_tensors(path).items():
            short = checkpoint.name_of(name, path)
            if short is not None:
                layer = checkpoint.layers.get(short)
                tensor = (mapped() if wanted(short) else
                          torch.empty(layer.stored_shape if layer else checkpoint.shapes[short],
                                      dtype=layer and layer.how.held, device="meta"))
                tensors[short] = layer.weight(tensor) if layer else tensor
    return tensors


def read_auxiliary(checkpoint, tensors):
    """{name of a weight of ComfyUI's quantised layers: {auxiliary tensor: values}} for all of its rows. Weights on the
    meta device are left out."""
    if not checkpoint.layers:
        return {}
    mapped = map_tensors(checkpoint.files[0])
    return {name: layer.by_rows({what: mapped[checkpoint.prefix + there]() for what, there in layer.auxiliary.items()})
            for name, layer in checkpoint.layers.items() if not tensors[name].is_meta}


def read_plain(checkpoint, tensors, without=()):
    """These tensors of a file as plain numbers, except those named in `without`, which are on the meta device."""
    unpacking = {name: tensor for name, tensor in tensors.items()
                 if name in checkpoint.quantised and name not in without and not tensor.is_meta}
    auxiliary = read_auxiliary(checkpoint, {**dict.fromkeys(checkpoint.layers, META), **unpacking})
    plain = dict(tensors)
    for name in checkpoint.quantised | set(without):
        if name not in unpacking:
            plain[name] = torch.empty(checkpoint.shapes[name], device="meta")
        elif name in auxiliary and checkpoint.layers[name].type not in SCALED:
            layer = checkpoint.layers[name]
            plain[name] = kitchen_layers.unpacked(layer, tensors[name], kitchen_layers.in_tiles(layer, auxiliary[name]),
                                                  torch.float32)
        else:
            plain[name] = unpacked(tensors[name], checkpoint.dtypes[name], auxiliary.get(name, {}).get("weight_scale"),
                                   torch.float32).view(checkpoint.shapes[name])
    return plain
