"""tests.programs.comfyui_interfaces: its table is of the pack and ComfyUI of today, and finds every kind of change."""

import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.programs import comfyui_interfaces
from tests.programs.comfyui_interfaces import EXPLAINED, PACK, TABLE, VERSION, differences, is_explained, table_of
from tests.programs.comfyui_tree import Tree
from tests.programs.comfyui_uses import Uses
from tests.support.comfyui_server import comfyui_folder
from xdit_backend.comfyui.install_location import comfyui_version

# what changes -> (file of ComfyUI, text, its replacement, what the program prints of it)
MUTANTS = {
    "an argument is renamed": (
        "comfy/samplers.py", "def get_area_and_mult(conds, x_in, timestep_in):",
        "def get_area_and_mult(conds, x_in, timesteps):", "signature comfy.samplers:get_area_and_mult: -timestep_in "
        "+timesteps"),
    "the order of arguments changes": (
        "comfy/samplers.py", "def get_area_and_mult(conds, x_in, timestep_in):",
        "def get_area_and_mult(x_in, conds, timestep_in):", "signature comfy.samplers:get_area_and_mult: "
        "def (x_in, conds, timestep_in), was def (conds, x_in, timestep_in)"),
    "a default changes": (
        "comfy/model_patcher.py", "def partially_load(self, device_to, extra_memory=0,",
        "def partially_load(self, device_to, extra_memory=1,",
        "signature comfy.model_patcher:ModelPatcher.partially_load: -extra_memory=0 +extra_memory=1"),
    "a method of a base class is gone": (
        "comfy/model_patcher.py", "    def partially_unload(self,", "    def partially_unload_to(self,",
        "missing   comfy.model_patcher:ModelPatcher.partially_unload: missing"),
    "the body of an overridden method changes": (
        "comfy/model_patcher.py", "    def current_loaded_device(self):\n        return self.model.device",
        "    def current_loaded_device(self):\n        return self.offload_device",
        "code      comfy.model_patcher:ModelPatcher.current_loaded_device: code"),
    "the body of a replaced function changes": (
        "comfy/model_management.py", "def intermediate_device():\n", "def intermediate_device():\n    pick_device()\n",
        "code      comfy.model_management:intermediate_device: code"),
    "a class is replaced by a function": (
        "comfy/ldm/minimax/vae.py", "class MiniMaxH3VideoVAE(nn.Module):",
        "def MiniMaxH3VideoVAE(*sizes):\n    return None\n\n\nclass Other(nn.Module):",
        "signature comfy.ldm.minimax.vae:MiniMaxH3VideoVAE:"),
    "a method of a model is gone": (
        "comfy/ldm/minimax/vae.py", "    def decode_temporal(", "    def decode_in_time(",
        "missing   comfy.ldm.minimax.vae:MiniMaxH3VideoVAE.decode_temporal: missing"),
    "a class has another base": (
        "comfy/ldm/minimax/vae.py", "class MiniMaxH3VideoVAE(nn.Module):",
        "class MiniMaxH3VideoVAE(nn.Sequential):", "signature comfy.ldm.minimax.vae:MiniMaxH3VideoVAE: -nn.Module "
        "+nn.Sequential"),
    "a block computes in another order": (
        "comfy/ldm/lightricks/av_model.py", "vx_scaled = vx_norm3 * (1 + scale_ca_video_hidden_states_v2a)",
        "vx_scaled = comfy.ldm.common_dit.rms_norm(vx) * (1 + scale_ca_video_hidden_states_v2a)",
        "code      comfy.ldm.lightricks.av_model:BasicAVTransformerBlock.forward: code"),
    "a payload has a new key": (
        "comfy/model_base.py", 'payload["seed"] =', 'payload["audio_scale"] = 1.0\n        payload["seed"] =',
        "names     comfy.model_base:MiniMaxH3[keys] audio_scale: new"),
    "a model has another prediction type": (
        "comfy/model_base.py", "    FLUX = 8", "    FLUX = 8\n    FLOW_AV = 13",
        "code      comfy.model_base:ModelType.FLOW_AV: code"),
    "a constant has another value": (
        "comfy/patcher_extension.py", 'ON_LOAD = "on_load_after"', 'ON_LOAD = "on_load"',
        "signature comfy.patcher_extension:CallbacksMP.ON_LOAD: "),
    "a package is needed": (
        "comfy/ldm/modules/attention.py", "import math\n", "import math\nimport comfy_kitchen\n",
        "signature comfy.ldm.modules.attention: +comfy_kitchen"),
    "a quantised format is new": (
        "comfy/quant_ops.py", "\n__all__", '\nQUANT_ALGOS["new"] = {}\n\n__all__',
        "code      comfy.quant_ops:QUANT_ALGOS: code"),
    "a function that is recognised by name is renamed": (
        "comfy_extras/nodes_pag.py", "def perturbed_attention(", "def perturbed(",
        "missing   comfy_extras.nodes_pag:PerturbedAttentionGuidance.execute.<locals>.perturbed_attention: missing"),
    "a model reads a new option": (
        "comfy/ldm/flux/model.py", "\nclass Flux(", '\nSTEPS = transformer_options.get("skip_every")\n\n\nclass Flux(',
        "names     names of transformer_options skip_every: new"),
}


@pytest.fixture(scope="module")
def comfyui():
    """The folder of the ComfyUI that the table is of."""
    folder, wanted = comfyui_folder(), json.loads(TABLE.read_text(encoding="utf-8"))[VERSION]
    if folder is None or comfyui_version(folder) != wanted:
        pytest.skip(f"Name ComfyUI {wanted} in XDIT_COMFYUI: the table is of that version.")
    return folder


@pytest.fixture(scope="module")
def copy(comfyui, tmp_path_factory):
    """A folder with links to the files of ComfyUI."""
    folder = tmp_path_factory.mktemp("comfyui")
    for name in ("comfy", "comfy_extras"):
        shutil.copytree(comfyui / name, folder / name, copy_function=os.symlink,
                        ignore=lambda path, names: [each for each in names if not (
                            each.endswith(".py") or Path(path, each).is_dir())])
    return folder


@contextmanager
def changed(copy, file, text, replacement):
    """While active, one file of the copy has another text. Yields the part of the table with its symbols."""
    path = copy / file
    original = path.resolve()
    source = original.read_text(encoding="utf-8")
    assert text in source, f"{file} has no {text!r}"
    path.unlink()
    path.write_text(source.replace(text, replacement, 1), encoding="utf-8")
    try:
        yield table_of_module(file.removesuffix(".py").replace("/", "."))
    finally:
        path.unlink()
        path.symlink_to(original)


def table_of_module(name):
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return {key: value for key, value in table.items() if key.partition(":")[0] == name}


def test_the_table_is_of_this_pack_and_its_comfyui(comfyui):
    assert table_of(PACK, Tree(comfyui)) == json.loads(TABLE.read_text(encoding="utf-8")), (
        "Run: python -m tests.programs.comfyui_interfaces FOLDER --write")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The program with the symbols of one module only, and a pack that uses none of them."""
    (tmp_path / "__init__.py").touch()
    table = {VERSION: json.loads(TABLE.read_text(encoding="utf-8"))[VERSION]} | table_of_module("comfy.samplers")
    comfyui_interfaces.save_table(table, tmp_path / "table.json")
    (tmp_path / "explained.json").write_text("{}")
    for name, value in (("PACK", tmp_path), ("TABLE", tmp_path / "table.json"),
                        ("EXPLAINED", tmp_path / "explained.json")):
        monkeypatch.setattr(comfyui_interfaces, name, value)
    return tmp_path


def test_the_comfyui_of_the_table_passes(small, comfyui, capsys):
    assert comfyui_interfaces.main([str(comfyui)]) == 0

    assert re.fullmatch(r"[1-9]\d* symbols of ComfyUI (\S+), compared with \1: 0 symbols missing, 0 .*, 0 .*, 0 .*; "
                        "0 explained\n", capsys.readouterr().out)


def test_a_changed_comfyui_fails_until_it_is_explained(small, copy, capsys):
    file, text, replacement, line = MUTANTS["an argument is renamed"]
    with changed(copy, file, text, replacement):
        assert comfyui_interfaces.main([str(copy)]) == 1
        printed = capsys.readouterr().out
        assert line in printed and "0 symbols missing, 1 signatures" in printed

        reason = {"def (conds, x_in, timesteps)": "It is passed by position."}
        (small / "explained.json").write_text(json.dumps({"comfy.samplers:get_area_and_mult": reason}))

        assert comfyui_interfaces.main([str(copy)]) == 0
        assert capsys.readouterr().out.endswith("; 1 explained\n")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_changed_comfyui_is_reported(mutant, copy):
    file, text, replacement, expected = MUTANTS[mutant]
    options = "names of transformer_options"

    with changed(copy, file, text, replacement) as table:
        if options in expected:
            table[options] = json.loads(TABLE.read_text(encoding="utf-8"))[options]
        found = [f"{each.kind:9} {each}" for each in differences(table, Tree(copy))]

    assert any(each.startswith(expected) for each in found), found
    assert len(found) <= 3                                     # a change is not reported all over


def test_comments_docstrings_and_annotations_are_no_changes(copy):
    with changed(copy, "comfy/samplers.py", "def get_area_and_mult(conds, x_in, timestep_in):\n",
                 "def get_area_and_mult(conds: dict, x_in, timestep_in) -> tuple:\n"
                 '    """New words."""\n    # more words\n') as table:
        assert "comfy.samplers:get_area_and_mult" in table
        assert differences(table, Tree(copy)) == []


def test_an_explanation_holds_for_one_change_only():
    first, second = (comfyui_interfaces.Difference("code", "comfy.ops:f", now, "0") for now in ("111111", "222222"))

    assert is_explained(first, {"comfy.ops:f": {"111111": "The same arithmetic."}})
    assert not is_explained(second, {"comfy.ops:f": {"111111": "The same arithmetic."}})


def test_explanations_are_of_symbols_in_the_table():
    table = json.loads(TABLE.read_text(encoding="utf-8"))

    for symbol, changes_of in json.loads(EXPLAINED.read_text(encoding="utf-8")).items():
        # a name of a list, or of the keys of a class, follows after a space
        listed = symbol.rpartition(" ")[0].removesuffix("[keys]")
        assert {symbol, symbol.rpartition(".")[0], listed} & table.keys(), symbol
        assert changes_of and all(reason.endswith(".") for reason in changes_of.values())


def test_uses_are_read_from_the_source(tmp_path, comfyui):
    (tmp_path / "nodes").mkdir()
    (tmp_path / "xdit_backend").mkdir()
    (tmp_path / "__init__.py").write_text("import folder_paths as paths\npaths.get_user_directory()\n")
    (tmp_path / "nodes" / "a.py").write_text(
        "import comfy.model_patcher\n"
        "import comfy.gone\n"
        "from comfy.samplers import calc_cond_batch, gone_too\n\n"
        "class Own(comfy.model_patcher.ModelPatcher):\n"
        "    def load(self):\n"
        "        return self.patches_uuid  # as comfy.float.stochastic_rounding\n")
    (tmp_path / "xdit_backend" / "b.py").write_text('NATIVE = "comfy.ldm.lightricks.av_model:LTXAVModel"\n')

    uses = Uses(tmp_path, Tree(comfyui))

    levels = {key: how for key, (how, _) in uses.found.items()}
    assert levels["folder_paths:get_user_directory"] == "called"
    assert levels["comfy.samplers:calc_cond_batch"] == "called"
    assert levels["comfy.model_patcher:ModelPatcher.load"] == "copied"
    assert levels["comfy.model_patcher:ModelPatcher.patches_uuid"] == "called"
    assert levels["comfy.float:stochastic_rounding"] == "copied"
    assert levels["comfy.ldm.lightricks.av_model:LTXAVModel"] == "computed"
    assert levels["comfy.ldm.lightricks.av_model:BasicAVTransformerBlock"] == "reached"
    assert levels["comfy.model_base:LTXAV"] == "reached"
    assert uses.missing == {"comfy.gone": "nodes/a.py", "comfy.samplers.gone_too": "nodes/a.py"}


def test_a_folder_without_comfyui_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        comfyui_interfaces.main([str(tmp_path)])

    assert f"Name ComfyUI's folder: {tmp_path} has no comfy/model_base.py." in capsys.readouterr().err
