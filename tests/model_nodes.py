"""What every node of ComfyUI that takes a MODEL does with ours, beside ComfyUI's own: equal, or refused in our words.

    XDIT_COMFYUI=FOLDER OMP_NUM_THREADS=1 python -m tests.model_nodes [--write] [--pipefusion] [--only NAME ...]

runs each node once with its widgets' defaults on a tiny model, samples with the MODEL that comes out (or takes what else it
made), prints the outcomes, and with --write makes docs/nodes.md of them. tests/nodes/test_model_nodes.py does the same.
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

from tests.comfyui_server import ROOT, comfyui_folder, run_async
from tests.tolerances import relative_error

TABLE = ROOT / "docs" / "nodes.md"
TOLERANCE = 1e-4                           # relative, float32 on both sides
INTRO = """# ComfyUI's nodes that take a MODEL

What each of them does with the MODEL of Load xDiT Model, with the defaults of its widgets (but for the steps between which it
acts: all of them).

- **equal**: the latents, or what else the node makes, are those of ComfyUI's own loader.
- **refused**: the workflow ends with this message, before anything wrong is drawn.
- **as with ComfyUI's own**: the node is for another kind of model, and ComfyUI's own loader ends in the same error.

In a merge, the MODEL in question is the first one; the second one is of ComfyUI's loader.

Written by `python -m tests.model_nodes --write`; a test compares it with what happens.

| node | with | outcome |
| --- | --- | --- |
"""
# the kind of model a node is for; sd3 for all others
KINDS = {"ARVideoI2V": "wan", "EasyCache": "flux", "FluxKVCache": "flux", "LTXVContextWindows": "wan", "ModelMergeFlux1": "flux",
         "ModelMergeWAN2_1": "wan", "NAGuidance": "flux",
         "PerturbedAttentionGuidance": "sd15", "SelfAttentionGuidance": "sd15", "ScaleROPE": "flux", "USOStyleReference": "flux",
         "WanContextWindowsManual": "wan", "WanInfiniteTalkToVideo": "wan", "WanUni3CControlnetApply": "wan", "wanBlockSwap": "wan"}
# widgets whose defaults are too large for a test
VALUES = {"ARVideoI2V": {"width": 64, "height": 64, "length": 5}, "WanInfiniteTalkToVideo": {"width": 64, "height": 64, "length": 5}}
SHORT = {"steps": 3, "cfg": 4.0, "noise_seed": 7, "seed": 7, "start_percent": 0.0, "end_percent": 1.0}
UNCOMPILED = {"TorchCompileModel"}         # compared with the native model without the node, whose compiling takes minutes


@dataclass(frozen=True)
class Outcome:
    """What a node did. text: "equal", "refused: ...", "as with ComfyUI's own: ..."; else a fault, which good says."""

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
        if not name.startswith("XDiT") and any("MODEL" in type_of(option).split(",") for option in inputs_of(node).values()):
            found[name] = node
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def inputs_of(node):
    types = node.INPUT_TYPES()
    return {**types.get("required", {}), **types.get("optional", {})}


def type_of(option):
    return option[0] if isinstance(option[0], str) else "COMBO"


class Matrix:
    """Runs nodes on our MODEL and on ComfyUI's own, with the same other inputs."""

    def __init__(self, comfyui, config, vae):
        self.comfyui, self.config, self.vae = comfyui, config, vae
        self.folder = Path(tempfile.mkdtemp(dir=comfyui.base))
        self.nodes = model_nodes(comfyui)
        comfyui.folder_paths.set_output_directory(str(self.folder))
        for kind, save in (("loras", self._save_lora), ("hypernetworks", self._save_hypernetwork), ("controlnet", self._save_lora)):
            (self.folder / kind).mkdir()
            comfyui.folder_paths.add_model_folder_path(kind, str(self.folder / kind), is_default=True)
            save(self.folder / kind)

    def outcome(self, name):
        """Run one node on both and compare."""
        kind, errors = KINDS.get(name, "sd3"), self.comfyui.errors
        try:
            ours = self._result(name, kind, self.comfyui.ours(kind, self.config))
        except errors.XDiTError as error:
            return Outcome(name, kind, f"refused: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a node raises is what is compared
            ours = error
        try:
            native = self._result(name, kind, self.comfyui.native(kind).clone(), plain=name in UNCOMPILED)
        except Exception as error:  # noqa: BLE001
            if (type(error), str(error)) == (type(ours), str(ours)):
                return Outcome(name, kind, f"as with ComfyUI's own: {type(error).__name__}: {_one_line(error)}")
            return Outcome(name, kind, f"native ends in {type(error).__name__}: {_one_line(error)}; ours: {_one_line(ours)}", good=False)
        if isinstance(ours, Exception):
            return Outcome(name, kind, f"raw {type(ours).__name__}: {_one_line(ours)}", good=False)
        if torch.is_tensor(native) and torch.is_tensor(ours) and native.shape == ours.shape:
            error = relative_error(ours, native)
        else:
            error = 0.0 if ours == native else float("inf")
        return Outcome(name, kind, "equal" if error < TOLERANCE else f"different by {error:.1e}", good=error < TOLERANCE)

    def changes_a_model(self, name):
        """Does this node take one MODEL and give one?"""
        types = [type_of(option) for option in inputs_of(self.nodes[name]).values()]
        return [str(value) for value in self.nodes[name].RETURN_TYPES] == ["MODEL"] and types.count("MODEL") == 1

    def chain(self, names, model):
        """What is sampled with a MODEL after these nodes, one after the other."""
        with torch.inference_mode():
            for name in names:
                model, = run_node(self.nodes[name], self._arguments(name, self.nodes[name], "sd3", model))
            return self._sample("sd3", model)

    def _result(self, name, kind, model, plain=False):
        """A tensor: what the node made, or what was sampled with it."""
        node = self.nodes[name]
        with torch.inference_mode():
            if plain:
                return self._sample(kind, model=model)
            before = set(self.folder.rglob("*.safetensors"))
            outputs = run_node(node, self._arguments(name, node, kind, model))
            saved = set(self.folder.rglob("*.safetensors")) - before
            if saved:
                return _flat(load_file(saved.pop()))
            made = dict(zip(map(str, getattr(node, "RETURN_TYPES", ())), outputs))
            for result in ("LATENT", "FLOAT"):
                if result in made and "MODEL" not in made:
                    value = made[result]
                    return value["samples"] if result == "LATENT" else torch.tensor([value])
            if "MODEL" not in made and len(outputs) == 1 and isinstance(outputs[0], (dict, type(None))):
                return outputs[0]                              # plain values, or nothing
            usable = {key: made[key] for key in ("MODEL", "GUIDER", "SIGMAS", "SAMPLER") if key in made}
            if "CONDITIONING" in made:
                usable["positive"] = made["CONDITIONING"]
            if not usable:
                raise NotImplementedError(f"{name} makes {list(made)}, and this test does not know how to use it")
            return self._sample(kind, **{"model": usable.pop("MODEL", model)}, **usable, latent=made.get("LATENT"))

    def _sample(self, kind, model, GUIDER=None, SIGMAS=None, SAMPLER=None, positive=None, latent=None):
        comfyui, nodes = self.comfyui, self.comfyui.nodes.NODE_CLASS_MAPPINGS
        latent = latent or self._latent(kind)
        if GUIDER is None and SIGMAS is None and SAMPLER is None:
            return comfyui.sample(model, kind, latent=latent, positive=positive)
        sigmas = SIGMAS if SIGMAS is not None else run_node(nodes["BasicScheduler"], {
            "model": model, "scheduler": "simple", "steps": 3, "denoise": 1.0})[0]
        guider = GUIDER or run_node(nodes["CFGGuider"], {"model": model, "cfg": 4.0, "positive": comfyui.conditioning(kind, 1),
                                                     "negative": comfyui.conditioning(kind, 2)})[0]
        return run_node(nodes["SamplerCustomAdvanced"], {
            "noise": self._noise(), "guider": guider, "sampler": SAMPLER or self._sampler(), "sigmas": sigmas,
            "latent_image": latent})[0]["samples"]

    def _arguments(self, name, node, kind, model):
        comfyui = self.comfyui
        seeds = iter(range(3, 12))                             # not those of the prompts that are sampled with
        made = {"CONDITIONING": lambda: comfyui.conditioning(kind, next(seeds)), "LATENT": lambda: self._latent(kind),
                "VAE": lambda: self.vae, "NOISE": self._noise, "SAMPLER": self._sampler, "SIGMAS": lambda: torch.linspace(1, 0, 4),
                "IMAGE": lambda: torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(5)),
                "MASK": lambda: torch.ones(1, 64, 64), "CLIP": lambda: None, "MODEL_PATCH": self._model_patch,
                "AUDIO": lambda: {"waveform": torch.zeros(1, 2, 16000), "sample_rate": 16000},
                "LORA_MODEL": lambda: load_file(self.folder / "loras" / "tiny.safetensors"),
                "LATENT_OPERATION": lambda: (lambda latent, **_: 0.9 * latent), "CLIP_VISION": lambda: None,
                "CLIP_VISION_OUTPUT": lambda: SimpleNamespace(all_hidden_states=torch.zeros(1, 27, 4, 8),
                                                              penultimate_hidden_states=torch.zeros(1, 4, 8)),
                "AUDIO_ENCODER_OUTPUT": lambda: {"encoded_audio_all_layers": [torch.zeros(1, 50, 768)] * 13}}
        arguments, seen = {}, 0
        optional = node.INPUT_TYPES().get("optional", {})
        for key, option in inputs_of(node).items():
            kind_of_input, settings = type_of(option), option[1] if len(option) > 1 else {}
            if key in VALUES.get(name, {}):
                arguments[key] = VALUES[name][key]
            elif kind_of_input == "MODEL":                     # the first is the one in question, the others ComfyUI's own
                arguments[key] = model if seen == 0 else self._weaker(kind) if "Merge" in name else comfyui.native(kind)
                seen += 1
            elif kind_of_input in made:
                if key not in optional or kind_of_input == "CONDITIONING":
                    arguments[key] = made[kind_of_input]()
            elif kind_of_input == "COMFY_DYNAMICCOMBO_V3":
                arguments[key] = {key: settings["options"][0]["key"]}
            elif "default" in settings or kind_of_input == "BOOLEAN":
                arguments[key] = settings.get("default", False)
            elif kind_of_input == "COMBO":
                options = settings.get("options") if isinstance(option[0], str) else option[0]
                arguments[key] = next((value for value in options if str(value).startswith("tiny")), next(iter(options), None))
            elif key not in optional:
                raise NotImplementedError(f"{name} needs {key} of type {kind_of_input}, which this test does not make")
        arguments |= {key: value for key, value in SHORT.items() if key in arguments}
        if getattr(node, "INPUT_IS_LIST", False):
            return {key: [value] for key, value in arguments.items()}
        return arguments

    def _weaker(self, kind):
        """ComfyUI's own MODEL with a fifth of its weights: so that merges change something, and not so much that rounding shows."""
        model = self.comfyui.native(kind).clone()
        model.add_patches({key: ("diff", (torch.zeros(1),)) for key in model.model_state_dict("diffusion_model.")}, 0.0, 0.2)
        return model

    def _latent(self, kind):
        return self.comfyui.latent(kind)

    def _noise(self):
        return run_node(self.comfyui.nodes.NODE_CLASS_MAPPINGS["RandomNoise"], {"noise_seed": 7})[0]

    def _sampler(self):
        return self.comfyui.samplers.sampler_object("euler")

    def _model_patch(self):
        """A ControlNet in the form of a model patch, with what nodes for other patches look at before they take it."""
        import comfy.model_patcher
        import comfy.ops
        from comfy_extras.nodes_model_patch import QwenImageBlockWiseControlNet
        module = QwenImageBlockWiseControlNet(1, 64, 0, 256, operations=comfy.ops.disable_weight_init)
        module.cond_in_channels, module.project_modules = 3, torch.nn.ModuleList()
        return comfy.model_patcher.ModelPatcher(module, torch.device("cpu"), torch.device("cpu"))

    def _save_lora(self, folder):
        generator = torch.Generator().manual_seed(9)
        name = "diffusion_model.joint_blocks.0.x_block.attn.proj"
        save_file({f"{name}.lora_up.weight": torch.randn(256, 4, generator=generator),
                   f"{name}.lora_down.weight": torch.randn(4, 256, generator=generator)}, str(folder / "tiny.safetensors"))

    def _save_hypernetwork(self, folder):
        torch.save({}, folder / "tiny.pt")


def write_table(outcomes):
    """docs/nodes.md of these outcomes."""
    rows = [f"| {outcome.node} | {outcome.kind} | {_cell(outcome.text)} |\n" for outcome in outcomes]
    return INTRO + "".join(rows)


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
    from tests.nodes.conftest import ComfyUI
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]     # our nodes/ would shadow ComfyUI's nodes.py
    with tempfile.TemporaryDirectory(prefix="xdit-nodes-") as base, contextlib.ExitStack() as stack:
        comfyui = ComfyUI(comfyui_folder(), base)
        stack.callback(comfyui.groups.close)
        config = comfyui.config("cpu,cpu", pipefusion=2, warmup_steps=1000) if options.pipefusion else comfyui.config("cpu,cpu")
        matrix = Matrix(comfyui, config, comfyui.nodes.VAELoader().load_vae(comfyui.file("vae-sd3", "vae", encoder=True))[0])
        outcomes = []
        for name in options.only or matrix.nodes:
            outcomes.append(matrix.outcome(name))
            print(f"{'' if outcomes[-1].good else 'FAULT '}{name} ({outcomes[-1].kind}): {outcomes[-1].text}", flush=True)
    if options.write:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(write_table(outcomes), encoding="utf-8")
    sys.exit(any(not outcome.good for outcome in outcomes))


if __name__ == "__main__":
    main()
