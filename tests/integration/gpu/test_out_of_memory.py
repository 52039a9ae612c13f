"""A GPU that runs out of memory: the prompt fails in words, and the next picture is right."""

import pytest
import torch

from tests.support.model_zoo import example
from tests.support.ranks import run_ranks
from tests.support.tolerances import close
from tests.unit.host.conftest import call_of, folders, layout, spec_of  # noqa: F401
from xdit_backend.host.client import Client
from xdit_backend.protocol import messages, specs
from xdit_backend.protocol.errors import WorkerFailedError
from xdit_backend.protocol.shared_memory import SegmentStore, map_segment
from xdit_backend.protocol.specs import Layout
from xdit_backend.worker.engine import Engine

pytestmark = pytest.mark.gpu


def predict_with_and_without_memory(rank, world_size, commands):
    """Carry out the last command twice; the first time, rank 0 has no memory left.
    Returns (did it fail?, exchanges begun)."""
    engine, ballast, failed = Engine(rank, torch.device("cuda", 0), lambda *phase: None), [], False
    for command in commands[:-1]:
        engine.execute(command)
    if rank == 0:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
        for size in (2 ** 20, 2 ** 9):
            while True:
                try:
                    ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
    try:
        engine.execute(commands[-1])
    except torch.OutOfMemoryError:
        failed = True
    num_exchanges = engine.traffic.num_exchanges
    ballast.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)
    engine.memory.give_back()
    engine.execute(commands[-1])
    return failed, num_exchanges


def test_a_rank_without_memory_fails_alone_and_is_right_the_next_time(spec_of):  # noqa: F811
    """Guidance's branches on two ranks of one GPU, which exchange nothing."""
    store, branches = SegmentStore(), [example("SD3", torch.float32, rows=64, columns=64),
                                       example("SD3", torch.float32, rows=64, columns=64, num_text_tokens=9)]
    spec, predictions, named = spec_of("SD3", "float32"), [], []
    try:
        commands = [messages.LoadModel(1, spec)]
        for index, one in enumerate(branches):
            tensors = {name: store.share(tensor) for name, tensor in one.conditioning.items()}
            commands.append(messages.Conditioning(2 + index, f"branch {index}", tensors))
            prediction, view = store.create(tuple(one.latent.shape), torch.float32)
            predictions.append(view)
            named.append(specs.Branch(store.share(one.latent), store.share(one.timestep), f"branch {index}",
                                      prediction))
        commands.append(messages.Predict(4, spec.name, Layout(cfg_degree=2), named))

        outcomes = run_ranks(predict_with_and_without_memory, 2, commands, timeout_s=200)

        assert outcomes == [(True, 0), (False, 0)]
        for branch, one in zip(named, branches):
            close(map_segment(branch.prediction), one.run(), 1e-4)
    finally:
        store.close()


def test_a_full_gpu_is_told_and_the_next_prediction_is_right(spec_of):  # noqa: F811
    """Of Flux.1, which has positions for latents of any size."""
    one, small = (example("Flux.1", torch.float32, rows=side, columns=side) for side in (1024, 6))
    spec, client = spec_of("Flux.1", "float32"), Client(("cuda:0",))
    try:
        client.predict(spec, layout(), 4, [call_of(small)])
        free, _ = torch.cuda.mem_get_info(0)
        ballast = torch.empty(free - 2 ** 26, dtype=torch.uint8, device="cuda:0")
        with pytest.raises(WorkerFailedError, match="^Use a smaller latent.* OutOfMemoryError .* more were "
                                                    "requested, and .* free.* In use: "):
            client.predict(spec, layout(), 4, [call_of(one)])
        pid = client.report_memory()[0]["pid"]
        del ballast
        torch.cuda.empty_cache()

        result, = client.predict(spec, layout(), 4, [call_of(small)])

        close(result, small.run(), 1e-4)
        assert client.report_memory()[0]["pid"] == pid         # one GPU's group lives on
    finally:
        client.close()
