"""Two copies of the package in a process, as where a ComfyUI holds the pack twice, have operators of their own."""

import importlib.util
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conftest import ROOT
from xdit_backend.distributed import operators


def test_a_second_copy_takes_no_operator_away(monkeypatch):
    spec = importlib.util.spec_from_file_location("second pack-1", ROOT / "xdit_backend" / "__init__.py",
                                                  submodule_search_locations=[str(ROOT / "xdit_backend")])
    monkeypatch.setitem(sys.modules, "second pack-1", importlib.util.module_from_spec(spec))
    before = set(sys.modules)
    try:
        second = importlib.import_module("second pack-1.distributed.operators")
        with FakeTensorMode():
            for each in (operators, second):
                assert [tensor.shape for tensor in each.tensor_sums([torch.zeros(2, 3)])] == [(2, 3)]
        assert second.tensor_sums._qualname == "xdit_second_pack_1::tensor_sums"
        assert operators.tensor_sums._qualname == "xdit::tensor_sums"
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
