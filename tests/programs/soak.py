"""Hundreds of prompts of changing sizes, models and layouts through one ComfyUI: what do it and its workers hold as
time goes by?

    XDIT_COMFYUI=FOLDER OMP_NUM_THREADS=1 python -m tests.programs.soak [--count 500]

prints, for the host and for the workers, memory (their own, not what they map of files), open files and threads: how
much more the last quarter of the prompts has than the second one, and the slope between. Fails where a slope is more
than noise.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import left_behind, still_there
from tests.integration.failures.test_server import workers, workflow
from tests.support.comfyui_server import ROOT, Host, comfyui_folder, make_base
from tests.support.tiny_checkpoints import import_comfyui, save

KINDS = ("sd3", "sd35")
LAYOUTS = ({"cfg": 2}, {"data": 2}, {"ulysses": 2}, {"ring": 2}, {"pipefusion": 2}, {"displaced": 2}, {"tensor": 2})
SIDES = (128, 160, 192, 256, 320)
MOST_MB, MOST_COUNT = 10.0, 1.0            # that a process may gain in a hundred prompts: memory; open files, threads


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    memory_mb: float
    num_files: int
    num_threads: int

    def __str__(self):
        return f"{self.memory_mb:.0f} MB, {self.num_files} files, {self.num_threads} threads"

    @classmethod
    def by(cls, pid):
        process = psutil.Process(pid)
        return cls(process.memory_full_info().uss / 2 ** 20, process.num_fds(), process.num_threads())


def draw(number):
    """A prompt, by its number."""
    chance = random.Random(number)
    graph = workflow(seed=number + 1, steps=chance.randint(2, 4), **chance.choice(LAYOUTS))
    graph["latent"]["inputs"] |= {"width": chance.choice(SIDES), "height": chance.choice(SIDES),
                                  "batch_size": chance.randint(1, 2)}
    graph["model"]["inputs"]["model_name"] = f"{chance.choice(KINDS)}.safetensors"
    graph["positive"]["inputs"]["tokens"] = chance.choice((7, 20, 77))
    return graph


def soak(count, report=lambda text: None):
    """[{process: Held}] after each of so many prompts: of "host", and of each worker by its place."""
    before, told = set(left_behind()), []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        make_base(base, extra_packs=[ROOT / "tests" / "support" / "host_nodes"])
        import_comfyui(comfyui_folder())
        for kind in KINDS:
            save(kind, base / "models" / "diffusion_models" / f"{kind}.safetensors")
        save("vae-sd3", base / "models" / "vae" / "vae.safetensors")
        with Host(comfyui_folder(), base) as host:
            for number in range(count):
                host.run(draw(number))
                pids = {"host": host.process.pid, **{f"worker {index}": pid for index, pid in enumerate(workers(host))}}
                told.append({name: Held.by(pid) for name, pid in pids.items()})
                report(f"{number + 1} of {count}: " + "; ".join(f"{name} {held}" for name, held in told[-1].items()))
    assert not (left := still_there(before)), f"left behind: {sorted(left)}"
    return told


def slopes(told):
    """{process: {field: (median of the second quarter, of the last, what a hundred prompts add)}}.
    Workers must be the same throughout."""
    second, last = told[len(told) // 4:len(told) // 2], told[-len(told) // 4:]
    result = {}
    for name in told[0]:
        result[name] = {}
        for field in ("memory_mb", "num_files", "num_threads"):
            early, late = (statistics.median(getattr(entry[name], field) for entry in part) for part in (second, last))
            values = [getattr(entry[name], field) for entry in told[len(told) // 4:]]
            result[name][field] = early, late, 100 * statistics.linear_regression(range(len(values)), values).slope
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=500)
    options = parser.parse_args()
    started_s = time.monotonic()
    told = soak(options.count, lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{options.count} prompts in {time.monotonic() - started_s:.0f} s")
    grown = []
    for name, fields in slopes(told).items():
        for field, (early, late, slope) in fields.items():
            print(f"{name:9} {field:12} {early:8.1f} in the second quarter, {late:8.1f} in the last, {slope:+.2f} in "
                  f"100 prompts")
            if slope > (MOST_MB if field == "memory_mb" else MOST_COUNT):
                grown.append(f"{name}'s {field}")
    sys.exit(f"not flat: {', '.join(grown)}" if grown else 0)


if __name__ == "__main__":
    main()
