"""LTX-2's block as ComfyUI 0.31 and newer compute it: interleaved and compiled forwards equal a single one, which
tests/integration/models/test_changed_comfyui.py compares with ComfyUI's."""

import torch
from torch._dynamo.utils import counters

import tests.support.reusing_backend  # noqa: F401
from tests.support.model_zoo import example
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from tests.unit.parallel.test_tensor_parallel import TENSOR, InDouble, on_shares
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.models.ltx2_block import AGAIN
from xdit_backend.protocol.specs import ForwardOptions

EXACT = 1e-12


def examples():
    """Two forwards of one model with the changed order, the second with another video and text; what one process
    predicts for each; and the largest difference that the order makes to the first."""
    first, second = made = [example("LTX-2", seed=seed) for seed in (1, 2)]
    second.latent = -1.5 * second.latent
    before = first.run()
    for one in made:
        one.conditioning[AGAIN] = torch.zeros(1)
    wanted = [one.run() for one in made]
    return made, wanted, max((new - old).abs().max().item() for new, old in zip(wanted[0], before))


def largest(one, output, wanted):
    """Largest difference over both components."""
    found = one.family.prediction(output, one.latent)
    return max((mine - want).abs().max().item() for mine, want in zip(found, wanted, strict=True))


def interleaved(rank, world_size):
    with torch.no_grad(), InDouble():
        made, wanted, of_order = examples()
        mesh, hooks, loaded = on_shares(made[0], TENSOR, world_size)
        results = hooks.run_in_turn([loaded.context(mesh, Traffic(), each.latent, each.timestep, each.conditioning)
                                     for each in made])
        return [largest(one, output, want) for one, (output, _), want in zip(made, results, wanted)], of_order


def test_interleaved_forwards_update_the_context_from_their_own_video():
    for errors, of_order in run_ranks(interleaved, 2):
        within(max(errors), EXACT)
        assert of_order > 1e-3


def test_the_updated_context_is_part_of_the_one_graph_of_all_blocks():
    torch._dynamo.reset()
    counters.clear()
    (one, _), (wanted, _), _ = examples()
    hooks, graphs = Hooks(one.model, one.family.plan), []

    for _ in range(2):
        context = one.loaded(hooks).context(SINGLE, Traffic(), one.latent, one.timestep, one.conditioning,
                                            options=ForwardOptions(compile_backend="reusing"))
        within(largest(one, hooks.run(context)[0], wanted), EXACT)
        graphs.append(counters["stats"]["unique_graphs"])

    assert graphs == [1, 1] and not counters["graph_break"]
