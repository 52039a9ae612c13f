"""Workflows drawn at random, with ComfyUI's own model and with ours: the combinations that no other test thinks of.

    XDIT_COMFYUI=FOLDER OMP_NUM_THREADS=1 python -m tests.programs.random_workflows [--first N] [--count N] [--layout
    NAME ...] [--kind NAME ...] [--products]

draws workflows by their numbers and prints what came of each. The same number draws the same workflow.
With --products each also has a quantised file, or weights that come from host memory, or compiled blocks, or two of
these. tests/integration/sampling/test_random_workflows.py runs a few of each layout.
"""

import argparse
import collections
import functools
import importlib
import math
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager

import torch

from tests.integration.conftest import in_parts
from tests.integration.lora.test_lora import Loras
from tests.integration.models.test_z_image_omni import CASES, reference_inputs, with_references
from tests.integration.sampling.test_reference_images import EDIT, references
from tests.programs.model_nodes import inputs_of, run_node, type_of
from tests.support.comfy_quants import WRITTEN, save_comfy_quant
from tests.support.comfyui_server import ROOT, comfyui_folder, run_async
from tests.support.tiny_checkpoints import families
from tests.support.tolerances import relative_error

# by how much text is moved, number by number (a norm takes one factor of all away), to see whether a workflow enlarges
# rounding; where inputs are rounded to few bits, one of these has some of them go to the next number
MOVED, MOVED_ROUNDED = (1e-6,), (1e-5, 1e-4, -1e-4)
# relative; samplers that divide by small differences of predictions enlarge rounding
TOLERANCE = 1e-4
PATIENCE_S = 180                           # for one workflow; longer is a hang
TWO, THREE, FOUR = "cpu,cpu", "cpu,cpu,cpu", "cpu,cpu,cpu,cpu"
WHOLE = {"warmup_steps": 1000}             # no step is stale
LAYOUTS = {                                # name -> devices and degrees; the result is that of one device
    "auto": (TWO, {}), "cfg": (TWO, {"cfg": 2}), "data": (TWO, {"data": 2}), "ulysses": (TWO, {"ulysses": 2}),
    "ring": (TWO, {"ring": 2}), "one patch": (TWO, {"pipefusion": 2, "num_patches": 1}),
    "warm-up": (TWO, {"pipefusion": 2, "num_patches": 3, **WHOLE}),
    "warm-up by sequence": (TWO, {"pipefusion": 2, "num_patches": 4, **WHOLE, "warmup": "sequence"}),
    "warm-up by batches": (TWO, {"pipefusion": 2, "num_patches": 4, **WHOLE, "warmup": "micro_batches"}),
    "auto 4": (FOUR, {}), "cfg x ulysses": (FOUR, {"cfg": 2, "ulysses": 2}),
    "cfg x ring": (FOUR, {"cfg": 2, "ring": 2}),
    "ring x ulysses": (FOUR, {"ring": 2, "ulysses": 2}), "data x ulysses": (FOUR, {"data": 2, "ulysses": 2}),
    "cfg x pipefusion": (FOUR, {"cfg": 2, "pipefusion": 2, "num_patches": 2, **WHOLE}),
    "pipefusion x ring": (FOUR, {"pipefusion": 2, "ring": 2, "num_patches": 1}),
    "pipefusion x ulysses": (FOUR, {"pipefusion": 2, "ulysses": 2, "num_patches": 3, **WHOLE, "warmup": "sequence"}),
    "displaced": (TWO, {"displaced": 2, "displaced_mode": "full_sync"}),
    "displaced, warm-up": (TWO, {"displaced": 2, **WHOLE}),
    "cfg x displaced": (FOUR, {"cfg": 2, "displaced": 2, "displaced_mode": "full_sync"}),
    "tensor": (TWO, {"tensor": 2}), "tensor x ring": (FOUR, {"tensor": 2, "ring": 2}),
    "three rings": (THREE, {"ring": 3}), "three stages": (THREE, {"pipefusion": 3, "num_patches": 5, **WHOLE}),
    "three bands": (THREE, {"displaced": 3, "displaced_mode": "full_sync"}),
}
STALE = {                                  # the result is the oracle's
    "stale": (TWO, {"pipefusion": 2, "num_patches": 4}),
    "stale, cold": (TWO, {"pipefusion": 2, "num_patches": 3, "warmup_steps": 0}),
    "stale, offloaded": (TWO, {"pipefusion": 2, "num_patches": 3, "warmup_steps": 2, "offload_keys_values": True}),
    "stale, micro-batches": (TWO, {"pipefusion": 2, "num_patches": 2, "warmup": "micro_batches"}),
    "stale x cfg": (FOUR, {"cfg": 2, "pipefusion": 2, "num_patches": 3}),
    "stale x ulysses": (FOUR, {"pipefusion": 2, "ulysses": 2, "num_patches": 4, "warmup": "sequence"}),
    "stale x ring": (FOUR, {"pipefusion": 2, "ring": 2, "num_patches": 2, "warmup_steps": 0}),
    "stale x tensor": (FOUR, {"pipefusion": 2, "tensor": 2, "num_patches": 3, "warmup": "sequence"}),
}
UNET_LAYOUTS = ("auto", "auto 4", "cfg", "data", "displaced", "displaced, warm-up", "cfg x displaced", "three bands")
WHOLE_LAYOUTS = ("auto", "auto 4", "cfg", "data")
SIZES = ((16, 18), (8, 24), (15, 17), (9, 31), (2, 6), (3, 3), (2, 2), (31, 5), (1, 8), (4, 40), (12, 10))
# of what ComfyUI's own models take
OWN_SIZES = {**dict.fromkeys(("hunyuanvideo", "cosmos-predict1", "cosmos-predict1-video"),
                             ((16, 18), (8, 24), (2, 6), (2, 2), (30, 4), (4, 40), (12, 10))),
             "hidream-o1": ((16, 18), (8, 24), (2, 6), (2, 2), (30, 4), (4, 40), (12, 10)),
             # of the video, or the picture, that its prompt has
             "seedvr2": ((16, 18),), "wan-fun-control": ((16, 18),),
             "stable-cascade-b": ((16, 18), (18, 24), (22, 30), (40, 16)),
             **dict.fromkeys(("pixart", "pixart-alpha"), ((34, 32), (20, 46), (48, 20), (62, 4), (36, 36)))}
CHANGES = [("RescaleCFG", {"multiplier": 0.7}), ("CFGNorm", {"strength": 0.9}), ("CFGZeroStar", {}),
           ("APG", {"eta": 0.8, "norm_threshold": 4.0, "momentum": 0.3}),
           ("APG", {"eta": 1.0, "norm_threshold": 0.0, "momentum": -0.5}),
           ("TCFG", {}), ("Mahiro", {}), ("FreSca", {"scale_low": 1.1, "scale_high": 1.3, "freq_cutoff": 4}),
           ("Epsilon Scaling", {"scaling_factor": 1.02}), ("ModelSamplingSD3", {"shift": 5.0}),
           ("ModelSamplingAuraFlow", {"shift": 1.2}),
           ("ModelSamplingFlux", {"max_shift": 1.3, "base_shift": 0.4, "width": 128, "height": 192}),
           ("ModelNoiseScale", {}),
           ("ModelSamplingDiscrete", {"sampling": "v_prediction", "zsnr": True}), ("ModelSamplingContinuousEDM", {}),
           ("DifferentialDiffusion", {"strength": 0.8}),
           ("CFGOverride", {"cfg": 2.0, "start_percent": 0.2, "end_percent": 0.8}),
           ("LazyCache", {"reuse_threshold": 0.4}), ("EasyCache", {}),
           ("ContextWindowsManual", {"context_length": 6, "context_overlap": 2, "dim": 2}),
           ("ContextWindowsManual", {"context_length": 9, "context_overlap": 3, "dim": 2,
                                     "context_schedule": "looped_uniform", "freenoise": True}),
           ("WanContextWindowsManual", {"context_length": 9, "context_overlap": 4}),
           ("ModelComputeDtype", {"dtype": "fp32"}),
           ("LatentApplyOperationCFG", {})]
SAMPLERS = [
    ("SamplerDPMPP_2M_SDE", {"solver_type": "heun", "eta": 0.7, "noise_device": "cpu"}),
    ("SamplerDPMPP_3M_SDE", {"noise_device": "gpu"}),
    ("SamplerDPMPP_SDE", {"r": 0.4, "s_noise": 0.9}), ("SamplerDPMPP_2S_Ancestral", {"eta": 0.6}),
    ("SamplerEulerAncestral", {"eta": 0.5}),
    ("SamplerEulerAncestralCFGPP", {"eta": 0.8}), ("SamplerLMS", {"order": 3}), ("SamplerDPMAdaptative", {"order": 2}),
    ("SamplerER_SDE", {"solver_type": "Reverse-time SDE"}), ("SamplerSASolver", {"use_pece": True}),
    ("SamplerSEEDS2", {"solver_type": "phi_2"})]
SCHEDULES = [
    ("KarrasScheduler", {"sigma_max": 0.98, "sigma_min": 0.02}),
    ("ExponentialScheduler", {"sigma_max": 0.95, "sigma_min": 0.05}),
    ("PolyexponentialScheduler", {"sigma_max": 1.0, "sigma_min": 0.03}),
    ("LaplaceScheduler", {"sigma_max": 0.9, "sigma_min": 0.1}),
    ("BetaSamplingScheduler", {}), ("OptimalStepsScheduler", {"model_type": "Wan"}),
    ("ManualSigmas", {"sigmas": "0.9, 0.7, 0.72, 0.3, 0"})]
GUIDERS = ("BasicGuider", "CFGGuider", "CFGGuider", "DualCFGGuider", "DualCFGGuider nested", "PerpNegGuider",
           "DualModelGuider", "DualModelGuider, other")
ADAPTERS = (None, "lora", "dora", "loha", "lokr", "oft", "diff")             # None: a file with each of them
REFERENCES = ((10, 8), (5, 7), (16, 18), (2, 2), (24, 6))                    # sizes of reference latents
PROMPTS = ("plain", "plain", "mask", "mask bounds", "area", "area and strength", "combine", "combine both", "average",
           "concat", "range", "range, late", "zero out", "longer", "shorter", "same", "guidance", "no guidance")
# how a model computes: as graphs of torch.compile; with so many times the least that weights take of each device
COMPUTED = ({}, {}, {"held": 1}, {"held": 1.2}, {"compiled": True}, {"compiled": True, "held": 1})
SIMPLE = {"prompt": ("plain", "average", "longer", "zero out"), "guider": ("BasicGuider", "CFGGuider"),
          "changes": ((), (("ModelSamplingSD3", {"shift": 5.0}),), (("DifferentialDiffusion", {"strength": 0.8}),)),
          "schedule": (None,), "sigmas": (None,), "second": ("none", "none", "interrupted"), "dtype": ("fp32",),
          "loras": ((),)}


def draw(comfyui, number, layouts=None, kinds=None, products=False):
    """A workflow by its number: what to do, in words. products: with another kind of file, and computed otherwise."""
    pick = random.Random(number).choice
    group = pick((LAYOUTS, LAYOUTS, LAYOUTS, STALE)) if layouts is None else None
    names = layouts or [name for name in group for _ in range(1 if group[name][0] == FOUR else 2)]
    kind = pick(kinds or list(families()))
    own = {"replicated": WHOLE_LAYOUTS, "unet": UNET_LAYOUTS}.get(families()[kind].plan.hooks, names)
    layout = pick([name for name in names if name in own] or own)
    drawn = {
        "number": number, "layout": layout, "kind": kind,
        "dtype": pick(("fp32", "fp32", "fp32", "bf16", "fp16", "fp8_e4m3fn")),
        "node": pick(("KSampler", "Parallel Sampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced")),
        "sampler": pick(comfyui.samplers.KSampler.SAMPLERS), "sampler node": pick((None, None, *SAMPLERS)),
        "scheduler": pick(comfyui.samplers.KSampler.SCHEDULERS), "schedule": pick((None, None, None, *SCHEDULES)),
        "sigmas": pick((None, None, None, "split", "denoise", "flip", "extend", "first")),
        "steps": pick((1, 2, 3, 4)), "cfg": pick((1.0, 0.5, 1.5, 4.0, 7.5)), "denoise": pick((1.0, 1.0, 0.6)),
        "seed": number,
        "size": pick(OWN_SIZES.get(kind, SIZES)), "frames": pick((1, 2, 3, 5)), "batch": pick((1, 1, 2, 3)),
        "tokens": pick((20, 1, 77, 7)),
        "latent": pick(("empty", "empty", "picture", "noise mask", "masks of a batch", "batch index")),
        "range": (pick((0, 1)), pick((2, 3, 10000))), "noise": pick(("enable", "enable", "disable")),
        "leftover": pick(("enable", "disable")), "prompt": pick(PROMPTS), "guider": pick(GUIDERS),
        "changes": tuple(pick(CHANGES) for _ in range(pick((0, 0, 1, 1, 2)))),
        "second": pick(("none", "none", "none", "hires", "interrupted", "again")),
        "loras": tuple((pick(ADAPTERS), pick((1.0, 0.6, -0.4, 1.7))) for _ in range(pick((0, 0, 0, 1, 1, 2)))),
        "references": tuple(pick(REFERENCES) for _ in range(pick((0, 0, 1, 2)) if kind in EDIT else 0)),
        "pictures": pick((None, *CASES)) if kind == "z-image-omni" else None,
    }
    if families()[kind].name == "MiniMax H3":                  # whose model takes one video alone
        drawn["batch"] = 1
    if drawn["pictures"] is not None:                          # ComfyUI's own fails of two, with a text after these
        drawn["batch"] = 1
    if kind == "hunyuan3d-2.1" and layout not in STALE:        # whose class gives a batch each other's predictions
        drawn["batch"] = 1                                     # where branches are computed apart
    if kind == "hunyuanimage-refiner":                         # whose own sampling takes an empty latent of one frame
        drawn |= {"latent": "empty", "frames": 1}
    if families()[kind].plan.is_unet and min(drawn["size"]) < 8:
        drawn["size"] = (16, 18)                               # norms over a pixel or two enlarge rounding
    if layout in STALE:
        drawn |= {name: pick(values) for name, values in SIMPLE.items()}
        drawn["sampler node"], drawn["steps"] = None, max(drawn["steps"], 3)
        drawn["sampler"] = drawn["sampler"].replace("dpm_adaptive", "euler")             # runs whole
        if math.prod(drawn["size"]) < 24:
            drawn["size"] = (4, 40)                            # fewer patches where ranks share their tokens
        if drawn["latent"] == "masks of a batch":
            drawn["latent"] = "noise mask"
    if products:
        drawn["computed"] = pick(COMPUTED)
        if layout not in STALE and not families()[kind].plan.is_unet:
            drawn["dtype"] = pick((drawn["dtype"], *WRITTEN))
        if drawn["dtype"] in WRITTEN:
            drawn["loras"] = ()                                # ComfyUI rounds weights anew, ours adds to what is there
    return drawn


class Runner:
    """Runs drawn workflows on ComfyUI's own model or on ours, as ComfyUI would."""

    def __init__(self, comfyui):
        self.comfyui, self.models, self.loras = comfyui, {}, Loras(comfyui)
        self.text_moved_by = 0.0
        if "ModelSamplingSD3" not in comfyui.nodes.NODE_CLASS_MAPPINGS:
            run_async(comfyui.nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))

    def native(self, drawn):
        """What ComfyUI's own model gives; for a layout with stale steps, the oracle."""
        kind, dtype = drawn["kind"], drawn["dtype"]
        if drawn["layout"] in STALE:
            from tests.integration.sampling.test_pipefusion import oracle
            settings = STALE[drawn["layout"]][1]
            return oracle(self.comfyui, kind, settings["num_patches"], settings.get("warmup_steps", 1))
        if dtype == "fp32":
            return self.comfyui.native(kind)
        if dtype in WRITTEN:
            with torch.inference_mode():                       # as a workflow's nodes run
                return self.comfyui.nodes.UNETLoader().load_unet(self.written(kind, dtype), "default")[0]
        if ("native", kind, dtype) not in self.models:
            import comfy.sd
            held = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3fn": torch.float8_e4m3fn}[dtype]
            path = self.comfyui.base / "diffusion_models" / self.comfyui.file(kind)
            self.models["native", kind, dtype] = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": held})
        return self.models["native", kind, dtype]

    def other(self, kind):
        """ComfyUI's own model once more: clones of one model share its sampling, which nodes change."""
        if ("other", kind) not in self.models:
            self.models["other", kind] = self.comfyui.nodes.UNETLoader().load_unet(self.comfyui.file(kind), "default")[
                0]
        return self.models["other", kind]

    def written(self, kind, format_):
        """The name of a file in one of ComfyUI's quantised formats."""
        name, folder = f"{kind}-{format_}.safetensors", self.comfyui.base / "diffusion_models"
        if not (folder / name).exists():
            save_comfy_quant(folder / name, folder / self.comfyui.file(kind), format_)
        return name

    def ours(self, drawn):
        kind, dtype, computed = drawn["kind"], drawn["dtype"], drawn.get("computed", {})
        key = kind, dtype, drawn["layout"], *sorted(computed.items())
        if key not in self.models:
            devices, degrees = {**LAYOUTS, **STALE}[drawn["layout"]]
            name = self.written(kind, dtype) if dtype in WRITTEN else self.comfyui.file(kind)
            listed = name, "default" if dtype in WRITTEN else dtype
            model = self.comfyui.load_model.execute(*listed, self.comfyui.config(devices, **degrees)).args[0]
            if "held" in computed:
                kilobytes = math.ceil(model.model.remote.memory.group.least_bytes * computed["held"] / 1e3)
                degrees = {"mode": "manual" if degrees else "auto", **degrees, "weights_memory": f"{kilobytes / 1e6}"}
                model = self.comfyui.load_model.execute(*listed, self.comfyui.config(devices, **degrees)).args[0]
            if computed.get("compiled"):
                model = model.clone()                          # as TorchCompileModel asks, of a backend that is quick
                supported = importlib.import_module(
                    f"{self.comfyui.pack.__name__}.nodes.bridge.compatibility.pipefusion_support")
                model.model_options["transformer_options"][supported.COMPILE] = "eager"
            self.models[key] = model
        return self.models[key]

    def node(self, name, **given):
        """The first output of a node; what is not given is its widget's default."""
        node, arguments = self.comfyui.nodes.NODE_CLASS_MAPPINGS[name], {}
        for key, option in inputs_of(node).items():
            settings = option[1] if len(option) > 1 else {}
            if key in given:
                arguments[key] = given[key]
            elif "default" in settings or type_of(option) == "BOOLEAN":
                arguments[key] = settings.get("default", False)
            elif type_of(option) == "COMBO":
                arguments[key] = next(iter(settings.get("options") if isinstance(option[0], str) else option[0]))
        return run_node(node, arguments)[0]

    def prompts(self, drawn):
        """The positive and the negative prompt of a workflow."""
        def make(seed, tokens=drawn["tokens"]):
            return [[self.moved(text), options]
                    for text, options in self.comfyui.conditioning(drawn["kind"], seed, tokens=tokens)]

        positive, negative, other, node = make(1), make(2), make(4, 33), self.node
        mask = torch.zeros(1, 64, 64)
        mask[:, :30] = 1
        if drawn["prompt"] in ("mask", "mask bounds"):
            where = {"mask": "default", "mask bounds": "mask bounds"}[drawn["prompt"]]
            positive = (node("ConditioningSetMask", conditioning=positive, mask=mask, set_cond_area=where, strength=0.8)
                        + node("ConditioningSetMask", conditioning=other, mask=1 - mask, set_cond_area="default"))
        elif drawn["prompt"] == "area":
            positive = node("ConditioningSetAreaPercentage", conditioning=positive, width=0.5, height=1.0, x=0.25,
                            y=0.0) + other
        elif drawn["prompt"] == "area and strength":
            positive = node("ConditioningSetAreaStrength", strength=0.6, conditioning=node(
                "ConditioningSetArea", conditioning=positive, width=64, height=64, x=16, y=0, strength=1.0)) + other
        elif drawn["prompt"] == "combine":
            positive = positive + make(5)
        elif drawn["prompt"] == "combine both":
            positive, negative = positive + other, negative + make(6, 9)
        elif drawn["prompt"] == "average":
            positive = node("ConditioningAverage", conditioning_to=positive, conditioning_from=make(4, 12),
                            conditioning_to_strength=0.4)
        elif drawn["prompt"] == "concat":
            positive = node("ConditioningConcat", conditioning_to=positive, conditioning_from=other)
        elif drawn["prompt"] == "range":
            positive = (node("ConditioningSetTimestepRange", conditioning=positive, start=0.0, end=0.5)
                        + node("ConditioningSetTimestepRange", conditioning=other, start=0.4, end=1.0))
        elif drawn["prompt"] == "range, late":
            negative = node("ConditioningSetTimestepRange", conditioning=negative, start=0.5, end=1.0)
        elif drawn["prompt"] == "zero out":
            negative = node("ConditioningZeroOut", conditioning=negative)
        elif drawn["prompt"] in ("longer", "shorter"):
            positive = other if drawn["prompt"] == "longer" else make(1, 3)
        elif drawn["prompt"] == "same":
            negative = make(1)
        elif drawn["prompt"] == "guidance":
            positive = node("FluxGuidance", conditioning=positive, guidance=2.0)
        elif drawn["prompt"] == "no guidance":
            positive = node("FluxDisableGuidance", conditioning=positive)
        for latent in references(drawn["kind"], drawn["references"]):
            positive = node("ReferenceLatent", conditioning=positive, latent={"samples": latent})
        if drawn["pictures"] is not None:
            positive = with_references(positive, *reference_inputs(self.comfyui, drawn["pictures"]))
        return positive, negative

    def moved(self, text):
        """The text as ComfyUI's own model gets it to see whether a workflow enlarges rounding."""
        return text * (1 + self.text_moved_by * torch.randn(text.shape, generator=torch.Generator().manual_seed(0)))

    def latent(self, drawn):
        generator, size, batch = torch.Generator().manual_seed(drawn["seed"]), drawn["size"], drawn["batch"]
        samples = self.comfyui.latent(drawn["kind"], batch=batch, size=size)["samples"]
        if samples.is_nested:                                  # video and sound, or a shape and a camera
            video, sound = samples.unbind()
            parts = video[:, :, :1].repeat(1, 1, drawn["frames"], 1, 1) if video.ndim == 5 else video, sound
            return {"samples": in_parts(*(part if drawn["latent"] == "empty"
                                          else torch.randn(part.shape, generator=generator) for part in parts))}
        if samples.ndim == 5 and drawn["kind"] != "qwen-image":
            samples = samples[:, :, :1].repeat(1, 1, drawn["frames"], 1, 1)
        made = {"samples": samples if drawn["latent"] == "empty" else torch.randn(samples.shape, generator=generator)}
        if drawn["latent"] in ("noise mask", "masks of a batch"):
            made["noise_mask"] = torch.rand(batch if drawn["latent"] == "masks of a batch" else 1, 1, *size,
                                            generator=generator)
        elif drawn["latent"] == "batch index":
            made["batch_index"] = [3 * index + 1 for index in range(batch)]
        return made

    def changed(self, model, drawn):
        """The MODEL after the nodes of the workflow that change it."""
        for index, (adapter, strength) in enumerate(drawn["loras"]):
            model = self.loras.load(model, self.loras.file(drawn["kind"], "publisher", adapter, seed=9 + index),
                                    strength)
        for name, given in drawn["changes"]:
            if name == "LatentApplyOperationCFG":
                given = {"operation": self.node("LatentOperationTonemapReinhard", multiplier=0.9)}
            model = self.node(name, model=model, **given)
        return model

    def sigmas(self, model, drawn):
        if drawn["schedule"] is None:
            sigmas = self.node("BasicScheduler", model=model, scheduler=drawn["scheduler"], steps=drawn["steps"],
                               denoise=drawn["denoise"])
        else:
            name, given = drawn["schedule"]
            sigmas = self.node(name, **{"model": model, "steps": max(drawn["steps"], 2), **given})
        if drawn["sigmas"] in ("split", "denoise"):
            name, given = {"split": ("SplitSigmas", {"step": 2}),
                           "denoise": ("SplitSigmasDenoise", {"denoise": 0.5})}[drawn["sigmas"]]
            sigmas = self.node(name, sigmas=sigmas, **given)
        elif drawn["sigmas"] == "flip":
            sigmas = self.node("FlipSigmas", sigmas=sigmas)
        elif drawn["sigmas"] == "extend":
            sigmas = self.node("ExtendIntermediateSigmas", sigmas=sigmas, steps=2, end_at_sigma=0.3)
        elif drawn["sigmas"] == "first":
            sigmas = self.node("SetFirstSigma", sigmas=sigmas, sigma=0.97)
        return sigmas

    def guider(self, model, drawn, positive, negative):
        third, cfg, name = self.comfyui.conditioning(drawn["kind"], 3), drawn["cfg"], drawn["guider"]
        if name == "BasicGuider":
            return self.node(name, model=model, conditioning=positive)
        if name.startswith("DualCFGGuider"):
            style = "nested" if "nested" in name else "regular"
            return self.node("DualCFGGuider", model=model, cond1=positive, cond2=third, negative=negative,
                             cfg_conds=cfg, cfg_cond2_negative=1.5, style=style)
        if name == "PerpNegGuider":
            return self.node(name, model=model, positive=positive, negative=negative, empty_conditioning=third, cfg=cfg,
                             neg_scale=0.7)
        if name.startswith("DualModelGuider"):
            other = self.other(drawn["kind"]) if "other" in name else model.clone()
            return self.node("DualModelGuider", model=model, positive=positive, cfg=cfg, model_negative=other,
                             negative=negative)
        return self.node(name, model=model, positive=positive, negative=negative, cfg=cfg)

    def run(self, model, drawn):
        """The workflow's latent with this MODEL; Parallel Sampler is KSampler for ComfyUI's own."""
        with torch.inference_mode():
            model, (positive, negative), latent = self.changed(model, drawn), self.prompts(drawn), self.latent(drawn)
            if self.text_moved_by and "context" in families()[drawn["kind"]].inputs.ignored:  # text is numbers of words
                model = model.clone()
                model.set_model_sampler_post_cfg_function(functools.partial(moved, self.text_moved_by))
            if drawn["second"] == "interrupted":
                self.interrupted(model, drawn, positive, negative, latent)
            made = self.sample(model, drawn, positive, negative, latent)
            if drawn["second"] == "again":
                made = self.sample(model, drawn, positive, negative, {"samples": made["samples"]})
            elif drawn["second"] == "hires" and not made["samples"].is_nested and made["samples"].ndim == 4:
                height, width = (side * 3 // 2 // 2 * 2 for side in made["samples"].shape[2:])
                made = self.node("LatentUpscale", samples={"samples": made["samples"]}, upscale_method="bilinear",
                                 width=width * 8, height=height * 8, crop="disabled")
                made = self.sample(model, {**drawn, "denoise": 0.5, "noise": "enable"}, positive, negative, made)
            samples = made["samples"]
            return torch.cat([part.flatten(1) for part in samples.unbind()], 1) if samples.is_nested else samples

    def sample(self, model, drawn, positive, negative, latent):
        given = {"model": model, "positive": positive, "negative": negative, "latent_image": latent,
                 "cfg": drawn["cfg"]}
        named = {**given, "steps": drawn["steps"], "sampler_name": drawn["sampler"], "scheduler": drawn["scheduler"]}
        if drawn["node"] == "KSamplerAdvanced":
            start, end = drawn["range"]
            return self.node("KSamplerAdvanced", **named, add_noise=drawn["noise"], noise_seed=drawn["seed"],
                             start_at_step=start, end_at_step=end, return_with_leftover_noise=drawn["leftover"])
        if drawn["node"].startswith("SamplerCustom"):
            name, options = drawn["sampler node"] or ("KSamplerSelect", {"sampler_name": drawn["sampler"]})
            sampler, sigmas = self.node(name, **{"model": model, **options}), self.sigmas(model, drawn)
            if drawn["node"] == "SamplerCustom":
                return self.node("SamplerCustom", **given, add_noise=drawn["noise"] == "enable",
                                 noise_seed=drawn["seed"], sampler=sampler, sigmas=sigmas)
            noise = (self.node("RandomNoise", noise_seed=drawn["seed"]) if drawn["noise"] == "enable"
                     else self.node("DisableNoise"))
            return self.node("SamplerCustomAdvanced", noise=noise, guider=self.guider(model, drawn, positive, negative),
                             sampler=sampler, sigmas=sigmas, latent_image=latent)
        ours = drawn["node"] == "Parallel Sampler" and isinstance(model, self.comfyui.proxy.ProxyPatcher)
        return self.node("XDiTParallelSampler" if ours else "KSampler", **named, seed=drawn["seed"],
                         denoise=drawn["denoise"])

    def interrupted(self, model, drawn, positive, negative, latent):
        """Another run of the workflow, which is cancelled on its way. ComfyUI's own model only ends sooner or later."""
        management = self.comfyui.management
        timer = threading.Timer(0.02 * (drawn["number"] % 9), management.interrupt_current_processing)
        timer.start()
        try:
            self.sample(model, {**drawn, "steps": 6}, positive, negative, latent)
        except management.InterruptProcessingException:
            pass
        finally:
            timer.cancel()
            timer.join()
            management.interrupt_current_processing(False)

    def outcome(self, drawn):
        """(word, text): equal, refused, both raise, native raises, chaotic; or a fault: wrong, raw, hang."""
        try:
            with patience():
                want = self.run_native(drawn)
        except Exception as error:  # noqa: BLE001 - whatever a workflow ends in is what is compared
            want = error
        try:
            with patience():
                result = self.run(self.ours(drawn), drawn)
        except self.comfyui.errors.XDiTError as error:
            refused = isinstance(error, (self.comfyui.errors.ConfigError, self.comfyui.errors.UnsupportedError))
            if "NaN or infinite" in str(error) and torch.is_tensor(want) and torch.isfinite(want).all():
                return "wrong", f"finite with ComfyUI's own model: {error}"
            return "refused" if refused else "raw", f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001
            if isinstance(want, Exception):
                return "both raise", f"{type(want).__name__}: {want} / {type(error).__name__}: {error}"
            return "hang" if isinstance(error, Hang) else "raw", f"{type(error).__name__}: {error}"
        if isinstance(want, Exception):
            return "native raises", f"{type(want).__name__}: {want}"
        word, text = compare(result, want)
        if word == "wrong" and self.is_chaotic(drawn, result, want):
            return "chaotic", f"{text}, and ComfyUI's own model is as far from itself with text moved a little"
        return word, text

    def run_native(self, drawn):
        return self.run(self.native(drawn), {**drawn, "second": "none"} if drawn["second"] == "interrupted" else drawn)

    def is_chaotic(self, drawn, result, want):
        """Is the difference what any rounding would make of this workflow?"""
        if result.shape != want.shape:
            return False
        return any(self.is_as_far(drawn, result, want, by)
                   for by in (MOVED_ROUNDED if drawn["dtype"] in WRITTEN else MOVED))

    def is_as_far(self, drawn, result, want, moved_by):
        """Is ComfyUI's own result with text moved by so much about as far from its own as this result is?"""
        self.text_moved_by = moved_by
        try:
            moved = self.run_native(drawn)
        finally:
            self.text_moved_by = 0.0
        finite = torch.isfinite(want) & torch.isfinite(moved)
        return bool(torch.isfinite(result[finite]).all()) and relative_error(result[finite], want[finite]) < (
            10 * relative_error(moved[finite], want[finite]))


def compare(result, want):
    """("equal" or "wrong", by how much). One step of some schedules is NaN."""
    finite = torch.isfinite(want)
    if result.shape != want.shape or not torch.equal(finite, torch.isfinite(result)):
        return "wrong", f"{tuple(result.shape)} of {tuple(want.shape)}, or other numbers are not finite"
    if not finite.any() or not want[finite].any():
        return "equal" if torch.equal(result[finite], want[finite]) else "wrong", "nothing but zeros or NaN"
    error = relative_error(result[finite], want[finite])
    return "equal" if error < TOLERANCE else "wrong", f"{error:.1e}"


def moved(by, given):
    """What a step predicts, moved by so much."""
    drawn = torch.randn(given["denoised"].shape, generator=torch.Generator().manual_seed(0))
    return given["denoised"] + by * drawn


class Hang(Exception):
    """A workflow took longer than it can."""


@contextmanager
def patience():
    """In the main thread, raise Hang in what runs for too long."""
    def stop(number, frame):
        raise Hang
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first workflow")
    parser.add_argument("--count", type=int, default=100, help="how many workflows")
    parser.add_argument("--layout", nargs="*", choices=[*LAYOUTS, *STALE], help="draw from these")
    parser.add_argument("--kind", nargs="*", help="kinds of tiny checkpoints to draw from")
    parser.add_argument("--products", action="store_true", help="with another kind of file, and computed otherwise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from tests.integration.conftest import ComfyUI
    # our nodes/ would shadow ComfyUI's nodes.py
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    counts = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory(prefix="xdit-workflows-") as base:
        comfyui = ComfyUI(comfyui_folder(), base)
        runner, show = Runner(comfyui), functools.partial(print, flush=True)
        try:
            for number in range(options.first, options.first + options.count):
                started_s, drawn = time.monotonic(), draw(comfyui, number, options.layout, options.kind,
                                                            options.products)
                word, text = runner.outcome(drawn)
                counts[drawn["layout"]][word] += 1
                show(f"{number} {word}: {text[:300]} | {time.monotonic() - started_s:.1f} s | "
                     f"{drawn if word in FAULTS else [drawn.get(name) for name in SHOWN]}")
        finally:
            comfyui.groups.close()
    for layout, words in counts.items():
        show(f"{layout}: {dict(words)}")
    total = sum(counts.values(), collections.Counter())
    show(f"all: {dict(total)}")
    sys.exit(any(total[word] for word in FAULTS))


SHOWN = ("layout", "kind", "node", "dtype", "computed")
FAULTS = ("wrong", "raw", "hang", "native raises")


if __name__ == "__main__":
    main()
