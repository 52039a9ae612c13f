"""A package's attention in real workers: stand-ins on their path."""

import dataclasses
import os

import pytest
import torch

from tests.support import kernel_packages
from tests.support.model_zoo import example
from tests.unit.host.conftest import call_of, layout
from xdit_backend.host import torchrun
from xdit_backend.host.client import Client
from xdit_backend.protocol.errors import UnsupportedError
from xdit_backend.protocol.specs import BackendChoice, ForwardOptions


def test_workers_attend_by_the_package_that_they_have_and_tell_so(spec_of, tmp_path, monkeypatch, supervisor):
    kernel_packages.write(tmp_path)
    (tmp_path / "flash_attn" / "__init__.py").unlink()
    (tmp_path / "sitecustomize.py").write_text(kernel_packages.ON_HOPPER)
    environment = torchrun.environment_of
    monkeypatch.setattr(torchrun, "environment_of", lambda *of: environment(*of) | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(torchrun.ROOT)])})
    client, one = Client(("cpu", "cpu"), supervisor=supervisor), example("SD3", torch.bfloat16)

    def predict(name, **degrees):
        before = client.backend_counts
        call = dataclasses.replace(call_of(one), options=ForwardOptions(backend=BackendChoice(name, True)))
        result, = client.predict(spec_of("SD3", "bfloat16"), layout(**degrees), 4, [call])
        return result, dict(client.backend_counts - before)
    try:
        plain, counts = predict("sdpa", ulysses=2)
        assert set(counts) == {"sdpa"}
        for name, degrees in (("sage", {"ulysses": 2}), ("flash3", {"ring": 2}), ("xformers", {"ring": 2}),
                              ("comfy_kitchen_int8", {"ulysses": 2})):
            result, counts = predict(name, **degrees)
            assert set(counts) == {name} and (result - plain).abs().max() < 0.05 * plain.abs().max()
        assert all(why["sage"] == "" and "is not installed" in why["flash"]
                   for why in client.group.unusable_backends.values())
        with pytest.raises(UnsupportedError, match=r"flash on cpu is not installed \(package flash-attn\)"):
            predict("flash", ulysses=2)
    finally:
        client.close()
