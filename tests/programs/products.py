"""Steps of every family under every product of two or three methods, of unlike and of like texts, beside one device's.

    OMP_NUM_THREADS=1 python -m tests.programs.products [--methods 2 3 | --devices 4 8] [--texts 7 9 7]
    [--families Wan] [--weights-memory 1]

prints what is not one device's, and how many were compared. tests/integration/test_smoke.py runs a few that are drawn.
"""

import argparse
import tempfile
import time

from tests.support.compare_single_device import EXACT, errors_of, layouts_of, layouts_on, words
from xdit_backend.models import FAMILIES

TOGETHER = 4                               # families on one set of ranks, whose groups are made once


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", type=int, nargs="+", default=(2, 3), choices=(1, 2, 3),
                        help="in a product, each of degree 2")
    parser.add_argument("--devices", type=int, nargs="+", default=(),
                        help="all layouts of so many devices instead, such as tensor4 and data x tensor")
    parser.add_argument("--texts", type=int, nargs="+", default=(7, 9, 7),
                        help="tokens of a prompt, and of those that are beside it, each in a step of its own")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--weights-memory", type=int, default=0, metavar="BYTES",
                        help="of a device, that weights may take; 1: all that can comes from host memory")
    parser.add_argument("--seed", type=int, default=0, help="draws which steps keep keys and values")
    options = parser.parse_args()
    sets = ([(f"layouts of {number} devices", layouts_on, number, number) for number in options.devices]
            or [(f"products of {number}", layouts_of, number, 2 ** number) for number in options.methods])
    for title, layouts, number, num_devices in sets:
        num_compared, num_wrong, largest, started_s = 0, 0, 0.0, time.monotonic()
        for first in range(0, len(options.families), TOGETHER):
            names = options.families[first:first + TOGETHER]
            requested = [(name, layout) for name in names for layout in layouts(name, number)]
            with tempfile.TemporaryDirectory() as folder:
                outcomes = errors_of(requested, folder, num_devices, tuple(options.texts), options.weights_memory,
                                     seed=options.seed)
            wrong = {key: error for key, error in outcomes.items() if isinstance(error, Exception)
                     or not error <= EXACT}
            for (name, layout), error in wrong.items():
                print(f"{name}, {words(layout)}: {error!r:.300}", flush=True)
            num_compared, num_wrong = num_compared + len(requested), num_wrong + len(wrong)
            largest = max([largest, *(outcomes[key] for key in outcomes.keys() - wrong.keys())])
            print(f"{', '.join(names)}: {len(requested)} layouts, {time.monotonic() - started_s:.0f} s", flush=True)
        print(f"{title}: {num_compared} in {len(options.texts) - 1} steps each, {num_wrong} wrong; "
              f"the largest error of the others {largest:.1e}", flush=True)


if __name__ == "__main__":
    main()
