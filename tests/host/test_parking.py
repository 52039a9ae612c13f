"""Memory of real workers whose weights are parked, and time to have them back: pytest -s shows the figures."""

import time

import psutil
import pytest

from xdit_backend.checkpoints.header import model_spec, read_header, recognise
from xdit_backend.host.client import Client
from xdit_backend.models import FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["as in the file", "cast"])
def test_parked_weights_are_in_memory_once_and_come_back(tmp_path, dtype):
    """A file of 480 MB on two workers. What is in the file as the workers have it is never copied; what was cast is held once."""
    from diffusers import SD3Transformer2DModel
    config = {**FAMILIES["SD3"].tiny.config, "num_layers": 6, "num_attention_heads": 12, "attention_head_dim": 64,
              "caption_projection_dim": 768}
    SD3Transformer2DModel(**config).save_pretrained(tmp_path / "transformer")
    header = read_header(tmp_path)
    spec = model_spec(header, recognise(header), dtype, dtype)
    client = Client(("cpu", "cpu"))
    figures = []

    def held_bytes():
        """Of both ranks; what they share is counted once."""
        return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)

    def measured(what, step):
        started_s = time.perf_counter()
        step()
        figures.append((what, time.perf_counter() - started_s, held_bytes() - before))

    try:
        pids = [int(numbers["pid"]) for numbers in client.report_memory().values()]
        before = held_bytes()
        measured("read from the file", lambda: client.load_model(spec))
        rank_bytes = client.residence(spec.name).weight_bytes[0]
        measured("parked", lambda: client.park(spec.name, 2 ** 40))
        measured("back", lambda: client.load_model(spec))
        measured("parked again", lambda: client.park(spec.name, 2 ** 40))
        client.drop(spec.name)
        measured("read again", lambda: client.load_model(spec))
        homeless_bytes = client.residence(spec.name).homeless_bytes[0]
    finally:
        client.close()

    print(f"\n{dtype}: {rank_bytes / 2**20:.0f} MB of weights on each of two ranks, {homeless_bytes / 2**20:.0f} MB not in the file so")
    for what, took_s, held in figures:
        print(f"{what:20} {took_s:7.2f} s   {held / 2**20:6.0f} MB held by both ranks")
    (_, _, read), (_, _, parked), _, (_, _, parked_again), _ = figures
    if dtype == "float32":                                     # in the file already
        assert homeless_bytes < 0.05 * rank_bytes and max(parked, parked_again) < read + 0.05 * rank_bytes
    else:
        assert homeless_bytes > 0.95 * rank_bytes and max(parked, parked_again) < read - 0.9 * rank_bytes
