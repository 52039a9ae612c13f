"""Run on all GPUs on nodes of other packs: loaders of any kind, and raylight's graphs; in Node, without a page."""

import json
import subprocess

import pytest

from tests.integration.page.pack_graphs import (
    CORE,
    DEFINITIONS,
    INITIALIZER,
    RES4LYF_OUTPUTS,
    loaded_by,
    node,
    raylight,
    workflow,
)
from tests.support.page_modules import write_modules

CONVERT = """import fs from "node:fs";
import { toAllGpus, toOneGpu, filesToTakeOver } from %s;
const given = JSON.parse(fs.readFileSync(0));
const one = toAllGpus(given.workflow, given.refusals, given.definitions);
const edited = JSON.parse(JSON.stringify(one.workflow));
for (const [id, key, value] of given.edits) edited.nodes.find((node) => node.id === id)[key] = value;
const files = filesToTakeOver(given.workflow, given.definitions);
console.log(JSON.stringify({ ...one, back: toOneGpu(edited), files }));"""


@pytest.fixture(scope="module")
def convert(node, modules):
    """A function from a workflow file to what toAllGpus returns, with `back` of toOneGpu and `files` of
    filesToTakeOver.
    edits: [(id of a node, entry, value)] between the two."""
    def run(given, definitions=DEFINITIONS, refusals=None, edits=(), folder=modules):
        values = {"workflow": given, "definitions": definitions, "refusals": refusals or {}, "edits": list(edits)}
        done = subprocess.run([node, "--input-type=module", "-e", CONVERT % json.dumps(str(folder / "convert.mjs"))],
                              input=json.dumps(values).encode(), stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout)
    return run


def nodes_of(result, type):
    return [one for one in result["workflow"]["nodes"] if one["type"] == type]


def named(result):
    return {(one["type"], one["reason"]) for one in result["left"]}


def origins(graph, id):
    """{input: (type of the node that it is linked to, index of the output)} of a node, from the list of links."""
    by_id = {one["id"]: one for one in graph["nodes"]}
    ends = {link[0]: link for link in graph["links"]}
    for link in graph["links"]:                                # both ends name the link
        assert link[0] in by_id[link[1]]["outputs"][link[2]]["links"], link
        assert by_id[link[3]]["inputs"][link[4]]["link"] == link[0], link
    return {slot["name"]: (by_id[ends[slot["link"]][1]]["type"], ends[slot["link"]][2])
            for slot in by_id[id]["inputs"] if slot["link"] is not None}


def same_bytes(one, other):
    return json.dumps(one) == json.dumps(other)


DISTORCH = ["cuda:0", 14, "cpu", "", True]
LOADERS = [
    ("UNETLoaderMultiGPU", ["flux.safetensors", "fp8_e5m2", "cuda:1"], ["flux.safetensors", "fp8_e5m2"]),
    ("UNETLoaderDisTorch2MultiGPU", ["wan.safetensors", "default", *DISTORCH], ["wan.safetensors", "default"]),
    ("UnetLoaderGGUFMultiGPU", ["flux.gguf", "cuda:1"], ["flux.gguf", "default"]),
    ("UnetLoaderGGUFDisTorchMultiGPU", ["flux.gguf", "cuda:0", 4, True, ""], ["flux.gguf", "default"]),
    ("UnetLoaderGGUFDisTorch2MultiGPU", ["flux.gguf", *DISTORCH], ["flux.gguf", "default"]),
    ("UnetLoaderGGUFAdvancedMultiGPU", ["flux.gguf", "default", "default", True, "cuda:1"], ["flux.gguf", "default"]),
    ("UnetLoaderGGUFAdvanced", ["flux.gguf", "default", "default", False], ["flux.gguf", "default"]),
    ("DiffusionModelLoaderKJ", ["flux.safetensors", "fp8_e4m3fn", "default", True, "disabled", True],
     ["flux.safetensors", "fp8_e4m3fn"]),
    ("XfuserUNETLoader", ["flux.safetensors", "fp8_e5m2"], ["flux.safetensors", "fp8_e5m2"]),
    ("CheckpointLoaderSimpleMultiGPU", ["sdxl.safetensors", "cuda:1"], ["sdxl.safetensors", "default"]),
    ("DiffusersLoader", ["sd15-folder"], ["sd15-folder", "default"]),
    ("unCLIPCheckpointLoader", ["sdxl.safetensors"], ["sdxl.safetensors", "default"]),
    ("SomeLoader", ["wan.safetensors", 1, "cuda:1"], ["wan.safetensors", "default"]),
]


@pytest.mark.parametrize("type, values, expected", LOADERS)
@pytest.mark.parametrize("is_installed", [True, False])
def test_a_loader_of_any_pack_becomes_load_xdit_model(convert, type, values, expected, is_installed):
    """Also without the pack, whose nodes ComfyUI's page keeps as they are in the file; one that no table names is
    recognised by the files that it lists."""
    given = loaded_by(type, values)

    result = convert(given, DEFINITIONS if is_installed else CORE)

    if type == "SomeLoader" and not is_installed:
        assert named(result) == {("SomeLoader", "no_counterpart"), ("KSampler", "model_stays")}
    else:
        assert [one["widgets_values"] for one in nodes_of(result, "XDiTLoadModel")] == [expected]
        assert result["left"] == []
        [dropped] = [one.get("text", "") for one in result["outcomes"] if one["type"] == type]
        assert dropped == ", ".join(name for name in PLACED.get(type, "").split())
    assert same_bytes(result["back"]["workflow"], given)


PLACED = {
    "UNETLoaderMultiGPU": "device", "UnetLoaderGGUFMultiGPU": "device", "CheckpointLoaderSimpleMultiGPU": "device",
    "UNETLoaderDisTorch2MultiGPU": "compute_device virtual_vram_gb donor_device expert_mode_allocations eject_models",
    "UnetLoaderGGUFDisTorch2MultiGPU":
        "compute_device virtual_vram_gb donor_device expert_mode_allocations eject_models",
    "UnetLoaderGGUFDisTorchMultiGPU": "device virtual_vram_gb use_other_vram expert_mode_allocations",
    "UnetLoaderGGUFAdvancedMultiGPU": "patch_on_device device", "UnetLoaderGGUFAdvanced": "patch_on_device",
    "DiffusionModelLoaderKJ": "patch_cublaslinear enable_fp16_accumulation", "SomeLoader": "load_device",
}


@pytest.mark.parametrize("type, values, reason", [
    ("DiffusionModelLoaderKJ", ["flux.safetensors", "bf16", "default", False, "disabled", False], "dtype"),
    ("DiffusionModelLoaderKJ", ["flux.safetensors", "default", "fp16", False, "disabled", False], "setting"),
    ("DiffusionModelLoaderKJ", ["flux.safetensors", "default", "default", False, "sageattn_qk_int8_pv_fp16_cuda",
                                False], "setting"),
    ("UnetLoaderGGUFAdvanced", ["flux.gguf", "float32", "default", False], "setting"),
    ("UnetLoaderGGUFAdvancedMultiGPU", ["flux.gguf", "default", "bfloat16", False, "cuda:0"], "setting"),
    ("CheckpointLoaderAdvancedDisTorch2MultiGPU", ["sdxl.safetensors", "cuda:0", 5, "cpu", "cuda:1", 2, "cpu", "cuda:1",
                                                   "", "", False, True], "setting"),
    ("SomeLoader", ["wan.safetensors", 0.5, "cuda:1"], "setting"),
    ("TwoModels", ["wan.safetensors", "flux.safetensors"], "several_files"),
    ("OneOfLoras", ["lora.safetensors"], "no_counterpart"),
    ("UltraCascade_Loader", ["stage_c.safetensors", "ultrapixel.safetensors"], "no_counterpart"),
])
def test_a_loader_whose_settings_change_the_image_is_named(convert, type, values, reason):
    given = loaded_by(type, values)

    result = convert(given)

    assert named(result) == {(type, reason), ("KSampler", "model_stays")} and result["changed"] == 0
    assert same_bytes(result["workflow"], given)


def test_a_linked_input_that_acts_is_named_and_a_linked_device_is_dropped(convert):
    values = ["flux.safetensors", "default", "default", False, "disabled", False]
    given = loaded_by("DiffusionModelLoaderKJ", values, inputs=[("extra_state_dict", "STRING")])
    given["nodes"].append(node(9, "DiffusionModelSelector", [], [], [("path", "STRING")]))
    link(given, 9, 0, 1, "extra_state_dict")
    acting = convert(given)
    given = loaded_by("UNETLoaderMultiGPU", ["flux.safetensors", "default", "cuda:0"],
                      inputs=[(name, "COMBO", "widget") for name in ("unet_name", "weight_dtype", "device")])
    given["nodes"].insert(0, node(9, "DeviceSelectorMultiGPU", ["cuda:1"], [], [("device", "COMBO")]))
    link(given, 9, 0, 1, "device")
    given["links"].insert(0, given["links"].pop())
    placing = convert(given)

    assert ("DiffusionModelLoaderKJ", "input") in named(acting)
    [loader] = nodes_of(placing, "XDiTLoadModel")
    assert [slot["name"] for slot in loader["inputs"]] == ["parallel", "model_name", "weight_dtype"]
    assert origins(placing["workflow"], 1) == {} and len(placing["workflow"]["links"]) == 1
    assert same_bytes(placing["back"]["workflow"], given)


@pytest.mark.parametrize("shown, is_converted", [("unet_name", True), ("weight_dtype", True), ("device", False)])
def test_a_widget_that_a_subgraph_shows_follows_its_loader_or_leaves_it(convert, shown, is_converted):
    """Load xDiT Model has no device to show."""
    inner = loaded_by("UNETLoaderMultiGPU", ["flux.safetensors", "default", "cuda:0"])
    inner["links"] = [dict(zip(("id", "origin_id", "origin_slot", "target_id", "target_slot", "type"), row))
                      for row in inner["links"]]
    subgraph = {"id": "sub", "name": "Sub", "nodes": inner["nodes"], "links": inner["links"], "inputs": [],
                "outputs": [], "state": {"lastNodeId": 2, "lastLinkId": 1}}
    given = workflow(node(5, "sub", [], [], [], properties={"proxyWidgets": [["1", shown]]}), links=[])
    given["definitions"] = {"subgraphs": [subgraph]}

    result = convert(given)

    [[_, name]] = result["workflow"]["nodes"][0]["properties"]["proxyWidgets"]
    assert name == {"unet_name": "model_name"}.get(shown, shown)
    assert {one["type"] for one in result["outcomes"] if one["outcome"] == "converted"} == (
        {"UNETLoaderMultiGPU", "KSampler"} if is_converted else set())
    assert same_bytes(result["back"]["workflow"], given)


def link(graph, begin, output, end, name):
    by_id = {one["id"]: one for one in graph["nodes"]}
    graph["last_link_id"] += 1
    index = [slot["name"] for slot in by_id[end]["inputs"]].index(name)
    by_id[end]["inputs"][index]["link"] = graph["last_link_id"]
    by_id[begin]["outputs"][output]["links"] = [graph["last_link_id"]]
    graph["links"].append([graph["last_link_id"], begin, output, end, index, by_id[begin]["outputs"][output]["type"]])


@pytest.mark.parametrize("definitions", [DEFINITIONS, CORE])
def test_sage_attention_of_a_loader_goes_to_a_config(convert, definitions):
    given = loaded_by("DiffusionModelLoaderKJ", ["flux.safetensors", "default", "default", False, "auto", False])

    result = convert(given, definitions)

    [config] = nodes_of(result, "XDiTParallelConfig")
    names = config_names()
    assert dict(zip(names, config["widgets_values"]))["attention"] == "sage"
    assert dict(zip(names, config["widgets_values"]))["mode"] == "auto"
    assert origins(result["workflow"], 1) == {"parallel": ("XDiTParallelConfig", 0)}
    assert same_bytes(result["back"]["workflow"], given)


def config_names():
    inputs = CORE["XDiTParallelConfig"]["input"]
    return [*inputs["required"], *inputs["optional"]]


FLUX = ["flux.safetensors", "fp8_e4m3fn_fast"]
STYLE = [("clip_vision", "CLIP_VISION"), ("style_model", "STYLE_MODEL")]


@pytest.mark.parametrize("type, values, outputs, parts", [
    ("FluxLoader", [*FLUX, "l.safetensors", "t5.safetensors", "ae.sft", "vision.safetensors", "redux.safetensors"],
     [*RES4LYF_OUTPUTS, *STYLE],
     [("DualCLIPLoader", ["l.safetensors", "t5.safetensors", "flux", "default"]), ("VAELoader", ["ae.sft"]),
      ("CLIPVisionLoader", ["vision.safetensors"]), ("StyleModelLoader", ["redux.safetensors"])]),
    ("FluxLoader", [*FLUX, ".use_ckpt_clip", ".none", ".use_ckpt_vae", ".none", ".none"], RES4LYF_OUTPUTS,
     [("XDiTLoadClipVae", ["flux.safetensors"]), ("XDiTLoadClipVae", ["flux.safetensors"])]),
    ("SD35Loader", ["sd3.safetensors", "default", "l.safetensors", "g.safetensors", "t5.safetensors", "vae.sft"],
     RES4LYF_OUTPUTS, [("TripleCLIPLoader", ["l.safetensors", "g.safetensors", "t5.safetensors"]),
                       ("VAELoader", ["vae.sft"])]),
    ("ClownModelLoader", ["hidream.safetensors", "fp8_e4m3fn", "l", "g", "t5", "llama", "hidream", "ae.sft"],
     RES4LYF_OUTPUTS, [("QuadrupleCLIPLoader", ["l", "g", "t5", "llama"]), ("VAELoader", ["ae.sft"])]),
    ("ClownModelLoader", ["sd3.safetensors", "default", "t5", ".none", ".none", ".none", "sd3", "ae.sft"],
     RES4LYF_OUTPUTS, [("CLIPLoader", ["t5", "sd3", "default"]), ("VAELoader", ["ae.sft"])]),
])
def test_text_encoders_and_vae_of_a_loader_keep_a_loader_of_comfyuis(convert, type, values, outputs, parts):
    given = loaded_by(type, values, outputs)

    result = convert(given)

    [loader] = nodes_of(result, "XDiTLoadModel")
    assert loader["id"] == 1 and loader["widgets_values"] == values[:2] and result["left"] == []
    for id, (loader_type, loader_values) in enumerate(parts, 3):
        [(origin, _)] = origins(result["workflow"], id).values()
        assert origin == loader_type
        assert loader_values in [one["widgets_values"] for one in nodes_of(result, origin)]
    assert len(result["workflow"]["nodes"]) == len(given["nodes"]) + len({part for part, _ in parts})
    assert same_bytes(result["back"]["workflow"], given)


@pytest.mark.parametrize("type, values, outputs", [
    ("ClownModelLoader", ["flux.safetensors", "default", "l", "t5", ".none", ".none", ".auto", "ae.sft"],
     RES4LYF_OUTPUTS),
    ("unCLIPCheckpointLoader", ["sdxl.safetensors"], [("MODEL", "MODEL"), ("CLIP", "CLIP"), ("VAE", "VAE"),
                                                      ("CLIP_VISION", "CLIP_VISION")]),
    ("DiffusersLoader", ["sd15-folder"], [("MODEL", "MODEL"), ("CLIP", "CLIP"), ("VAE", "VAE")]),
])
def test_a_loader_without_counterparts_for_its_other_outputs_stays_for_them(convert, type, values, outputs):
    given = loaded_by(type, values, outputs)

    result = convert(given)

    [loader] = nodes_of(result, "XDiTLoadModel")
    assert [loader["widgets_values"][0], origins(result["workflow"], 2)["model"]] == [values[0], ("XDiTLoadModel", 0)]
    assert origins(result["workflow"], 3)["clip"] == (type, 1)
    assert same_bytes(result["back"]["workflow"], given)


@pytest.mark.parametrize("type, values", [
    ("CheckpointLoaderSimpleMultiGPU", ["sdxl.safetensors", "cuda:1"]),
    ("CheckpointLoaderSimpleDisTorch2MultiGPU", ["sdxl.safetensors", *DISTORCH]),
    ("CheckpointLoaderAdvancedMultiGPU", ["sdxl.safetensors", "cuda:0", "cpu", "cuda:1"]),
    ("CheckpointLoaderAdvancedDisTorch2MultiGPU", ["sdxl.safetensors", "cuda:0", 5, "cpu", "cuda:1", 2, "cpu", "cuda:1",
                                                   "", "", True, True]),
])
def test_a_checkpoint_loader_with_devices_becomes_load_clip_and_vae(convert, type, values):
    given = loaded_by(type, values, [("MODEL", "MODEL"), ("CLIP", "CLIP"), ("VAE", "VAE")])

    result = convert(given)

    assert [one["widgets_values"] for one in nodes_of(result, "XDiTLoadClipVae")] == [["sdxl.safetensors"]]
    assert [one["widgets_values"] for one in nodes_of(result, "XDiTLoadModel")] == [["sdxl.safetensors", "default"]]
    assert [origins(result["workflow"], id) for id in (2, 3, 4)] == [
        {"model": ("XDiTLoadModel", 0)}, {"clip": ("XDiTLoadClipVae", 0)}, {"vae": ("XDiTLoadClipVae", 1)}]
    assert same_bytes(result["back"]["workflow"], given)


def test_models_that_a_pack_runs_itself_are_named(convert):
    given = workflow(
        node(1, "WanVideoModelLoaderMultiGPU", ["wan.safetensors"], [("lora", "WANVIDLORA")],
             [("model", "WANVIDEOMODEL")]),
        node(2, "WanVideoSamplerMultiGPU", [30], [("model", "WANVIDEOMODEL")], []),
        node(3, "xDiT.Model", [], [("preset", "*")], [("model", "*")]),
        node(4, "xDiT.Sample", [], [("model", "*")], [("images", "IMAGE")]),
        links=[(1, 0, 2, "model"), (3, 0, 4, "model")])

    result = convert(given)

    assert {(one["type"], one["reason"], one["by"]) for one in result["left"]} == {
        ("WanVideoModelLoaderMultiGPU", "own_model", "ComfyUI-WanVideoWrapper"),
        ("xDiT.Model", "own_model", "xdit-comfyui (xDiT project)"),
        ("xDiT.Sample", "own_model", "xdit-comfyui (xDiT project)")}
    assert result["changed"] == 0


def test_a_patch_that_needs_its_packs_own_model_leaves_the_loader(convert):
    model = [("model", "MODEL")]
    given = workflow(node(1, "XfuserUNETLoader", ["flux.safetensors", "default"], [], [("MODEL", "MODEL")]),
                     node(2, "XfuserFluxLoraLoader", ["furry.safetensors", 1], model, [("MODEL", "MODEL")]),
                     node(3, "KSampler", [], model, []), links=[(1, 0, 2, "model"), (2, 0, 3, "model")])

    assert ("XfuserUNETLoader", "patch") in named(convert(given))


def test_text_encoders_that_comfyui_multigpu_places_stay_where_they_are(convert):
    given = loaded_by("UNETLoaderMultiGPU", ["flux.safetensors", "default", "cuda:0"])
    given["nodes"].append(node(9, "CLIPLoaderMultiGPU", ["t5.safetensors", "sd3", "cuda:1"], [], [("CLIP", "CLIP")]))

    assert [(one["type"], one["reason"]) for one in convert(given)["stay"]] == [("CLIPLoaderMultiGPU", "placed")]


# ---- raylight

@pytest.fixture(scope="module")
def taken(convert):
    return convert(raylight())


def test_raylights_degrees_become_a_config(taken):
    [config] = nodes_of(taken, "XDiTParallelConfig")
    values = dict(zip(config_names(), config["widgets_values"]))

    assert {name: values[name] for name in ("devices", "mode", "ulysses_degree", "ring_degree", "cfg_degree",
                                            "data_degree", "attention")} == {
        "devices": "cuda:0,cuda:1,cuda:2,cuda:3", "mode": "manual", "ulysses_degree": 2, "ring_degree": 1,
        "cfg_degree": 2, "data_degree": 1, "attention": "sdpa"}
    assert [one["text"] for one in taken["dropped"] if one["type"] == "RayInitializer"] == [
        "clear_vram_after_sampling"]


def test_raylights_loras_patch_the_model_behind_its_loader_in_their_order(taken):
    graph = taken["workflow"]

    assert origins(graph, 2) == {"parallel": ("XDiTParallelConfig", 0)}
    assert origins(graph, 3) == {"model": ("XDiTLoadModel", 0)}
    assert origins(graph, 4) == {"model": ("LoraLoaderModelOnly", 0)}
    assert origins(graph, 5)["model"] == origins(graph, 9)["model"] == ("LoraLoaderModelOnly", 0)
    [last] = [row for row in graph["links"] if row[3] == 5]
    assert last[1] == 4                                        # the last LoRA, not the first
    assert [one["widgets_values"] for one in nodes_of(taken, "LoraLoaderModelOnly")] == [
        ["first.safetensors", 1], ["second.safetensors", 0.5]]


def test_raylights_samplers_become_comfyuis_with_the_model_that_they_passed_on(taken):
    graph = taken["workflow"]

    assert origins(graph, 6)["model"] == origins(graph, 7)["model"] == ("ModelSamplingSD3", 0)
    assert origins(graph, 8) == {"noise": ("RandomNoise", 0), "guider": ("CFGGuider", 0),
                                 "sampler": ("KSamplerSelect", 0), "sigmas": ("BasicScheduler", 0),
                                 "latent_image": ("KSamplerAdvanced", 0)}
    assert [one["widgets_values"] for one in nodes_of(taken, "RandomNoise")] == [[11, "fixed"]]
    assert nodes_of(taken, "SamplerCustomAdvanced")[0]["widgets_values"] == []
    assert [slot["name"] for slot in nodes_of(taken, "SamplerCustomAdvanced")[0]["outputs"]] == [
        "output", "denoised_output"]


def test_raylights_vae_and_control_net_become_comfyuis(taken):
    graph = taken["workflow"]

    assert origins(graph, 10) == {"vae": ("VAELoader", 0), "samples": ("SamplerCustomAdvanced", 0)}
    assert origins(graph, 11) == origins(graph, 12) == {}
    assert {**origins(graph, 13)} == {"control_net": ("ControlNetLoader", 0), "vae": ("VAELoader", 0)}
    assert {kind for *_, kind in graph["links"]} <= {"XDIT_PARALLEL", "MODEL", "GUIDER", "SIGMAS", "SAMPLER", "LATENT",
                                                     "CONDITIONING", "CONTROL_NET", "VAE", "NOISE"}
    types = {slot["type"] for one in graph["nodes"] for slot in one["inputs"] + one["outputs"]}
    assert not any("RAY" in kind.upper() for kind in types)


def test_raylights_graph_comes_back_to_the_byte(taken):
    assert same_bytes(taken["back"]["workflow"], raylight())
    assert taken["back"]["changed"] == taken["changed"] == 13 and taken["back"]["left"] == []


BEFORE_CFG = ["local", "default", 2, 2, 1]


@pytest.mark.parametrize("values, expected", [
    ([*BEFORE_CFG, False, False], (2, 1, 1, "sdpa")),                                          # FSDP, its offload
    ([*BEFORE_CFG, False, False, "FA"], (2, 1, 1, "flash")),
    ([*BEFORE_CFG, 1, False, False, "FA3"], (2, 1, 1, "flash3")),
    ([*BEFORE_CFG, True, False, False, False, "SAGE_AUTO"], (2, 1, 1, "sage")),      # cfg_degree of an old file
    (["local", "default", 4, 1, 2, 2, False, True, False, "TORCH_CUDNN", True, False], (1, 2, 2, "sdpa")),
    (["local", "default", 4, 2, 1, 1, False, True, False, 2, "FA", True, False], (2, 1, 1, "flash")),    # replicas
    (["local", "default", 4, 2, 1, 1, False, True, False, "FA", True, False, 2], (2, 1, 1, "flash")),
    (["local", "default", 4, 2, 1, 1, 2, False, True, False, "FA", True, False], (2, 1, 1, "flash")),    # dp_degree
    (["local", "default", 2, 0, 0, 0, 0, False, False, False, False, "TORCH_FLASH", False, False], (1, 1, 1, "sdpa")),
])
def test_every_layout_of_raylights_initializer_is_read(convert, values, expected):
    [config] = nodes_of(convert(raylight(values)), "XDiTParallelConfig")
    settings = dict(zip(config_names(), config["widgets_values"]))
    ulysses, ring, cfg, attention = expected

    assert (settings["ulysses_degree"], settings["ring_degree"], settings["cfg_degree"],
            settings["attention"]) == expected
    assert len(settings["devices"].split(",")) == values[2] == ulysses * ring * cfg * settings["data_degree"]


def test_raylights_chosen_gpus_are_the_devices(convert):
    given = raylight()
    given["nodes"][0] |= {"type": "RayInitializerAdvanced", "widgets_values": [
        "local", "default", 2, "1,3", 2, 1, False, 1, 1, False, False, False, "FA", False, False, 2.0, "None", "None"]}

    [config] = nodes_of(convert(given), "XDiTParallelConfig")

    assert dict(zip(config_names(), config["widgets_values"]))["devices"] == "cuda:1,cuda:3"


CLUSTER = ["ray://10.0.0.1:10001", *INITIALIZER[1:]]
OTHER_ATTENTION = [*INITIALIZER[:11], "SPARSE_SAGE", *INITIALIZER[12:]]
ACTORS = [("ray_actors", "RAY_ACTORS")]


@pytest.mark.parametrize("given, expected", [
    (raylight(CLUSTER), ("RayInitializer", "setting")),
    (raylight(OTHER_ATTENTION), ("RayInitializer", "setting")),
    (raylight(sampler=[0.5]), ("XFuserKSamplerAdvanced", "setting")),
    (raylight(loader=["wan.safetensors", "int4"]), ("RayUNETLoader", "setting")),
    (raylight(extra=[node(20, "DPKSamplerAdvanced", [], ACTORS, [])], extra_links=[(5, 0, 20, "ray_actors")]),
     ("DPKSamplerAdvanced", "no_counterpart")),
    (raylight(extra=[node(20, "RayUNETLoader", ["wan.safetensors", "default"], [("lora", "RAY_LORA")], [])],
              extra_links=[(4, 0, 20, "lora")]), ("RayUNETLoader", "shared_patch")),
])
def test_one_node_without_a_counterpart_leaves_raylights_whole_graph(convert, given, expected):
    result = convert(given)

    assert expected in named(result) and same_bytes(result["workflow"], given) and result["changed"] == 0
    others = {reason for _, reason in named(result)} - {expected[1]}
    assert others == {"with"} or expected[1] == "shared_patch"
    assert len(result["left"]) == 13 + len(given["nodes"]) - 14


def test_a_refused_file_leaves_raylights_graph(convert):
    result = convert(raylight(), refusals={"models": {"wan.safetensors": "it is empty"}})

    assert {one["text"] for one in result["left"] if one["reason"] == "file"} == {"it is empty"}
    assert result["files"] == ["wan.safetensors"] and result["changed"] == 0


# ---- edits between the two conversions

def test_later_values_are_carried_back(convert):
    """Seeds change after each run."""
    given, seeds = raylight(), [8, "randomize"]
    numbers = [one["id"] for one in convert(given)["workflow"]["nodes"] if one["type"] == "RandomNoise"]
    edits = [(6, "widgets_values", ["enable", 9, "randomize", 6, 3.5, "euler", "simple", 0, 3, "disable"]),
             (numbers[0], "widgets_values", seeds), (3, "widgets_values", ["third.safetensors", 1])]

    back = convert(given, edits=edits)["back"]

    values = {one["id"]: one["widgets_values"] for one in back["workflow"]["nodes"]}
    assert [values[6][1], values[8], values[3][0]] == [9, [True, 8, "randomize"], "third.safetensors"]


@pytest.mark.parametrize("type, values, outputs, id, edit, reason", [
    ("UNETLoaderMultiGPU", ["flux.safetensors", "default", "cuda:1"], [("MODEL", "MODEL")], 1,
     ["flux.safetensors", "int8"], "dtype"),
    ("UnetLoaderGGUF", ["flux.gguf"], [("MODEL", "MODEL")], 1, ["flux.gguf", "fp8_e5m2"], "dtype"),
    ("CheckpointLoaderSimpleMultiGPU", ["sdxl.safetensors", "cuda:1"], [("MODEL", "MODEL"), ("VAE", "VAE")], 1,
     ["other.safetensors"], "files_differ"),
    ("FluxLoader", [*FLUX, "l", "t5", "ae.sft", ".none", ".none"], RES4LYF_OUTPUTS, 5, ["l", "t5", "sd3", "default"],
     "edited"),
])
def test_an_edit_that_the_original_has_no_setting_for_is_named(convert, type, values, outputs, id, edit, reason):
    back = convert(loaded_by(type, values, outputs), edits=[(id, "widgets_values", edit)])["back"]

    assert [one["reason"] for one in back["left"]] == [reason]


def test_a_graph_of_raylight_that_was_rewired_stays_converted(convert):
    """A node of ComfyUI's in the chain of models has no counterpart in raylight."""
    result = convert(raylight())
    loras = [one for one in result["workflow"]["nodes"] if one["id"] == 3]
    back = convert(raylight(), edits=[(3, "outputs", [{**loras[0]["outputs"][0], "links": [999]}])])["back"]

    assert {one["reason"] for one in back["left"]} == {"edited", "with"} and back["changed"] == 0


# ---- exactness

def test_old_files_without_lists_of_slots_come_back_without_them(convert):
    """Files of old pages have no `inputs` for nodes without links, and no `properties`."""
    given = loaded_by("UNETLoader", ["flux.safetensors"])
    for key in ("inputs", "properties"):
        del given["nodes"][0][key]
    del given["nodes"][1]["outputs"]

    result = convert(given)

    assert nodes_of(result, "XDiTLoadModel") and same_bytes(result["back"]["workflow"], given)


def test_a_node_that_grows_moves_off_its_neighbour_and_comes_back(convert):
    """Distributed VAE Decode is one slot higher than VAE Decode, and wider."""
    given = loaded_by("CheckpointLoaderSimple", ["sdxl.safetensors"], [("MODEL", "MODEL"), ("VAE", "VAE")])
    decode, below = given["nodes"][2], node(9, "SaveImage", [], [("images", "IMAGE")], [])
    decode |= {"pos": [1200, 900], "size": [140, 46]}
    given["nodes"].append(below | {"pos": [1200, 990]})
    given["last_node_id"] = 9

    result = convert(given)
    moved = convert(given, edits=[(decode["id"], "pos", [5000, 5000])])["back"]["workflow"]

    [one] = nodes_of(result, "XDiTVAEDecode")
    [x, y], [width, height] = one["pos"], one["size"]
    assert height == 66 and width > 190 and [x, y] != [1200, 900] and max(abs(x - 1200), abs(y - 900)) <= 40
    assert y + height <= 990 - 30 or x + width <= 1200 or y - 30 >= 990 + below["size"][1]
    assert same_bytes(result["back"]["workflow"], given)
    assert [each["pos"] for each in moved["nodes"] if each["id"] == decode["id"]] == [[5000, 5000]]


def upscaling(reroute=False):
    """A workflow that only upscales, with a link of the upscale model through a reroute."""
    nodes = [node(1, "UpscaleModelLoader", ["esrgan.pth"], [("model_name", "COMBO", "widget")],
                  [("UPSCALE_MODEL", "UPSCALE_MODEL")]),
             node(2, "LoadImage", ["example.png", "image"], [], [("IMAGE", "IMAGE"), ("MASK", "MASK")]),
             node(3, "ImageUpscaleWithModel", [], [("upscale_model", "UPSCALE_MODEL"), ("image", "IMAGE")],
                  [("IMAGE", "IMAGE")]),
             node(4, "SaveImage", ["upscaled"], [("images", "IMAGE")], [])]
    if reroute:
        nodes.append(node(5, "Reroute", [], [("", "*")], [("", "UPSCALE_MODEL")]))
    through = [(1, 0, 5, ""), (5, 0, 3, "upscale_model")] if reroute else [(1, 0, 3, "upscale_model")]
    return workflow(*nodes, links=[*through, (2, 0, 3, "image"), (3, 0, 4, "images")])


@pytest.mark.parametrize("reroute", [False, True])
def test_a_workflow_that_only_upscales_converts_there_and_back(convert, reroute):
    given = upscaling(reroute)

    result = convert(given)

    [one] = nodes_of(result, "XDiTUpscaleImage")
    assert result["changed"] == 1 and not result["left"] and not nodes_of(result, "ImageUpscaleWithModel")
    assert origins(result["workflow"], one["id"]) == origins(given, 3)
    assert same_bytes(result["back"]["workflow"], given) and result["back"]["changed"] == 1


@pytest.mark.parametrize("reroute", [False, True])
def test_an_upscale_model_that_the_workers_reject_leaves_its_node(convert, reroute):
    result = convert(upscaling(reroute), refusals={"upscalers": {"esrgan.pth": "It is no image model."}})

    assert named(result) == {("ImageUpscaleWithModel", "file")} and result["changed"] == 0
    assert result["left"][0]["text"] == "It is no image model."
    assert same_bytes(result["workflow"], upscaling(reroute))


def test_each_node_has_one_outcome(convert):
    given = raylight(extra=[node(20, "VAEDecodeTiled", [], [], []), node(21, "VAEDecode", [], [], []),
                            node(22, "KSampler", [], [("model", "MODEL")], [])])

    result = convert(given)

    outcomes = {one["id"]: one["outcome"] for one in result["outcomes"]}
    assert len(outcomes) == len(result["outcomes"])
    assert {outcomes[id] for id in range(1, 14)} == {"converted"}
    assert [outcomes.get(id) for id in (14, 20, 21, 22)] == [None, "unchanged", "converted", "named"]
    assert result["changed"] + len(result["left"]) + len(result["stay"]) == len(result["outcomes"])


MUTANTS = [
    ("convert", "attachLinks(book, graph, links);", ""),
    ("change", "  if (was.now) node.widgets_values = values;\n", ""),
    ("change", "if (was.inputs || inputs.length) node.inputs = inputs;", "if (true) node.inputs = inputs;"),
    ("change", "node.size = was.size;", ""),
    ("change", "if (was.pos && isSame(node.pos, was.pos[1])) node.pos = was.pos[0];", ""),
    ("graph", "if (position >= 0) list.splice(position, 0, id);", "list.unshift(id);"),
    ("graph", "else graph.links.splice(index, 0, restored);", "else graph.links.push(restored);"),
]


@pytest.mark.parametrize("module, text, replacement", MUTANTS)
def test_exactness_notices_a_broken_conversion(convert, tmp_path, module, text, replacement):
    path = write_modules(tmp_path) / f"{module}.mjs"
    source = path.read_text(encoding="utf-8")
    assert source.count(text) == 1
    path.write_text(source.replace(text, replacement), encoding="utf-8")
    old = loaded_by("UNETLoaderMultiGPU", ["flux.safetensors", "default", "cuda:1"])
    del old["nodes"][0]["inputs"]
    close = raylight()
    close["nodes"].append(node(30, "Note", [], [], []) | {"pos": [400, 170]})                  # below the initializer
    close["last_node_id"] = 30

    exact = [same_bytes(convert(given, folder=tmp_path)["back"]["workflow"], given)
             for given in (raylight(), old, close)]

    assert not all(exact)


def test_definitions_are_those_of_comfyui(host):
    """The stubs of ComfyUI's own nodes and this pack's have the inputs and outputs of a running ComfyUI's."""
    for type, stub in CORE.items():
        real = host.get(f"/object_info/{type}")[type]
        assert real["output"] == stub["output"], type
        for kind in ("required", "optional"):
            assert list(real["input"].get(kind, {})) == list(stub["input"][kind]), type
    defaults = {name: options["default"] for kind in ("required", "optional")
                for name, (_, options) in host.get("/object_info/XDiTParallelConfig")["XDiTParallelConfig"]["input"][
                    kind].items()}
    stubs = {name: options["default"] for kind in ("required", "optional")
             for name, (_, options) in CORE["XDiTParallelConfig"]["input"][kind].items()}
    assert defaults == stubs
