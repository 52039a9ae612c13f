"""Every quantised format of ComfyUI's under every method in every family, as docs/reference/models.md lists them: a
step of two ranks equals one device, whose layers equal ComfyUI's
(tests/unit/checkpoints/quantisation/test_comfy_quant.py).

Cells that have every pair of family, format and method are slow, other ones on each day of commits; of these some are
drawn for the default tier.
"""

import itertools
import random
import re
import tempfile
from pathlib import Path

import pytest

from tests.support.comfy_quants import NEWER, WRITTEN
from tests.support.quantised_formats import HOWS, METHODS, Files, cells, covering, errors, execute_wrong, format_of
from tests.support.tolerances import within
from tests.unit.checkpoints.conftest import file_of  # noqa: F401
from xdit_backend.checkpoints.quantisation.layer_formats import FORMATS
from xdit_backend.protocol.errors import UnsupportedError

NUM_DRAWN = 5
BLOCKS = {"int8_convrot": 64, "mxfp8": 32}                     # inputs that halves of a tiny matrix may not be whole of
ALWAYS = ("boogu-image", "float8_e4m3fn", "tensor")            # where a whole layer takes what ranks add up
ROUNDED = 1e-6                             # inputs are rounded from float32, in which ranks may have another last digit
# int8's products are in float32, so that a number falls to another step. Of two models' whose networks for pixels take
# what is made of tokens, one device itself changes by up to 0.12 and 0.23 where its inputs differ in the seventh digit
FLIPPED, OF_PIXELS = 0.1, {"chroma-radiance": 0.2, "pixeldit": 0.3}


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        generator = random.Random(f"{metafunc.config.option.smoke_seed} formats")
        every = covering(cells(), generator)
        drawn = generator.sample(every, NUM_DRAWN)
        every = [*every, *({ALWAYS} - {*every})]
        metafunc.parametrize("cell", [pytest.param(cell, marks=[] if cell in (*drawn, ALWAYS) else [pytest.mark.slow],
                                                   id="-".join(cell)) for cell in every])


@pytest.fixture(scope="module")
def outcome_of(request, file_of):  # noqa: F811
    """outcome_of(cell): what came of it. All cells of a kind that are asked for run when the first is."""
    requested = [item.callspec.params["cell"] for item in request.session.items
             if item.path == request.path and hasattr(item, "callspec")]
    found = {}

    def outcome(cell):
        if cell not in found:
            with tempfile.TemporaryDirectory() as folder:
                found.update(errors([each for each in requested if each[0] == cell[0]], Files(file_of, Path(folder)),
                                    pytest.MonkeyPatch()))
        return found[cell]
    return outcome


def test_a_step_of_two_ranks_equals_one_device(outcome_of, cell):
    (kind, how, method), outcome = cell, outcome_of(cell)
    if method == "tensor" and format_of(how).rounds_inputs and not format_of(how).agreed:
        assert isinstance(outcome, UnsupportedError) and "whose matrix multiplications round" in str(outcome)
        return
    if method == "tensor" and isinstance(outcome, UnsupportedError):
        inputs, block = map(int, re.search(r"has (\d+) inputs, in blocks of (\d+), and each device needs whole",
                                           str(outcome)).groups())
        assert inputs // 2 % block and block == BLOCKS[how]
        return
    if isinstance(outcome, Exception):
        raise outcome

    flipped = OF_PIXELS.get(kind, FLIPPED)
    within(outcome, flipped if method == "tensor" and format_of(how).rounds_inputs else ROUNDED)


def test_a_rank_with_other_numbers_is_seen(file_of, tmp_path):  # noqa: F811
    """The mutant, under every method."""
    requested = [("sd3", "mxfp8", method) for method in METHODS]

    found = errors(requested, Files(file_of, tmp_path), pytest.MonkeyPatch(), execute_wrong)

    assert all(error > 0.1 for error in found.values()), found


def test_the_cells_have_every_pair_of_family_format_and_method():
    chosen = covering(cells(), random.Random(1))

    assert len(chosen) < len(cells()) / 5
    assert ({pair for cell in chosen for pair in itertools.combinations(enumerate(cell), 2)}
            == {pair for cell in cells() for pair in itertools.combinations(enumerate(cell), 2)})


def test_each_format_and_method_is_there():
    every = cells()

    unknown = NEWER.keys() - WRITTEN.keys()                    # to this ComfyUI
    assert {WRITTEN[how][0] for how in HOWS} == set(FORMATS) - unknown
    assert {method for _, _, method in every} == set(METHODS)
