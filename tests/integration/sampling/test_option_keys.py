"""Options that no code inside a model reads leave the latents as they are; those that act are rejected, wherever a node
sets them."""

import functools
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tolerances import close

TOLERANCE = 6e-6                           # relative, float32 on both sides
LAYOUTS = {"cfg": {"cfg": 2}, "ulysses": {"ulysses": 2},
           "pipefusion": {"pipefusion": 2, "num_patches": 2, "warmup_steps": 9}}


class Notes:
    """Attributes of a node's run, without a call."""

    def __init__(self):
        self.step = torch.ones(3)


INERT = {"pack_state": {"weights": torch.ones(4), "names": ["a", ("b", None)], "notes": Notes()}, "pack_flag": True,
         "pack_number": 0.5, ("pack", 1): "text", 7: [1, 2]}


def in_model_options(model, options):
    model.model_options.update(options)


def in_transformer_options(model, options):
    model.model_options["transformer_options"].update(options)


def in_each_call(model, options):
    """As a node's wrapper of the model's function does."""
    def called(apply_model, given):
        given["c"]["transformer_options"].update(options)
        return apply_model(given["input"], given["timestep"], **given["c"])
    model.set_model_unet_function_wrapper(called)


def in_each_step(model, options):
    """Into the options of a run, as samplers do."""
    def predict(executor, x, timestep, model_options, seed):
        model_options["transformer_options"].update(options)
        return executor(x, timestep, {**model_options, **options}, seed)
    model.add_wrapper("predict_noise", predict)


PLACES = [in_model_options, in_transformer_options, in_each_call, in_each_step]


def changed(model, place, options):
    model = model.clone()
    place(model, options)
    return model


def option_keys(comfyui):
    return sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.compatibility.option_keys"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_options_that_nothing_reads_change_nothing(comfyui, layout):
    """With a sampler's model_sampling among them, which is a module of ComfyUI's."""
    model = comfyui.ours("wan", comfyui.config("cpu,cpu", **LAYOUTS[layout]))
    for place in PLACES:
        options = {**INERT, "model_sampling": model.get_model_object("model_sampling")}
        native, ours = (comfyui.sample(changed(each, place, options), "wan", steps=2)
                        for each in (comfyui.native("wan"), model))

        assert torch.equal(native, comfyui.reference("wan", steps=2))
        close(ours, native, TOLERANCE)


def test_options_that_nothing_reads_leave_stale_patches_alone(comfyui, said):
    model = comfyui.ours("wan", comfyui.config("cpu,cpu", pipefusion=2, num_patches=2, warmup_steps=1))

    comfyui.sample(changed(model, in_model_options, INERT), "wan", steps=2)

    assert not any("every step synchronous" in text for text in said)


class Callable:
    def __call__(self):
        pass


@pytest.mark.parametrize("value", [
    print, [print], {"deep": ({"er": [lambda x: x]},)}, Callable(), {Callable(): 1}, functools.partial(print),
    torch.nn.Linear(1, 1), Callable, functools.reduce(lambda inner, _: [inner], range(9), 1)],
    ids=["function", "list", "nested", "callable", "key", "partial", "module", "class", "deep"])
def test_functions_are_rejected_wherever_they_are(comfyui, value):
    model = comfyui.ours("sd3", comfyui.config())
    for place in PLACES:
        with pytest.raises(comfyui.errors.UnsupportedError, match="a function in its .*_options .pack_state: "):
            comfyui.sample(changed(model, place, {"pack_state": value}), "sd3", steps=1)


@pytest.mark.parametrize("place, key", [
    (in_model_options, "multigpu_clones"), *((place, key) for place in PLACES[1:] for key in (
        "block_index", "frame_rate"))], ids=lambda value: getattr(value, "__name__", str(value)))
def test_keys_that_comfyuis_code_reads_are_rejected(comfyui, place, key):
    """Also as names of parameters that options are unpacked into."""
    model = comfyui.ours("sd3", comfyui.config())

    with pytest.raises(comfyui.errors.UnsupportedError, match=f"{key} in its .*_options"):
        comfyui.sample(changed(model, place, {key: 1}), "sd3", steps=1)


SOURCES = {
    "lookup": "def forward(self, x, transformer_options={}):\n    return x * transformer_options['pack_number']\n",
    "get": "def scale(options):\n    return options.get('pack_number', 1)\n",
    "in": "def scale(o):\n    if 'pack_number' in o:\n        return 2\n",
    "function": "def scale(transformer_options):\n    return look_up(transformer_options, 'pack_number')\n",
    "loop": "def scale(o):\n    for key in ('pack_flag', 'pack_number'):\n        o.pop(key)\n",
    "name": "KEY = 'pack_number'\n",
    "argument": "def scale(x, pack_number=1):\n    pass\n\n\ndef forward(x, transformer_options):\n"
                "    scale(**{**transformer_options})\n"}
OF_MODEL = {
    "lookup": "def f(args):\n    return args['model_options']['pack_number']\n",
    "alias": "def f(model):\n    options = model.model_options.copy()\n    return options.get('pack_number')\n",
    "in": "def f(model_options):\n    return 'pack_number' in model_options\n"}
WRITTEN = ("def f(model_options, transformer_options, extra):\n    transformer_options['pack_number'] = 1\n"
           "    return {'pack_number': 1}\n")


@pytest.fixture
def newer(comfyui, monkeypatch, tmp_path):
    """newer(path, source): has the check read a ComfyUI that also has this file."""
    import comfy.model_sampling
    keys, folder = option_keys(comfyui), Path(comfy.model_sampling.__file__).parent
    copy = tmp_path / "comfy"
    copy.mkdir()
    for name in ("samplers.py", "ldm/flux/model.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / name, copy / name)

    def add(path, source):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_text(source)
        monkeypatch.setattr(comfy.model_sampling, "__file__", str(copy / "model_sampling.py"))
        clear()

    def clear():
        keys.is_read.cache_clear()
        keys._files.cache_clear()
    yield add
    monkeypatch.undo()
    clear()


@pytest.mark.parametrize("source", SOURCES)
def test_keys_that_a_newer_model_reads_are_rejected(comfyui, newer, source):
    newer("ldm/new/model.py", SOURCES[source])

    with pytest.raises(comfyui.errors.UnsupportedError, match="pack_number in its transformer_options"):
        comfyui.sample(changed(comfyui.ours("sd3", comfyui.config()), in_transformer_options, INERT), "sd3", steps=1)


@pytest.mark.parametrize("source", OF_MODEL)
def test_keys_that_a_newer_sampler_reads_are_rejected(comfyui, newer, source):
    newer("new_samplers.py", OF_MODEL[source])

    with pytest.raises(comfyui.errors.UnsupportedError, match="pack_number in its model_options"):
        comfyui.sample(changed(comfyui.ours("sd3", comfyui.config()), in_model_options, INERT), "sd3", steps=1)


def test_keys_that_a_newer_comfyui_only_writes_are_let_through(comfyui, newer):
    """And those that it looks up in other dicts than a MODEL's options."""
    newer("new_samplers.py", WRITTEN + "    return extra['pack_number']\n")
    ours = changed(comfyui.ours("sd3", comfyui.config()), in_model_options, INERT)

    close(comfyui.sample(ours, "sd3", steps=1), comfyui.reference("sd3", steps=1), TOLERANCE)


def test_keys_that_a_patch_inside_the_model_reads_are_rejected(comfyui, tmp_path):
    """A patch that is known, from a file that looks the key up."""
    source = "def execute():\n    def skip(args, extra_args):\n        return args\n    return skip\n"
    path = tmp_path / "nodes_slg.py"
    for more, is_rejected in (("", False), ("\n\nKEY = 'pack_flag'\n", True)):
        path.write_text(source + more)
        written = {}
        exec(compile(source, str(path), "exec"), written)
        skip = written["execute"]()
        skip.__qualname__ = "SkipLayerGuidanceDiTSimple.execute.<locals>.skip"
        model = changed(comfyui.ours("sd3", comfyui.config()), in_transformer_options, INERT)
        model.set_model_patch_replace(skip, "dit", "double_block", 1)
        if is_rejected:
            with pytest.raises(comfyui.errors.UnsupportedError, match="pack_flag in its transformer_options"):
                comfyui.sample(model, "sd3", steps=1)
        else:
            comfyui.sample(model, "sd3", steps=1)
