"""ComfyUI's classes are held against the plans of their families, and compared with themselves in pieces, before they
run."""

import dataclasses

import pytest
import torch

from tests.support.model_zoo import rotate_in_float64
from xdit_backend.checkpoints.build_transformer import build_empty
from xdit_backend.comfyui.install_location import comfyui_version, find_comfyui
from xdit_backend.comfyui.native_models import class_at
from xdit_backend.models import FAMILIES
from xdit_backend.multi_node.listener import version_differences
from xdit_backend.protocol.errors import CheckpointError
from xdit_backend.worker.self_check import check_split

NAMES = [name for name, family in FAMILIES.items() if family.is_comfyuis and not family.plan.hooks == "replicated"]


@pytest.fixture(autouse=True)
def comfyui():
    if find_comfyui() is None:
        pytest.skip("no ComfyUI: name one in XDIT_COMFYUI")
    class_at(FAMILIES["Lens"].transformer)
    rotate_in_float64(False)


@pytest.mark.parametrize("name", NAMES)
def test_each_class_computes_in_pieces_what_it_computes_whole(name):
    check_split(FAMILIES[name])


def with_plan(name, **changed):
    family = FAMILIES[name]
    return dataclasses.replace(family, plan=dataclasses.replace(family.plan, **changed))


@pytest.mark.parametrize("family", [
    pytest.param(with_plan("Boogu-Image", attention={"attn": ("image", "reference", "text")}), id="order of tokens"),
    pytest.param(with_plan("Lens", positions={}), id="positions"),
    pytest.param(with_plan("Wan HuMo", cacheable_outside={"text_embedding": "run", "time_projection": "run",
                                                     "patch_embedding": "run"}), id="what stays"),
    pytest.param(with_plan("Wan SCAIL", positions={}), id="frames before"),
    pytest.param(dataclasses.replace(with_plan("Wan Animate", token_index_argument=None),
                                     adapt_model=lambda model, config: None), id="code between blocks")])
def test_a_class_that_differs_from_its_plan_is_refused(family):
    with pytest.raises(CheckpointError, match=f"{family.name} runs as ComfyUI's own module, and .* of ComfyUI .*split "
                                              f"in two"):
        check_split(family)


@pytest.mark.parametrize("name, part, what", [
    ("Wan Camera", "rope_encode", "has no module or method rope_encode"),
    ("Wan Camera", "forward_orig", "has no argument camera_conditions"),
    ("NewBie-Image", "_forward", "has no argument clip_text_pooled"),
    ("Lens", None, "has no argument freqs_cis of the blocks of transformer_blocks")])
def test_a_class_that_lacks_what_a_plan_names_is_refused(monkeypatch, name, part, what):
    family, version = FAMILIES[name], comfyui_version(find_comfyui())
    cls = class_at(family.transformer)
    if part is None:
        family = dataclasses.replace(family, adapt_model=lambda model, config: _rename_argument(model))
    else:
        monkeypatch.delattr(next(each for each in cls.__mro__ if part in vars(each)), part)

    with pytest.raises(CheckpointError, match=f"of ComfyUI {version} {what}"):
        build_empty(family, family.testing.config)


def _rename_argument(model):
    for block in model.transformer_blocks:
        block.forward = lambda hidden_states, encoder_hidden_states, temb, pe, attention_mask=None: None


def test_a_class_that_this_comfyui_lacks_is_refused_by_its_version():
    with pytest.raises(CheckpointError, match=r"^Update ComfyUI: the version [\d.]+ in .* has no Wan9Model in "):
        class_at("comfy.ldm.wan.model:Wan9Model")


def test_no_comfyui_is_said_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr("xdit_backend.comfyui.native_models.find_comfyui", lambda: None)

    with pytest.raises(CheckpointError, match="^Install ComfyUI on this machine, and set XDIT_COMFYUI"):
        build_empty(FAMILIES["Lens"], FAMILIES["Lens"].testing.config)


def test_what_comfyui_makes_in_float32_stays_so():
    model = build_empty(FAMILIES["Wan Camera"], FAMILIES["Wan Camera"].testing.config)

    assert model.wide_modules == {"patch_embedding"}
    assert model.text_embedding[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("theirs, differs", [({"ComfyUI": "0.29.0"}, True), ({"ComfyUI": "0.30.0"}, False),
                                             ({}, False)])
def test_machines_compare_versions_of_comfyui_where_both_have_one(theirs, differs):
    assert ("ComfyUI is 0.29.0 there and 0.30.0 here" in version_differences(theirs, {"ComfyUI": "0.30.0"})) == differs
