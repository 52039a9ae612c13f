"""Linear layers that diffusers fuses into one and ComfyUI's files store as two, possibly in different formats. The
model then has two as well: Family.adapt_model splits its linears, and Detection.with_split_linears the tensors of a
folder."""

import torch
from torch import nn


class SplitLinear(nn.ModuleList):
    """Two nn.Linear of the same input, whose outputs are concatenated: (..., in_features) -> (..., out_features)."""

    def forward(self, tensor):
        return torch.cat([linear(tensor) for linear in self], -1)


def split_linears(model, end):
    """Replace each nn.Linear of the model whose path ends in `end` by a SplitLinear of two equal halves."""
    for path, module in [*model.named_modules()]:
        if path.endswith(f".{end}"):
            first, second = (nn.Linear(module.in_features, module.out_features // 2, module.bias is not None)
                             for _ in range(2))
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, SplitLinear([first, second]))


def split_tensors(tensors, end):
    """Split the tensors of a diffusers folder, {name: tensor}, that belong to such linears. end: "" if there are
    none."""
    ends = (f".{end}.weight", f".{end}.bias") if end else ()
    return {new: value for name, tensor in tensors.items() for new, value in (
        [(f"{path}.{number}.{leaf}", half) for path, _, leaf in [name.rpartition(".")]
         for number, half in enumerate(tensor.chunk(2))] if name.endswith(ends) else [(name, tensor)])}
