"""`exchange` of xDiT Parallel Config: what devices that share tokens send is rounded, halved and said."""

import pytest

from tests.integration.sampling.test_pipefusion import EXACT
from tests.support.tolerances import close, relative_error

FEW, HALF = "keys and values in fp8", "all in fp8"


def sent_bytes(comfyui, count=2):
    return comfyui.groups.client(("cpu",) * count).totals()[0].get("sent_bytes", 0)


@pytest.mark.parametrize("kind, degrees, exchange, share", [
    ("flux", {"ulysses": 2}, HALF, 1 / 4), ("wan", {"ulysses": 2}, FEW, 5 / 8),
    pytest.param("sd3", {"ring": 2}, FEW, 1 / 4, marks=pytest.mark.slow),
    pytest.param("qwen-image", {"ring": 2}, HALF, 1 / 4, marks=pytest.mark.slow)], ids=str)
def test_what_devices_send_is_rounded_and_the_node_says_so(comfyui, said, kind, degrees, exchange, share):
    """In float32, of which 8 bits are a quarter; beside them scales, and a text's tokens, which are few here."""
    results, sent = {}, {}
    for form in ("whole", exchange):
        model = comfyui.ours(kind, comfyui.config("cpu,cpu", exchange=form, **degrees))
        before = sent_bytes(comfyui)
        results[form] = comfyui.sample(model, kind)
        sent[form] = sent_bytes(comfyui) - before

    close(results["whole"], comfyui.reference(kind), EXACT)
    assert 10 * EXACT < relative_error(results[exchange], results["whole"]) < 0.05
    assert share < sent[exchange] / sent["whole"] < share + 0.1
    assert all(f" 2, {exchange} (" in text for text in said[2:]) and exchange not in said[0]


def test_an_exchange_that_nothing_reads_is_said(comfyui, said):
    comfyui.sample(comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2, exchange=HALF)), "sd3", steps=1)

    assert "(exchange=all in fp8 unused: ulysses_degree x ring_degree is 1)" in said[0]
