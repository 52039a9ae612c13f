"""Maps of files: what safetensors reads, of every type and place; of files larger than memory too; and writing to them
changes no file."""

import json
import os
import struct

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from xdit_backend.checkpoints.memory_map import TYPES, map_tensors


def test_tensors_are_those_that_safetensors_reads(tmp_path):
    tensors = {name: torch.arange(24).view(2, 3, 4).to(getattr(torch, type_)) for name, type_ in TYPES.items()
               if hasattr(torch, type_)}
    tensors |= {"empty": torch.empty(0, 3), "number": torch.tensor(7.0)}
    save_file(tensors, tmp_path / "a.safetensors", {"a": "b"})
    wanted = load_file(tmp_path / "a.safetensors")

    found = {name: mapped() for name, mapped in map_tensors(tmp_path / "a.safetensors").items()}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_tensors_may_start_anywhere(tmp_path):
    """Not all that write such files fill their headers up."""
    numbers = torch.arange(6, dtype=torch.float32)
    header = json.dumps({"one": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                         "six": {"dtype": "F32", "shape": [2, 3], "data_offsets": [1, 25]}}).encode()
    header += b" " * ((1 - len(header)) % 2)
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x" + numbers.numpy().tobytes())

    assert map_tensors(tmp_path / "a.safetensors")["six"]().equal(numbers.view(2, 3))


def test_what_is_written_to_a_map_stays_in_memory(tmp_path):
    save_file({"a": torch.zeros(8)}, tmp_path / "a.safetensors")
    map_tensors(tmp_path / "a.safetensors")["a"]().fill_(1)

    assert not load_file(tmp_path / "a.safetensors")["a"].any()


def test_a_file_that_is_larger_than_memory_is_mapped(tmp_path):
    """Holes for content. safetensors and torch.from_file are refused, where the system counts what is lent."""
    memory, swap = psutil.virtual_memory().total, psutil.swap_memory().total
    rows = (memory + swap) * 3 // 2 // 2 ** 20
    header = json.dumps({"a": {"dtype": "U8", "shape": [rows, 2 ** 20], "data_offsets": [0, rows * 2 ** 20]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    try:
        os.truncate(path, 8 + len(header) + rows * 2 ** 20)
    except OSError:
        pytest.skip("this file system has no files of that size")

    tensor = map_tensors(path)["a"]()
    assert tensor.shape == (rows, 2 ** 20) and not tensor[::rows // 8, :8].any()
