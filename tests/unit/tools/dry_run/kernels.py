"""Writes how many kernels a step of each family's tiny model launches, under each layout, into kernels.json:
python -m tests.unit.tools.dry_run.kernels [FAMILY ...]. To be run where a change makes it fewer, or more for a
reason."""

import json
import sys

from tests.unit.tools.dry_run.rows import KERNELS, LAYOUTS, counted, known_kernels, releases, tiny


def main():
    known = (known_kernels() if KERNELS.exists() else {}) | {"of": releases()}
    for name in sys.argv[1:] or LAYOUTS:
        known[name] = {layout: counted(tiny(name), layout).kernels for layout in LAYOUTS[name]}
        print(name, known[name], flush=True)
        KERNELS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
