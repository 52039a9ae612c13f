"""Linear layers that diffusers has as one and ComfyUI's files as two, which they may hold in different ways: the model
has two as well. Placed by a family's `amend`; a folder's tensors are told apart by Family.halved.
"""

import torch
from torch import nn


class SplitLinear(nn.ModuleList):
    """Two nn.Linear of the same inputs, whose outputs follow one another: (..., in_features) -> (..., out_features)."""

    def forward(self, tensor):
        return torch.cat([linear(tensor) for linear in self], -1)


def halve(model, end):
    """Put Halves in the place of a model's nn.Linear whose paths end so."""
    for path, module in [*model.named_modules()]:
        if path.endswith(f".{end}"):
            first, second = (nn.Linear(module.in_features, module.out_features // 2, module.bias is not None)
                             for _ in range(2))
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, SplitLinear([first, second]))


def halved(tensors, end):
    """{name: tensor} of a folder of diffusers', with halves of what such linears hold. end: "": there are none."""
    ends = (f".{end}.weight", f".{end}.bias") if end else ()
    return {new: piece for name, tensor in tensors.items() for new, piece in (
        [(f"{path}.{number}.{leaf}", half) for path, _, leaf in [name.rpartition(".")]
         for number, half in enumerate(tensor.chunk(2))] if name.endswith(ends) else [(name, tensor)])}
