"""Every family under every method: with weights from host memory a step gives the same bits as with all on the device,
in float32 and in bfloat16, and no block comes twice a step, of PipeFusion twice a patch, for two branches. Where ranks
that hold the same blocks bring a part of each, so do they all."""

import itertools
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.support.compare_single_device import PUBLISHED, layouts_of, save, words
from tests.support.model_zoo import UNETS, example
from tests.support.ranks import run_ranks
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.offload.offload_plan import plan_weights
from xdit_backend.models import FAMILIES
from xdit_backend.partition import cut_patches, ranks_by_part, stage_blocks
from xdit_backend.protocol import messages, specs
from xdit_backend.protocol.shared_memory import SegmentStore, map_segment
from xdit_backend.protocol.specs import Stages
from xdit_backend.tools.dry_run.simulated_rank import table_of
from xdit_backend.worker.cooperative_loading import can_cooperate
from xdit_backend.worker.engine import Engine

BLOCKS = {2: 8, 3: 12, 4: 12, 5: 10, 8: 12, 10: 15}  # of a tiny model's list of blocks -> of one here
COUNTS = ("num_layers", "num_single_layers", "n_layers", "num_mmdit_layers", "num_single_dit_layers",
          "num_visual_blocks", "num_dit_layers", "depth", "depth_single_blocks", "patch_depth", "pixel_depth",
          "num_blocks", "num_hidden_layers")
SIZES = {False: {"rows": 6, "columns": 10}, True: {"rows": 16, "columns": 18}}             # True: of U-Nets
TYPES = ("float32", "bfloat16")
LEFT = 1.3                                 # of a rank's part of a block, with what all bring of its end
STAY = {"half": 0.5, "a tenth": 0.1}       # of the blocks, beside the buffers that the others come through
STAY["a tenth, shared"] = STAY["a tenth"]  # with WeightCopies.is_shared


def deeper(name):
    """What of a tiny model's config gives it so many blocks that some of them come."""
    config = FAMILIES[name].testing.config
    if name in UNETS:
        return PUBLISHED[name]
    found = {key: BLOCKS[config[key]] for key in COUNTS if key in config}
    if "llama_layers" in config:                               # one for each block
        found["llama_layers"] = list(range(sum(found.values())))
    return PUBLISHED.get(name, {}) | found


class Folder:
    """A family's model on disk, and the branches that are asked of it."""

    def __init__(self, name, dtype, folder):
        self.name, self.dtype, self.family = name, dtype, FAMILIES[name]
        self.branches = [example(name, getattr(torch, dtype), num_text_tokens=count, seed=seed, more=deeper(name),
                                 batch=2, thin=False, **SIZES[FAMILIES[name].plan.is_unet])
                         for seed, count in enumerate((7, 9))]
        self.checkpoint = replace(open_checkpoint(save(self.branches[0], folder)), recognised=self.family)

    def spec(self, layout, weights_memory=0):
        return self.checkpoint.spec(self.dtype, self.dtype, self._stages(layout), layout.tensor_degree,
                                    weights_memory=weights_memory)

    def _stages(self, layout):
        if layout.pipefusion_degree == 1:
            return None
        blocks = self.family.num_blocks(self.branches[0].config)
        return Stages(2, layout.stage_ranks, (blocks // 2, blocks - blocks // 2))

    def budget(self, layout, share):
        """Bytes of a device for what is outside of the blocks, the buffers, and so much of the blocks."""
        spec, found = self.spec(layout), []
        table = table_of(self.checkpoint, spec)
        parts = [None] if spec.stages is None else [stage_blocks(spec.stages.num_blocks, stage) for stage in range(2)]
        for blocks in parts:
            least = plan_weights(table, 1, blocks)[0]
            found.append(least.device_bytes + share * least.offloaded_bytes)
        return int(min(found))


@dataclass
class Run:
    """Steps with a budget: what the workers are told, what they write, and how many steps by the whole latent."""

    spec: specs.ModelSpec
    commands: list
    made: list


def run_of(folder, layout, store, requests, share):
    spec = folder.spec(layout, 0 if share is None else folder.budget(layout, STAY[share]))
    copies = specs.WeightCopies(is_shared=share == "a tenth, shared")
    names, made = [f"{folder.name} {layout} {share} {number}" for number in range(2)], []
    commands = [messages.LoadModel(next(requests), spec)]
    for name, one in zip(names, folder.branches, strict=True):
        commands.append(messages.Conditioning(next(requests), name, {
            key: store.share(tensor) for key, tensor in one.conditioning.items()}))

    def branch(one, name, rows):
        latent = one.latent if rows is None else one.latent.narrow(rows[0].dim, rows[0].start, rows[1])
        shape = (latent.shape[0], folder.family.num_channels(one.config), *latent.shape[2:])
        shapes = [shape, *(tuple(one.conditioning[part].shape) for part in folder.family.inputs.components.names)]
        written = [store.create(each, one.latent.dtype)[0] for each in shapes]
        made.extend(written)
        return specs.Branch(store.share(latent.contiguous()), store.share(one.timestep), name, written[0],
                            parts=dict(zip(folder.family.inputs.components.names, written[1:], strict=True)))

    def step(rows=None, **settings):
        branches = [branch(one, name, rows) for name, one in zip(names, folder.branches, strict=True)]
        patch = None if rows is None else rows[0]
        commands.append(messages.Predict(next(requests), spec.name, layout, branches, patch, keep=True,
                                         options=specs.ForwardOptions(copies=copies), **settings))

    step()
    step(stale=layout.displaced_degree > 1)
    if layout.pipefusion_degree > 1 and not folder.family.inputs.components.names:
        for rows in cut_patches(folder.branches[0].latent.shape, folder.family.inputs.latent.patch, 2):
            step(rows)
    commands += [messages.DropConditioning(next(requests), names), messages.DropModel(next(requests), spec.name)]
    return Run(spec, commands, made)


def executed(rank, world_size, runs):
    """[(bytes of the weights that come, those that have come, of the largest two blocks)] of each run."""
    engine, found = Engine(rank, torch.device("cpu"), lambda *phase: None), []
    for name, commands in runs:
        for command in commands:
            if isinstance(command, messages.DropModel):
                offloaded = engine._models[name].transformer.offloaded
                found.append((0, 0, 0) if offloaded is None else (
                    offloaded.host_bytes, offloaded.copied_bytes, offloaded.buffer_bytes))
            engine.execute(command)
            if isinstance(command, messages.LoadModel):
                _align(engine._models[name].transformer)
    return found


def _align(transformer):
    """Of one row, MKL's products have other last bits where a matrix begins elsewhere in a line of the cache, as those
    of a map of a file do. Devices have no maps."""
    apart = {} if transformer.offloaded is None else transformer.offloaded.weights
    with torch.inference_mode():
        for weight in (*transformer.model.parameters(), *transformer.model.buffers()):
            if id(weight) not in apart:
                weight.data = weight.data.clone()


def check(name, dtype, layouts, world_size=2):
    """What is wrong under these layouts of so many ranks, with weights that come."""
    store, requests = SegmentStore(), itertools.count(1)
    try:
        with tempfile.TemporaryDirectory() as path, torch.no_grad():
            folder = Folder(name, dtype, Path(path))
            runs = {(words(layout), share): run_of(folder, layout, store, requests, share)
                    for layout in layouts for share in (None, *STAY)}
            ranks = run_ranks(executed, world_size, [(run.spec.name, run.commands) for run in runs.values()])
        wrong, by_run = [], dict(zip(runs, zip(*ranks)))
        for (layout, share), run in runs.items():
            counted = by_run[layout, share]
            if share is None:
                continue
            for made, wanted in zip(run.made, runs[layout, None].made, strict=True):
                if not torch.equal(*map(map_segment, (made, wanted))):
                    wrong.append(f"{name}, {layout}, {dtype}: {share} stays, other bits")
                    break
            if not all(held for held, _, _ in counted):
                wrong.append(f"{name}, {layout}: nothing comes where {share} stays")
            steps = sum(isinstance(command, messages.Predict) for command in run.commands)
            times = max(max(repeats) for repeats in folder.branches[0].config.get("block_repeat", ((1,),)))
            if any(came > times * steps * held + ahead for held, came, ahead in counted):
                wrong.append(f"{name}, {layout}: a block comes more often than it runs: {counted}")
            num_alike = len(ranks_by_part(world_size, run.spec)[0]) if can_cooperate(run.spec, world_size) else 1
            if share == "a tenth, shared" and num_alike > 1:
                before = by_run[layout, "a tenth"]
                if any(came > LEFT * whole / num_alike for (_, came, _), (_, whole, _) in zip(counted, before)):
                    wrong.append(f"{name}, {layout}: ranks do not share what comes: {counted}, else {before}")
        return wrong
    finally:
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Flux.1", "Wan", "SD3", "SDXL"])
def test_weights_that_come_give_the_same_bits_under_products_of_two_methods(name):
    assert not check(name, "float32", layouts_of(name, 2), 4)


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", [(name, tuple(TYPES)[number % 2]) for number, name in enumerate(FAMILIES)])
def test_weights_that_come_give_the_same_bits_under_every_method(name, dtype):
    """Each family in one of the types, in turn."""
    assert not check(name, dtype, layouts_of(name, 1))


def test_weights_that_come_give_the_same_bits_in_what_is_drawn(request):
    """A transformer and a U-Net, in either type."""
    rng = random.Random(request.config.option.smoke_seed)
    for names, dtype in zip((FAMILIES.keys() - UNETS.keys(), UNETS), rng.sample(TYPES, 2)):
        name = rng.choice(sorted(names))
        assert not check(name, dtype, rng.sample(layouts_of(name, 1), 2))
