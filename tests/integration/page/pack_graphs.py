"""Small workflow files with nodes of other packs, and the definitions of their nodes as ComfyUI's /object_info returns
them. Types, slots and widgets are those of the packs; the graphs are our own. Used by test_convert_packs.py."""

MODELS = {"diffusion_models": ["flux.safetensors", "wan.safetensors"], "checkpoints": ["sdxl.safetensors"],
          "unet_gguf": ["flux.gguf"], "diffusers": ["sd15-folder"]}
DEVICES = ["cpu", "cuda:0", "cuda:1"]
DTYPES = ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"]
GGUF_DTYPES = ["default", "target", "float32", "float16", "bfloat16"]


def definition(outputs, display_name=None, optional=None, **required):
    return {"input": {"required": required, "optional": optional or {}}, "output": list(outputs),
            "display_name": display_name}


def combo(choices, **options):
    return [choices, options]


def number(kind="FLOAT", **options):
    return [kind, options]


TOGGLE, TEXT = ["BOOLEAN", {"default": False}], ["STRING", {"default": ""}]
SEED = ["INT", {"default": 0, "control_after_generate": True}]

# ComfyUI's own nodes and this pack's: test_definitions_are_those_of_comfyui compares them with a running ComfyUI.
CORE = {
    "UNETLoader": definition(["MODEL"], unet_name=combo(MODELS["diffusion_models"]), weight_dtype=combo(DTYPES)),
    "CheckpointLoaderSimple": definition(["MODEL", "CLIP", "VAE"], ckpt_name=combo(MODELS["checkpoints"])),
    "unCLIPCheckpointLoader": definition(["MODEL", "CLIP", "VAE", "CLIP_VISION"],
                                         ckpt_name=combo(MODELS["checkpoints"])),
    "DiffusersLoader": definition(["MODEL", "CLIP", "VAE"], model_path=combo(MODELS["diffusers"])),
    "CLIPLoader": definition(["CLIP"], clip_name=combo(["t5.safetensors"]), type=combo(["sd3", "hidream"]),
                             optional={"device": combo(["default", "cpu"])}),
    "DualCLIPLoader": definition(["CLIP"], clip_name1=combo([]), clip_name2=combo([]), type=combo(
        ["sd3", "flux", "hidream"]), optional={"device": combo(["default", "cpu"])}),
    "TripleCLIPLoader": definition(["CLIP"], **{f"clip_name{index}": combo([]) for index in (1, 2, 3)}),
    "QuadrupleCLIPLoader": definition(["CLIP"], **{f"clip_name{index}": combo([]) for index in (1, 2, 3, 4)}),
    "VAELoader": definition(["VAE"], vae_name=combo(["ae.safetensors"])),
    "CLIPVisionLoader": definition(["CLIP_VISION"], clip_name=combo([])),
    "StyleModelLoader": definition(["STYLE_MODEL"], style_model_name=combo([])),
    "RandomNoise": definition(["NOISE"], noise_seed=SEED),
    "XDiTLoadModel": definition(["MODEL"], "Load xDiT Model", {"parallel": ["XDIT_PARALLEL", {}]},
                                model_name=combo([]), weight_dtype=combo(DTYPES, default="default")),
    "XDiTLoadClipVae": definition(["CLIP", "VAE"], "Load CLIP and VAE", ckpt_name=combo([])),
    "XDiTVAEDecode": definition(["IMAGE"], "Distributed VAE Decode", {"parallel": ["XDIT_PARALLEL", {}]},
                                samples=["LATENT", {}], vae=["VAE", {}]),
    "UpscaleModelLoader": definition(["UPSCALE_MODEL"], model_name=combo([])),
    "ImageUpscaleWithModel": definition(["IMAGE"], upscale_model=["UPSCALE_MODEL", {}], image=["IMAGE", {}]),
    "XDiTUpscaleImage": definition(["IMAGE"], "Distributed Upscale Image", {"parallel": ["XDIT_PARALLEL", {}]},
                                   upscale_model=["UPSCALE_MODEL", {}], image=["IMAGE", {}]),
    "XDiTParallelConfig": definition(
        ["XDIT_PARALLEL"], "xDiT Parallel Config", {
            "stage_blocks": TEXT, "warmup": combo(["auto"], default="auto"), "offload_keys_values": TOGGLE,
            "forecast_keys_values": number(default=0.6), "displaced_degree": number("INT", default=1),
            "displaced_mode": combo(["auto"], default="auto"), "approximate": combo(["allowed"], default="allowed"),
            "weights_memory": ["STRING", {"default": "auto"}], "compile": combo(["off"], default="off"),
            "attention": combo(["auto", "as ComfyUI", "sdpa", "flash", "sage"], default="auto"),
            "exchange": combo(["whole"], default="whole"), "sparse_attention": combo(["off"], default="off"),
            "sparse_settings": ["STRING", {"default": ""}]},
        devices=["STRING", {"default": "auto"}], mode=combo(["auto", "manual"], default="auto"),
        **{f"{axis}_degree": number("INT", default=1) for axis in ("cfg", "data", "pipefusion", "ring", "ulysses",
                                                                   "tensor")},
        num_patches=number("INT", default=0), warmup_steps=number("INT", default=1)),
}
# ComfyUI-GGUF, ComfyUI-MultiGPU, KJNodes and RES4LYF, and packs that the tables do not name.
OTHERS = {
    "UnetLoaderGGUF": definition(["MODEL"], unet_name=combo(MODELS["unet_gguf"])),
    "UnetLoaderGGUFAdvanced": definition(
        ["MODEL"], unet_name=combo(MODELS["unet_gguf"]), dequant_dtype=combo(GGUF_DTYPES, default="default"),
        patch_dtype=combo(GGUF_DTYPES, default="default"), patch_on_device=TOGGLE),
    "UNETLoaderDisTorch2MultiGPU": definition(
        ["MODEL"], None, {"compute_device": combo(DEVICES), "virtual_vram_gb": number(default=4.0),
                          "donor_device": combo(DEVICES), "expert_mode_allocations": TEXT, "eject_models": TOGGLE},
        unet_name=combo(MODELS["diffusion_models"]), weight_dtype=combo(DTYPES)),
    "DiffusionModelLoaderKJ": definition(
        ["MODEL"], None, {"extra_state_dict": ["STRING", {"forceInput": True}]},
        model_name=combo(MODELS["diffusion_models"]), weight_dtype=combo([*DTYPES, "fp16", "bf16", "fp32"]),
        compute_dtype=combo(["default", "fp16", "bf16", "fp32"], default="default"), patch_cublaslinear=TOGGLE,
        sage_attention=combo(["disabled", "auto", "sageattn_qk_int8_pv_fp16_cuda"]), enable_fp16_accumulation=TOGGLE),
    "SomeLoader": definition(["MODEL"], model=combo(MODELS["diffusion_models"] + MODELS["checkpoints"]),
                             strength=number(default=1.0), load_device=combo(DEVICES)),
    "OneOfLoras": definition(["MODEL"], lora_name=combo(["lora.safetensors"])),
    "TwoModels": definition(["MODEL"], high=combo(MODELS["diffusion_models"]), low=combo(MODELS["diffusion_models"])),
}
DEFINITIONS = CORE | OTHERS


def node(id, type, values=(), inputs=(), outputs=(), **more):
    """A node of a workflow file. inputs: [(name, type)] or, for widgets that have a slot, [(name, type, "widget")];
    outputs: [(name, type)]. more: other entries of the file."""
    slots = [{"name": name, "type": kind, **({"widget": {"name": name}} if is_widget else {}), "link": None}
             for name, kind, *is_widget in inputs]
    return {"id": id, "type": type, "pos": [400 * (id % 5), 500 * (id // 5)], "size": [300, 130], "flags": {},
            "order": id, "mode": 0, "inputs": slots,
            "outputs": [{"name": name, "type": kind, "links": None} for name, kind in outputs],
            "properties": {"Node name for S&R": type}, "widgets_values": list(values)} | more


def workflow(*nodes, links):
    """A workflow file. links: [(id, output's index, id, input's name)]."""
    by_id, rows = {one["id"]: one for one in nodes}, []
    for number_, (begin, output, end, name) in enumerate(links, 1):
        slots = by_id[end]["inputs"]
        index = [slot["name"] for slot in slots].index(name)
        origin = by_id[begin]["outputs"][output]
        origin["links"] = [*(origin["links"] or []), number_]
        slots[index]["link"] = number_
        rows.append([number_, begin, output, end, index, origin["type"]])
    return {"last_node_id": max(by_id), "last_link_id": len(rows), "nodes": list(nodes), "links": rows, "groups": [],
            "config": {}, "extra": {}, "version": 0.4}


def loaded_by(type, values, outputs=(("MODEL", "MODEL"),), inputs=(), **more):
    """A loader with users of all its outputs: KSampler, text and VAE nodes."""
    users = {"MODEL": ("KSampler", "model"), "CLIP": ("CLIPTextEncode", "clip"), "VAE": ("VAEDecode", "vae"),
             "CLIP_VISION": ("CLIPVisionEncode", "clip_vision"), "STYLE_MODEL": ("StyleModelApply", "style_model")}
    nodes = [node(1, type, values, inputs, outputs, **more)]
    for id, (_, kind) in enumerate(outputs, 2):
        nodes.append(node(id, users[kind][0], [], [(users[kind][1], kind)], []))
    return workflow(*nodes, links=[(1, index, index + 2, users[kind][1]) for index, (_, kind) in enumerate(outputs)])


RES4LYF_OUTPUTS = [("model", "MODEL"), ("clip", "CLIP"), ("vae", "VAE")]
INITIALIZER = ["local", "default", 4, 2, 1, 2, 1, False, True, False, False, "TORCH_FLASH", False, False]


def raylight(initializer=INITIALIZER, loader=("wan.safetensors", "default"), sampler=(), extra=(), extra_links=()):
    """Every kind of change in one graph: degrees, two LoRAs, samplers that pass on the model, noise, a control net
    and tiles of the VAE. sampler: the last widgets of the first sampler. extra: more nodes."""
    actors, cond = ("ray_actors", "RAY_ACTORS"), [("positive", "CONDITIONING"), ("negative", "CONDITIONING")]
    latent = ("latent_image", "LATENT")
    return workflow(
        node(1, "RayInitializer", initializer, [], [("ray_actors_init", "RAY_ACTORS_INIT")]),
        node(2, "RayUNETLoader", loader, [("ray_actors_init", "RAY_ACTORS_INIT"), ("lora", "RAY_LORA")], [actors],
             properties={"Node name for S&R": "RayUNETLoader", "cnr_id": "raylight", "ver": "0.2.0"}),
        node(3, "RayLoraLoader", ["first.safetensors", 1], [("prev_ray_lora", "RAY_LORA")], [("ray_lora", "RAY_LORA")]),
        node(4, "RayLoraLoader", ["second.safetensors", 0.5], [("prev_ray_lora", "RAY_LORA")],
             [("ray_lora", "RAY_LORA")], mode=4),
        node(5, "RayModelSamplingSD3", [8], [actors], [actors]),
        node(6, "XFuserKSamplerAdvanced", ["enable", 7, "randomize", 6, 3.5, "euler", "simple", 0, 3, "disable",
                                           *sampler], [actors, *cond, latent], [("latent", "LATENT"), actors]),
        node(7, "RayCFGGuider", [1], [actors, *cond], [("guider", "RAY_GUIDER")]),
        node(8, "XFuserSamplerCustomAdvanced", [True, 11, "fixed"], [
            ("guider", "RAY_GUIDER"), ("sampler", "SAMPLER"), ("sigmas", "SIGMAS"), latent],
             [("output", "LATENT"), ("denoised_output", "LATENT"), actors]),
        node(9, "RayBasicScheduler", ["simple", 10, 1], [actors], [("SIGMAS", "SIGMAS")]),
        node(10, "RayVAEDecodeDistributed", ["wan_vae.safetensors", 512, 64, 64, 8],
             [actors, ("samples", "LATENT")], [("IMAGE", "IMAGE")]),
        node(11, "RayVAELoader", ["wan_vae.safetensors"], [actors], [("ray_vae", "ray_vae")]),
        node(12, "RayControlNetLoader", ["control.safetensors"], [actors], [("ray_control_net", "RAY_CONTROL_NET")]),
        node(13, "RayControlNetApply", [1, 0, 1], [*cond, ("ray_control_net", "RAY_CONTROL_NET"), ("image", "IMAGE"),
                                                   ("ray_vae", "RAY_VAE")], cond),
        node(14, "KSamplerSelect", ["euler"], [], [("SAMPLER", "SAMPLER")]),
        *extra, links=[
            (1, 0, 2, "ray_actors_init"), (3, 0, 4, "prev_ray_lora"), (4, 0, 2, "lora"), (2, 0, 5, "ray_actors"),
            (5, 0, 6, "ray_actors"), (6, 0, 8, "latent_image"), (6, 1, 7, "ray_actors"), (7, 0, 8, "guider"),
            (2, 0, 9, "ray_actors"), (9, 0, 8, "sigmas"), (14, 0, 8, "sampler"), (8, 2, 10, "ray_actors"),
            (8, 0, 10, "samples"), (2, 0, 11, "ray_actors"), (2, 0, 12, "ray_actors"), (11, 0, 13, "ray_vae"),
            (12, 0, 13, "ray_control_net"), (13, 0, 6, "positive"), (13, 1, 6, "negative"), (13, 0, 7, "positive"),
            (13, 1, 7, "negative"), *extra_links])
