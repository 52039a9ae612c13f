"""Every family's tiny model under every method, as its workers run it on pretended devices: no operator mixes devices,
the host waits where it is allowed to, weights are what arithmetic says to the byte, what is told of bytes that are sent
is what torch is given, and no more kernels are launched than were."""

import pytest

from tests.dry_run.rows import ALLOWED_WAITS, LAYOUTS, counted, most_kernels, place_of, tiny, weights_of

# Of each family one layout, in turn, so that all are among them; the others are for --all.
ROWS = [(name, layout) for name in LAYOUTS for layout in LAYOUTS[name]]
DRAWN = {(name, LAYOUTS[name][index % len(LAYOUTS[name])]) for index, name in enumerate(LAYOUTS)}


def check(row, name, layout):
    """What is asked of every row. row: its Counted."""
    assert row.mixed == {}
    assert {place_of(wait) for wait in row.waits} <= set(ALLOWED_WAITS)
    assert row.weight_bytes == weights_of(tiny(name), layout)
    assert row.kernels <= most_kernels(name, layout)
    assert row.sent_bytes == row.told_bytes


@pytest.mark.parametrize("name, layout", [
    pytest.param(*row, marks=[] if row in DRAWN else pytest.mark.slow) for row in ROWS])
def test_a_step_on_a_pretended_device(name, layout):
    row = counted(tiny(name), layout)

    check(row, name, layout)
    assert row.kernels > 100 and row.peak_bytes > row.kept_bytes > 0
    assert (row.sent_bytes > 0) == (layout not in ("one", "cfg2", "pipefusion2"))              # the last stage's rank
