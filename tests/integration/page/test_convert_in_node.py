"""Run on all GPUs, and back, on every workflow that ComfyUI's own package of templates installs;
in Node, without a page."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.page.conftest import files_of_note
from tests.support.comfyui_server import ROOT, comfyui_folder
from tests.support.page_modules import evaluate


@pytest.fixture(scope="module")
def templates():
    """The folder of ComfyUI's templates."""
    found = importlib.util.find_spec("comfyui_workflow_templates_json")
    if comfyui_folder() is None or found is None:
        pytest.skip("no ComfyUI with its templates: run `python3 start.py test`")
    return Path(found.origin).parent / "templates"


def convert(node, modules, folder):
    done = subprocess.run([node, Path(__file__).parent / "convert_templates.mjs", modules / "convert.mjs",
                           folder],
                          stdout=subprocess.PIPE, check=True)
    return {entry["name"]: entry for entry in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def converted(node, modules, templates):
    return convert(node, modules, templates)


def test_there_and_back_gives_the_same_file(converted):
    assert len(converted) > 400
    assert sum(entry["changed"] > 0 for entry in converted.values()) > 150
    assert [name for name, entry in converted.items() if not (entry["back"] and entry["kept"])] == []


def test_links_keep_their_ends(converted):
    assert [name for name, entry in converted.items() if entry["loose"]] == []


def test_widgets_that_subgraphs_show_are_called_what_they_are_now(converted):
    assert [name for name, entry in converted.items() if entry["stale"]] == []


def test_twice_is_once(converted):
    assert [name for name, entry in converted.items() if entry["again"]] == []


def test_infinite_talk_goes_to_the_workers_with_its_two_speakers(converted):
    entry = converted["video_wan2_1_infinitetalk.json"]

    assert "XDiTLoadModel" in entry["types"] and "UNETLoader" not in entry["types"]


def test_a_loader_of_a_vision_model_stays_beside_that_of_the_model(converted):
    """It gives the CLIP vision model and the VAE of its checkpoint."""
    entry = converted["3d_hunyuan3d-v2.1.json"]

    assert {"XDiTLoadModel", "ImageOnlyCheckpointLoader", "XDiTParallelSampler"} <= {*entry["types"]}
    assert "XDiTLoadClipVae" not in entry["types"] and entry["left"] == []


@pytest.mark.parametrize("name", ["video_humo.json", "video_wan2.1_fun_camera_v1.1_1.3B.json",
                                  "video_wan2_2_14B_fun_camera.json"])
def test_a_model_that_runs_as_comfyuis_own_module_goes_to_the_workers(converted, name):
    entry = converted[name]

    assert entry["changed"] and "XDiTLoadModel" in entry["types"]
    assert [left for left in entry["left"] if left["type"] == "UNETLoader"] == []


def test_samplers_and_tiles_that_stay_are_told(converted):
    """ComfyUI's other samplers run a MODEL of the workers as it is; what goes tile by tile stays on one device."""
    told = {(one["type"], one["reason"]) for entry in converted.values() for one in entry["stay"]}

    assert {("KSamplerAdvanced", "as_it_is"), ("SamplerCustomAdvanced", "as_it_is"),
            ("VAEDecodeTiled", "tiled")} <= told
    assert [name for name, entry in converted.items() if entry["stay"] and not entry["changed"]] == []


def test_the_model_of_a_split_loader_stays_in_its_group_and_keeps_its_title(converted):
    made = {one["title"]: one for one in converted["sdxl_simple_example.json"]["made"]}

    assert set(made) == {"Load xDiT Model - BASE", "Load xDiT Model - REFINER"}
    assert made["Load xDiT Model - REFINER"]["groups"] == ["Load in REFINER SDXL Model", "Refiner"]
    assert "Load in BASE SDXL Model" in made["Load xDiT Model - BASE"]["groups"]
    assert {one["beside"] for one in made.values()} == {"Load CLIP and VAE - BASE", "Load CLIP and VAE - REFINER"}
    # where there is room for it in a group, or for a larger one
    placed = [one for entry in converted.values() for one in entry["made"] if one["begins"]]
    assert sum(one["groups"][:1] == one["begins"][:1] for one in placed) > 0.9 * len(placed) > 20
    assert [one for entry in converted.values() for one in entry["made"] if one["covers"]] == []


@pytest.mark.parametrize("name, types, stay", [
    ("default.json", ["XDiTLoadModel", "XDiTLoadClipVae", "XDiTParallelSampler", "XDiTVAEDecode"], []),
    ("sdxlturbo_example.json", ["XDiTLoadModel", "XDiTLoadClipVae", "XDiTVAEDecode"], []),
    ("01_get_started_text_to_image.json", ["XDiTLoadModel", "XDiTParallelSampler", "XDiTVAEDecode"], []),
    ("sd3.5_large_canny_controlnet_example.json",
     ["XDiTLoadModel", "XDiTLoadClipVae", "XDiTParallelSampler", "XDiTVAEDecode"], []),
    ("image_qwen_image_controlnet_patch.json",
     ["XDiTLoadModel", "XDiTParallelSampler", "XDiTVAEDecode", "XDiTVAEEncode"], []),
    ("image_flux2_klein_9b_kv_image_edit.json", ["XDiTLoadModel", "XDiTVAEDecode", "XDiTVAEEncode"], []),
])
def test_what_becomes_of_a_template(converted, name, types, stay):
    if name not in converted:
        pytest.skip(f"this version of ComfyUI's templates has no {name}")
    entry = converted[name]

    assert {one for one in entry["types"] if one.startswith("XDiT")} == set(types)
    assert set(stay) <= {(left["type"], left["reason"]) for left in entry["left"]}
    assert bool(stay) == bool(entry["left"])


@pytest.mark.parametrize("message, words, rest", [
    ("Set cfg above 1, or mode to auto: cfg_degree=2 needs two branches, and cfg=1.0 evaluates one. One. Two. Three.",
     "Set cfg above 1, or mode to auto: cfg_degree=2 needs two branches, and cfg=1.0 evaluates one. One. Two. Three.",
     ""),
    ("Worker rank 1 (cpu) died (exit code -9, killed). Queue the prompt again to start a new group. See "
     "docs/guide/troubleshooting.md in the folder of the xDiT nodes. Its last lines:\nRoot Cause (first observed "
     "failure):\n[0]:\n",
     "Worker rank 1 (cpu) died (exit code -9, killed). Queue the prompt again to start a new group.",
     "See docs/guide/troubleshooting.md in the folder of the xDiT nodes. Its last lines:\nRoot Cause (first observed "
     "failure):\n[0]:")])
def test_of_a_message_with_lines_of_output_two_sentences_are_shown(node, modules, message, words, rest):
    assert evaluate(node, modules / "messages.mjs", "headOf", f"headOf({json.dumps(message)})") == [words, rest]


def test_our_own_templates_turn_into_stock_workflows(node, modules):
    """All but the prompts that ComfyUI has no node for; what comes of it converts like any other."""
    done = subprocess.run([node, Path(__file__).parent / "stock_templates.mjs", modules / "stock.mjs",
                           modules / "convert.mjs", ROOT / "workflows"], stdout=subprocess.PIPE, check=True)
    results = json.loads(done.stdout)
    inputs = {"KSampler": {"model", "positive", "negative", "latent_image", "seed", "steps", "cfg", "sampler_name",
                           "scheduler", "denoise"}, "VAEDecode": {"samples", "vae"}, "VAEEncode": {"pixels", "vae"},
              "ImageUpscaleWithModel": {"upscale_model", "image"},
              "UNETLoader": {"unet_name", "weight_dtype"}, "CheckpointLoaderSimple": {"ckpt_name"}}

    assert len(results) > 20
    for name, entry in results.items():
        assert entry["loose"] == entry["unknown"] == [] and entry["kept"] and entry["again"] == 0, name
        nodes = entry["workflow"]["nodes"]
        assert {one["type"] for one in nodes if one["type"].startswith("XDiT")} <= {"XDiTDemoPrompt"}, name
        assert {(left["type"], left["reason"]) for left in entry["left"]} <= {("XDiTDemoPrompt", "no_stock")}
        for one in nodes:
            assert {slot["name"] for slot in one["inputs"]} == inputs.get(
                one["type"], {slot["name"] for slot in one["inputs"]}), (name, one["type"])
        # nodes that are converted again
        assert entry["back"] >= (1 if name.startswith("Upscale") else 2), name


@pytest.mark.parametrize("locale", ["en", "zh", "fr"])
def test_templates_are_listed_with_demo_first_and_a_sentence_each(node, modules, locale):
    """Titles are the names of files, so none is written as a program writes them."""
    titles = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    listed, [core, ours] = evaluate(node, modules / "templates.mjs", "listTemplates", f"""(async () => {{
        const api = {{ async getWorkflowTemplates() {{ return {json.dumps({"other": ["b", "a"], "us": titles})}; }},
            async getCoreWorkflowTemplates(locale) {{ return [locale]; }} }};
        listTemplates(api, "us");
        return [await api.getWorkflowTemplates(), await api.getCoreWorkflowTemplates("{locale}")];
    }})()""")

    assert listed == {"other": ["b", "a"]} and core == locale
    assert [one["title"] for one in ours["templates"]][:2] == ["Demo", "Compare"] and ours["moduleName"] == "us"
    assert sorted(one["title"] for one in ours["templates"]) == titles
    assert [title for title in titles if "_" in title or title[0].islower()] == []
    for one in ours["templates"]:
        assert one["name"] == one["title"] and one["description"].endswith("。" if locale == "zh" else ".")
        assert "-" not in one["description"]                   # the page shows none
        assert sum(1 + (letter > "\u2e80") for letter in one["description"]) <= 66     # two lines, and no more


def test_templates_have_tags_and_the_sizes_of_their_files(node, modules, templates):
    """Tags are ComfyUI's own, by which its browser filters. Its index has sizes of the same files, each rounded."""
    index = {one["name"]: one for group in json.loads((templates / "index.json").read_text(encoding="utf-8"))
             for one in group["templates"]}
    details = evaluate(node, modules / "templates.mjs", "DETAILS", "DETAILS")
    known = {tag for one in index.values() for tag in one.get("tags", [])}

    assert set(details) == {path.stem for path in (ROOT / "workflows").glob("*.json")}
    for title, one in details.items():
        assert one["tags"] and set(one["tags"]) <= known and one["models"], title
        assert (one["gb"] > 0) == bool(files_of_note(title)[0]), title
    for title, name in (("Flux.1", "flux_dev_full_text_to_image"), ("Z-Image-Turbo", "image_z_image_turbo"),
                        ("HunyuanVideo", "hunyuan_video_text_to_video"),
                        ("Wan 2.1, text to video", "text_to_video_wan"),
                        ("MiniMax H3, video with audio", "video_minimax_h3_t2v")):
        assert abs(details[title]["gb"] * 1e9 / index[name]["size"] - 1) < 0.02, title
