"""What every node of ComfyUI that takes a MODEL does with ours, beside ComfyUI's own: equal, or refused in our words.

    XDIT_COMFYUI=FOLDER OMP_NUM_THREADS=1 python -m tests.programs.model_nodes [--write] [--pipefusion] [--only NAME
    ...]

runs each node once on a tiny model of a kind that it is for, samples with the MODEL that comes out (or takes what else
it made), and without the node, prints the outcomes, and with --write makes docs/nodes.md of them.
tests/integration/sampling/test_model_nodes.py does the same.
"""

import argparse
import contextlib
import inspect
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from tests.support.comfyui_server import ROOT, comfyui_folder, run_async
from tests.support.control_zoo import save_controlnet
from tests.support.model_patch_zoo import PATCHES, SupirStandIn, save_model_patch, thin_classes
from tests.support.tolerances import relative_error

TABLE = ROOT / "docs" / "nodes.md"
TOLERANCE = 1e-4                           # relative, float32 on both sides
INTRO = """# ComfyUI's nodes that take a MODEL

What each of them does with the MODEL of Load xDiT Model: on a kind of model that the node is for, with the defaults
of its widgets but for those that are named beside the kind, of which the defaults would change nothing or are too large
for a test. Between the steps at which it acts lie all of them, and a merge takes 0.7 of each part from the first model.

- **equal**: the latents, or what else the node makes, are those of ComfyUI's own loader; and, where a node changes the
  MODEL, they are others than without it.
- **equal but for rounding**: it has both compute in half precision, where each rounds in its own way.
- **equal, and changes nothing**: so it does with ComfyUI's own loader: it compiles, chooses among devices of which
  there is one, or is kept for old workflows.
- **refused**: the workflow ends with this message, before anything wrong is drawn. With ComfyUI's own loader the node
  has an effect.
- **made for** another model, which xDiT does not run: what comes of it on one that xDiT runs. **As with ComfyUI's
  own**: its loader ends in the same error.

In a merge, the MODEL in question is the first one; the second one is of ComfyUI's loader.

Written by `python -m tests.programs.model_nodes --write`; a test compares it with what happens.

| node | with | outcome |
| --- | --- | --- |
"""
# the kind of model a node is for; sd3 for those that are for all
KINDS = {
    **dict.fromkeys(("DiffControlNetLoader", "HypernetworkLoader", "HyperTile", "ModelSamplingContinuousEDM",
                     "ModelSamplingContinuousV",
                     "ModelSamplingDiscrete", "PerturbedAttentionGuidance", "SDTurboScheduler", "SelfAttentionGuidance",
                     "TomePatchModel",
                     "UNetCrossAttentionMultiply", "UNetSelfAttentionMultiply", "UNetTemporalAttentionMultiply"),
                    "sd15"),
    **dict.fromkeys(("FreeU", "FreeU_V2", "ModelMergeBlocks", "ModelMergeSD1", "PatchModelAddDownscale"),
                    "sd15-blocks"),
    **dict.fromkeys(("EasyCache", "ModelMergeFlux1", "ModelSamplingFlux", "NAGuidance", "SkipLayerGuidanceDiT",
                     "SkipLayerGuidanceDiTSimple", "USOStyleReference"), "flux"),
    **dict.fromkeys(("ARVideoI2V", "ContextWindowsManual", "ModelMergeWAN2_1", "ScaleROPE", "WanContextWindowsManual",
                     "WanUni3CControlnetApply", "wanBlockSwap"), "wan"),
    **dict.fromkeys(("GetICLoRAParameters", "LTXVContextWindows", "ModelMergeLTXV", "ModelSamplingLTXV"), "ltx-video"),
    **dict.fromkeys(("ModelMergeCosmos7B", "ModelMergeCosmos14B"), "cosmos-predict1"),
    **dict.fromkeys(("ModelMergeCosmosPredict2_2B", "ModelMergeCosmosPredict2_14B"), "cosmos-predict2"),
    **dict.fromkeys(("ModelMergeAuraflow", "ModelSamplingAuraFlow"), "auraflow"),
    **dict.fromkeys(("ModelMergeQwenImage", "QwenImageDiffsynthControlnet"), "qwen-image"),
    "AnimaLLLiteApply": "anima", "ChromaRadianceOptions": "chroma", "FluxKVCache": "flux2-klein",
    "HiDreamO1PatchSeamSmoothing": "hidream-o1",
    "LTXVReferenceAudio": "ltx-2", "MiniMaxH3SigmaShift": "minimax-h3", "ModelMergeKrea2": "krea-2",
    "ModelMergeMochiPreview": "mochi", "ModelSamplingStableCascade": "stable-cascade-c",
    "ModelMergeSD2": "sd2",
    "ModelMergeSD35_Large": "sd35-large", "ModelMergeSDXL": "sdxl-blocks", "RenormCFG": "lumina-2",
    "SUPIRApply": "sdxl", "SeedVR2Conditioning": "seedvr2", "TripoSplatSamplingPreview": "triposplat",
    "WanInfiniteTalkToVideo": "wan-i2v", "ZImageFunControlnet": "z-image"}
# What nodes are made for that no family of xDiT is
OTHERS = {"ARVideoI2V": "Causal-Wan", "ChromaRadianceOptions": "Chroma Radiance",
          "RTDETR_detect": "RT-DETR",
          "SAM3_Detect": "SAM 3", "SAM3_VideoTrack": "SAM 3", "SDPoseKeypointExtractor": "SDPose"}
# Nodes that change nothing, with any value of their widgets, on one device
IDLE = {"MultiGPU_WorkUnits", "SelectModelDevice", "TorchCompileModel", "TripoSplatSamplingPreview",
        "wanBlockSwap"}
# Values of widgets whose defaults change nothing of a tiny model, or are too large for a test
SIZE = {"width": 64, "height": 64, "length": 5}
VALUES = {
    "ARVideoI2V": SIZE, "WanInfiniteTalkToVideo": SIZE,
    "CFGOverride": {"cfg": 2.0}, "FreSca": {"freq_cutoff": 3},
    "ContextWindowsManual": {"context_length": 2, "context_overlap": 1, "dim": 2},
    "EasyCache": {"reuse_threshold": 3.0}, "LazyCache": {"reuse_threshold": 3.0},
    "HyperTile": {"tile_size": 64}, "LTXVContextWindows": {"context_length": 9, "context_overlap": 8},
    "MiniMaxH3SigmaShift": {"shift_video": 5.0, "shift_audio": 2.0},
    "ModelComputeDtype": {"dtype": "fp16"}, "ModelNoiseScale": {"noise_scale": 1.5},
    "ModelSamplingAuraFlow": {"shift": 3.0}, "ModelSamplingFlux": {"max_shift": 2.0},
    "ModelSamplingSD3": {"shift": 5.0}, "ModelSamplingStableCascade": {"shift": 3.0},
    "ModelSamplingDiscrete": {"sampling": "v_prediction"}, "SamplingPercentToSigma": {"sampling_percent": 0.5},
    "ScaleROPE": {"scale_x": 1.5}, "SkipLayerGuidanceDiT": {"double_layers": "1", "single_layers": "0"},
    "SkipLayerGuidanceDiTSimple": {"double_layers": "1", "single_layers": "0"},
    "SkipLayerGuidanceSD3": {"layers": "1, 2"},
    "UNetCrossAttentionMultiply": {"k": 1.2}, "UNetSelfAttentionMultiply": {"k": 1.2},
    "UNetTemporalAttentionMultiply": {"self_structural": 1.2},
    "WanContextWindowsManual": {"context_length": 5, "context_overlap": 4}}
# inputs that are linked
OPTIONAL = {"ZImageFunControlnet": {"image"}, "WanInfiniteTalkToVideo": {"start_image", "clip_vision_output"}}
SHORT = {"steps": 3, "cfg": 4.0, "noise_seed": 7, "seed": 7, "start_percent": 0.0, "end_percent": 1.0}
# two programs round half precision each in their own way (tests/integration/sampling/test_half_precision.py)
IN_HALF = {"ModelComputeDtype"}
# compared with the native model without the node, whose compiling takes minutes
UNCOMPILED = {"TorchCompileModel"}
VAES = {"wan": "vae-wan", "wan-i2v": "vae-wan", "qwen-image": "vae-wan", "z-image": "vae-flux", "sdxl": "vae-sd"}
SLOW = {"sd15-blocks", "sdxl-blocks", "sd2"}                   # U-Nets as deep as published ones
ACTS = 10 * TOLERANCE                      # by what a node that changes something changes the latents at least
ROUNDS = 50 * TOLERANCE                    # of float16


@dataclass(frozen=True)
class Outcome:
    """What a node did. text: "equal", "equal but for rounding", "equal, and changes nothing", "refused: ...", "as with
    ComfyUI's own: ..."; else a fault, which good says."""

    node: str
    kind: str
    text: str
    good: bool = True


def model_nodes(comfyui):
    """{name: class} of ComfyUI's nodes with an input of type MODEL."""
    if "ModelSamplingSD3" not in comfyui.nodes.NODE_CLASS_MAPPINGS:
        run_async(comfyui.nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    found = {}
    for name, node in comfyui.nodes.NODE_CLASS_MAPPINGS.items():
        if (not name.startswith("XDiT")
                and any("MODEL" in type_of(option).split(",") for option in inputs_of(node).values())):
            found[name] = node
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def inputs_of(node):
    types = node.INPUT_TYPES()
    return {**types.get("required", {}), **types.get("optional", {})}


def type_of(option):
    return option[0] if isinstance(option[0], str) else "COMBO"


class Matrix:
    """Runs nodes on our MODEL and on ComfyUI's own, with the same other inputs."""

    def __init__(self, comfyui, config, vae_of):
        self.comfyui, self.config, self._vae_of = comfyui, config, vae_of
        self._plain = {}                                       # kind -> what is sampled without a node
        self.folder = Path(tempfile.mkdtemp(dir=comfyui.base))
        self.nodes = model_nodes(comfyui)
        comfyui.folder_paths.set_output_directory(str(self.folder))
        for kind, save in (("loras", self._save_lora), ("hypernetworks", self._save_hypernetwork),
                           ("controlnet", self._save_controlnet),
                           ("model_patches", self._save_model_patches)):
            (self.folder / kind).mkdir()
            comfyui.folder_paths.add_model_folder_path(kind, str(self.folder / kind), is_default=True)
            save(self.folder / kind)

    def vae(self, kind):
        """The VAE of a kind of model. Of TripoSplat's, which makes splats, what its node asks."""
        if kind == "triposplat":
            decoder = SimpleNamespace(gaussians_per_point=32, gs=SimpleNamespace(model_channels=8))
            return SimpleNamespace(first_stage_model=decoder, vae_dtype=torch.float32, patcher=None)
        return self._vae_of(VAES.get(kind, "vae-sd3"), encoder=True)

    def outcome(self, name):
        """Run one node on both and compare; and with ComfyUI's own model without it."""
        kind = KINDS.get(name, "sd3")
        ours = self._attempt(name, kind, self.comfyui.ours(kind, self.config))
        native = self._attempt(name, kind, self.comfyui.native(kind).clone(), plain=name in UNCOMPILED)
        refused, other = isinstance(ours, self.comfyui.errors.XDiTError), name in OTHERS
        if isinstance(native, Exception):
            said = f"{type(native).__name__}: {_one_line(native)}"
            if refused:
                text = f"refused: {ours}" if other else f"refused, and native ends in {said}: {ours}"
            elif (type(native), str(native)) == (type(ours), str(ours)):
                text = f"as with ComfyUI's own: {said}"
            else:
                text, other = f"native ends in {said}; ours: {_one_line(ours)}", False
            return Outcome(name, kind, text, good=other)
        idle = not self._acts(name, kind, native)
        if refused:
            return Outcome(name, kind, f"refused{', and changes nothing' if idle else ''}: {ours}",
                           good=other or not idle)
        if isinstance(ours, Exception):
            return Outcome(name, kind, f"raw {type(ours).__name__}: {_one_line(ours)}", good=False)
        error = difference(ours, native)
        if not error < (ROUNDS if name in IN_HALF else TOLERANCE):
            return Outcome(name, kind, f"different by {error:.1e}", good=False)
        how = "equal but for rounding" if name in IN_HALF else "equal"
        return Outcome(name, kind, f"{how}{', and changes nothing' if idle else ''}",
                       good=other or idle == (name in IDLE))

    def _attempt(self, name, kind, model, plain=False):
        """What came of it, an exception too."""
        # nodes ask for all that are loaded, and fail at one that is gone
        listed = self.comfyui.management.current_loaded_models
        listed[:] = [loaded for loaded in listed if loaded.model is not None]
        try:
            return self._result(name, kind, model, plain)
        except Exception as error:  # noqa: BLE001 - whatever a node raises is what is compared
            return error

    def _acts(self, name, kind, result):
        """Does what came of ComfyUI's own MODEL with this node differ from what comes of it without? Of a node that
        makes something that there is not without it: yes."""
        node = self.nodes[name]
        if name == "GetICLoRAParameters":
            return result != run_node(node, {"iclora_model": self.comfyui.native(kind)})[0]
        if "MODEL" not in map(str, node.RETURN_TYPES) and name != "DiffControlNetLoader":
            return True
        with torch.inference_mode():
            made = self._made(name, kind, self.comfyui.native(kind).clone())
            made.pop("MODEL", None)
            task = {**self._task(name, kind), **({"latent": made["LATENT"]} if "LATENT" in made else {})}
            if task:
                return difference(self._sample(kind, self.comfyui.native(kind), **task), result) > ACTS
            if kind not in self._plain:                        # most nodes need nothing of their own
                self._plain[kind] = self._sample(kind, self.comfyui.native(kind))
            return difference(self._plain[kind], result) > ACTS

    def changes_a_model(self, name):
        """Does this node take one MODEL and give one?"""
        types = [type_of(option) for option in inputs_of(self.nodes[name]).values()]
        return [str(value) for value in self.nodes[name].RETURN_TYPES] == ["MODEL"] and types.count("MODEL") == 1

    def chain(self, names, model):
        """What is sampled with a MODEL after these nodes, one after the other."""
        with torch.inference_mode():
            for name in names:
                model = self._made(name, "sd3", model)["MODEL"]
            return self._sample("sd3", model)

    def _made(self, name, kind, model):
        """{type: what a node made of it}; of several of a type a list."""
        node, made = self.nodes[name], {}
        outputs = run_node(node, self._arguments(name, node, kind, model))
        for type_, output in zip(map(str, getattr(node, "RETURN_TYPES", ())), outputs):
            made[type_] = [made[type_], output] if type_ in made else output
        return made

    def _result(self, name, kind, model, plain=False):
        """What the node made, or what was sampled with it."""
        with torch.inference_mode():
            if plain:
                return self._sample(kind, model)
            if name == "GetICLoRAParameters":                  # which asks what its LoRA's file says
                model = self._made("LoraLoaderModelOnly", kind, model)["MODEL"]
            before = set(self.folder.rglob("*.safetensors"))
            made = self._made(name, kind, model)
            saved = set(self.folder.rglob("*.safetensors")) - before
            if saved:
                return _flat(load_file(saved.pop()))
            tensors = {"LATENT": lambda latent: latent["samples"], "FLOAT": lambda value: torch.tensor([value]),
                       "LORA_MODEL": _flat, "IC_LORA_PARAMETERS": lambda parameters: parameters}
            for result in tensors.keys() & made if "MODEL" not in made else ():
                return tensors[result](made[result][0] if isinstance(made[result], list) else made[result])
            usable = {key: made[key] for key in ("GUIDER", "SIGMAS", "SAMPLER") if key in made} | self._task(name, kind)
            if "CONDITIONING" in made:
                usable |= dict(zip(("positive", "negative"), made["CONDITIONING"]))
            if "CONTROL_NET" in made:
                image = torch.rand(1, 128, 144, 3, generator=torch.Generator().manual_seed(5))
                usable |= dict(zip(("positive", "negative"),
                                   self.comfyui.nodes.ControlNetApplyAdvanced().apply_controlnet(
                                       self.comfyui.conditioning(kind, 1), self.comfyui.conditioning(kind, 2),
                                       made["CONTROL_NET"], image, 1.0, 0.0, 1.0)))
            if not usable and "MODEL" not in made:
                raise NotImplementedError(f"{name} makes {list(made)}, and this test does not know how to use it")
            return self._sample(kind, made.get("MODEL", model), **usable | {"latent": made["LATENT"]}
                                if "LATENT" in made else usable)

    def _task(self, name, kind):
        """What is to be sampled for a node to have something to act on, but for what is sampled for all."""
        generator = torch.Generator().manual_seed(6)
        if name == "DifferentialDiffusion":
            latent = self._latent(kind)
            samples = torch.randn(latent["samples"].shape, generator=generator)
            return {"latent": {"samples": samples, "noise_mask": torch.linspace(0, 1, 144).expand(1, 128, 144)}}
        if name == "FluxKVCache":
            positive = self.comfyui.conditioning(kind, 1)
            positive[0][1]["reference_latents"] = [torch.randn(1, 128, 6, 8, generator=generator)]
            return {"positive": positive}
        if name == "AnimaLLLiteApply":                         # which takes pictures alone
            return {"latent": {"samples": torch.zeros(1, 16, 1, 16, 18)}}
        if name in ("USOStyleReference", "WanInfiniteTalkToVideo"):            # which take one branch alone
            return {"cfg": 1.0}
        if name in ("EasyCache", "LazyCache"):
            return {"steps": 6}
        return {}

    def _sample(self, kind, model, GUIDER=None, SIGMAS=None, SAMPLER=None, latent=None, **task):
        comfyui, nodes = self.comfyui, self.comfyui.nodes.NODE_CLASS_MAPPINGS
        latent = latent or self._latent(kind)
        if GUIDER is None and SIGMAS is None and SAMPLER is None:
            return comfyui.sample(model, kind, latent=latent, **task)
        sigmas = SIGMAS if SIGMAS is not None else run_node(nodes["BasicScheduler"], {
            "model": model, "scheduler": "simple", "steps": 3, "denoise": 1.0})[0]
        guider = (GUIDER or run_node(nodes["CFGGuider"],
                                     {"model": model, "cfg": 4.0, "positive": comfyui.conditioning(kind, 1),
                                 "negative": comfyui.conditioning(kind, 2)})[0])
        return run_node(nodes["SamplerCustomAdvanced"], {
            "noise": self._noise(), "guider": guider, "sampler": SAMPLER or self._sampler(), "sigmas": sigmas,
            "latent_image": latent})[0]["samples"]

    def _arguments(self, name, node, kind, model):
        comfyui, generator = self.comfyui, torch.Generator().manual_seed(5)
        seeds = iter(range(3, 12))                             # not those of the prompts that are sampled with
        made = {"CONDITIONING": lambda: comfyui.conditioning(kind, next(seeds)), "LATENT": lambda: self._latent(kind),
                "VAE": lambda: self._audio_vae() if name == "LTXVReferenceAudio" else self.vae(kind),
                "NOISE": self._noise, "SAMPLER": self._sampler, "SIGMAS": lambda: torch.linspace(1, 0, 4),
                "IMAGE": lambda: torch.rand(1, *((128, 144) if name == "SUPIRApply" else (64, 64)), 3,
                                            generator=generator),
                "MASK": lambda: torch.ones(1, 64, 64),
                "CLIP": lambda: None, "MODEL_PATCH": lambda: self._model_patch(name),
                "AUDIO": lambda: {"waveform": torch.zeros(1, 2, 16000), "sample_rate": 16000},
                "LORA_MODEL": lambda: load_file(self.folder / "loras" / "tiny.safetensors"),
                "LATENT_OPERATION": lambda: (lambda latent, **_: 0.9 * latent), "CLIP_VISION": lambda: None,
                "CLIP_VISION_OUTPUT": lambda: self._vision(kind, generator),
                "AUDIO_ENCODER_OUTPUT": lambda: {"encoded_audio_all_layers": [
                    torch.randn(1, 50, 768, generator=generator) for _ in range(13)]}}
        arguments, seen = {}, 0
        optional = node.INPUT_TYPES().get("optional", {})
        for key, option in inputs_of(node).items():
            kind_of_input, settings = type_of(option), option[1] if len(option) > 1 else {}
            if key in VALUES.get(name, {}):
                arguments[key] = VALUES[name][key]
            elif kind_of_input == "MODEL":
                # the first is the one in question, the others ComfyUI's own
                arguments[key] = model if seen == 0 else self._weaker(kind) if "Merge" in name else comfyui.native(kind)
                seen += 1
            elif kind_of_input in made:
                if key not in optional or kind_of_input == "CONDITIONING" or key in OPTIONAL.get(name, ()):
                    arguments[key] = made[kind_of_input]()
            elif kind_of_input == "COMFY_DYNAMICCOMBO_V3":
                arguments[key] = {key: settings["options"][0]["key"]}
            elif name.startswith("ModelMerge") and kind_of_input == "FLOAT" and name != "ModelMergeSubtract":
                arguments[key] = 0.7                           # by default all of the first model
            elif "default" in settings or kind_of_input == "BOOLEAN":
                arguments[key] = settings.get("default", False)
            elif kind_of_input == "COMBO":
                options = settings.get("options") if isinstance(option[0], str) else option[0]
                arguments[key] = next((value for value in options if str(value).startswith("tiny")),
                                      next(iter(options), None))
            elif key not in optional:
                raise NotImplementedError(f"{name} needs {key} of type {kind_of_input}, which this test does not make")
        arguments |= {key: value for key, value in SHORT.items() if key in arguments
                      and key not in VALUES.get(name, {})}
        if getattr(node, "INPUT_IS_LIST", False):
            return {key: [value] for key, value in arguments.items()}
        return arguments

    def _weaker(self, kind):
        """ComfyUI's own MODEL with a fifth of its weights:
        so that merges change something, and not so much that rounding shows."""
        model = self.comfyui.native(kind).clone()
        model.add_patches({key: ("diff", (torch.zeros(1),)) for key in model.model_state_dict("diffusion_model.")}, 0.0,
                          0.2)
        return model

    def _latent(self, kind):
        return self.comfyui.latent(kind, size=(16, 8) if kind in SLOW else None)

    def _noise(self):
        return run_node(self.comfyui.nodes.NODE_CLASS_MAPPINGS["RandomNoise"], {"noise_seed": 7})[0]

    def _sampler(self):
        return self.comfyui.samplers.sampler_object("euler")

    def _vision(self, kind, generator):
        """What a vision encoder says of a picture: for Wan's layers of the width it takes, else of a tiny one."""
        size = (257, 1280) if kind == "wan-i2v" else (4, 8)
        return SimpleNamespace(all_hidden_states=torch.randn(1, 27, *size, generator=generator),
                               penultimate_hidden_states=torch.randn(1, *size, generator=generator))

    def _audio_vae(self):
        """What a node asks of an autoencoder for sound: LTX-2's, of 8 channels and 16 bands."""
        return SimpleNamespace(audio_sample_rate=16000, encode=lambda waveform: torch.randn(
            1, 8, 5, 16, generator=torch.Generator().manual_seed(8)))

    def _model_patch(self, name):
        """By ComfyUI's own loader, of a tiny file."""
        if name == "SUPIRApply":
            import comfy.model_patcher
            return comfy.model_patcher.ModelPatcher(SupirStandIn(), torch.device("cpu"), torch.device("cpu"))
        loader = self.comfyui.nodes.NODE_CLASS_MAPPINGS["ModelPatchLoader"]
        with thin_classes(loader):
            return loader().load_model_patch(f"{PATCHES[name]}.safetensors")[0]

    def _save_model_patches(self, folder):
        loader = self.comfyui.nodes.NODE_CLASS_MAPPINGS["ModelPatchLoader"]
        with thin_classes(loader):
            for name in PATCHES.values():
                save_model_patch(name, folder / f"{name}.safetensors", loader)

    def _save_lora(self, folder):
        generator, tensors = torch.Generator().manual_seed(9), {}
        # of sd3 and ltx-video, both 256 wide
        for name in ("joint_blocks.0.x_block.attn.proj", "transformer_blocks.0.attn1.to_q"):
            tensors |= {f"diffusion_model.{name}.lora_up.weight": torch.randn(256, 4, generator=generator),
                        f"diffusion_model.{name}.lora_down.weight": torch.randn(4, 256, generator=generator)}
        save_file(tensors, str(folder / "tiny.safetensors"), metadata={"reference_downscale_factor": "2"})

    def _save_hypernetwork(self, folder):
        """For SD 1.5's layers that attend to text: two matrices of its width each."""
        generator = torch.Generator().manual_seed(9)
        torch.save({768: [{"linear.weight": 0.03 * torch.randn(768, 768, generator=generator),
                           "linear.bias": torch.zeros(768)}
                          for _ in range(2)]}, folder / "tiny.pt")

    def _save_controlnet(self, folder):
        """SD 1.5's, as its difference from the model."""
        path = folder / "tiny.safetensors"
        save_controlnet("sd15", path)
        tensors = {f"control_model.{name}": 0.3 * tensor for name, tensor in load_file(path).items()}
        save_file(tensors | {"difference": torch.zeros(0)}, str(path))


def write_table(outcomes):
    """docs/nodes.md of these outcomes."""
    rows = [f"| {outcome.node} | {_with(outcome)} | {_cell(outcome.text)} |\n" for outcome in outcomes]
    return INTRO + "".join(rows)


def _with(outcome):
    """The kind of model, and the widgets that have other values than by default."""
    values = "".join(f", {key} {value}" for key, value in VALUES.get(outcome.node, {}).items())
    return f"{outcome.kind}{values}" + (f"; made for {OTHERS[outcome.node]}" if outcome.node in OTHERS else "")


def equal_on(kind):
    """The names of the nodes that the table says are equal on this kind of model, for which they are made."""
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in TABLE.read_text(encoding="utf-8").splitlines()
             if line.startswith("| ")][2:]
    return [name for name, made_with, text in cells
            if text.partition(",")[0] == "equal" and made_with.partition(",")[0] == kind
            and "made for" not in made_with]


def difference(result, reference):
    """The relative error of tensors; of other values, or other shapes: 0 or infinite."""
    if torch.is_tensor(result) and torch.is_tensor(reference) and result.shape != reference.shape:
        return float("inf")
    if type(result) is type(reference) and hasattr(result, "unbind"):
        return relative_error(result, reference)
    return 0.0 if result == reference else float("inf")


def _cell(text):
    return text.replace("|", "\\|").replace("<", "&lt;")


def _one_line(error):
    return " ".join(str(error).split())[:160] if isinstance(error, BaseException) else "a result"


def _flat(tensors):
    """All tensors of a file as one, in the order of their names."""
    return torch.cat([tensors[name].flatten().float() for name in sorted(tensors)])


def run_node(node, arguments):
    """Execute a node of either of ComfyUI's kinds; returns its outputs."""
    if hasattr(node, "define_schema"):
        accepted = inspect.signature(node.execute).parameters
        keywords = any(parameter.kind == parameter.VAR_KEYWORD for parameter in accepted.values())
        outputs = node.execute(**{key: value for key, value in arguments.items() if keywords or key in accepted})
        return getattr(outputs, "args", outputs)
    outputs = getattr(node(), node.FUNCTION)(**arguments)
    return outputs if isinstance(outputs, tuple) else ()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/nodes.md")
    parser.add_argument("--pipefusion", action="store_true", help="two stages, all steps whole, which must be exact")
    parser.add_argument("--only", nargs="*", help="names of nodes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from tests.integration.conftest import ComfyUI
    # our nodes/ would shadow ComfyUI's nodes.py
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    with tempfile.TemporaryDirectory(prefix="xdit-nodes-") as base, contextlib.ExitStack() as stack:
        comfyui = ComfyUI(comfyui_folder(), base)
        stack.callback(comfyui.groups.close)
        config = (comfyui.config("cpu,cpu", pipefusion=2, warmup_steps=1000) if options.pipefusion
                  else comfyui.config("cpu,cpu"))
        matrix = Matrix(comfyui, config, lambda kind, **options: comfyui.nodes.VAELoader().load_vae(
            comfyui.file(kind, "vae", **options))[0])
        outcomes = []
        for name in options.only or matrix.nodes:
            outcomes.append(matrix.outcome(name))
            print(f"{'' if outcomes[-1].good else 'FAULT '}{name} ({outcomes[-1].kind}): {outcomes[-1].text}",
                  flush=True)
    if options.write:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(write_table(outcomes), encoding="utf-8")
    sys.exit(any(not outcome.good for outcome in outcomes))


if __name__ == "__main__":
    main()
