"""Check of a graph before its conversion: the page gets the messages that a run ends with."""

import importlib
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.support.comfyui_server import ROOT, run_async
from tests.support.upscale_models import esrgan
from xdit_backend.models import FAMILIES

KINDS = "sd15", "sd3", "flux", "wan", "sdxl", "flux2-klein", "lumina-2", "qwen-image", "ltx-video"


@pytest.fixture(scope="module")
def module(comfyui):
    if "TomePatchModel" not in comfyui.nodes.NODE_CLASS_MAPPINGS:
        run_async(comfyui.nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    module = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.server.graph_check")
    return SimpleNamespace(OTHER_MODELS=module.OTHER_MODELS,
                           check_graph=lambda prompt: module.check_graph(prompt, comfyui.nodes.NODE_CLASS_MAPPINGS))


def graph_of(file, patches=(), loader="UNETLoader", positive="text", more=None):
    """A prompt: a loader, nodes that patch its MODEL, KSampler and VAE Decode. patches: (class, values) in order."""
    key = {"UNETLoader": "unet_name", "CheckpointLoaderSimple": "ckpt_name", "XDiTLoadModel": "model_name"}[loader]
    values = {"weight_dtype": "default"} if loader != "CheckpointLoaderSimple" else {}
    prompt = {"loader": {"class_type": loader, "inputs": {key: file, **values}},
              "text": {"class_type": "CLIPTextEncode", "inputs": {"text": "a cat", "clip": ["clip", 0]}},
              "clip": {"class_type": "CLIPLoader", "inputs": {"clip_name": "absent_clip.safetensors", "type": "sd3"}},
              "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "absent_vae.safetensors"}},
              "empty": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}}
    last = "loader"
    for number, (kind, settings) in enumerate(patches):
        prompt[str(number)] = {"class_type": kind, "inputs": {"model": [last, 0], **settings}}
        last = str(number)
    prompt["sampler"] = {"class_type": "KSampler", "inputs": {
        "model": [last, 0], "positive": [positive, 0], "negative": ["text", 0], "latent_image": ["empty", 0],
        "seed": 1, "steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}}
    prompt["decode"] = {"class_type": "VAEDecode", "inputs": {"samples": ["sampler", 0], "vae": ["vae", 0]}}
    return prompt | (more or {})


def verdicts(found):
    return {node: entry["verdict"] for node, entry in found["nodes"].items()}


def message_of_run(comfyui, kind, family, **values):
    """The message with which a run on the workers rejects a node."""
    class_ = comfyui.nodes.NODE_CLASS_MAPPINGS[kind]
    result = getattr(class_(), class_.FUNCTION)(model=comfyui.ours(family, comfyui.config("cpu")), **values)
    with pytest.raises(comfyui.errors.XDiTError) as rejected:
        comfyui.sample((result if isinstance(result, tuple) else result.args)[0], family)
    return str(rejected.value)


@pytest.mark.parametrize("is_here", [True, False])
def test_a_patch_that_a_run_rejects_is_named_with_the_message_of_the_run(comfyui, module, is_here):
    file = comfyui.file("sd15") if is_here else "absent.safetensors"

    found = module.check_graph(graph_of(file, [("FreeU", {"b1": 1.1, "b2": 1.2, "s1": 0.9, "s2": 0.2}),
                                               ("TomePatchModel", {"ratio": 0.5})]))

    assert found["nodes"] == {"loader": {"verdict": "refused", "by": "1", "reason": message_of_run(
        comfyui, "TomePatchModel", "sd15", ratio=0.5)}}
    assert found["absent"] == [*([] if is_here else [file]), "absent_vae.safetensors"]
    assert found["missing"] == ["absent_clip.safetensors"] and found["models"] == {}


def test_patches_for_another_kind_of_model_have_the_message_of_the_run(comfyui, module):
    """Known from the file; without it, such a node could be for its model."""
    found = module.check_graph(graph_of(comfyui.file("sd3"), [("FluxKVCache", {})]))

    assert found["nodes"]["loader"]["reason"] == message_of_run(comfyui, "FluxKVCache", "sd3")
    assert verdicts(module.check_graph(graph_of("absent.safetensors", [("FluxKVCache", {})]))) == {"0": "unchanged"}


def test_patches_that_act_and_those_that_do_not_are_told_apart(comfyui, module):
    found = module.check_graph(graph_of(comfyui.file("wan"), [
        ("wanBlockSwap", {}), ("ModelSamplingSD3", {"shift": 5.0}),
        ("LoraLoaderModelOnly", {"lora_name": "absent_lora.safetensors", "strength_model": 1.0})]))

    assert verdicts(found) == {"0": "no_effect", "1": "unchanged", "2": "unchanged"}
    assert "absent_lora.safetensors" in found["missing"]


def test_a_copy_of_the_model_has_the_message_of_the_run(comfyui, module):
    model = comfyui.ours("sd3", comfyui.config("cpu"))
    with pytest.raises(comfyui.errors.UnsupportedError) as rejected:
        model.clone(force_deepcopy=True)

    found = module.check_graph(graph_of(comfyui.file("sd3"), [("TrainLoraNode", {})]))

    assert found["nodes"]["loader"] == {"verdict": "refused", "by": "0", "reason": str(rejected.value)}


def test_the_sampler_that_caches_frames_in_the_model_is_rejected(comfyui, module):
    more = {"ar": {"class_type": "SamplerARVideo", "inputs": {"num_frame_per_block": 1}},
            "guider": {"class_type": "CFGGuider", "inputs": {"model": ["loader", 0], "cfg": 1.0,
                                                             "positive": ["text", 0], "negative": ["text", 0]}},
            "custom": {"class_type": "SamplerCustomAdvanced", "inputs": {"guider": ["guider", 0],
                                                                         "sampler": ["ar", 0]}}}

    found = module.check_graph(graph_of("absent.safetensors", more=more))

    assert found["nodes"]["loader"]["by"] == "custom" and "ar_video" in found["nodes"]["loader"]["reason"]
    more["ar"] = {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}}
    assert "loader" not in module.check_graph(graph_of("absent.safetensors", more=more))["nodes"]


def test_conditioning_of_another_model_and_unknown_nodes_are_named(comfyui, module):
    pose = {"pose": {"class_type": "SDPoseKeypointExtractor", "inputs": {"model": ["loader", 0]}}}
    unknown = {"new": {"class_type": "TextEncodeOfNewModel", "inputs": {"clip": ["clip", 0]}}}

    found = module.check_graph(graph_of("absent.safetensors", more=pose))["nodes"]["loader"]
    assert found["by"] == "pose" and "SDPose, which xDiT does not support" in found["reason"]

    found = module.check_graph(graph_of("absent.safetensors", positive="new", more=unknown))["nodes"]["loader"]
    assert found["by"] == "sampler" and "TextEncodeOfNewModel" in found["reason"]


def test_gligen_is_found_through_conditioning(comfyui, module):
    more = {"gligen": {"class_type": "GLIGENLoader", "inputs": {"gligen_name": "absent.safetensors"}},
            "box": {"class_type": "GLIGENTextBoxApply", "inputs": {
                "conditioning_to": ["text", 0], "clip": ["clip", 0], "gligen_textbox_model": ["gligen", 0],
                "text": "a", "width": 64, "height": 64, "x": 0, "y": 0}},
            "area": {"class_type": "ConditioningSetAreaStrength", "inputs": {"conditioning": ["box", 0],
                                                                             "strength": 1.0}}}

    found = module.check_graph(graph_of(comfyui.file("sd15"), positive="area", more=more))["nodes"]["loader"]

    assert found["by"] == "box" and "middle_patch" in found["reason"]


def test_files_have_the_messages_of_the_loaders(comfyui, module):
    (comfyui.base / "diffusion_models" / "text.safetensors").write_bytes(b"no model")
    prompt = graph_of("text.safetensors")
    prompt["vae"]["inputs"]["vae_name"] = "pixel_space"

    found = module.check_graph(prompt)

    with pytest.raises(comfyui.errors.CheckpointError) as rejected:
        comfyui.load_model.execute("text.safetensors", "default")
    assert found["models"] == {"text.safetensors": str(rejected.value)} and found["nodes"] == {}
    assert "no layers to run" in found["vaes"]["pixel_space"] and found["absent"] == []


def test_a_model_is_followed_through_switches_and_into_a_loader_of_the_pack(comfyui, module):
    more = {"switch": {"class_type": "ComfySwitchNode", "inputs": {"switch": True, "on_true": ["loader", 0]}},
            "tome": {"class_type": "TomePatchModel", "inputs": {"model": ["switch", 0], "ratio": 0.3}}}

    found = module.check_graph(graph_of(comfyui.file("sd15"), loader="XDiTLoadModel", more=more))

    assert found["nodes"]["loader"]["by"] == "tome"


def test_no_path_leads_out_of_the_folders_of_models(comfyui, module):
    (comfyui.base / "outside").mkdir(exist_ok=True)
    (comfyui.base / "outside.safetensors").write_bytes(b"no model")

    for name in ("../outside.safetensors", "../outside", str(comfyui.base / "outside.safetensors")):
        found = module.check_graph(graph_of(name))
        assert found["models"] == {} and found["absent"][:1] in ([name], ["absent_vae.safetensors"])


def test_the_code_of_other_packs_is_not_run(comfyui, module, monkeypatch):
    class Strange:
        RETURN_TYPES, FUNCTION, RELATIVE_PYTHON_MODULE = ("MODEL",), "patch", "custom_nodes.strange"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"model": ("MODEL",)}}

        def patch(self, model):
            raise AssertionError("was run")

    monkeypatch.setitem(comfyui.nodes.NODE_CLASS_MAPPINGS, "Strange", Strange)

    found = module.check_graph(graph_of(comfyui.file("sd3"), [("Strange", {})]))

    assert verdicts(found) == {"0": "unchanged"}


def test_each_node_of_comfyui_has_the_verdict_of_its_run(comfyui, module):
    """docs/reference/nodes.md has what each comes to in a run, on a kind of model that it is for."""
    rows = re.findall(r"(?m)^\| (\S.*?) \| ([\w.-]+).*? \| (\w+)", (ROOT / "docs/reference/nodes.md").read_text())
    classes, wrong, checked = comfyui.nodes.NODE_CLASS_MAPPINGS, [], {}
    for name, kind, outcome in rows:
        if name not in classes or tuple(classes[name].RETURN_TYPES) != ("MODEL",) or kind not in KINDS:
            continue
        inputs = {key: spec for part in ("required", "optional")
                  for key, spec in classes[name].INPUT_TYPES().get(part, {}).items() if key != "model"}
        values = {key: spec[1]["default"] for key, spec in inputs.items() if len(spec) > 1 and "default" in spec[1]}
        found = verdicts(module.check_graph(graph_of(comfyui.file(kind), [(name, values)])))
        checked[name] = found.get("loader") or found["0"]
        if (checked[name] == "refused") != (outcome == "rejected"):
            wrong.append((name, kind, found, outcome))

    assert wrong == [] and len(checked) > 30
    assert checked["TomePatchModel"] == checked["SUPIRApply"] == "refused"


def test_nodes_of_other_models_are_for_no_family(module):
    assert [(model, name) for model in module.OTHER_MODELS.values() for name in FAMILIES
            if model.lower() in name.lower()] == []


@pytest.mark.parametrize("shape", ["chain", "lattice", "ring"])
def test_nodes_that_pass_on_any_type_are_followed_once_each(comfyui, shape):
    """4,000 in a row, in layers of two that both link to both of the next, and in a ring."""
    class Passes:
        RETURN_TYPES = ("*",)
    classes = comfyui.nodes.NODE_CLASS_MAPPINGS | {"Passes": Passes}
    prompt, last, width = graph_of(comfyui.file("sd15")), ["loader", 0], 2 if shape == "lattice" else 1
    links = {"a": last}
    for number in range(0, 4000, width):
        for place in range(width):
            prompt[f"p{number + place}"] = {"class_type": "Passes", "inputs": links}
        links = {f"a{place}": [f"p{number + place}", 0] for place in range(width)}
    if shape == "ring":
        prompt["p0"]["inputs"] = links | {"more": last}
    prompt["sampler"]["inputs"]["model"] = ["p3999", 0]
    module = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.server.graph_check")
    graph = module.Graph(prompt, classes)

    assert graph.loaders("MODEL") == ["loader"]
    assert len(graph.users("loader")) == 4001 and graph.users("loader")[-1] == "sampler"


def upscaling(name, loader="UpscaleModelLoader"):
    return {"loader": {"class_type": loader, "inputs": {"model_name": name}},
            "image": {"class_type": "LoadImage", "inputs": {"image": "example.png"}},
            "upscale": {"class_type": "ImageUpscaleWithModel", "inputs": {"upscale_model": ["loader", 0],
                                                                          "image": ["image", 0]}}}


@pytest.fixture
def upscale_models(comfyui, tmp_path):
    comfyui.folder_paths.add_model_folder_path("upscale_models", str(tmp_path))
    torch.save(esrgan(), tmp_path / "esrgan.pth")
    torch.save({"params": {"weight": torch.zeros(1)}}, tmp_path / "other.pth")
    yield tmp_path
    comfyui.folder_paths.folder_names_and_paths["upscale_models"][0].remove(str(tmp_path))
    comfyui.folder_paths.filename_list_cache.pop("upscale_models", None)


def test_upscale_models_that_load_are_let_through_and_absent_ones_named(comfyui, module, upscale_models):
    """A file of another kind too: ComfyUI's own loader rejects it."""
    for name, absent in (("esrgan.pth", []), ("other.pth", []), ("absent.pth", ["absent.pth"])):
        found = module.check_graph(upscaling(name))

        assert found["upscalers"] == {} and [one for one in found["absent"] if one != "example.png"] == absent


def test_an_upscale_model_has_the_message_of_the_run(comfyui, module, upscale_models, monkeypatch):
    """As with a loader that patches what it loads."""
    loader = comfyui.nodes.NODE_CLASS_MAPPINGS["UpscaleModelLoader"]
    load = loader.execute

    def patched(name):
        result = load(name)
        result.args[0].model.register_forward_hook(lambda *_: None)
        return result
    monkeypatch.setattr(loader, "execute", patched)
    found = module.check_graph(upscaling("esrgan.pth"))
    with pytest.raises(comfyui.errors.UnsupportedError) as rejected:
        comfyui.nodes.NODE_CLASS_MAPPINGS["XDiTUpscaleImage"].execute(
            patched("esrgan.pth").args[0], torch.zeros(1, 8, 8, 3), comfyui.config("cpu"))

    assert found["upscalers"] == {"esrgan.pth": str(rejected.value)}


@pytest.mark.parametrize("kind, node", [("sd15", "LoraLoader"), ("sd3", "LoraLoaderModelOnly")])
def test_a_lora_that_fits_no_tensor_is_named_with_the_message_of_the_run(comfyui, module, monkeypatch, kind, node):
    folder = comfyui.base / "loras"
    folder.mkdir(exist_ok=True)
    monkeypatch.setitem(comfyui.folder_paths.folder_names_and_paths, "loras", ([str(folder)], {".safetensors"}))
    path = {"sd15": "input_blocks_1_1_transformer_blocks_0_attn1_to_q", "sd3": "joint_blocks_0_x_block_attn_qkv"}[kind]
    for name, target in (("fits", path), ("other", "another_model_to_q")):
        up, down = torch.zeros(4, 2), torch.zeros(2, 4)
        save_file({f"lora_unet_{target}.lora_up.weight": up, f"lora_unet_{target}.lora_down.weight": down},
                  folder / f"{name}.safetensors")
    (folder / "broken.safetensors").write_bytes(b"no LoRA")

    def found(name, strength=1.0, file=None):
        settings = {"lora_name": f"{name}.safetensors", "strength_model": strength, "strength_clip": 0.0}
        return module.check_graph(graph_of(file or comfyui.file(kind), [(node, settings)]))["nodes"]
    loader = comfyui.nodes.NODE_CLASS_MAPPINGS["LoraLoaderModelOnly"]()
    with pytest.raises(comfyui.errors.XDiTError) as rejected:
        loader.load_lora_model_only(comfyui.ours(kind, comfyui.config("cpu")), "other.safetensors", 1.0)

    assert found("other")["loader"] == {"verdict": "refused", "by": "0", "reason": str(rejected.value)}
    for others in (("fits",), ("other", 0.0), ("other", 1.0, "absent.safetensors"), ("broken",), ("absent",)):
        assert "loader" not in found(*others), others
