"""Weights in float8 under PipeFusion: cast for the first patches of a run and kept as far as there is room,
with the same result."""

import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.model_zoo import example
from tests.support.ranks import run_ranks
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.partition import cut_patches
from xdit_backend.protocol import messages, specs
from xdit_backend.protocol.shared_memory import SegmentStore, map_segment
from xdit_backend.protocol.specs import Layout, Stages
from xdit_backend.worker.engine import Engine
from xdit_backend.worker.predictions import Predictions

NUM_PATCHES = 4
CASTS = (torch.ops.aten.to, torch.ops.aten._to_copy)


class Casts(TorchDispatchMode):
    """Counts weights that are cast from float8, and their bytes afterwards."""

    count = num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if (function.overloadpacket in CASTS and args[0].dtype == torch.float8_e4m3fn
                and isinstance(args[0], torch.nn.Parameter)):
            self.count += 1
            self.num_bytes += output.nbytes
        return output


def casts_of_commands(rank, world_size, commands, unused_bytes):
    """Of each command on this rank: (casts, their bytes, its answer).
    unused_bytes: what the device is said to have left."""
    Predictions.unused_bytes = property(lambda self: unused_bytes)
    engine, counted = Engine(rank, torch.device("cpu"), lambda *phase: None), []
    torch.set_grad_enabled(False)
    for command in commands:
        with Casts() as casts:
            numbers = engine.execute(command)
        counted.append((casts.count, casts.num_bytes, numbers))
    for link in engine.links:
        link.drain()
    return counted


def play(store, one, spec, spare_bytes):
    """A warm-up step, three steps of patches, the end of the run, a whole step of another:
    (predictions, what each rank counted)."""
    request, made = itertools.count(1), []
    patches = cut_patches(one.latent.shape, (2, 2), NUM_PATCHES)

    def predict(time, patch=None, rows=0):
        latent = one.latent if patch is None else one.latent.narrow(2, patch.start, rows)
        made.append(store.create(tuple(latent.shape), torch.float32)[0])
        branch = specs.Branch(store.share(latent), store.share(torch.tensor([time])), "text", made[-1])
        return messages.Predict(next(request), spec.name, Layout(pipefusion_degree=2), [branch], patch, keep=True)

    text = messages.Conditioning(next(request), "text",
                                 {name: store.share(tensor) for name, tensor in one.conditioning.items()})
    commands = [messages.LoadModel(next(request), spec), text, predict(900.0),
                *(predict(time, *patch) for time in (800.0, 700.0, 600.0) for patch in patches),
                messages.ReportMemory(next(request)), messages.DropConditioning(next(request), ["text"]),
                messages.ReportMemory(next(request)), text, predict(500.0)]
    ranks = run_ranks(casts_of_commands, 2, commands, spare_bytes / 0.8)
    return [map_segment(prediction).clone() for prediction in made], ranks


def test_no_cast_is_repeated_for_each_patch_as_far_as_there_is_room(tmp_path):
    one, store, results = example("SD3", torch.float32, rows=16, columns=6), SegmentStore(), {}
    one.model.save_pretrained(tmp_path / "transformer")
    header = open_checkpoint(tmp_path)
    spec = header.spec("float8_e4m3fn", "float32", Stages(2))
    try:
        for free_bytes in (2 ** 40, 60_000, 0):
            results[free_bytes], ranks = play(store, one, spec, free_bytes)
            for counted in ranks:
                whole, patch, steps = counted[2], counted[3], counted[4 + NUM_PATCHES:3 + 3 * NUM_PATCHES]
                held, after = (counted[index + 3 * NUM_PATCHES][2]["cast_bytes"] for index in (3, 5))
                repeated = [num_bytes for _, num_bytes, _ in steps]
                assert whole[0] >= patch[0] > 10 and counted[-1][0] == whole[0]          # another run begins anew
                assert after == 0
                if free_bytes == 2 ** 40:
                    assert not any(repeated) and whole[1] / 2 < held <= whole[1]
                elif free_bytes:
                    assert free_bytes / 2 < held <= free_bytes
                    assert 0 < min(repeated) and max(repeated) <= whole[1] - held
                else:
                    assert held == 0 and min(repeated) > whole[1] / 3
    finally:
        store.close()

    assert results[0][-2].std() > 0.01
    for other in (2 ** 40, 60_000):
        assert all(torch.equal(got, want) for got, want in zip(results[other], results[0]))
