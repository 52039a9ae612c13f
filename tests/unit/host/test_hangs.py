"""An exchange that one rank never joins, and one that it joins late:
real workers, with torch's transfer replaced in them."""

import pytest

from tests.conftest import left_behind, still_there
from tests.support.model_zoo import example
from tests.support.tolerances import within
from tests.unit.host.conftest import call_of, layout
from xdit_backend.host import torchrun
from xdit_backend.host.client import Client
from xdit_backend.protocol.errors import WorkerDiedError

LATE_OR_LOST = """
import os
import time
import torch.distributed as dist
transfer = dist.all_to_all_single

class Nothing:
    def wait(self):
        pass

def faulty(*args, **kwargs):
    if os.environ["RANK"] == "1" and os.path.exists({folder!r} + "/lost"):
        return Nothing()
    if os.environ["RANK"] == "1" and os.path.exists({folder!r} + "/late"):
        os.unlink({folder!r} + "/late")
        time.sleep(7)
    return transfer(*args, **kwargs)
dist.all_to_all_single = faulty
"""


@pytest.mark.slow
def test_a_lost_exchange_is_noticed_and_replaced_and_a_late_one_is_waited_for(
    spec_of, tmp_path, monkeypatch, supervisor):
    (tmp_path / "sitecustomize.py").write_text(LATE_OR_LOST.format(folder=str(tmp_path)))
    (tmp_path / "xdit_backend").symlink_to(torchrun.ROOT / "xdit_backend")
    monkeypatch.setattr(torchrun, "ROOT", tmp_path)
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", "5")
    before, one = set(left_behind()), example("SD3")
    client = Client(("cpu", "cpu"), supervisor=supervisor)
    client.begin_step("step 3 of 20")

    def predict():
        result, = client.predict(spec_of("SD3"), layout(ulysses=2), 4, [call_of(one)])
        within((result - one.run()).abs().max(), 1e-6)
    try:
        predict()
        (tmp_path / "late").touch()
        predict()
        assert not (tmp_path / "late").exists()
        (tmp_path / "lost").touch()
        with pytest.raises(WorkerDiedError,
                           match=r"hangs while computing a step \(step 3 of 20\).* waited for other ranks"):
            predict()
        (tmp_path / "lost").unlink()
        predict()
    finally:
        client.close()

    assert not still_there(before)
