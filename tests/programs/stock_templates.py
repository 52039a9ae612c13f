"""ComfyUI's own templates, as its page sends them and after Run on all GPUs, on tiny models: do they come to the same?

    XDIT_COMFYUI=FOLDER OMP_NUM_THREADS=1 python -m tests.programs.stock_templates [NAME ...] [--write]

runs those that load a diffusion model and prints what came of each; pictures are small, steps are few, text encoders
say random numbers (tests/support/doubles.py). --write: into docs/reference/templates.md. It needs Chromium.
"""

import argparse
import collections
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.integration.page.prompts import prompts_of
from tests.programs.random_workflows import compare, patience
from tests.support.comfyui_server import ROOT, comfyui_folder, run_async
from tests.support.doubles import StandIns

TABLE = ROOT / "docs" / "reference" / "templates.md"
LOADERS = {"UNETLoader": "unet_name", "CheckpointLoaderSimple": "ckpt_name", "ImageOnlyCheckpointLoader": "ckpt_name",
           "unCLIPCheckpointLoader": "ckpt_name", "XDiTLoadModel": "model_name"}
BESIDE = "beside"                          # of a model that finds things in pictures, and gives no latent
# the tiny model in the place of a published file, by what its name contains; the first that fits
KINDS = (
    ("^sam3|^rt_detr", BESIDE), ("^void_pass", "cogvideox-1.5-inpaint"),
    ("v1-5|dreamshaper_8", "sd15"), ("x4-upscaler", "sd-x4-upscaler"), ("zero123", "stable-zero123"),
    ("sv3d_u", "sv3d-u"), ("sv3d_p", "sv3d-p"), ("^svd", "svd"),
    ("stage_c", "stable-cascade-c"), ("stage_b", "stable-cascade-b"),
    ("sd_xl_refiner", "sdxl-refiner"), ("sd_xl|sdxl", "sdxl"),
    ("sd3.5_large", "sd35-large"), ("schnell", "flux-schnell"), ("flux1?.?1?-fill|fill-dev", "flux-fill"),
    ("flux1-canny|flux1-depth", "flux-canny"), ("flux-2-klein", "flux2-klein"), ("flux-2|flux2", "flux2"),
    ("^flux1|^flux.1", "flux"),
    ("radiance-x0", "chroma-radiance-x0"), ("radiance", "chroma-radiance"), ("chroma", "chroma"),
    ("mage_flow", "mage-flow"), ("neta", "lumina-2"), ("newbie", "newbie-image"), ("triposplat", "triposplat"),
    ("seedvr2", "seedvr2"),
    ("qwen_image_edit_2511", "qwen-image-2511"),
    ("layered", "qwen-image-layered"), ("qwen_image|firered", "qwen-image"), ("zeta", "z-image-pixel"),
    ("pixeldit", "pixeldit"), ("^pid", "pid"),
    ("z_image_omni", "z-image-omni"), ("z_image", "z-image"),
    ("ernie", "ernie-image"), ("krea2", "krea-2"),
    ("hidream_[ie]1", "hidream-i1"), ("hidream_o1", "hidream-o1"), ("hunyuanvideo1.5|capybara", "hunyuanvideo-1.5"),
    ("hunyuan_video_t2v", "hunyuanvideo"), ("ltx-2.3", "ltx-2.3"), ("ltx-2-", "ltx-2"), ("ltx-video", "ltx-video"),
    ("anima", "anima"), ("lotus", "lotus"), ("kandinsky5lite_t2i", "kandinsky-5-image"), ("kandinsky5", "kandinsky-5"),
    ("stable_audio_3", "stable-audio-3"), ("stable-audio-open", "stable-audio-open"),
    ("ace_step_v1_", "ace-step-1.0"), ("acestep_v1.5|ace_step_1.5", "ace-step-1.5"),
    ("hunyuan.?3d.*v2.1", "hunyuan3d-2.1"), ("hunyuan.?3d", "hunyuan3d-2"),
    ("minimax.*music", "minimax-music-3"), ("minimax", "minimax-h3"),
    ("omnigen2", "omnigen-2"), ("boogu", "boogu-image"), ("^lens", "lens"),
    ("ideogram", "ideogram-4"), ("joyai", "joyimage"), ("longcat", "longcat-image"), ("ovis", "ovis-image"),
    ("humo", "wan-humo"), ("animate", "wan-animate"), ("camera", "wan-camera"), ("vace", "wan-vace"),
    ("scail_2", "wan-scail-2"), ("scail", "wan-scail"), ("s2v", "wan-s2v"), ("dancer", "wandancer"),
    ("flf2v", "wan-flf"), ("ti2v|5b", "wan22-ti2v"), ("wan2.2.*fun_control", "wan-fun-control"),
    ("fun_control", "wan-control"),
    ("wan2.2_(i2v|fun_inp)", "wan22-i2v"), ("(wan.*(i2v|fun_inp|wanmove|ati))|chrono_edit", "wan-i2v"),
    ("causal_forcing", "wan-causal"), ("wan", "wan"))
STEPS, FRAMES = 3, 9
SIZES = re.compile(r"width|height|size|longer|shorter|edge|dimension|left|right|top|bottom|value|resolution$")
FAULTS = ("wrong", "raw", "hang")
HEAD = """# ComfyUI's own templates

Outcomes of ComfyUI's templates ({version}) that load a diffusion model after Run on all GPUs, on two devices, with tiny
models instead of the published ones: small images, {steps} steps, random numbers instead of text encodings.
`python -m tests.programs.stock_templates --write` generates this page.

- **equal**: the latents that its samplers make, and what it shows, equal those of ComfyUI's own nodes up to rounding.
- **chaotic**: it differs, and ComfyUI's own differs from itself as much if the text changes in the sixth digit.
- **rejected**: the workflow ends with this message before anything is generated.
- **left**: the page leaves its loaders unchanged, with a reason; it runs on one GPU as before.
- **not run**: xDiT rejects these files ([models.md](models.md#not-supported)).
- **not compared**: ComfyUI's own nodes do not run here without the missing nodes or files.

{counts}

| template | outcome | |
| --- | --- | --- |
"""


def kind_of(file):
    """The kind of tiny model in the place of a file; None: xDiT does not run it, or no stand-in is here."""
    return next((kind for mark, kind in KINDS if re.search(mark, Path(file).name.lower())), None)


def templates_folder():
    return Path(importlib.util.find_spec("comfyui_workflow_templates_json").origin).parent / "templates"


def templates():
    """{name: workflow} of ComfyUI's templates that load a diffusion model."""
    found = {}
    for path in sorted(templates_folder().glob("*.json")):
        workflow = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(workflow, dict) and "nodes" in workflow:
            graphs = [workflow, *(workflow.get("definitions") or {}).get("subgraphs", [])]
            if {node["type"] for graph in graphs for node in graph["nodes"]} & LOADERS.keys():
                found[path.stem] = workflow
    return found


def files_of(prompt):
    """The files of diffusion models that a prompt loads."""
    return sorted({str(node["inputs"][LOADERS[node["class_type"]]]) for node in prompt.values()
                   if node["class_type"] in LOADERS})


def reasons(comfyui, prompt):
    """Why the page leaves a graph's loaders as they are, as the server answers it."""
    check = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.server.graph_check")
    prompt = {number: node for number, node in prompt.items() if node["class_type"]}
    found = check.check_graph(prompt, comfyui.nodes.NODE_CLASS_MAPPINGS)
    return sorted({*found["models"].values(), *(node["reason"] for node in found["nodes"].values() if node["reason"])})


def smaller(prompt, least=64):
    """The same with small pictures, short videos and few steps. least: pixels of a side."""
    prompt = json.loads(json.dumps(prompt))
    for node in prompt.values():
        title, kind = node.get("_meta", {}).get("title", "").lower(), node["class_type"]
        for name, value in node["inputs"].items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                node["inputs"][name] = _smaller(name, value, title, kind, least)
    return prompt


def _smaller(name, value, title, kind, least):
    if name in ("start_at_step", "end_at_step") or "step" in title and kind.startswith("Primitive"):
        return value if value == 0 or value > 100 else max(1, STEPS * value // 20 if "at_step" in name else STEPS)
    if name == "steps":
        return min(value, STEPS)
    if "megapixels" in name:
        return 0.01
    if name in ("length", "frames", "num_frames", "frames_number", "max_frames", "video_frames") or (
            kind == "PrimitiveInt" and re.search("length|frames", title)):
        return min(value, FRAMES)
    if name in ("seconds", "duration") or "duration" in title:
        return min(value, 1)
    if 200 <= value <= 8192 and SIZES.search(name) and "token" not in name:
        return max(least, int(value / 8) // 32 * 32)
    return value


class Server:
    """ComfyUI's, with nobody at its page."""

    client_id = last_node_id = last_prompt_id = None
    prompt_queue = SimpleNamespace(currently_running={"walk": None})

    def __getattr__(self, name):
        return lambda *_, **__: None


class Walk:
    """Runs prompts in ComfyUI's own executor, in this process."""

    def __init__(self, comfyui):
        self.comfyui = comfyui
        if "ModelSamplingSD3" not in comfyui.nodes.NODE_CLASS_MAPPINGS:
            run_async(comfyui.nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
        classes = comfyui.nodes.NODE_CLASS_MAPPINGS
        classes["ModelPatchLoader_"] = classes["ModelPatchLoader"]
        self.stand_ins = StandIns(comfyui, kind_of, comfyui.config("cpu,cpu"))
        import server
        self.server = server.PromptServer.instance = Server()
        self.latents = keep_latents(comfyui.samplers.CFGGuider)

    def outcome(self, given, on_all):
        """(word, text): equal, chaotic, rejected; not compared: what has no stand-in; left: what the page leaves as it
        is; or a fault: wrong, raw, hang."""
        files = files_of(given)
        if not any(node["class_type"] == "XDiTLoadModel" for node in on_all.values()):
            why = reasons(self.comfyui, given)
            return "left", "; ".join(why) or f"no loader of it can be taken ({', '.join(files)})"
        unknown = [file for file in files if kind_of(file) is None]
        if unknown:
            return "not run", ", ".join(unknown)
        missing = {str(node["class_type"]) for node in given.values()} - self.comfyui.nodes.NODE_CLASS_MAPPINGS.keys()
        if missing:
            return "not compared", f"nodes that are not ComfyUI's own: {', '.join(sorted(missing))}"
        # text and VAE are of the model that draws
        self.stand_ins.kind = kind_of(min(files, key=lambda file: kind_of(file) in ("lotus", BESIDE)))
        want = self.run(given)
        if isinstance(want, str):
            return "not compared", f"ComfyUI's own ends in {want}"
        result = self.run(on_all)
        if isinstance(result, str):
            refused = re.match(r"\S*(ConfigError|UnsupportedError)", result)
            return "rejected" if refused else "raw", result
        if not self.latents:
            return "not compared", "nothing is sampled"
        word, text = self.compare(result, want)
        if word == "wrong" and self.is_chaotic(given, result, want):
            return "chaotic", f"{text}, and ComfyUI's own model is as far from itself with text moved a little"
        return word, text

    def run(self, prompt, moved_by=0.0):
        """{output node, or number of a sampler's run: what it shows, as one tensor}, or the error's type and text."""
        import execution
        self.stand_ins.moved_by, self.stand_ins.shown = moved_by, {}
        self.latents.clear()
        executor = execution.PromptExecutor(self.server, execution.CacheType.CLASSIC, {
            "ram": 0, "ram_inactive": 0, "lru": 0})
        # whose VAE halves sides five times, and whose templates once more
        least = 128 if self.stand_ins.kind.startswith("ltx") else 64
        prompt, classes = smaller(prompt, least), self.comfyui.nodes.NODE_CLASS_MAPPINGS
        ends = [number for number, node in prompt.items()
                if getattr(classes[node["class_type"]], "OUTPUT_NODE", False)]
        gc.collect()
        listed = self.comfyui.management.current_loaded_models
        listed[:] = [loaded for loaded in listed if loaded.model is not None]        # at one that is gone nodes fail
        with patience():
            executor.execute(prompt, "walk", {}, ends)
        if not executor.success:
            [error] = [data for event, data in executor.status_messages if event == "execution_error"]
            return f"{error['exception_type'].rpartition('.')[2]}: {error['node_type']}: {error['exception_message']}"
        made = self.stand_ins.shown | dict(enumerate(self.latents))
        return {number: torch.cat(parts) for number, given in made.items() if (parts := list(_numbers(given)))}

    @staticmethod
    def compare(result, want):
        if result.keys() != want.keys():
            return "wrong", f"{sorted(map(str, result))} of {sorted(map(str, want))} make something"
        worst = [compare(result[number], want[number]) for number in want]
        return next((outcome for outcome in worst if outcome[0] != "equal"), max(worst, key=lambda each: float(
            each[1]) if each[1][0].isdigit() else 0))

    def is_chaotic(self, given, result, want):
        moved = self.run(given, moved_by=1e-6)
        return not isinstance(moved, str) and all(
            (result[number] - want[number]).norm() < 10 * (moved[number] - want[number]).norm() or
            torch.equal(result[number], want[number]) for number in want)


def keep_latents(guider):
    """The list to which each run of a sampler adds the latents that it makes."""
    latents, sample = [], guider.sample

    def sampled(self, *args, **kwargs):
        latents.append(sample(self, *args, **kwargs))
        return latents[-1]

    guider.sample = sampled
    return latents


def _numbers(value):
    """All tensors in what an output node is given, flat and in order."""
    if getattr(value, "is_nested", False):
        yield from _numbers(value.unbind())
    elif torch.is_tensor(value):
        yield value.detach().float().flatten()
    elif isinstance(value, dict):
        for name in sorted(value, key=str):
            yield from _numbers(value[name])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each)
    elif hasattr(value, "get_components"):
        components = value.get_components()
        yield from _numbers([components.images, components.audio])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="templates; without any: all that load a diffusion model")
    parser.add_argument("--write", action="store_true", help="write docs/reference/templates.md, or those rows of it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: workflow for name, workflow in templates().items() if not options.names or name in options.names}
    prompts = list(prompts_of(chosen))
    from tests.integration.conftest import ComfyUI
    # our nodes/ would shadow ComfyUI's nodes.py
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="xdit-templates-") as base:
        comfyui = ComfyUI(comfyui_folder(), base)
        logging.disable(logging.ERROR)                         # what workflows end in is printed here
        try:
            walk = Walk(comfyui)
            for name, given, on_all in prompts:
                started_s = time.monotonic()
                outcomes[name] = outcome_of(walk, given, on_all)
                print(f"{name} {outcomes[name][0]}: {outcomes[name][1][:400]} | {time.monotonic() - started_s:.1f} s",
                      flush=True)
        finally:
            comfyui.groups.close()
    print(dict(collections.Counter(word for word, _ in outcomes.values())))
    if options.write:
        TABLE.write_text(table({**rows(), **outcomes} if options.names else outcomes), encoding="utf-8")
    sys.exit(any(word in FAULTS for word, _ in outcomes.values()))


def rows():
    """{template: (outcome, text)} of docs/reference/templates.md, as it is."""
    return _rows_of(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}


def render(text):
    """The page with the outcomes that it has, and everything else as this file describes it."""
    return _page(_rows_of(text), re.search(r"templates \(([\d.]+)\)", text)[1])


def table(outcomes):
    """docs/reference/templates.md of {template: (word, text)}."""
    return _page(outcomes, importlib.metadata.version("comfyui-workflow-templates"))


def _rows_of(text):
    return {name: (word, reason.strip("`")) for name, word, reason
            in re.findall(r"(?m)^\| (\S+) \| ([\w ]+) \| (.*?) ?\|$", text) if name != "template"}


def _page(outcomes, version):
    counts = collections.Counter(word for word, _ in outcomes.values())
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    lines = [f"| {name} | {word} | {'' if word in ('equal', 'chaotic') else f'`{cell(text)}`'} |"
             for name, (word, text) in sorted(outcomes.items())]
    return HEAD.format(version=version, steps=STEPS, counts=f"Of {len(outcomes)}: {summary}.") + "\n".join(lines) + "\n"


def cell(text):
    """One line of the message without the error's type; a pipe is escaped."""
    message = re.sub(r"^(Unsupported|Config)Error: \w+: ", "", " ".join(text.split()))
    return message.replace("\\|", "|").replace("|", "\\|")[:300]


def outcome_of(walk, given, on_all):
    if isinstance(given, Exception):
        return "raw", f"the page raised {given}"
    try:
        return walk.outcome(given, on_all)
    except Exception as error:  # noqa: BLE001 - whatever a workflow ends in is what is compared
        return "raw", f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
