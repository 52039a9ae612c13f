"""Running workers of which each brings a part of the weights that come and sends it to the others: the same bits as
where each brings all, in runs of both kinds, with weights that change, and after faults."""

import dataclasses

import psutil
import pytest
import torch

from tests.support.model_zoo import example
from tests.support.tiers import by_default
from tests.unit.host.conftest import call_of, layout
from tests.unit.host.test_copies import faults, set_environment  # noqa: F401
from tests.unit.host.test_offloading import folder  # noqa: F401
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.host.client import Client
from xdit_backend.host.weight_updates import Change
from xdit_backend.models.common.example_inputs import conditioning_of
from xdit_backend.protocol import specs
from xdit_backend.protocol.errors import CopyError, WorkerDiedError
from xdit_backend.protocol.specs import ForwardOptions, WeightCopies

METHODS = by_default([{"ulysses": 2}], [{"cfg": 2}, {"ulysses": 2}, {"ring": 2}, {"data": 2}, {"displaced": 2}])


class Cancelled(Exception):
    """What ComfyUI's cancel button raises, for this host."""


class Asked:
    """Predictions of a model whose weights come, of two branches. storage: of its weights."""

    def __init__(self, client, folder, degrees, storage="float32"):      # noqa: F811
        self.client, self.layout, self.checkpoint = client, layout(**degrees), open_checkpoint(folder)
        one, family = example("Flux.1", torch.float32, batch=2), self.checkpoint.family
        self.channels, self.calls = family.num_channels(one.config), []
        self.spec = self.checkpoint.spec(storage, "float32", weights_memory=1)
        for seed, length in ((0, 7), (1, 5)):
            tensors = conditioning_of(family, one.config, torch.Generator().manual_seed(seed), {"context": length}, 2)
            self.calls.append(call_of(dataclasses.replace(one, conditioning=tensors)))

    def submit(self, is_shared, num_calls=2):
        options = ForwardOptions(copies=WeightCopies(is_shared=is_shared))
        calls = [dataclasses.replace(call, options=options) for call in self.calls]
        return self.client.submit(self.spec, self.layout, self.channels, calls[:num_calls])

    def predict(self, is_shared=True, num_calls=2):
        return [each.clone() for each in self.client.wait([self.submit(is_shared, num_calls)])[1]]

    def sent_bytes(self):
        """By each rank, in all."""
        return [numbers["sent_bytes"] for _, numbers in sorted(self.client.catch_up(60).items())]


def same(results, wanted):
    return all(torch.equal(*pair) for pair in zip(results, wanted, strict=True))


@pytest.mark.parametrize("storage", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("degrees", METHODS, ids=str)
def test_steps_of_both_kinds_in_any_order_predict_the_same(client, folder, degrees, storage):  # noqa: F811
    """Also after one that only a part of the ranks had something to do in, and after weights were parked on one rank:
    what they hold in their buffers is then not the same."""
    requested = Asked(client, folder, degrees, storage)
    want = requested.predict(is_shared=False)
    for is_shared in (True, True, False, True, False, False, True):
        assert same(requested.predict(is_shared), want)
    one = requested.predict(is_shared=False, num_calls=1)
    assert same(requested.predict(num_calls=1), one) and same(requested.predict(), want)
    client.models.park(requested.spec.name, 2 ** 34)
    assert same(requested.predict(), want)
    client.drop(requested.spec.name)


def test_weights_that_are_changed_and_changed_back_are_shared_as_they_are_then(client, folder):      # noqa: F811
    """As a LoRA that is switched on and off."""
    requested = Asked(client, folder, {"cfg": 2})
    names = [name for name in requested.checkpoint.shapes if name.endswith("to_q.weight")]
    up, down = torch.full((requested.checkpoint.shapes[names[0]][0], 1), 0.5), torch.full(
        (1, requested.checkpoint.shapes[names[0]][1]), 0.25)

    def made(share):
        return specs.Change(None, (specs.LowRank(share(up), share(down), 1.0),), "float32", "float32")
    plain = requested.predict(is_shared=False)
    for changes in ({name: Change(("lora",), 1, made) for name in names}, {}):
        client.models.load(requested.spec, changes)
        want = requested.predict(is_shared=False)
        assert same(requested.predict(), want) and same(requested.predict(), want)
        assert same(want, plain) == (not changes)
    client.drop(requested.spec.name)


@pytest.mark.parametrize("degrees", METHODS, ids=str)
def test_after_a_cancel_in_mid_run_the_next_one_is_right(client, folder, degrees):      # noqa: F811
    """What was sent before is carried out by all ranks, whole."""
    requested = Asked(client, folder, degrees)
    want = requested.predict(is_shared=False)

    def cancelled():
        raise Cancelled
    for _ in range(5):
        handles = [requested.submit(True) for _ in range(3)]
        client.workers.check = cancelled
        try:
            with pytest.raises(Cancelled):
                while True:
                    client.wait(handles)
        finally:
            client.workers.check = lambda: None
        assert same(requested.predict(), want)
    client.drop(requested.spec.name)


@pytest.mark.parametrize("fault", ["kill", "copy"])
@pytest.mark.parametrize("degrees", METHODS, ids=str)
def test_a_rank_that_ends_or_whose_copy_fails_is_told_as_everywhere(
        degrees, fault, faults, folder, monkeypatch, supervisor):       # noqa: F811
    """The other one waits for it in an exchange."""
    set_environment(monkeypatch, faults)
    client = Client(("cpu", "cpu"), supervisor=supervisor)
    try:
        requested = Asked(client, folder, degrees)
        want = requested.predict(is_shared=False)
        assert same(requested.predict(), want)
        group = client.group
        if fault == "copy":
            (faults / "fails-1").touch()
        else:
            pid = int(client.report_memory()[1]["pid"])
            psutil.Process(pid).suspend()
            handle = requested.submit(True)
            psutil.Process(pid).kill()
        with pytest.raises(CopyError if fault == "copy" else WorkerDiedError, match="Queue the prompt again"):
            if fault == "copy":
                requested.predict()
            else:
                client.wait([handle])
        assert same(requested.predict(), want) and client.group is not group
    finally:
        client.close()
