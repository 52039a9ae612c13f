"""Custom operators can be defined with every supported version of PyTorch."""

import typing

import torch

from xdit_backend.protocol import op_registration
from xdit_backend.protocol.op_registration import operator


def test_a_list_is_annotated_as_the_oldest_supported_pytorch_knows_it():
    """PyTorch 2.6 infers a schema from typing.List alone, and rejects the builtin list."""
    @operator
    def test_sum_of_a_list(tensors: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
        return torch.stack(tensors).sum(0) + sum(sizes)

    hints = test_sum_of_a_list._init_fn.__annotations__
    assert hints["tensors"] == typing.List[torch.Tensor] and hints["sizes"] == typing.List[int]  # noqa: UP006
    assert all(not isinstance(hint, type(list[int])) for hint in hints.values())
    assert test_sum_of_a_list([torch.ones(2)] * 3, [1, 2]).tolist() == [6.0, 6.0]


def test_folders_in_any_language_have_namespaces_that_torch_accepts():
    first, second = (op_registration.namespace_of(f"C:\\Jürgen {name}\\xdit_backend") for name in "图片")

    assert first != second and first.isascii() and first.isidentifier()
    torch.library.define(f"{first}::nothing", "() -> ()")
