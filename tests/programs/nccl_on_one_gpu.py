"""Everything of NCCL that one GPU can show, in under eight minutes: workers that share it, connected by NCCL.

    python -m tests.programs.nccl_on_one_gpu --library DIR/libnccl.so.2 --folder results
    python -m tests.programs.nccl_on_one_gpu --devices cpu,cpu --folder results          # a rehearsal, over gloo

Needs NCCL 2.30 or newer; --library is preloaded in place of torch's. Each part is a process of its own with a time
limit, and its output is written to the folder at once, so that a part that fails or hangs does not end the others.
Parts: links; each method, cancel and kill with two workers; products of two methods with four; the tests of stages and
of Ring; then a report with models of published width. Exit code: 0 if all parts passed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import ROOT
from xdit_backend import system
from xdit_backend.host.torchrun import NCCL_ON_ONE_GPU

TOTAL_S = 470
LAST_LINES = 15                            # of a part's output, on the terminal
LINKS = ("import json, sys; from xdit_backend.tools.report.links import backends_of, measure_links\n"
         "devices = sys.argv[1].split(',')\n"
         "for backend in backends_of(devices):\n"
         "    for link in measure_links(devices, backend):\n"
         "        print(backend, link.collective, link.num_bytes >> 20, 'MiB', link.seconds.shown(),\n"
         "              f'{link.bytes_s / 1e9:.2f} GB/s', flush=True)\n"
         "assert 'nccl' in backends_of(devices) or devices[0] == 'cpu', 'NCCL is not used'\n")


def parts(devices, folder, rehearsal):
    """[(name, longest seconds, arguments of Python)] in the order of their worth."""
    report = ["-m", "xdit_backend", "report", "--folder", str(folder)]
    first, four = devices.split(",")[0], ",".join([devices.split(",")[0]] * 4)
    tests = ["-m", "pytest", "-q", "-x", "tests/integration/gpu/test_gpu.py"]
    return [
        ("links", 60, ["-c", LINKS, devices]),
        ("methods, cancel and kill", 120, [*report, "--devices", devices, "--no-times"]),
        ("products of two methods", 80, [*report, "--devices", four, "--no-times", "--only", "Flux.1"]),
        *([] if rehearsal or not first.startswith("cuda") else [("stages and Ring", 60, tests)]),
        ("report", 200, [*report, "--devices", devices, "--no-checks", "--minutes", "3"])]


def run(name, limit_s, arguments, environment, folder):
    """Run a part; returns {"part", "passed", "seconds", "why"}."""
    started_s, path, job = time.monotonic(), folder / f"{name.replace(' ', '-').replace(',', '')}.txt", system.Job()
    with open(path, "wb") as output:
        process = job.start([sys.executable, *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                            stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit_s)
            why = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            job.end()
            process.wait()
            why = f"not done after {limit_s:.0f} s"
    lines = path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    print(f"== {name}: {why or 'passed'}, {time.monotonic() - started_s:.0f} s",
          *[line for line in lines if line.strip()][-LAST_LINES:], sep="\n", flush=True)
    return {"part": name, "passed": not why, "seconds": round(time.monotonic() - started_s, 1), "why": why}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", default="cuda:0,cuda:0", help="of the workers; cpu,cpu for a rehearsal")
    parser.add_argument("--library", type=Path, help="libnccl.so.2 of NCCL 2.30 or newer")
    parser.add_argument("--folder", type=Path, default=Path("results"), help="of the output")
    options = parser.parse_args()
    rehearsal, folder = options.devices.startswith("cpu"), options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"XDIT_SHARED_DEVICES": "1", "XDIT_NCCL_ON_ONE_GPU": "1", "OMP_NUM_THREADS": "1"}
    environment |= NCCL_ON_ONE_GPU | {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": str(folder / "nccl.%p.txt")}
    if options.library is not None:
        environment["LD_PRELOAD"] = str(options.library.absolute())
    results, started_s = [], time.monotonic()
    for name, limit_s, arguments in parts(options.devices, folder, rehearsal):
        left_s = TOTAL_S - (time.monotonic() - started_s)
        if left_s < 10:
            results.append({"part": name, "passed": False, "seconds": 0, "why": "no time left"})
        else:
            results.append(run(name, min(limit_s, left_s), arguments, environment, folder))
        (folder / "parts.json").write_text(json.dumps(results, indent=1))
    print(*(f"{result['part']}: {result['why'] or 'passed'} ({result['seconds']:.0f} s)" for result in results),
          sep="\n")
    sys.exit(0 if all(result["passed"] for result in results) else 1)


if __name__ == "__main__":
    main()
