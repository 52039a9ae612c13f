"""The lists of the tests that run on Windows (tests/support/windows.py) name files and tests that exist."""

import re

import pytest

from tests.support.architecture import ROOT
from tests.support.windows import FILES, NEED_PYTHONPATH, SKIPPED


def test_every_file_of_the_tier_exists():
    assert [name for name in FILES if not (ROOT / name.partition("::")[0]).exists()] == []
    assert all(f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")
               for path, _, test in (name.partition("::") for name in FILES) if test)


@pytest.mark.parametrize("part", [*SKIPPED, *NEED_PYTHONPATH])
def test_every_skipped_test_exists(part):
    path, _, name = part.partition("::")
    files = [found for found in (ROOT / "tests").rglob("test_*.py") if found.as_posix().endswith(path)]

    assert files and (not name or any(re.search(rf"def {re.escape(name)}", found.read_text(encoding="utf-8"))
                                      for found in files))
