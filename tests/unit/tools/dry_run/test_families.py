"""Every family's tiny model under every method, as its workers run it on pretended devices: no operator mixes devices,
the host waits where it is allowed to, weights are what arithmetic says to the byte, what is told of bytes that are sent
is what torch is given, and no more kernels are launched than were."""

import dataclasses

import pytest

from tests.unit.tools.dry_run.rows import ALLOWED_WAITS, LAYOUTS, counted, most_kernels, place_of, tiny, weights_of
from xdit_backend.hooks import attention_dispatch
from xdit_backend.protocol.errors import ConfigError, UnsupportedError

# Of each family one layout, in turn, so that all are among them; the others are for --all.
ROWS = [(name, layout) for name in LAYOUTS for layout in LAYOUTS[name]]
DRAWN = {(name, LAYOUTS[name][index % len(LAYOUTS[name])]) for index, name in enumerate(LAYOUTS)}


def check(row, name, layout):
    """What is asked of every row. row: its Counted."""
    assert row.mixed == {}
    assert {place_of(wait) for wait in row.waits} <= set(ALLOWED_WAITS)
    assert row.weight_bytes == weights_of(tiny(name), layout)
    assert row.kernels <= most_kernels(name, layout)
    assert row.sent_bytes == row.reported_bytes


@pytest.mark.parametrize("name, layout", [
    pytest.param(*row, marks=[] if row in DRAWN else pytest.mark.slow) for row in ROWS])
def test_a_step_on_a_pretended_device(name, layout):
    row = counted(tiny(name), layout)

    check(row, name, layout)
    assert row.kernels > 100 and row.peak_bytes > row.cached_bytes > 0
    assert (row.sent_bytes > 0) == (layout not in ("one", "cfg2", "pipefusion2"))              # the last stage's rank


def test_experts_take_as_many_tokens_each():
    """Each token goes to two of HiDream-I1's, however many there are: products are as many, but for the choice."""
    checkpoint, run = tiny("HiDream-I1")
    few, many = (counted((dataclasses.replace(checkpoint, config=checkpoint.config | {"num_routed_experts": number}),
                          run), "one") for number in (2, 4))

    assert few.flops < many.flops < 1.01 * few.flops and few.kernels < many.kernels
    assert set(map(place_of, many.waits)) == {"copy at transformer_hidream_image.py moe_infer"}


def test_a_model_whose_shapes_depend_on_numbers_is_refused(monkeypatch):
    plain = attention_dispatch.usp_attention
    monkeypatch.setattr(attention_dispatch, "usp_attention", lambda query,
                        *others: plain(query * query.unique().numel(),
                                                                                 *others))
    with pytest.raises(UnsupportedError, match="PixArt-Sigma cannot be counted without a device"):
        counted(tiny("PixArt-Sigma"), "ulysses2")


def test_a_layout_that_a_family_refuses_is_refused_in_its_words():
    with pytest.raises(ConfigError, match="Set displaced_degree to 1, and .* is not supported for Sana: "):
        counted(tiny("Sana"), "displaced2")
    with pytest.raises(ConfigError, match="ulysses_degree=3 does not divide PixArt-Sigma's 4 attention heads"):
        counted(tiny("PixArt-Sigma"), "ulysses3")
