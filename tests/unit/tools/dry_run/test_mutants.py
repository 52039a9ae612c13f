"""What rows are asked of notices what it is there for: each of these mistakes, made on purpose, is seen."""

import dataclasses

import pytest
import torch

from tests.unit.tools.dry_run.rows import counted, known_kernels, place_of, tiny, weights_of
from tests.unit.tools.dry_run.test_families import check
from tests.unit.tools.dry_run.test_published import off_by
from xdit_backend.hooks import attention_dispatch, token_shards_io
from xdit_backend.parallel import displaced_exchange, sequence_parallel, stale_kv_cache
from xdit_backend.parallel.pipefusion import Link
from xdit_backend.planner import memory_model
from xdit_backend.tools.dry_run import simulated_rank
from xdit_backend.worker.predictions import Predictions

CALM = "PixArt-Sigma"          # of few kernels, and no wait


@pytest.fixture
def row_with(monkeypatch):
    """(owner, name of a function, mutant of the function, layout) -> the row of a tiny model with that mistake.
    mutant(the function as it is, *arguments)."""
    def row(owner, name, mutant, layout="ulysses2"):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: mutant(plain, *args, **kwargs))
        return counted(tiny(CALM), layout)
    return row


def test_without_a_mistake_nothing_is_seen():
    check(counted(tiny(CALM), "ulysses2"), CALM, "ulysses2")


def test_a_tensor_that_a_hook_makes_on_the_host_is_seen(row_with):
    found = row_with(attention_dispatch, "usp_attention", lambda plain, query, *others: plain(
        query + torch.zeros(query.shape[1:], dtype=query.dtype), *others))

    assert {place_of(where) for where in found.mixed} == {"add of cpu and cuda:0 at attention_dispatch.py attend"}


def test_a_number_that_is_read_in_a_block_is_seen(row_with):
    found = row_with(attention_dispatch, "usp_attention", lambda plain, query, *others: (query.sum().item(),
                                                                                plain(query, *others))[1])

    assert {place_of(where) for where in found.waits} == {"_local_scalar_dense at attention_dispatch.py attend"}


def test_a_copy_from_memory_that_is_not_page_locked_is_seen(row_with):
    found = row_with(token_shards_io, "cut", lambda plain, tensor, *others: plain(
        tensor + torch.zeros(tensor.shape[-1], dtype=tensor.dtype).to(tensor.device), *others))

    assert any(where.startswith("copy of ") for where in found.waits)


def test_a_second_copy_of_keys_and_values_is_seen(row_with):
    def twice(plain, self, key, keys, values, *others):
        self.once[key] = keys.clone(), values.clone()
        return plain(self, key, keys, values, *others)
    plain = counted(tiny(CALM), "pipefusion2").cached_bytes

    assert row_with(stale_kv_cache.KeyValues, "update", twice, "pipefusion2").cached_bytes > 1.1 * plain


def test_a_message_that_is_kept_when_it_has_been_read_is_seen(row_with):
    def kept(plain, self, link, handles, *others):
        self.read = [*getattr(self, "read", []), *handles]
        return plain(self, link, handles, *others)
    plain = counted(tiny(CALM), "pipefusion2").cached_bytes

    assert row_with(Predictions, "_receive", kept, "pipefusion2").cached_bytes > 1.1 * plain


def test_a_message_that_is_kept_when_it_has_arrived_is_seen(monkeypatch):
    plain = counted(tiny(CALM), "pipefusion2", 0).cached_bytes
    monkeypatch.setattr(Link, "let_go", lambda self: None)

    assert counted(tiny(CALM), "pipefusion2", 0).cached_bytes > 1.1 * plain


def test_a_copy_of_what_an_exchange_gave_is_seen(row_with):
    found = row_with(sequence_parallel, "_all_to_all_heads", lambda plain, *others: [
        part.transpose(1, 2).contiguous().transpose(1, 2) for part in plain(*others)])

    assert found.kernels > known_kernels()[CALM]["ulysses2"]


def test_a_cast_for_each_patch_is_seen(row_with):
    found = row_with(attention_dispatch, "patch_attention", lambda plain, query, *others: plain(
        query.float().to(query.dtype), *others), "pipefusion2")

    assert found.kernels > known_kernels()[CALM]["pipefusion2"]


def test_a_collective_on_the_wrong_group_is_seen(row_with):
    """Of all four ranks, where it is for two."""
    found = row_with(displaced_exchange, "start_all_gather", lambda plain, rows, own, group, traffic: plain(
        rows, own, None, traffic), "displaced2-ulysses2")

    assert found.sent_bytes != found.reported_bytes


def test_a_kernel_for_each_head_is_seen(row_with):
    def by_head(plain, self, query, key, value, *others):
        return torch.cat([plain(self, *(each[:, head:head + 1] for each in (query, key, value)), *others)
                          for head in range(query.shape[1])], 1)

    assert row_with(sequence_parallel.Attention, "local", by_head).kernels > known_kernels()[CALM]["ulysses2"]


def test_weights_that_are_held_twice_are_seen(row_with):
    def twice(plain, checkpoint, table, model, *others):
        loaded = plain(checkpoint, table, model, *others)
        loaded.transformer.files = {name: weight.clone() for name, weight in model.named_parameters()}
        return loaded

    assert row_with(simulated_rank, "load", twice).weight_bytes > 1.9 * weights_of(tiny(CALM), "ulysses2")


def test_a_forecast_that_is_off_by_a_tenth_is_seen(monkeypatch):
    plain = memory_model.rank_memory

    def less(*others):
        found = plain(*others)
        return dataclasses.replace(found, activations=0.9 * found.activations, keys_values=0.9 * found.keys_values)
    assert abs(off_by("wan2.1-14b-480p", "one", plain)) < 0.05
    assert abs(off_by("wan2.1-14b-480p", "one", less)) > 0.05
