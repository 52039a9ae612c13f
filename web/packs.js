/**
 * Tables of the nodes that Run on all GPUs converts, ComfyUI's own and those of other packs: the node types they become, and what becomes of their
 * widgets and slots. convert.js applies them; nothing in it is specific to a pack.
 */

// ---- loaders of diffusion models: their widgets in the order of a file's widgets_values; the first one is the file

const GGUF_ADVANCED = ["unet_name", "dequant_dtype", "patch_dtype", "patch_on_device"];
const BASES = {
  UNETLoader: ["unet_name", "weight_dtype"],
  UnetLoaderGGUF: ["unet_name"],
  UnetLoaderGGUFAdvanced: GGUF_ADVANCED,
  CheckpointLoaderSimple: ["ckpt_name"],
  DiffusersLoader: ["model_path"],
};
// ComfyUI-MultiGPU: its variants of these loaders, by the suffix of the type.
const VARIANTS = {
  MultiGPU: ["device"],
  DisTorchMultiGPU: ["device", "virtual_vram_gb", "use_other_vram", "expert_mode_allocations"],
  DisTorch2MultiGPU: ["compute_device", "virtual_vram_gb", "donor_device", "expert_mode_allocations", "eject_models"],
};
const RES4LYF = { FluxLoader: ["clip_name1", "clip_name2_opt"], SD35Loader: ["clip_name1", "clip_name2_opt", "clip_name3_opt"],
  ClownModelLoader: ["clip_name1_opt", "clip_name2_opt", "clip_name3_opt", "clip_name4_opt", "clip_type"] };

const variantsOf = ([type, widgets]) => Object.entries(VARIANTS).map(([suffix, more]) => [type + suffix, [...widgets, ...more]]);

/** Loaders that are known without their pack: {type: names of widgets}. Others are recognised by their widgets' choices (loaders.js). */
export const LOADERS = {
  ...BASES,
  ...Object.fromEntries(Object.entries(BASES).flatMap(variantsOf)),
  ImageOnlyCheckpointLoader: ["ckpt_name"],
  unCLIPCheckpointLoader: ["ckpt_name"],
  CheckpointLoaderAdvancedMultiGPU: ["ckpt_name", "unet_device", "clip_device", "vae_device"],
  CheckpointLoaderAdvancedDisTorch2MultiGPU: ["ckpt_name", "unet_compute_device", "unet_virtual_vram_gb", "unet_donor_device", "clip_compute_device",
    "clip_virtual_vram_gb", "clip_donor_device", "vae_device", "unet_expert_mode_allocations", "clip_expert_mode_allocations", "high_precision_loras",
    "eject_models"],
  DiffusionModelLoaderKJ: ["model_name", "weight_dtype", "compute_dtype", "patch_cublaslinear", "sage_attention", "enable_fp16_accumulation"],
  FluxLoader: ["model_name", "weight_dtype", ...RES4LYF.FluxLoader, "vae_name", "clip_vision_name", "style_model_name"],
  SD35Loader: ["model_name", "weight_dtype", ...RES4LYF.SD35Loader, "vae_name"],
  ClownModelLoader: ["model_name", "weight_dtype", ...RES4LYF.ClownModelLoader, "vae_name"],
  XfuserUNETLoader: ["unet_name", "weight_dtype"],                           // xdit-comfyui by the xDiT project, first version
};
// Widgets for the placement of weights, for speed, or of other outputs' files: any value is accepted, and none is needed on all GPUs.
const PLACEMENT = new Set([...Object.values(VARIANTS).flat(), "unet_device", "clip_device", "vae_device", "unet_compute_device", "unet_virtual_vram_gb",
  "unet_donor_device", "clip_compute_device", "clip_virtual_vram_gb", "clip_donor_device", "unet_expert_mode_allocations", "clip_expert_mode_allocations",
  "patch_on_device", "load_device", "offload_device", "patch_cublaslinear", "enable_fp16_accumulation"]);
const OF_OTHER_OUTPUTS = /^(clip|vae|style_model)_/;
const NEUTRAL = ["default", "auto", "disabled", "none", "None", "", null, undefined];               // values that change nothing, whatever the widget is
const STANDARDS = { high_precision_loras: true };             // defaults of widgets without a definition; false for others
export const DTYPES = ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"];                      // of weight_dtype, in both ComfyUI's and our loader
// SageAttention as its package chooses it is the `sage` of xDiT Parallel Config; its single kernels have no counterpart.
export const ATTENTIONS = { sage_attention: { auto: "sage" } };

/** Return how a loader's widget converts: "mapped", "placement" (has no effect on all GPUs), "default", or "acts" (has no counterpart). */
export function effectOf(name, value, standard) {
  if (name === "weight_dtype" || ATTENTIONS[name]?.[value]) return "mapped";
  if (PLACEMENT.has(name)) return "placement";
  if (OF_OTHER_OUTPUTS.test(name) || NEUTRAL.includes(value)) return "default";
  return value === (STANDARDS[name] ?? standard ?? false) ? "default" : "acts";
}

const CLIP_LOADERS = [null, "CLIPLoader", "DualCLIPLoader", "TripleCLIPLoader", "QuadrupleCLIPLoader"];
const CLIP_TYPES = { FluxLoader: "flux", SD35Loader: "sd3" };
const ONLY_FOR = { TripleCLIPLoader: "sd3", QuadrupleCLIPLoader: "hidream" };                        // these have no widget for the type

/**
 * Return ComfyUI's own loader for one output of a loader that also loads separate files, as {type, output, values, same}, or null if there is none.
 * values: {widget: value}. same: {widget: the widget of the given loader that it copies}. choices(type, widget): choices of an installed node, or undefined.
 */
export function partOf(type, output, values, choices) {
  if (!(type in RES4LYF)) return null;
  const isNone = (name) => values[name] === ".none";
  const checkpoint = { type: "XDiTLoadClipVae", output, values: { ckpt_name: values.model_name }, same: { ckpt_name: "model_name" } };
  const single = (loader, widget, from) => ({ type: loader, output, values: { [widget]: values[from] }, same: { [widget]: from } });
  if (output === "VAE" && values.vae_name === ".use_ckpt_vae") return checkpoint;
  if (output === "VAE") return isNone("vae_name") ? null : single("VAELoader", "vae_name", "vae_name");
  if (output === "CLIP_VISION") return isNone("clip_vision_name") ? null : single("CLIPVisionLoader", "clip_name", "clip_vision_name");
  if (output === "STYLE_MODEL") return isNone("style_model_name") ? null : single("StyleModelLoader", "style_model_name", "style_model_name");
  const names = RES4LYF[type].filter((name) => name !== "clip_type" && !isNone(name));
  if (values[names[0]] === ".use_ckpt_clip") return checkpoint;
  const loader = CLIP_LOADERS[names.length], kind = CLIP_TYPES[type] ?? values.clip_type;
  if (!loader || (ONLY_FOR[loader] ?? kind) !== kind || !(choices(loader, "type") ?? [kind]).includes(kind) || kind === ".auto") return null;
  const from = Object.fromEntries(names.map((name, index) => [names.length === 1 ? "clip_name" : `clip_name${index + 1}`, name]));
  const files = Object.fromEntries(Object.entries(from).map(([to, name]) => [to, values[name]]));
  if (loader in ONLY_FOR) return { type: loader, output, values: files, same: from };
  return { type: loader, output, values: { ...files, type: kind, device: "default" }, same: CLIP_TYPES[type] ? from : { ...from, type: "clip_type" } };
}

// ---- models that another pack runs itself: by the type of the output, and by the type of the node

export const OWN_MODELS = { WANVIDEOMODEL: "ComfyUI-WanVideoWrapper" };
const OFFICIAL = "xdit-comfyui (xDiT project)";
export const PIPELINES = { "xDiT.Preset": OFFICIAL, "xDiT.Model": OFFICIAL, "xDiT.Sample": OFFICIAL };

// ---- raylight: its nodes exchange types of its own, so either all of a workflow's nodes are converted or none

const BEFORE_CFG = ["ray_cluster_address", "ray_cluster_namespace", "GPU", "ulysses_degree", "ring_degree"];
const SELECTED = [...BEFORE_CFG.slice(0, 3), "GPU_SELECT", ...BEFORE_CFG.slice(3)];
const FSDP = ["FSDP", "FSDP_CPU_OFFLOAD"], TESTS = ["skip_comm_test", "use_mmap"], RAY = ["ray_object_store_gb", "ray_dashboard_address", "torch_dist_address"];
const NOISE = ["noise_seed", "control_after_generate"];
const SAMPLED = ["add_noise", ...NOISE, "steps", "cfg", "sampler_name", "scheduler", "start_at_step", "end_at_step",
  "return_with_leftover_noise"];
const ATTENTION_BACKENDS = {
  TORCH: "sdpa", TORCH_MATH: "sdpa", TORCH_FLASH: "sdpa", TORCH_EFFICIENT: "sdpa", TORCH_CUDNN: "sdpa", FA: "flash", FA3: "flash3", SAGE_AUTO: "sage",
};
const TILES = ["tile_size", "overlap", "temporal_size", "temporal_overlap"];
const LOCAL = ["", "local", "LOCAL"];
const toModel = { ray_actors: "model" }, alone = { ray_actors: null };

/** Settings of xDiT Parallel Config for raylight's degrees. data_degree is what they leave of the GPUs, as in raylight. */
function parallelOf({ GPU, GPU_SELECT = "", ulysses_degree, ring_degree, cfg_degree = 1, XFuser_attention = "TORCH_FLASH" }) {
  const [ulysses, ring, cfg] = [ulysses_degree, ring_degree, cfg_degree].map((degree) => Math.max(1, Number(degree)));
  const selected = GPU_SELECT.split(",").map((name) => name.trim()).filter(Boolean);
  const devices = Array.from({ length: GPU }, (_, index) => `cuda:${selected[index] ?? index}`);
  return { devices: devices.join(","), mode: "manual", ulysses_degree: ulysses, ring_degree: ring, cfg_degree: cfg,
    data_degree: Math.max(1, Math.floor(GPU / (ulysses * ring * cfg))), attention: ATTENTION_BACKENDS[XFuser_attention] };
}

const INITIALIZER = {
  to: "XDiTParallelConfig", settings: parallelOf, outputs: [["parallel", 0]],
  dropped: ["sync_ulysses", "clear_vram_after_sampling", ...FSDP, "FSDP_model_replicas"],
  same: { ulysses_degree: "ulysses_degree", ring_degree: "ring_degree" },
  only: { ray_cluster_address: LOCAL, XFuser_attention: Object.keys(ATTENTION_BACKENDS) },
  kinds: { GPU: "number", dp_degree: "number", FSDP_model_replicas: "number", XFuser_attention: "string" },
};
/**
 * Rows: {type: {to, widgets, ...}}. widgets: layouts of widgets_values, the newest first; `kinds`, the types of values, distinguishes layouts of the same
 * length. same: {new widget: old one}; if absent, the widgets stay as they are. only: {widget: values that convert}. as: {widget: {value: new value}}.
 * slots: {old input: new input, or null if it is removed}. outputs: [[new name, old index]]. through: {output index: inputs by which it is
 * an input passed on}. after: an input with a chain of nodes that patch the model; they move behind it. feeds: {new input: a new node for it}.
 */
export const RAYLIGHT = {
  RayInitializer: { ...INITIALIZER, widgets: [
    [...BEFORE_CFG, "cfg_degree", "dp_degree", "sync_ulysses", "clear_vram_after_sampling", ...FSDP, "XFuser_attention", ...TESTS],
    [...BEFORE_CFG, "cfg_degree", "dp_degree", "sync_ulysses", ...FSDP, "XFuser_attention", ...TESTS],
    [...BEFORE_CFG, "cfg_degree", "sync_ulysses", ...FSDP, "FSDP_model_replicas", "XFuser_attention", ...TESTS],
    [...BEFORE_CFG, "cfg_degree", "sync_ulysses", ...FSDP, "XFuser_attention", ...TESTS, "FSDP_model_replicas"],
    [...BEFORE_CFG, "cfg_degree", "sync_ulysses", ...FSDP, "XFuser_attention", ...TESTS],
    [...BEFORE_CFG, "cfg_degree", "sync_ulysses", ...FSDP, "XFuser_attention"],
    [...BEFORE_CFG, "cfg_degree", ...FSDP, "XFuser_attention"], [...BEFORE_CFG, ...FSDP, "XFuser_attention"], [...BEFORE_CFG, ...FSDP],
  ] },
  RayInitializerAdvanced: { ...INITIALIZER, widgets: [
    [...SELECTED, "clear_vram_after_sampling", "cfg_degree", "dp_degree", "sync_ulysses", ...FSDP, "XFuser_attention", ...TESTS, ...RAY],
    [...SELECTED, "cfg_degree", "dp_degree", "sync_ulysses", ...FSDP, "XFuser_attention", ...TESTS, ...RAY],
    [...SELECTED, "cfg_degree", "sync_ulysses", ...FSDP, "XFuser_attention", ...TESTS, ...RAY],
    [...BEFORE_CFG, "cfg_degree", "sync_ulysses", ...FSDP, "XFuser_attention", ...TESTS, ...RAY],
    [...BEFORE_CFG.slice(0, 2), ...RAY, ...BEFORE_CFG.slice(2), "cfg_degree", "sync_ulysses", ...FSDP, "XFuser_attention"],
  ] },
  RayUNETLoader: { to: "XDiTLoadModel", widgets: [BASES.UNETLoader], same: { model_name: "unet_name", weight_dtype: "weight_dtype" }, outputs: [["MODEL", 0]],
    as: { weight_dtype: { bf16: "default", fp16: "default" } },                // raylight loads both like default
    only: { weight_dtype: [...DTYPES, "bf16", "fp16"] }, slots: { ray_actors_init: "parallel", lora: null }, after: "lora" },
  RayGGUFLoader: { to: "XDiTLoadModel", widgets: [GGUF_ADVANCED.slice(0, 3)], same: { model_name: "unet_name" }, outputs: [["MODEL", 0]],
    only: { dequant_dtype: ["default"], patch_dtype: ["default"] }, slots: { ray_actors_init: "parallel", lora: null }, after: "lora" },
  RayLoraLoader: { to: "LoraLoaderModelOnly", slots: { prev_ray_lora: "model", prev_lora: "model" }, outputs: [["MODEL", 0]], before: "model" },
  XFuserKSamplerAdvanced: { to: "KSamplerAdvanced", widgets: [[...SAMPLED, "denoise"], SAMPLED], same: Object.fromEntries(SAMPLED.map((name) => [name, name])),
    only: { denoise: [1] }, slots: toModel, outputs: [["LATENT", 0]], through: { 1: ["ray_actors"] } },
  XFuserSamplerCustom: { to: "SamplerCustom", slots: toModel, outputs: [["output", 0], ["denoised_output"]], through: { 1: ["ray_actors"] } },
  XFuserSamplerCustomAdvanced: { to: "SamplerCustomAdvanced", widgets: [["add_noise", ...NOISE]], same: {}, only: { add_noise: [true] },
    outputs: [["output", 0], ["denoised_output", 1]], through: { 2: ["guider", "ray_actors"] },
    feeds: { noise: { type: "RandomNoise", same: Object.fromEntries(NOISE.map((name) => [name, name])) } } },
  RayVAEDecodeDistributed: { to: "XDiTVAEDecode", widgets: [["vae_name", ...TILES], TILES], same: {}, dropped: TILES, slots: alone, outputs: [["IMAGE", 0]],
    feeds: { vae: { type: "VAELoader", same: { vae_name: "vae_name" } } } },
  RayVAELoader: { to: "VAELoader", slots: alone, outputs: [["VAE", 0]] },
  RayControlNetLoader: { to: "ControlNetLoader", slots: alone, outputs: [["CONTROL_NET", 0]] },
  RayControlNetApply: { to: "ControlNetApplyAdvanced", slots: { ray_control_net: "control_net", ray_vae: "vae" } },
  RayBasicGuider: { to: "BasicGuider", slots: toModel, outputs: [["GUIDER", 0]] },
  RayCFGGuider: { to: "CFGGuider", slots: toModel, outputs: [["GUIDER", 0]] },
  RayDualCFGGuider: { to: "DualCFGGuider", slots: toModel, outputs: [["GUIDER", 0]] },
  ...Object.fromEntries(["BasicScheduler", "BetaSamplingScheduler", "SamplingPercentToSigma", "SamplerSASolver"]
    .map((type) => [`Ray${type}`, { to: type, slots: toModel }])),
  ...Object.fromEntries(["ModelSamplingDiscrete", "ModelSamplingContinuousEDM", "ModelSamplingContinuousV", "ModelSamplingStableCascade", "ModelSamplingSD3",
    "ModelSamplingAuraFlow", "ModelSamplingFlux", "ModelSamplingLTXV", "RescaleCFG", "ModelComputeDtype", "TorchCompileModel"]
    .map((type) => [`Ray${type}`, { to: type, slots: toModel, outputs: [["MODEL", 0]] }])),
  ...Object.fromEntries(["Reroute", "SetNode", "GetNode"].map((type) => [type, { to: type }])),        // these pass on any type
};
/** raylight's types of slots, and ComfyUI's in their place. */
export const RAY_TYPES = {
  RAY_ACTORS_INIT: "XDIT_PARALLEL", RAY_ACTORS: "MODEL", RAY_LORA: "MODEL", RAY_GUIDER: "GUIDER", RAY_CONTROL_NET: "CONTROL_NET", RAY_VAE: "VAE", ray_vae: "VAE",
};
