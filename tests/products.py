"""A step of every family under every product of two or three methods, of unlike and of like texts, beside one device's.

    OMP_NUM_THREADS=1 python -m tests.products [--methods 2 or 3] [--texts 7 9] [--families Wan Flux.1]

prints what is not one device's, and how many were compared. tests/test_smoke.py runs a few that are drawn.
"""

import argparse
import tempfile
import time

from tests.steps import EXACT, errors_of, layouts_of, words
from xdit_backend.models import FAMILIES

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", type=int, default=2, choices=(1, 2, 3), help="in a product, each of degree 2")
    parser.add_argument("--texts", type=int, nargs=2, default=(7, 9), help="tokens of the two branches' prompts")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    options = parser.parse_args()
    num_compared, num_wrong, largest, started_s = 0, 0, 0.0, time.monotonic()
    for name in options.families:
        asked = [(name, layout) for layout in layouts_of(name, options.methods)]
        with tempfile.TemporaryDirectory() as folder:
            outcomes = errors_of(asked, folder, 2 ** options.methods, tuple(options.texts))
        for (_, layout), error in ((key, outcomes[key]) for key in asked):
            is_wrong = isinstance(error, Exception) or not error <= EXACT
            num_compared, num_wrong = num_compared + 1, num_wrong + is_wrong
            largest = largest if is_wrong else max(largest, error)
            if is_wrong:
                print(f"{name}, {words(layout)}: {error!r:.300}", flush=True)
        print(f"{name}: {len(asked)} products, {time.monotonic() - started_s:.0f} s", flush=True)
    print(f"{num_compared} compared, {num_wrong} wrong; the largest error of the others {largest:.1e}")
