"""Every model of ComfyUI's is a family, or is refused by its name: a walk over comfy.supported_models."""

import ast
from pathlib import Path

import pytest

from tests.support.comfyui_server import comfyui_folder
from tests.unit.checkpoints.test_header import write_header
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.detection import recognise
from xdit_backend.models import FAMILIES
from xdit_backend.protocol.errors import CheckpointError

FAMILY = {
    "ACEStep": "ACE-Step 1.0", "ACEStep15": "ACE-Step 1.5",
    "StableAudio": "Stable Audio Open", "StableAudio3": "Stable Audio 3",
    "Hunyuan3Dv2mini": "Hunyuan3D 2", "Hunyuan3Dv2": "Hunyuan3D 2", "Hunyuan3Dv2_1": "Hunyuan3D 2.1",
    "MiniMaxH3": "MiniMax H3",
    "Omnigen2": "OmniGen 2", "Boogu": "Boogu-Image", "Lens": "Lens", "Ideogram4": "Ideogram 4", "JoyImage": "JoyImage",
    "WAN21_Camera": "Wan Camera",
    "WAN22_Camera": "Wan Camera", "WAN21_HuMo": "Wan HuMo", "WAN22_Animate": "Wan Animate",
    "WAN21_SCAIL": "Wan SCAIL", "WAN21_SCAIL2": "Wan SCAIL-2", "WAN22_S2V": "Wan S2V",
    "WAN22_WanDancer": "WanDancer",
    "SD15": "SD 1.5", "SD15_instructpix2pix": "SD 1.5", "Stable_Zero123": "SD 1.5", "SD20": "SD 2", "LotusD": "SD 2",
    **dict.fromkeys(("SVD_img2vid", "SV3D_u", "SV3D_p"), "Stable Video Diffusion"),
    "Stable_Cascade_C": "Stable Cascade C", "Stable_Cascade_B": "Stable Cascade B",
    "SD_X4Upscaler": "SD x4 upscaler", "SD21UnclipL": "SD 2",
    "SD21UnclipH": "SD 2", "SDXL": "SDXL", "SDXL_instructpix2pix": "SDXL",
    "SDXLRefiner": "SDXL", "KOALA_1B": "SDXL", "SSD1B": "SDXL",
    "Segmind_Vega": "SDXL", "KOALA_700M": "SDXL", "SD3": "SD3", "AuraFlow": "AuraFlow", "PixArtAlpha": "PixArt-Alpha",
    "PixArtSigma": "PixArt-Sigma", "HunyuanDiT": "HunyuanDiT", "HunyuanDiT1": "HunyuanDiT", "Flux": "Flux.1",
    "FluxInpaint": "Flux.1",
    "FluxSchnell": "Flux.1", "Flux2": "Flux.2", "GenmoMochi": "Mochi", "LTXV": "LTX-Video", "LTXAV": "LTX-2",
    "HunyuanVideo15": "HunyuanVideo 1.5", "HunyuanVideo15_SR_Distilled": "HunyuanVideo 1.5 distilled",
    "HunyuanImage21": "HunyuanImage", "HunyuanImage21Refiner": "HunyuanImage refiner",
    "HunyuanVideo": "HunyuanVideo", "HunyuanVideoI2V": "HunyuanVideo", "HunyuanVideoSkyreelsI2V": "HunyuanVideo",
    "CosmosT2V": "Cosmos-Predict1", "CosmosI2V": "Cosmos-Predict1", "CosmosT2IPredict2": "Cosmos-Predict2",
    "CosmosI2VPredict2": "Cosmos-Predict2", "ZImage": "Z-Image", "PixelDiTT2I": "PixelDiT",
    "PiD": "PiD", "ZImagePixelSpace": "Z-Image pixel",
    "Lumina2": "Lumina 2", "WAN21_T2V": "Wan",
    "WAN21_I2V": "Wan",
    "WAN22_T2V": "Wan", "WAN21_FunControl2V": "Wan", "WAN21_Vace": "Wan VACE", "HiDream": "HiDream-I1",
    "Chroma": "Chroma", "ChromaRadiance": "Chroma Radiance",
    "MageFlow": "Mage-Flow", "TripoSplat": "TripoSplat", "HiDreamO1": "HiDream-O1", "SeedVR2": "SeedVR2",
    "QwenImage": "Qwen-Image", "Kandinsky5": "Kandinsky 5", "Kandinsky5Image": "Kandinsky 5 Image", "Anima": "Anima",
    "LongCatImage": "LongCat-Image", "ErnieImage": "ERNIE-Image", "Krea2": "Krea 2",
    "CogVideoX_T2V": "CogVideoX", "CogVideoX_I2V": "CogVideoX", "CogVideoX_Inpaint": "CogVideoX",
    # whose tensors are Wan's: ComfyUI tells them by what a loader of theirs says, and no file
    "WAN21_CausalAR_T2V": "Wan", "WAN21_FlowRVS": "Wan"}
NEWER = {"WAN_Animate2": "Wan Animate 2", "MiniMaxMusic3": "MiniMax Music 3"}  # from ComfyUI 0.31 and 0.33 on
# of newer ComfyUIs, not run yet
NOT_RUN = {"Trellis2", "MingImage", "QwenImage21", "SenseNovaU15", "YuE2"}
# class of ComfyUI's -> (a family's tensors, what it has beside those, what the refusal says)
REFUSED = {
    **{name: ({}, {mark: (2, 2)}, "a detection or depth model") for name, mark in (
        ("RT_DETR_v4", "backbone.stem.stem1.conv.weight"),
        ("SAM3", "detector.backbone.vision_backbone.trunk.pos_embed"),
        ("SAM31", "detector.backbone.vision_backbone.trunk.pos_embed"),
        ("DepthAnything3", "head.scratch.refinenet1.out_conv.weight"))}}


def classes_of_comfyui():
    """The names in comfy.supported_models.models, of its source."""
    if comfyui_folder() is None:
        pytest.skip("there is no ComfyUI; set XDIT_COMFYUI to its folder")
    source = (Path(comfyui_folder()) / "comfy" / "supported_models.py").read_text(encoding="utf-8")
    return [each.id for node in ast.parse(source).body if isinstance(node, ast.Assign)
            and node.targets[0].id == "models"
            for each in node.value.elts]


def test_each_model_of_comfyui_is_a_family_or_refused():
    classes, families = classes_of_comfyui(), FAMILY | NEWER

    assert [name for name in classes if (name in families) + (name in REFUSED) + (name in NOT_RUN) != 1] == []
    assert {*FAMILY, *REFUSED} <= {*classes}
    assert {*families.values()} <= FAMILIES.keys()
    theirs = {name for name, family in FAMILIES.items() if not family.sampled}
    # classes of ComfyUI's that are of two families: CogVideoX's, Flux.1's, Lumina 2's, HunyuanImage's, Wan's,
    # Z-Image's
    assert theirs - {*families.values()} == {"CogVideoX 1.5", "Ovis-Image", "NewBie-Image", "HunyuanImage distilled",
                                           "Wan Fun-Control", "CogVideoX-I2V", "Z-Image-Omni"}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_not_run_is_refused_by_its_name(tmp_path, name):
    base, more, words = REFUSED[name]
    write_header(tmp_path / "model.safetensors", {**base, **more})

    with pytest.raises(CheckpointError, match=f"is .*{words}"):
        recognise(open_checkpoint(tmp_path / "model.safetensors"))
