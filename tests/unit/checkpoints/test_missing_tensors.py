"""What a file or folder lacks, or is, is said in words before a worker is asked:
for every family, from headers alone."""

import json
import random
import shutil
import sys

import pytest
import torch

from tests.support.model_zoo import FOLDERS, example, save_as_published
from tests.support.tiers import FEW_FAMILIES, by_default
from tests.support.tiny_checkpoints import VARIANTS, families
from tests.unit.checkpoints.test_header import write_header
from xdit_backend.checkpoints.build_transformer import build
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.detection import recognise
from xdit_backend.models import FAMILIES
from xdit_backend.protocol.errors import CheckpointError

KINDS = [kind for kind in families() if kind != "ltx-2.3"]     # which its metadata tells


@pytest.fixture(scope="module")
def shapes_of():
    """Names and shapes of every family's tiny file, as ComfyUI's classes make them."""
    from tests.support.comfyui_server import comfyui_folder
    from tests.support.tiny_checkpoints import import_comfyui, state_dict
    if comfyui_folder() is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`, or name one in XDIT_COMFYUI")
    import_comfyui(comfyui_folder())
    made = {}

    def shapes(kind):
        if kind not in made:
            with torch.inference_mode():
                made[kind] = {name: tuple(tensor.shape) for name, tensor in state_dict(kind).items()}
        return dict(made[kind])
    return shapes


def look_at(path):
    header = open_checkpoint(path)
    model = header.meta_model()                                # which tells in words what config cannot be made of
    return header.config, model


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_has_all_that_is_needed(tmp_path, shapes_of, kind):
    write_header(tmp_path / "model.safetensors", shapes_of(kind))

    config, model = look_at(tmp_path / "model.safetensors")

    assert families()[kind].num_blocks(config) == sum(len(model.get_submodule(list_.name))
                                                      for list_ in families()[kind].blocks)


@pytest.mark.parametrize("kind", by_default(FEW_FAMILIES, [kind for kind in families() if kind not in VARIANTS]))
def test_mutated_headers_are_refused_in_words(tmp_path, shapes_of, kind):
    """A tensor left out, of another shape, of absurd size, one too many: six of each, or three;
    the same ones each time."""
    chance, path = random.Random(kind), tmp_path / "model.safetensors"
    unread = {"y_embedder.y_embedding", *families()[kind].detection.values}    # for training; which the node reads
    write_header(path, shapes_of(kind))
    whole, _ = look_at(path)
    for number in range(24 if kind in FEW_FAMILIES else 12):
        shapes = shapes_of(kind)
        name = chance.choice(sorted(shapes))
        if number % 4 == 0:
            del shapes[name]
        elif number % 4 == 1:
            shapes[name] = (*shapes[name][:-1], shapes[name][-1] + 1)
        elif number % 4 == 2:
            shapes[name] = chance.choice([(10 ** 12,), (), (0,), (1,) * 7, (2 ** 20, *shapes[name][1:])])
        else:
            shapes[f"{name}.more"] = (3,)
        write_header(path, shapes)
        try:
            config, _ = look_at(path)
        except CheckpointError as error:
            assert "model.safetensors" in str(error)
        else:
            # another size of the family, or what ComfyUI alone prepares text with
            assert (name in unread or "_embeddings_connector." in name
                    or config != whole), (number, name, shapes.get(name))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_missing_is_named(tmp_path, shapes_of, kind):
    """Under the name it has in the file, or the one it has in diffusers."""
    shapes = shapes_of(kind)
    name = next(name for end in (".bias", ".weight") for name in reversed(shapes)
                if name.endswith(end) and "1" in name and name not in families()[kind].detection.values)
    del shapes[name]
    write_header(tmp_path / "model.safetensors", shapes)

    with pytest.raises(CheckpointError, match=rf"model.safetensors again, .* it lacks .*\.{name.rpartition('.')[2]}"):
        look_at(tmp_path / "model.safetensors")


@pytest.mark.parametrize("change, words", [
    ({"data_offsets": [4, 8]}, "starts at byte 4"), ({"data_offsets": [0, 6]}, "has 6 bytes"),
    ({"dtype": "F3"}, "unknown type 'F3'"),
    ({"shape": [-1, -2]}, "sizes or offsets"), ({"shape": "ab"}, "cannot be read"),
    ({"data_offsets": [0]}, "cannot be read"),
    ({"shape": [2 ** 70]}, "sizes or offsets"),
    ({"shape": [2 ** 40]}, "has 4 bytes"), ({"shape": [1] * 9}, "at most 8"), ({"shape": [True]}, "sizes or offsets"),
    ({"shape": [2 ** 40, 0], "data_offsets": [0, 0]}, "has nothing"), ({"more": 1}, "exactly a dtype")], ids=str)
def test_headers_that_contradict_themselves_are_refused(tmp_path, change, words):
    raw = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]} | change}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))

    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize("names, words", [
    (["lora_unet_double_blocks_0_img_attn_proj.lora_down.weight"], "a LoRA"),
    (["diffusion_model.double_blocks.0.img_attn.proj.lora_A.weight"], "a LoRA"),
    (["transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight"], "a LoRA"),
    (["lycoris_double_blocks_0_img_attn_proj.lokr_w1"], "a LoRA"),
    (["diffusion_model.blocks.0.self_attn.q.diff_b"], "a LoRA"),
    (["controlnet_blocks.0.weight", "controlnet_x_embedder.weight", "txt_norm.weight",
      "transformer_blocks.0.img_mod.1.weight"],
     "a ControlNet"),                                          # its blocks are named as Qwen-Image's own
    (["vision_model.encoder.layers.0.mlp.fc1.weight"], "a CLIP vision model"),
    (["per_channel_statistics.mean-of-means"], "a VAE"),
    (["encoder.block.0.layer.0.SelfAttention.k.weight", "shared.weight"], "a text encoder"),
    (["text_model.encoder.layers.0.mlp.fc1.weight"], "a text encoder"),
    (["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"], "a text encoder"),
    (["decoder.conv_in.weight", "encoder.down.0.block.0.conv1.weight"], "a VAE"),
    (["first_stage_model.decoder.conv_in.weight"], "a VAE"),
    (["model.diffusion_model.input_blocks.0.0.weight", "conditioner.embedders.0.transformer.text_model.a",
      "first_stage_model.decoder.conv_in.b"],
     "a U-Net of a kind"),
    (["transformer_blocks.0.attn.add_q_proj.weight"], "under diffusers' names"),
    (["a"], "not a diffusion model that xDiT runs")], ids=str)
def test_other_files_are_called_what_they_are(tmp_path, names, words):
    write_header(tmp_path / "model.safetensors", dict.fromkeys(names, (2, 2)))

    with pytest.raises(CheckpointError, match=words):
        recognise(open_checkpoint(tmp_path / "model.safetensors"))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A diffusers folder of a tiny model, its config.json changed."""
    folder = tmp_path_factory.mktemp("folders")

    def changed(name, **changes):
        path = folder / name.replace(" ", "")
        if not path.exists():
            save_as_published(example(name).model, path)
            shutil.copy(path / "config.json", path / "original.json")
        config = json.loads((path / "original.json").read_text())
        # those of the published sizes, which the tiny model has others of
        rules = families_by_name()[name].detection.config.rules
        fixed = {key: value for key, value in rules.items() if not callable(value) and key not in changes}
        (path / "config.json").write_text(json.dumps(config | fixed | changes))
        return path
    return changed


def families_by_name():
    from xdit_backend.models import FAMILIES
    return FAMILIES


@pytest.mark.parametrize("name, changes, words", [
    ("PixArt-Sigma", {"use_additional_conditions": True}, "lacks tensors of a PixArt-Alpha model: adaln_single.emb"),
    ("PixArt-Sigma", {"norm_type": "ada_norm_zero"}, "norm_type = 'ada_norm_zero'"),
    ("Wan", {"rope_max_seq_len": 512}, "rope_max_seq_len = 512"),
    ("Wan", {"eps": 1e-5}, "eps = 1e-05"), ("Flux.1", {"axes_dims_rope": [8, 60, 60]}, "axes_dims_rope"),
    ("SD3", {"a_new_part": True}, "a_new_part = True")], ids=str)
def test_settings_of_a_folder_that_are_not_honoured_are_refused(folder_of, name, changes, words):
    with pytest.raises(CheckpointError, match=words):
        look_at(folder_of(name, **changes))


def test_a_folder_of_pixart_alpha_does_not_pass_for_sigma(folder_of):
    """Neither under its own class nor under the one that was split."""
    with pytest.raises(CheckpointError, match="lacks tensors of a PixArt-Alpha model"):
        look_at(folder_of("PixArt-Sigma", _class_name="Transformer2DModel", use_additional_conditions=True))
    with pytest.raises(CheckpointError, match="is the folder of a U-Net of a kind that xDiT does not run"):
        look_at(folder_of("PixArt-Sigma", _class_name="UNet2DConditionModel"))


@pytest.mark.parametrize("name", FOLDERS)
def test_what_a_folder_says_of_parts_that_are_off_is_passed_over(folder_of, name):
    """Sizes differ from the tiny model's, so what is refused are tensors; of a setting nothing is said."""
    try:
        look_at(folder_of(name, a_part_of_old_releases=None, _diffusers_version="0.27.0"))
    except CheckpointError as error:
        assert "a_part_of_old_releases" not in str(error)


@pytest.mark.parametrize("dtype", ["I16", "U8", "BOOL"])
def test_whole_numbers_in_the_place_of_weights_are_refused(tmp_path, shapes_of, dtype):
    from safetensors.torch import save_file
    types = {"I16": torch.int16, "U8": torch.uint8, "BOOL": torch.bool}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes_of("sd3").items()}
    tensors["joint_blocks.1.x_block.attn.qkv.weight"] = tensors["joint_blocks.1.x_block.attn.qkv.weight"].to(
        types[dtype])
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match="has whole numbers where the weights have fractions: "
                                              "transformer_blocks.1.attn.to_q.weight"):
        look_at(tmp_path / "model.safetensors")


class Broken:
    """diffusers, of which a package that it imports cannot be imported."""

    __spec__ = None

    def __getattr__(self, name):
        raise RuntimeError("Failed to import diffusers.loaders.peft: import of transformers halted")


def test_a_package_that_cannot_be_imported_is_no_fault_of_the_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", Broken())

    with pytest.raises(CheckpointError, match="^Repair or remove the package that is named last, .* diffusers.loaders"):
        build(FAMILIES["SD3"], {})
