"""Which files of a diffusers folder are read, and what is said where they cannot be."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.support.model_zoo import FOLDERS, example, save_as_published
from tests.unit.checkpoints.test_header import PUBLISHED, write_header
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.diffusers_folder import read_folder, read_json
from xdit_backend.models import FAMILIES
from xdit_backend.multi_node.file_digest import Contents
from xdit_backend.protocol.errors import CheckpointError

NAME = "diffusion_pytorch_model"
SHARDS = [f"{NAME}-0000{number}-of-00002.safetensors" for number in (1, 2)]
HALF = [f"{NAME}.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)]
OLD_HALF = [f"{NAME}-0000{number}-of-00002.fp16.safetensors" for number in (1, 2)]


def make(root, files, part="transformer"):
    (root / part).mkdir(parents=True)
    (root / part / "config.json").write_text('{"_class_name": "X"}')
    for file in files:
        (root / part / file).write_text("{}")
    return root


@pytest.mark.parametrize("part", ["transformer", "unet"])
@pytest.mark.parametrize("files, read", [
    ([f"{NAME}.safetensors"], [f"{NAME}.safetensors"]), (SHARDS, SHARDS), (HALF, HALF), (OLD_HALF, OLD_HALF),
    (SHARDS + HALF, SHARDS),
    ([f"{NAME}.fp16.safetensors", f"{NAME}.safetensors", f"{NAME}.non_ema.safetensors"], [f"{NAME}.safetensors"]),
    ([f"{NAME}.fp16.safetensors", f"{NAME}.safetensors.index.fp16.json"], [f"{NAME}.fp16.safetensors"])], ids=str)
def test_one_set_of_weights_is_read(tmp_path, part, files, read):
    """That without a variant, as diffusers does; where there is none, the only one."""
    found = read_folder(make(tmp_path / "folder", files, part))

    assert [file.name for file in found.files] == read and found.config == {"_class_name": "X"}


@pytest.mark.parametrize("files, words", [
    (SHARDS[1:], f"has 1 of 2 shards, including {SHARDS[1]}"),
    ([*SHARDS, f"{NAME}.safetensors"], f"more than once, as {SHARDS[0]} and as {NAME}.s"),
    ([f"{NAME}.fp16.safetensors", f"{NAME}.bf16.safetensors"], "more than once"),
    ([f"{NAME}.bin"], ".bin files are not read, since they can run code"),
    ([], "lacks .safetensors files")], ids=str)
def test_weights_that_are_not_clear_or_not_whole_are_refused(tmp_path, files, words):
    with pytest.raises(CheckpointError, match=words):
        read_folder(make(tmp_path / "folder", files))


def test_a_folder_of_other_parts_says_what_loads_them(tmp_path):
    make(make(tmp_path / "folder", [f"{NAME}.safetensors"], "vae"), ["model.safetensors"], "text_encoder")

    with pytest.raises(CheckpointError, match="It has text_encoder, vae. Load CLIP and Load VAE take files of such "
                                              "parts"):
        read_folder(tmp_path / "folder")


@pytest.mark.parametrize("content", [b"{", b"[1]", b"null", b"3", b"\xff\xfe\x00", b"[" * 100_000],
                         ids=lambda content: str(content[:8]))
@pytest.mark.parametrize("file", ["model_index.json", "scheduler/scheduler_config.json", "vae/config.json",
                                  "transformer/config.json"])
def test_json_that_is_malformed_or_of_another_type_is_refused_by_its_path(tmp_path, file, content):
    folder = make(tmp_path / "folder", [f"{NAME}.safetensors"])
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(content)

    with pytest.raises(CheckpointError, match=f"{file} (is not a JSON file that can be read|contains a )"):
        read_folder(folder)


def test_a_part_alone_is_read_with_what_is_beside_it(tmp_path):
    """A second transformer, which a workflow names by itself."""
    folder = make(make(tmp_path / "folder", SHARDS), SHARDS, "transformer_2")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))

    found = read_folder(folder / "transformer_2")

    assert {file.parent.name for file in found.files} == {"transformer_2"}
    assert (found.other_configs == {"model_index": read_json(folder / "model_index.json")}
            and folder / "model_index.json" in found.config_files)


def test_a_folder_is_found_elsewhere_by_its_content(tmp_path):
    """With what is read beside its weights; folders that are not whole are passed over."""
    folder = make(tmp_path / "here" / "named", SHARDS)
    make(tmp_path / "there" / "broken", SHARDS[1:])
    other = make(tmp_path / "there" / "other", SHARDS)
    for one, said in ((folder, "{}"), (other, "[]")):
        (one / "vae").mkdir()
        (one / "vae" / "config.json").write_text(said)

    content = Contents().of(folder)

    assert Contents().find("named", content, [tmp_path / "there"]) is None
    assert Contents().find("renamed", content, [tmp_path / "here"]) == str(folder)


def test_a_folder_of_a_model_that_is_comfyuis_module_says_that_files_are_taken(tmp_path):
    folder = tmp_path / "folder" / "transformer"
    folder.mkdir(parents=True)
    save_file({"x": torch.ones(1)}, folder / f"{NAME}.safetensors")
    (folder / "config.json").write_text('{"_class_name": "OmniGen2Transformer2DModel"}')

    with pytest.raises(CheckpointError, match="^Load a file of OmniGen 2 in ComfyUI's format: folder is a folder of "):
        _ = open_checkpoint(tmp_path / "folder").family


CLASSES = [FAMILIES[name].transformer for name in FOLDERS]
SHARING = [name for name in FOLDERS if CLASSES.count(FAMILIES[name].transformer) > 1]      # a class with other families


@pytest.mark.parametrize("name", SHARING)
def test_families_of_one_class_are_told_apart_in_their_tiny_folders(tmp_path, name):
    save_as_published(example(name).model, tmp_path / "model")

    assert open_checkpoint(tmp_path / "model").family.name == name


def family_of_config(folder, family, shapes):
    """The family recognised in a folder whose config.json has what a file of these shapes gives."""
    folder.mkdir()
    config = {key: value for key, value in family.detection.config(shapes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config | {"_class_name": family.transformer}))
    write_header(folder / f"{NAME}.safetensors", shapes)
    return open_checkpoint(folder).family.name


@pytest.mark.parametrize("name", [name for name, (family, *_) in PUBLISHED.items() if family in SHARING])
def test_families_of_one_class_are_told_apart_in_published_folders(tmp_path, name):
    family, shapes, _ = PUBLISHED[name]

    assert family_of_config(tmp_path / "model", FAMILIES[family], shapes) == family


@pytest.mark.parametrize("lacking", ["time_r_in.", "guidance_in."])
def test_a_distilled_hunyuanimage_with_one_of_its_inputs_is_told_by_that(tmp_path, lacking):
    """As it is told in a file."""
    family, shapes, _ = PUBLISHED["hunyuan-image-distilled"]
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith(lacking)}

    assert FAMILIES[family].detection.recognise(shapes)
    assert family_of_config(tmp_path / "model", FAMILIES[family], shapes) == family
