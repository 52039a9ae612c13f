"""Memory that runs out: in words with numbers, and the group goes on where no exchange was under way."""

import resource

import psutil
import pytest
import torch

from tests.support.model_zoo import example
from tests.support.tolerances import within
from tests.unit.host.conftest import call_of, layout
from xdit_backend.host.oom_report import describe_out_of_memory
from xdit_backend.planner.memory_fit import remedies
from xdit_backend.protocol.errors import WorkerFailedError
from xdit_backend.worker.engine import TRIED_TO_ALLOCATE, UNITS, is_out_of_memory

GB = 2 ** 30


def test_words_say_who_holds_what_and_what_would_fit():
    """6 GB of 24 are the run's or free, and it would have taken 8: three quarters of it fits."""
    numbers = {"requested_bytes": 3 * GB, "free_bytes": GB, "total_bytes": 24 * GB, "weight_bytes": 14 * GB,
               "cast_bytes": 0, "key_value_bytes": 2 * GB, "activation_bytes": 3 * GB, "other_bytes": 4 * GB,
               "num_conditionings": 3}
    words = remedies(numbers, 2)

    assert describe_out_of_memory(numbers).startswith(
        "3.0 GB more were requested, and 1.0 GB of 24.0 GB are free: 2.0 GB are missing. In use: weights 14.0 GB; "
        "keys and values 2.0 GB; activations 3.0 GB; other programs and libraries 4.0 GB.")
    assert "at most 75% of these pixels (each side times 0.87)" in words and "at least 3 devices" in words
    assert ("weight_dtype fp8_e4m3fn (7.0 GB) or int8 (7.0 GB) or nf4, with the package bitsandbytes (3.") in words
    assert "other programs, which take 4.0 GB (nvidia-smi" in words
    assert 'weights_memory "12.88", with which the other weights are streamed' in words
    assert "weights_memory" not in remedies(numbers, 2, device="cpu")


def test_what_would_fit_is_of_what_was_done():
    numbers = {"requested_bytes": 3 * GB, "free_bytes": GB, "weight_bytes": 10 * GB, "activation_bytes": 2 * GB}

    assert remedies(numbers, 2, "LoadModel").startswith('Use weights_memory "auto", or fewer GB than now')
    assert "smaller" not in remedies(numbers, 2, "LoadModel")
    assert remedies(numbers, 2, "Decode") == (
        "Use a smaller image or batch: at most 60% of these pixels (each side times 0.77), frames or images fit next "
        "to the weights; or at least 4 devices for Distributed VAE Decode or Encode.")


def test_only_types_that_would_fit_are_named():
    words = remedies({"requested_bytes": 9 * GB, "free_bytes": GB, "weight_bytes": 14 * GB}, 1)

    assert "weight_dtype nf4, with the package bitsandbytes (3.9 GB);" in words
    assert "weight_dtype" not in remedies({"requested_bytes": 12 * GB, "free_bytes": GB, "weight_bytes": 14 * GB}, 1)


def test_nothing_is_reckoned_from_what_is_not_known():
    numbers = {"free_bytes": 100.0, "weight_bytes": 0.0}

    assert describe_out_of_memory(numbers) == "more memory was requested, and 0 MB are free."
    assert remedies(numbers, 1) == "Use a smaller latent; or more devices."


@pytest.mark.parametrize("words, num_bytes", [
    ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3 GiB is free",
     2.5 * GB),
    ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1", 20 * 2 ** 20)])
def test_what_was_asked_for_is_read_from_torchs_words(words, num_bytes):
    error, found = torch.OutOfMemoryError(words), TRIED_TO_ALLOCATE.search(words)

    assert is_out_of_memory(error) and float(found[1]) * UNITS[found[2]] == num_bytes
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))


def test_a_worker_without_memory_says_so_in_numbers_and_draws_the_next_one(client, spec_of):
    """Rank 1 is held to what it has. Guidance's branches exchange nothing, so the group goes on."""
    one, large = example("SD3"), example("SD3", rows=48, columns=48, batch=256)
    client.predict(spec_of("SD3"), layout(cfg=2), 4, [call_of(one)] * 2)
    memory = client.report_memory()
    pids = [int(memory[rank]["pid"]) for rank in (0, 1)]
    worker = psutil.Process(pids[1])
    before = worker.rlimit(resource.RLIMIT_AS)
    client.begin_step("step 7 of 20")
    worker.rlimit(resource.RLIMIT_AS, (worker.memory_info().vms + 2 ** 25, before[1]))
    try:
        with pytest.raises(WorkerFailedError, match=(
                r"^Use a smaller latent.*\. Worker rank 1 \(cpu\) failed with OutOfMemoryError while computing a step "
                r"\(step 7 of 20\)(, in block \d of 4)?: out of memory: \d+ MB more were requested, ")):
            client.predict(spec_of("SD3"), layout(cfg=2), 4, [call_of(one), call_of(large)])
    finally:
        worker.rlimit(resource.RLIMIT_AS, before)
        client.begin_step("")

    results = client.predict(spec_of("SD3"), layout(cfg=2), 4, [call_of(one)] * 2)
    for result in results:
        within((result - one.run()).abs().max(), 1e-6)
    memory = client.report_memory()
    assert [int(memory[rank]["pid"]) for rank in (0, 1)] == pids
