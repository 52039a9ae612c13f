"""In which order tests run, beside what, and what they draw:
pytest's --order, --order-seed, --background-load, --smoke-seed, --until, for conftest.py."""

import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

ORDERS = ("written", "reverse", "random")
SEEDS = ("order_seed", "smoke_seed")
NO_TIME = "no time left"
FIRST = "tests/integration/test_smoke.py::"
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n for _ in range(10 ** 6): pass"


def add_options(parser):
    parser.addoption("--order", choices=ORDERS, default="written", help="of the files, and of the tests in each")
    parser.addoption("--order-seed", type=int, metavar="SEED", help="of --order random; default: of the commit's day")
    parser.addoption("--smoke-seed", type=int, metavar="SEED",
                     help="of the layouts of tests/integration/test_smoke.py and all else that is drawn; "
                          "default: of the commit's day")
    parser.addoption("--background-load", type=int, default=0, metavar="COUNT",
                     help="number of busy processes to run alongside the tests")
    parser.addoption("--until", type=float, metavar="TIME",
                     help="seconds since 1970: tests whose turn comes later are skipped")


def choose_seeds(config):
    """Those that are not given are of the day of the commit, so that what was seen to pass passes wherever it is run,
    and after a small mend; drawn where files differ from it. In a process of pytest-xdist, those of the first
    process."""
    if hasattr(config, "workerinput"):
        for name in SEEDS:
            setattr(config.option, name, config.workerinput[name])
        return
    generator = random.Random(committed(Path(__file__).parent.parent))
    for name in SEEDS:
        number = generator.randrange(10 ** 6)
        if getattr(config.option, name) is None:
            setattr(config.option, name, number)


def committed(folder):
    """The day of the commit where `folder` is, or None: files differ from it, or there is no git."""
    with suppress(OSError, subprocess.CalledProcessError):
        requested = [subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True,
                                    check=True).stdout.strip()
                 for words in (["status", "--porcelain", "--untracked-files=no"], ["log", "-1", "--format=%cs"])]
        return None if requested[0] else requested[1]
    return None


def header(config):
    order, seed, load = config.option.order, config.option.order_seed, config.option.background_load
    lines = {"written": [], "reverse": ["order: reverse"],
             "random": [f"order: random, again with --order random --order-seed {seed}"]}[order]
    lines.append(f"layouts of the smoke test: --smoke-seed {config.option.smoke_seed}")
    return lines + ([f"background load: {load} busy processes"] if load else [])


def arrange(items, order, seed):
    """Order the tests. A part of them, drawn with the same seed, has the same order as among all."""
    if order == "reverse":
        items.reverse()
    elif order == "random":
        items.sort(key=lambda item: (drawn(seed, item.nodeid.partition("::")[0]), drawn(seed, item.nodeid)))
    else:                                  # the smoke test first: it tells of every family in a minute
        items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def skip_after(until):
    """Skip the test whose turn it is where that comes after `until` (None: no limit)."""
    if until is not None and time.time() > until:
        pytest.skip(NO_TIME)


def drawn(seed, name):
    return random.Random(f"{seed} {name}").random()


def start_busy(config):
    """Start the processes of --background-load, which end with this one; none in the processes of pytest-xdist."""
    count = 0 if hasattr(config, "workerinput") else config.option.background_load
    return [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(count)]
