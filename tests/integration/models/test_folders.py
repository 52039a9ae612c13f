"""Diffusers folders, sharded: what is in them, under ComfyUI's names, is what is in the single file;
or they are refused by name."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.lora.test_lora import Loras
from tests.support.model_zoo import save_as_published
from tests.support.tiny_checkpoints import families, said_of
from tests.support.tolerances import close, relative_error
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.tensor_reader import read_file

TOLERANCE = 2e-5                           # relative, float32 on both sides
# nobody publishes one
REFUSED = {"sd35-text": "has tensors of shapes|has tensors that a SD3 model does not|have no known name"}
# which no conversion keeps: it is for training
DROPPED, OF_DROPPED = ("y_embedder.y_embedding",), "model_max_length"
MARK, MADE = "__index_timestep_zero__", "rope.inv_freq"        # the second diffusers' class makes
# U-Nets: test_unet_folders.py. The metadata of the files of ltx-2-plain and wan-causal has no counterpart in diffusers'
# config, nor has a curve of times. ComfyUI's own modules have no folders, nor has Chroma Radiance.
KINDS = [kind for kind, family in families().items()
         if not family.plan.is_unet and not family.is_comfyuis and family.name != "Chroma Radiance"
         and kind not in ("ltx-2-plain", "minimax-h3-curve", "wan-causal")]
# what a folder tells by more than its tensors
SAMPLED = ("anima", "ltx-video", "ltx-video-causal", "ltx-2", "ltx-2.3", "qwen-image-2511")


def save_folder(comfyui, kind, name):
    """The tiny file as a diffusers folder of several shards, laid out as published ones are. Returns its path."""
    file, folder = comfyui.base / "diffusion_models" / comfyui.file(kind), comfyui.base / "diffusers" / name
    comfyui.folder_paths.add_model_folder_path("diffusers", str(comfyui.base / "diffusers"), is_default=True)
    if folder.exists():
        return folder
    model = load_transformer(open_checkpoint(file).spec("float32", "float32"), torch.device("cpu")).model
    if kind == "anima":
        conditioner = model.text_conditioner
        del model.text_conditioner
        conditioner.save_pretrained(folder / "text_conditioner")
    if kind == "minimax-h3":                                   # which diffusers' class makes
        model.rope.register_buffer("inv_freq", model.rope.inv_freq, persistent=False)
    save_as_published(model, folder / "transformer", max_shard_size="100KB" if kind == "minimax-h3" else "1MB")
    config = folder / "transformer" / "config.json"
    if kind == "minimax-h3":                                   # of which published ones say nothing
        said = json.loads(config.read_text())
        config.write_text(json.dumps({key: value for key, value in said.items() if key != "_has_frequencies"}))
    if kind.startswith("ltx-video"):                           # of 0.9.1, and of 0.9.5
        (folder / "vae").mkdir()
        block = "LTXVideo095DownBlock3D" if kind == "ltx-video-causal" else "LTXVideoDownBlock3D"
        (folder / "vae" / "config.json").write_text(json.dumps({"down_block_types": [block] * 4}))
    if kind.startswith("ltx-2"):
        config.write_text(json.dumps(json.loads(config.read_text())
                                     | {"rope_type": "split", "rope_double_precision": True,
                                        "cross_attn_timestep_scale_multiplier": 1000}))
        connectors_of(file, said_of(kind)).save_pretrained(folder / "connectors", max_shard_size="1MB")
    return folder


def connectors_of(file, said):
    """Diffusers' object of what an LTX-2 file prepares its text with."""
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
    registers = load_file(file)["video_embeddings_connector.learnable_registers"]
    sizes = {f"{kind}_connector_{size}": said.get(f"{kind}_connector_{size}".replace("video_", ""),
                                                  said.get(f"connector_{size}", usual))
             for kind in ("video", "audio")
             for size, usual in (("attention_head_dim", 128), ("num_attention_heads", 30), ("num_layers", 2))}
    made = LTX2TextConnectors(caption_channels=24, text_proj_in_factor=2, rope_type="split", **sizes, **{
        f"{kind}_connector_num_learnable_registers": len(registers) for kind in ("video", "audio")})
    words = (("_embeddings_connector.", "_connector."), (".transformer_1d_blocks.", ".transformer_blocks."),
             (".q_norm.", ".norm_q."),
             (".k_norm.", ".norm_k."))
    tensors = {}
    for name, tensor in load_file(file).items():
        if "_embeddings_connector." in name:
            for ours, theirs in words:
                name = name.replace(ours, theirs)
            tensors[name] = tensor
    assert all(name.endswith("text_proj_in.weight")
               for name in made.load_state_dict(tensors, strict=False).missing_keys)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_what_the_single_file_is(comfyui, kind):
    file, family = comfyui.base / "diffusion_models" / comfyui.file(kind), families()[kind]
    folder = save_folder(comfyui, kind, f"folder-{kind}")
    found = open_checkpoint(folder)
    assert len(found.files) > 1
    if kind in REFUSED:
        with pytest.raises(comfyui.errors.CheckpointError, match=f"folder-{kind} .*({REFUSED[kind]})"):
            comfyui.proxy.load_proxy(str(folder), "fp32", comfyui.config())
        return

    folders = sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.model.diffusers_keys"]
    names = folders.under_comfyui_names(read_file(found, lambda name: True), found)
    proxy, single = (comfyui.proxy.load_proxy(str(path), "fp32", comfyui.config()) for path in (folder, file))

    names = {name.replace(".scale", ".weight"): tensor for name, tensor in names.items()}
    own = {name.replace(".scale", ".weight"): tensor for name, tensor in load_file(file).items()
           if name not in (*DROPPED, MARK, MADE)}
    assert names.keys() == own.keys() and all(torch.equal(names[name], own[name]) for name in own)
    assert (type(proxy.model) is type(single.model)
            and proxy.remote.family.name == single.remote.family.name == family.name)
    config, expected = ({key: value for key, value in one.model.model_config.unet_config.items() if key != OF_DROPPED}
                        for one in (proxy, single))
    # else a folder says in full what a file leaves to ComfyUI
    if family.detection.folder.metadata(open_checkpoint(folder).folder) is None:
        assert config == expected


@pytest.mark.parametrize("kind", SAMPLED)
def test_what_a_folder_says_beside_its_tensors_is_heeded(comfyui, kind):
    """By its settings, its VAE's, and by the parts of the model that are folders of their own."""
    save_folder(comfyui, kind, f"folder-{kind}")

    model = comfyui.load_model.execute(f"folder-{kind}", "fp32", comfyui.config()).args[0]

    close(comfyui.sample(model, kind, steps=2), comfyui.reference(kind, steps=2), TOLERANCE)


def test_lora_for_a_part_of_a_folders_tensor_equals_native(comfyui):
    """A folder of Ovis-Image has what is gated and its gate as one tensor;
    ComfyUI has two, and a LoRA may be for one of them."""
    loras = Loras(comfyui)
    save_folder(comfyui, "ovis-image", "folder-ovis-image")
    name = loras.file("ovis-image", adapter="lora", part="gate_proj")
    models = comfyui.load_model.execute("folder-ovis-image", "fp32",
                                        comfyui.config("cpu,cpu")).args[0], comfyui.native("ovis-image")

    result, reference = (comfyui.sample(loras.load(model, name), "ovis-image", steps=2) for model in models)
    comfyui.unload_all()                                       # the native model's weights are as they were

    close(result, reference, TOLERANCE)
    assert relative_error(reference, comfyui.reference("ovis-image", steps=2)) > 1e-3


def test_a_folder_that_does_not_say_which_model_it_is_is_refused(comfyui):
    folder = save_folder(comfyui, "ltx-video", "folder-ltx-video")
    (folder / "vae").rename(folder / "elsewhere")

    with pytest.raises(comfyui.errors.CheckpointError, match="^Download the whole folder, .*: folder-ltx-video is "
                                                             "a model of LTX-Video, whose variants only a folder"):
        comfyui.proxy.load_proxy(str(folder), "fp32", comfyui.config())
    (folder / "elsewhere").rename(folder / "vae")


def test_a_second_transformer_is_listed_by_itself(comfyui):
    comfyui.folder_paths.add_model_folder_path("diffusers", str(comfyui.base / "diffusers"), is_default=True)
    for part in ("two/transformer", "two/transformer_2", "below/one/unet", "neither/vae"):
        (comfyui.base / "diffusers" / part).mkdir(parents=True)

    options = comfyui.load_model.define_schema().inputs[0].options

    assert {"two", "two/transformer_2", "below/one"} <= set(options)
    assert not {"two/transformer", "below/one/unet", "neither", "neither/vae"} & set(options)


def test_a_table_that_comfyui_has_as_one_row_is_changed(comfyui):
    """A folder of Krea 2 has the six modulations of a block in rows of their own."""
    save_folder(comfyui, "krea-2", "folder-krea-2")
    models = comfyui.load_model.execute("folder-krea-2", "fp32",
                                        comfyui.config("cpu")).args[0].clone(), comfyui.native("krea-2").clone()
    for model in models:
        model.add_patches({"diffusion_model.blocks.0.mod.lin": (torch.linspace(-1, 1, 6 * 256),)}, 0.5)

    result, reference = (comfyui.sample(model, "krea-2", steps=2) for model in models)

    comfyui.unload_all()
    close(result, reference, TOLERANCE)
