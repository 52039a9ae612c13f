"""Every family, from a folder on disk through the engine of two ranks, under a layout that is drawn: a step equals one device.

`start.py test --smoke` runs these alone, in a minute; `--smoke-seed` draws the same layouts again.
"""

import itertools
import json
import random
from contextlib import contextmanager, nullcontext

import pytest
import torch

from tests.models.zoo import PIPELINES, UNETS, example
from tests.ranks import run_ranks
from tests.tolerances import InDouble, within
from xdit_backend.checkpoints.header import model_spec, read_header
from xdit_backend.checkpoints.loading import load_transformer
from xdit_backend.config import DEGREES, ParallelConfig, refuse_methods, validate_layout, validate_stages
from xdit_backend.models import FAMILIES
from xdit_backend.protocol import messages
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.protocol.messages import Layout, Stages
from xdit_backend.protocol.segments import SegmentStore, map_segment
from xdit_backend.worker.engine import Engine

pytestmark = pytest.mark.smoke
EXACT = 1e-10
SIZES = {"rows": 6, "columns": 10, "batch": 2}
# What a folder cannot say of a tiny model: it is as published ones are.
PUBLISHED = {"Anima": {"_conditioner": FAMILIES["Anima"].tiny.config["_conditioner"] | {"num_attention_heads": 16}},
             **{name: {"block_out_channels": (64,) * len(UNETS[name]["block_out_channels"]), "norm_num_groups": 32} for name in UNETS}}
# what diffusers saves of LTX-2's positions only where a pipeline has said so
SAID = {"LTX-2": {"rope_type": "split", "rope_double_precision": True, "cross_attn_timestep_scale_multiplier": 1000}}


def layouts(family, config):
    """Those of two ranks that a family can run, as the nodes refuse the others."""
    found = []
    for degree in DEGREES:
        layout = Layout(**{degree: 2})
        try:
            refuse_methods(layout, family.refused, family.name)
            validate_layout(layout, family.num_heads(config), family.name, family.num_key_heads(config))
            if layout.pipefusion_degree > 1:
                validate_stages(ParallelConfig(pipefusion_degree=2), family.num_blocks(config), family.name)
        except ConfigError:
            continue
        found.append(layout)
    return found


def save(one, folder):
    """As published folders are."""
    own = folder / ("unet" if one.family.by_rows else "transformer")
    for part in one.family.further:
        if hasattr(one.model, part):
            getattr(one.model, part).save_pretrained(folder / part)
            delattr(one.model, part)
    one.model.save_pretrained(own)
    config = json.loads((own / "config.json").read_text()) | SAID.get(one.family.name, {})
    (own / "config.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": PIPELINES.get(one.family.name, "Pipeline")}))


def unrounded(layout):
    return InDouble() if layout.tensor_degree > 1 else nullcontext()


class Run:
    """A family's step: the commands for the workers, where they write, and what one device has predicted."""

    def __init__(self, name, seed, folder, store, requests):
        family = FAMILIES[name]
        sizes = SIZES | ({"rows": 16, "columns": 12} if name in UNETS else {})
        branches = [example(name, num_text_tokens=count, more=PUBLISHED.get(name, {}), **sizes) for count in (7, 9)]
        save(branches[0], folder)
        self.layout = random.Random(f"{seed} {name}").choice(layouts(family, branches[0].config))
        stages = Stages(2) if self.layout.pipefusion_degree > 1 else None
        spec = model_spec(read_header(folder), family, "float64", "float64", stages, self.layout.tensor_degree)
        with unrounded(self.layout):                           # tables of positions are made with the model
            alone = load_transformer(model_spec(read_header(folder), family, "float64", "float64"), family, torch.device("cpu"))
        self.commands, self.made, self.wanted, named = [messages.LoadModel(next(requests), spec)], [], [], []
        for number, one in enumerate(branches):
            one.model, one.config = alone.model, alone.config
            with torch.no_grad(), unrounded(self.layout):
                wanted = one.run_parts()
            made = [store.create(tuple(part.shape), torch.float64)[0] for part in wanted]
            tensors = {name: store.share(tensor) for name, tensor in one.conditioning.items()}
            self.commands.append(messages.Conditioning(next(requests), f"{name} {number}", tensors))
            named.append(messages.Branch(store.share(one.latent), store.share(one.timestep), f"{name} {number}", made[0],
                                         parts=dict(zip(family.parts, made[1:], strict=True))))
            self.made, self.wanted = self.made + made, self.wanted + wanted
        self.commands += [messages.Predict(next(requests), spec.name, self.layout, named, keep=True),
                          messages.DropConditioning(next(requests), [branch.conditioning for branch in named]),
                          messages.DropModel(next(requests), spec.name)]

    @property
    def error(self):
        return max((map_segment(made) - wanted).abs().max().item() for made, wanted in zip(self.made, self.wanted, strict=True))


def carry_out(rank, world_size, runs):
    """Each run's commands, on one engine. runs: [(layout, commands)]. Returns [None, or what was raised]."""
    engine = Engine(rank, torch.device("cpu"), lambda *phase: None)
    for layout, commands in runs:
        with unrounded(layout):
            for command in commands:
                engine.carry_out(command)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """{family: its layout and error, or what was raised}, of the families that are asked for: one after the other on one set of ranks."""
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    store, requests, outcomes, runs = SegmentStore(), itertools.count(1), {}, {}
    try:
        for name in names:
            with kept(outcomes, name):
                runs[name] = Run(name, request.config.option.smoke_seed, tmp_path_factory.mktemp("smoke"), store, requests)
        with kept(outcomes, "all"):
            run_ranks(carry_out, 2, [(run.layout, run.commands) for run in runs.values()], timeout_s=600)
        for name, run in runs.items():
            with kept(outcomes, name):
                if "all" in outcomes:                          # whose fault it was: each by itself
                    run_ranks(carry_out, 2, [(run.layout, run.commands)])
                outcomes[name] = run.layout, run.error
    finally:
        store.close()
    return outcomes


@contextmanager
def kept(outcomes, name):
    try:
        yield
    except Exception as error:
        outcomes[name] = error


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_two_ranks_equals_one_device(outcomes, name):
    if isinstance(outcomes[name], Exception):
        raise outcomes[name]
    layout, error = outcomes[name]

    within(error, EXACT, str(layout))
