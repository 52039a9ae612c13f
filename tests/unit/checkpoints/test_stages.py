"""A rank of a pipeline reads its own stage's blocks and what is outside the blocks, and nothing else of the file."""

import functools
import json

import pytest
import torch

from tests.support.model_zoo import FOLDERS, PIPELINES, example, save_as_published
from xdit_backend.checkpoints import memory_map, tensor_reader
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.weight_table import block_sizes

CPU = torch.device("cpu")


@pytest.fixture
def names_read(monkeypatch):
    """Names of the tensors that are read while this is there."""
    names, map_tensors = [], memory_map.map_tensors

    def counting(path):
        def read(name, mapped):
            names.append(name)
            return mapped()
        return {name: functools.partial(read, name, mapped) for name, mapped in map_tensors(path).items()}
    monkeypatch.setattr(tensor_reader, "map_tensors", counting)
    return names


def load(path, blocks=None):
    header = open_checkpoint(path)
    family = header.family
    choose = None if blocks is None else lambda model: blocks
    return family, load_transformer(header.spec("float32", "float32"), CPU, choose_blocks=choose).model


def check(path, names_read, own):
    """Load the whole and then the blocks `own`; compare, and return the share of bytes that was read."""
    family, whole = load(path)
    all_names = list(names_read)
    names_read.clear()
    _, part = load(path, own)
    lists = [name for list_ in family.blocks for name in [list_.name] for _ in whole.get_submodule(name)]
    starts = {name: lists.index(name) for name in lists}
    paired = {list_.paired: list_.name for list_ in family.blocks}
    for (name, tensor), other in zip(whole.named_parameters(), part.parameters()):
        name = paired.get(name.partition(".")[0], name.partition(".")[0]) + name[len(name.partition(".")[0]):]
        list_ = next((prefix for prefix in starts if name.startswith(f"{prefix}.")), None)
        block = None if list_ is None else starts[list_] + int(name[len(list_) + 1:].partition(".")[0])
        here = block is None or block in own or name.startswith(family.plan.shared_parameters)
        assert other.is_meta != here, name
        assert not here or torch.equal(tensor, other), name
    assert len(set(names_read)) == len(names_read) < len(all_names)
    read = sum(tensor.numel() for tensor in part.parameters() if not tensor.is_meta)
    sizes = [size for size, _ in block_sizes(whole, family)]
    auxiliary = sum(tensor.numel() for name,
                 tensor in whole.named_parameters() if name.startswith(family.plan.shared_parameters)
                 and 0 not in own)
    assert read == sum(tensor.numel()
                       for tensor in whole.parameters()) - sum(sizes) + sum(sizes[block] for block in own) + auxiliary


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("own", [range(0, 1), range(1, 3), range(3, 4)], ids=str)
def test_a_stage_reads_its_own_blocks_of_a_diffusers_folder(tmp_path, names_read, name, own):
    save_as_published(example(name, torch.float32).model, tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": PIPELINES.get(name, "Pipeline")}))

    check(tmp_path, names_read, own)


@pytest.mark.parametrize("kind, own", [("sd3", range(1, 3)), ("wan", range(0, 1)), ("pixart", range(1, 2)),
                                       pytest.param("flux", range(1, 2), marks=pytest.mark.slow)])
def test_a_stage_reads_its_own_blocks_of_a_single_file(tmp_path, names_read, kind, own):
    """The publishers' formats, through the converters: flux has one double and one single block."""
    from tests.support.comfyui_server import comfyui_folder
    from tests.support.tiny_checkpoints import import_comfyui, save
    if comfyui_folder() is None:
        pytest.skip("no ComfyUI to make the file with")
    import_comfyui(comfyui_folder())
    save(kind, tmp_path / "model.safetensors")

    check(tmp_path / "model.safetensors", names_read, own)
