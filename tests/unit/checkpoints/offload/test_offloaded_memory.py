"""What a process whose weights come from host memory takes of its own, which stands for the memory of a device: the
budget, and what the run takes in any case."""

import dataclasses
import gc
from contextlib import contextmanager

import pytest
import torch

from tests.support.polling import looking
from tests.support.ranks import run_ranks
from tests.unit.checkpoints.offload.test_block_offload import CPU, inputs, saved
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.system import trim_heap
from xdit_backend.worker.memory import _status
from xdit_backend.worker.models import Loaded

SIZES = {"num_attention_heads": 8, "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24), "num_layers": 2,
         "num_single_layers": 10}
LARGER = SIZES | {"num_attention_heads": 20, "num_single_layers": 9}             # 1.4 GB of weights


@contextmanager
def highest():
    """Gives a list, whose only number is then the most anonymous memory that there was."""
    most = [0]

    def look():
        most[0] = max(most[0], _status()["RssAnon"])
    with looking(look, 0.002):
        yield most


def measured(rank, world_size, path, shares):
    """[(bytes of weights on the device, of anonymous memory when they are loaded, and at the most of some steps)]; the
    first one has run before."""
    torch.set_grad_enabled(False)
    checkpoint, found = open_checkpoint(path), []
    spec = checkpoint.spec("float32", "float32")
    for share in (None, None, *shares):
        gc.collect()
        trim_heap()
        before, held = _status()["RssAnon"], [0]
        with highest() as most:
            budget = 0 if share is None else int(share * found[0][0])
            transformer = load_transformer(dataclasses.replace(spec, weights_memory=budget), CPU, chunk_bytes=2 ** 20)
            if transformer.offloaded is not None:
                transformer.offloaded.restore()
            loaded = Loaded(transformer, Hooks(transformer.model, checkpoint.family.plan, (), transformer.offloaded),
                            torch.float32, range(0))
            latent, conditioning = inputs(loaded, rows=16, columns=16)
            for _ in range(3):
                loaded.hooks.run(loaded.context(SINGLE, Traffic(), latent, torch.tensor([700.0]), conditioning))
        apart = {} if transformer.offloaded is None else transformer.offloaded.weights
        held = sum(weight.nbytes for weight in transformer.model.parameters() if id(weight) not in apart)
        held += 0 if transformer.offloaded is None else transformer.offloaded.device_bytes
        found.append((held, most[0] - before))
        del transformer, loaded
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes, shares", [(SIZES, (0.6, 0.35)), (LARGER, (0.6, 0.45))],
                         ids=["240 MB", "more than a GiB"])
def test_anonymous_memory_keeps_to_the_budget(tmp_path, sizes, shares):
    with torch.no_grad():
        path = saved("Flux.1", tmp_path, torch.float32, sizes)

    (figures,) = run_ranks(measured, 1, path, shares)

    (whole, _), (_, peak), *offloaded = figures
    for share, (held, most) in zip(shares, offloaded):
        print(f"{share:.0%} of {whole / 1e6:.0f} MB: {held / 1e6:.0f} MB held, at most {most / 1e6:.0f} MB, and "
              f"{(peak - whole) / 1e6:.0f} MB beside weights where all are there")
        assert held <= share * whole
        assert most <= share * whole + max(0, peak - whole) + 0.03 * whole
