"""In which order tests run, and beside what: conftest.py asks, for pytest's --order reverse, --order drawn [--order-seed 7], --beside 2."""

import random
import subprocess
import sys

ORDERS = ("written", "reverse", "drawn")
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n for _ in range(10 ** 6): pass"


def add_options(parser):
    parser.addoption("--order", choices=ORDERS, default="written", help="of the files, and of the tests in each")
    parser.addoption("--order-seed", type=int, metavar="SEED", help="of --order drawn; default: another each time")
    parser.addoption("--beside", type=int, default=0, metavar="COUNT", help="so many processes that are never idle run beside the tests")


def choose_seed(config):
    """Draw a seed where none is given; in a process of pytest-xdist, take that of the first process."""
    if hasattr(config, "workerinput"):
        config.option.order_seed = config.workerinput["order_seed"]
    elif config.option.order_seed is None:
        config.option.order_seed = random.randrange(10 ** 6)


def header(config):
    order, seed, beside = config.option.order, config.option.order_seed, config.option.beside
    lines = {"written": [], "reverse": ["order: reverse"], "drawn": [f"order: drawn, again with --order drawn --order-seed {seed}"]}[order]
    return lines + ([f"beside {beside} busy processes"] if beside else [])


def arrange(items, order, seed):
    """Order the tests. A part of them, drawn with the same seed, has the same order as among all."""
    if order == "reverse":
        items.reverse()
    elif order == "drawn":
        items.sort(key=lambda item: (drawn(seed, item.nodeid.partition("::")[0]), drawn(seed, item.nodeid)))


def drawn(seed, name):
    return random.Random(f"{seed} {name}").random()


def start_busy(config):
    """The processes of --beside, which end with this one; none in the processes of pytest-xdist."""
    count = 0 if hasattr(config, "workerinput") else config.option.beside
    return [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(count)]
