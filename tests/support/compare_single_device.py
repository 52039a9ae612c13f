"""Steps of a family under a layout, from a folder on disk through the engine of each rank, beside one device's.
Of tests and commands."""

import functools
import importlib
import itertools
import json
import math
import random
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from tests.support.model_zoo import PIPELINES, UNETS, example, rotate_in_float64, save_as_published, save_transformer
from tests.support.ranks import run_ranks
from tests.support.tolerances import unrounded
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.comfyui.native_models import class_at
from xdit_backend.config import DEGREES, ParallelConfig, refuse_methods, validate, validate_layout, validate_stages
from xdit_backend.models import FAMILIES
from xdit_backend.protocol import messages, specs
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.protocol.shared_memory import SegmentStore, map_segment
from xdit_backend.protocol.specs import Layout, Stages
from xdit_backend.worker.engine import Engine

EXACT = 1e-10
SIZES = {"rows": 6, "columns": 10, "batch": 2}
# What a folder cannot say of a tiny model: it is as published ones are.
PUBLISHED = {"Anima": {"_conditioner": FAMILIES["Anima"].testing.config["_conditioner"]
                       | {"num_attention_heads": 16}},
             **{name: {"block_out_channels": (64,) * len(UNETS[name]["block_out_channels"])} | (
                 {"norm_num_groups": 32} if "norm_num_groups" in UNETS[name] else {"num_attention_heads": (1, 1, 1)})
                for name in UNETS},
             # nor a file of Wan: that heads are of 128
             **dict.fromkeys(("Wan Camera", "Wan HuMo", "Wan Animate", "Wan Animate 2", "Wan SCAIL", "Wan SCAIL-2",
                              "Wan S2V", "WanDancer", "Wan Fun-Control"),
                             {"dim": 256, "num_heads": 2})}
# what diffusers saves of LTX-2's positions only where a pipeline has said so
SAID = {"LTX-2": {"rope_type": "split", "rope_double_precision": True, "cross_attn_timestep_scale_multiplier": 1000}}


def layouts_of(name, num_methods):
    """The layouts of so many methods, each of degree 2, that a family can run, as the nodes refuse the others."""
    layouts = (Layout(**dict.fromkeys(degrees, 2)) for degrees in itertools.combinations(DEGREES, num_methods))
    return [layout for layout in layouts if can_run(name, layout)]


def layouts_on(name, num_devices):
    """The layouts of any methods and degrees on this number of devices that a family can run."""
    divisors = [degree for degree in range(1, num_devices + 1) if num_devices % degree == 0]
    layouts = (Layout(**dict(zip(DEGREES, degrees))) for degrees in itertools.product(divisors, repeat=len(DEGREES))
               if math.prod(degrees) == num_devices)
    return [layout for layout in layouts if can_run(name, layout)]


def can_run(name, layout):
    """Whether the nodes let a family run under a layout."""
    family, degrees = FAMILIES[name], vars(layout)
    config = family.testing.config | PUBLISHED.get(name, {})
    settings = ParallelConfig(mode="manual", **degrees)
    try:
        validate(settings, math.prod(degrees.values()))
        refuse_methods(layout, family.refused, family.name)
        validate_layout(layout, family.num_heads(config), family.name, family.num_key_heads(config))
        if layout.pipefusion_degree > 1:
            validate_stages(settings, family.num_blocks(config), family.name)
    except ConfigError:
        return False
    return True


def words(layout):
    """"cfg x tensor", of degrees of 2; "data x tensor4"."""
    degrees = {name.removesuffix("_degree"): getattr(layout, name) for name in DEGREES}
    return " x ".join(f"{axis}{degree if degree > 2 else ''}" for axis, degree in degrees.items() if degree > 1)


def save(one, folder):
    """As published folders are, or files of ComfyUI's own modules. The path to open."""
    if one.family.is_comfyuis:
        return save_transformer(one.model, folder)
    own = folder / ("unet" if one.family.plan.is_unet else "transformer")
    for part in one.family.detection.folder.extra_parts:
        if hasattr(one.model, part):
            getattr(one.model, part).save_pretrained(folder / part)
            delattr(one.model, part)
    save_as_published(one.model, own)
    config = json.loads((own / "config.json").read_text()) | SAID.get(one.family.name, {})
    (own / "config.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": PIPELINES.get(one.family.name, "Pipeline")}))
    return folder


def examples(name, num_text_tokens, more):
    """One for each number of tokens of its text. more: of the config."""
    plan = FAMILIES[name].plan
    sizes = SIZES | ({"rows": 16, "columns": 18 if plan.hooks == "replicated" else 12} if plan.is_unet else {})
    return [example(name, num_text_tokens=count, seed=seed, more=more, thin=False, **sizes)
            for seed, count in enumerate(num_text_tokens)]


def as_folder(name, folder, num_text_tokens):
    """The Saved of a family, in a folder of its own."""
    branches = examples(name, num_text_tokens, PUBLISHED.get(name, {}))
    return Saved(name, branches, save(branches[0], Path(tempfile.mkdtemp(dir=folder))))


class Saved:
    """A family's tiny model on disk, branches that are asked of it, and what one device predicts for each."""

    def __init__(self, name, branches, path):
        self.name, self.branches, self._path = name, branches, path
        self.family, self._wanted = branches[0].family, {}

    def spec(self, layout=None, weights_memory=0):
        stages = None
        if layout and layout.pipefusion_degree > 1:
            stages = Stages(layout.pipefusion_degree, layout.ulysses_degree * layout.ring_degree * layout.tensor_degree)
        # a U-Net so small is of no published family
        checkpoint = replace(open_checkpoint(self._path), recognised=self.family)
        return checkpoint.spec("float64", "float64", stages, layout.tensor_degree if layout else 1,
                               weights_memory=weights_memory)

    def wanted(self, layout):
        """[the parts of a branch's prediction]"""
        key = layout.tensor_degree > 1
        if key not in self._wanted:
            with unrounded(layout.tensor_degree), torch.inference_mode():  # tables of positions are made with the model
                alone = load_transformer(self.spec(), torch.device("cpu"))
                for one in self.branches:
                    one.model, one.config = alone.model, alone.config
                self._wanted[key] = [one.run_parts() for one in self.branches]
        return self._wanted[key]


class Run:
    """Steps under one layout, each of the first branch and another: the commands for the workers, which have loaded the
    model, and where they write."""

    def __init__(self, saved, layout, store, requests, weights_memory, compile_backend, seed):
        """seed: draws which steps keep their keys and values: every second one. Ring exchanges those of the others."""
        family, spec = saved.family, saved.spec(layout, weights_memory)
        self.model, self.layout, self._wanted = spec.name, layout, saved.wanted(layout)
        self.load, self.drop = messages.LoadModel(next(requests), spec), messages.DropModel(next(requests), spec.name)
        self.commands, self._compared = [], []
        names = [f"{saved.name} {layout} {number}" for number in range(len(saved.branches))]
        for name, one in zip(names, saved.branches, strict=True):
            tensors = {key: store.share(tensor) for key, tensor in one.conditioning.items()}
            self.commands.append(messages.Conditioning(next(requests), name, tensors))

        def branch(number):
            one, wanted = saved.branches[number], self._wanted[number]
            made = [store.create(tuple(part.shape), torch.float64)[0] for part in wanted]
            self._compared += zip(made, wanted, strict=True)
            return specs.Branch(store.share(one.latent), store.share(one.timestep), names[number], made[0],
                                parts=dict(zip(family.inputs.components.names, made[1:], strict=True)))
        predict = functools.partial(messages.Predict, options=specs.ForwardOptions(compile_backend=compile_backend))
        first = random.Random(f"{seed} {saved.name} {layout}").randrange(2)
        self.commands += [predict(next(requests), spec.name, self.layout, [branch(0), branch(other)],
                                  keep=(first + other) % 2 == 0)
                          for other in range(1, len(names))]
        self.commands.append(messages.DropConditioning(next(requests), names))

    @property
    def made(self):
        """Predictions, as segments hold them."""
        return [map_segment(made) for made, _ in self._compared]

    @property
    def error(self):
        return max((map_segment(made) - wanted).abs().max().item() for made, wanted in self._compared)


def execute(rank, world_size, runs):
    """Each run's commands, on one engine. runs: [(layout, commands)]. Returns [None, or what was raised]."""
    class_at(FAMILIES["Lens"].transformer)
    rotate_in_float64(True)
    engine = Engine(rank, torch.device("cpu"), lambda *phase: None)
    for layout, commands in runs:
        # no mode reaches into a graph
        is_compiled = any(command.options.compile_backend for command in commands
                          if isinstance(command, messages.Predict))
        if is_compiled:
            # which torch.compile then knows by its name
            importlib.import_module("tests.support.reusing_backend")
        with unrounded(1 if is_compiled else layout.tensor_degree):
            for command in commands:
                engine.execute(command)


def errors_of(requested, folder, world_size, num_text_tokens=(7, 9), weights_memory=0, compile_backend="", seed=0):
    """{(family, layout): the largest error of its steps, or what was raised}, one after the other on one set of ranks.
    asked: those keys.

    num_text_tokens: of the first branch, and of those that are in a step with it, each in one of its own.
    weights_memory: ModelSpec's; 1: of transformers, as much as can comes from host memory. compile_backend: Predict's.
    seed: Run's.
    """
    return errors_of_saved(requested, functools.partial(as_folder, folder=folder, num_text_tokens=num_text_tokens),
                           world_size, weights_memory, compile_backend, seed=seed)


def errors_of_saved(requested, saved_of, world_size, weights_memory=0, compile_backend="", execute=execute, seed=0):
    """The same of what saved_of(name) gives. execute: a function of ranks, as it is above."""
    store, requests, outcomes, families, runs = SegmentStore(), itertools.count(1), {}, {}, {}
    try:
        for name, layout in requested:
            with cached(outcomes, (name, layout)):
                if name not in families:
                    families[name] = saved_of(name)
                runs[name, layout] = Run(families[name], layout, store, requests, weights_memory, compile_backend,
                                          seed)
        outcomes |= _carried_out(runs, world_size, execute)
    finally:
        store.close()
    return outcomes


def _carried_out(runs, world_size, execute):
    """{key: the error, or what was raised} of Runs by key. Where a rank ends, each half goes by itself."""
    try:
        run_ranks(execute, world_size, _in_a_row(runs.values()), timeout_s=600 + 60 * len(runs))
        return {key: run.error for key, run in runs.items()}
    except Exception as error:
        keys = list(runs)
        if len(keys) < 2:
            return dict.fromkeys(keys, error)
        halves = keys[:len(keys) // 2], keys[len(keys) // 2:]
        return {key: outcome for half in halves
                for key, outcome in _carried_out({key: runs[key] for key in half}, world_size, execute).items()}


def _in_a_row(runs):
    """What `execute` takes. Layouts of one family for which the workers hold the same are one after the other:
    it is loaded once."""
    models = {}
    for run in runs:
        models.setdefault(run.model, []).append(run)
    return [(run.layout, [*([run.load] if run is identical[0] else []), *run.commands,
                          *([run.drop] if run is identical[-1] else [])])
            for identical in models.values() for run in identical]


@contextmanager
def cached(outcomes, name):
    try:
        yield
    except Exception as error:
        outcomes[name] = error
