"""Diffusers folders, sharded: what is in them, under ComfyUI's names, is what is in the single file; or they are refused by name."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_checkpoints import families
from xdit_backend.checkpoints.header import model_spec, read_header
from xdit_backend.checkpoints.transformer import load_transformer, read_file

# Folders that cannot be told apart, or lack something: what the message says.
REFUSED = {"anima": "has tensors that a Cosmos-Predict2 model does not", "ltx-video": "does not say causal_temporal_positioning",
           **dict.fromkeys(("ltx-video-causal", "ltx-2", "ltx-2-plain"), "does not say causal_temporal_positioning"),
           "qwen-image-2511": "with zero_cond_t = True, which ComfyUI could not tell",
           "sd35-text": "names are not known for all"}
DROPPED, OF_DROPPED = ("y_embedder.y_embedding",), "model_max_length"          # which no conversion keeps: it is for training
# LTX-2.3 is told by its file's metadata, which a folder lacks
KINDS = [kind for kind, family in families().items() if not family.by_rows and kind != "ltx-2.3"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_what_the_single_file_is(comfyui, kind):
    file, folder = comfyui.base / "diffusion_models" / comfyui.file(kind), comfyui.base / "diffusers" / f"folder-{kind}"
    header, family = read_header(file), families()[kind]
    model, _ = load_transformer(model_spec(header, family, "float32", "float32"), family, torch.device("cpu"))
    model.save_pretrained(folder / "transformer", max_shard_size="1MB")
    found = read_header(folder)
    assert len(found.files) > 1
    if kind in REFUSED:
        with pytest.raises(comfyui.errors.CheckpointError, match=f"folder-{kind} .*{REFUSED[kind]}"):
            comfyui.shell.load_shell(str(folder), "fp32", comfyui.config())
        return

    names = sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.folders"].under_comfyui_names(read_file(found, lambda name: True), found)
    shell, single = (comfyui.shell.load_shell(str(path), "fp32", comfyui.config()) for path in (folder, file))

    names = {name.replace(".scale", ".weight"): tensor for name, tensor in names.items()}
    own = {name.replace(".scale", ".weight"): tensor for name, tensor in load_file(file).items() if name not in DROPPED}
    assert names.keys() == own.keys() and all(torch.equal(names[name], own[name]) for name in own)
    assert type(shell.model) is type(single.model) and shell.remote.family.name == single.remote.family.name == family.name
    config, expected = ({key: value for key, value in one.model.model_config.unet_config.items() if key != OF_DROPPED}
                        for one in (shell, single))
    assert config == expected
