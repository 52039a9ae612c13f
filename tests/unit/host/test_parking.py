"""Memory of real workers that hold the same file, or whose weights are parked, and time to have them back:
pytest -s shows the figures."""

import shutil
import time
from contextlib import contextmanager

import psutil
import pytest

from tests.support.model_zoo import example
from tests.support.polling import looking
from tests.unit.host.conftest import call_of, layout
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.host.client import Client
from xdit_backend.models import FAMILIES


@pytest.fixture(scope="module")
def large_spec(tmp_path_factory):
    """large_spec(dtype): of an SD3 with 127 M parameters, 486 MB in float32."""
    from diffusers import SD3Transformer2DModel
    folder = tmp_path_factory.mktemp("large")
    config = {**FAMILIES["SD3"].testing.config, "num_layers": 6, "num_attention_heads": 12,
              "attention_head_dim": 64,
              "caption_projection_dim": 768}
    SD3Transformer2DModel(**config).save_pretrained(folder / "transformer")
    header = open_checkpoint(folder)
    yield lambda dtype: header.spec(dtype, dtype)
    shutil.rmtree(folder)


@contextmanager
def highest(pids):
    """Gives a dict, which then has the most bytes, in sum over these processes, by what smaps_rollup calls them."""
    most = {}

    def look():
        now = {}
        for pid in pids:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                for name, number, _ in (line.split() for line in list(file)[1:]):
                    now[name] = now.get(name, 0) + 1024 * int(number)
        most.update({name: max(number, most.get(name, 0)) for name, number in now.items()})
    with looking(look, 0.02):
        yield most


@pytest.mark.slow
def test_four_workers_hold_a_file_once_and_a_cast_once_each(large_spec, spec_of, supervisor):
    """The most that is held while it is loaded and used.
    What a worker imports and makes in any case is loaded before."""
    figures, one, specs = {}, example("SD3"), [large_spec(dtype) for dtype in ("float32", "bfloat16")]
    client = Client(("cpu",) * 4, supervisor=supervisor)

    try:
        pids = [int(numbers["pid"]) for numbers in client.report_memory().values()]
        client.predict(spec_of("SD3", "float32"), layout(ring=4), 4, [call_of(one)])
        for spec in specs:
            with highest(pids) as before:
                pass
            with highest(pids) as most:
                client.predict(spec, layout(ring=4), 4, [call_of(one)])
            weight_bytes = client.models.memory(spec.name).weight_bytes[0]
            figures[spec.compute_dtype] = held, own = [(most[name] - before[name]) / weight_bytes
                                                       for name in ("Pss:", "Anonymous:")]
            print(f"\n{spec.compute_dtype}: four workers hold {held:.2f} times the weights of one, {own:.2f} times of "
                  f"their own")
            client.drop(spec.name)
    finally:
        client.close()

    assert 0.9 < figures["float32"][0] < 1.4 and figures["float32"][1] < 0.4, "as in the file: its pages, once"
    assert 3.6 < figures["bfloat16"][1] < 4.4, "cast: one copy each, at no time two"


@pytest.fixture(scope="module")
def two_workers(supervisor):
    client = Client(("cpu", "cpu"), supervisor=supervisor)
    yield client
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["as in the file", "cast"])
def test_parked_weights_are_in_memory_once_and_come_back(large_spec, two_workers, dtype):
    """A file of 480 MB on two workers. What is in the file as the workers have it is never copied;
    what was cast is held once."""
    spec, client, figures = large_spec(dtype), two_workers, []

    def resident_bytes():
        """Of both ranks; what they share is counted once."""
        return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)

    def measured(what, step):
        started_s = time.perf_counter()
        step()
        figures.append((what, time.perf_counter() - started_s, resident_bytes() - before))

    pids = [int(numbers["pid"]) for numbers in client.report_memory().values()]
    before = resident_bytes()
    measured("read from the file", lambda: client.models.load(spec))
    rank_bytes = client.models.memory(spec.name).weight_bytes[0]
    measured("parked", lambda: client.models.park(spec.name, 2 ** 40))
    measured("back", lambda: client.models.load(spec))
    measured("parked again", lambda: client.models.park(spec.name, 2 ** 40))
    client.drop(spec.name)
    measured("read again", lambda: client.models.load(spec))
    unmapped_bytes = client.models.memory(spec.name).unmapped_bytes[0]
    client.drop(spec.name)

    print(f"\n{dtype}: {rank_bytes / 2**20:.0f} MB of weights on each of two ranks, {unmapped_bytes / 2**20:.0f} MB "
          f"not in the file so")
    for what, took_s, held in figures:
        print(f"{what:20} {took_s:7.2f} s   {held / 2**20:6.0f} MB held by both ranks")
    (_, _, read), (_, _, parked), _, (_, _, parked_again), _ = figures
    if dtype == "float32":                                     # in the file already
        assert unmapped_bytes < 0.05 * rank_bytes and max(parked, parked_again) < read + 0.05 * rank_bytes
    else:
        assert unmapped_bytes > 0.95 * rank_bytes and max(parked, parked_again) < read - 0.9 * rank_bytes
