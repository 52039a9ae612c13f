"""Check and time this machine's devices under every parallel method, and write a report to publish.

It needs no downloads and no ComfyUI, and takes at most six minutes. Every method is compared with one device on small
models, and a cancelled step and a killed worker are tried. Links and models of published shapes are timed, next to the
estimates. The report is written as a JSON file, a Markdown page and a chart. It names GPUs, driver and versions, and no
user, host, path or serial number.
"""

import argparse
import contextlib
import datetime
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import torch

from ...host import logs, machine_profiles
from ...host.preflight import num_cuda_devices
from ...host.torchrun import ROOT
from ...protocol.devices import resolve_devices
from ...protocol.errors import ConfigError, XDiTError
from ..bench.worker_groups import start_clients
from . import document, for_panel, results
from .checks import planned_checks, run_check
from .links import backends_of, measure_links
from .machine_facts import machine_facts, notes_of
from .timings import models, time_model

LEAST_S = 20                   # for the rounds of a model
WRITING_S = 20                 # of the end


def add_arguments(parser):
    parser.add_argument("--devices", default="auto", help='as in xDiT Parallel Config: "auto", or names such as '
                                                          '"cuda:0,cuda:1"')
    parser.add_argument("--minutes", type=float, default=6.0, help="the longest that it may take; models are timed in "
                                                                   "what the checks leave")
    parser.add_argument("--only", metavar="CHECK", default="", help="run only the checks whose names begin so, such as "
                                                                    '"Flux.1 ring2"')
    parser.add_argument("--no-times", action="store_true", help="check only")
    parser.add_argument("--no-checks", action="store_true", help="time only")
    parser.add_argument("--for-panel", action="store_true", help=argparse.SUPPRESS)      # see for_panel.py
    parser.add_argument("--folder", type=Path, default=Path(), help="folder of the report's files")


def main(options):
    devices = resolve_devices(options.devices, num_cuda_devices())
    if len(devices) == 1:
        devices *= 2                                           # two workers share it: methods are checked all the same
    if options.minutes <= 0:
        raise ConfigError(f"Use a positive number for --minutes: it is {options.minutes:g}.")
    progress = Progress(60 * options.minutes)
    if options.for_panel:
        return for_panel.make_for_panel(lambda: make(devices, options, progress), progress, options.folder)
    report = make(devices, options, progress)
    if options.only:
        for check in report.checks:
            print(f"{'passed' if check.passed else 'FAILED'}  {check.name}  {check.message}")
        sys.exit(1 if report.failed else 0)
    paths = document.write(report, options.folder)
    print("\n".join([*results.verdict(report), "", *(f"Written: {path}" for path in paths),
                     "To publish it, open an issue with the form \"Report of a machine\" and attach the JSON file."]))
    if not report.is_complete:
        print("The report is incomplete: it was ended early.")
    sys.exit(1 if report.failed else 0)


class Progress:
    """Progress on the terminal's last line, with the time left. seconds: the limit of the whole report."""

    def __init__(self, seconds, write=sys.stderr.write):
        self._start_s, self._seconds, self._write = time.monotonic(), seconds, write
        self.show = self._show_in_line                         # show(text)

    @property
    def elapsed_s(self):
        return time.monotonic() - self._start_s

    @property
    def left_s(self):
        return max(0.0, self._seconds - self.elapsed_s)

    def _show_in_line(self, text):
        minutes, seconds = divmod(round(self.left_s), 60)
        self._write(f"\rat most {minutes}:{seconds:02} left: {text}"[:100].ljust(100))

    def done(self):
        self._write("\r" + " " * 100 + "\r")


def make(devices, options, progress):
    """The Report of these devices. Ctrl-C ends it early with what was measured so far."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    progress.show("reading the machine")
    found = {"schema": results.SCHEMA, "date": datetime.date.today().isoformat(), "version": version(),
             "devices": tuple(devices), "machine": machine_facts(), "notes": [], "checks": [], "links": [], "sizes": {},
             "timings": [], "chosen": {}, "is_complete": True}
    with tempfile.TemporaryDirectory(prefix="xdit-report-") as folder, contextlib.ExitStack() as ending:
        try:
            _fill(found, devices, options, folder, progress, ending)
        except KeyboardInterrupt:
            found["is_complete"] = False
    progress.done()
    return results.Report(**found | {name: tuple(found[name]) for name in ("notes", "checks", "links", "timings")},
                          seconds=progress.elapsed_s)


def _fill(found, devices, options, folder, progress, ending):
    """Run the checks and measurements one after the other, and add each result to `found`."""
    found["notes"] = notes_of(found["machine"], devices)
    progress.show("starting the workers")
    clients = start_clients({1, len(devices)}, num_cuda_devices() if devices[0].startswith("cuda") else 0)
    for client in clients.values():
        ending.callback(client.close)
    planned = [check for check in planned_checks(clients, folder) if check.name.startswith(options.only)
               and not options.no_checks]
    if not planned and not options.no_checks:
        raise ConfigError(f'Use --only with the beginning of a check\'s name: none begins with "{options.only}".')
    for index, check in enumerate(planned):
        progress.show(f"check {index + 1} of {len(planned)}: {check.name}")
        found["checks"].append(run_check(check))
    if options.only or options.no_times:
        return
    for backend in backends_of(devices) if len(devices) > 1 else ():
        progress.show(f"timing the links: {backend}")
        _try(found, f"links by {backend}", lambda backend=backend: found["links"].extend(
            measure_links(devices, backend)))
    is_cuda = devices[0].startswith("cuda")
    progress.show("measuring the devices")
    machine = machine_profiles.measure(clients[len(devices)], "bfloat16" if is_cuda else "float32")
    found["notes"] = notes_of(found["machine"], devices, [device.matrix_flops_s for device in machine.devices])
    every = models(is_cuda)
    for index, model in enumerate(every):
        seconds = (progress.left_s - WRITING_S) / (len(every) - index)
        if seconds < LEAST_S:
            found["is_complete"] = False
            break

        def timed(model=model, seconds=seconds):
            # loading and the first steps take about half of it
            timings, chosen = time_model(model.make(folder), model, clients, machine, seconds / 2, progress.show)
            found["timings"].extend(timings)
            found["sizes"][model.name] = model.size
            if chosen:
                found["chosen"][model.name] = chosen
        _try(found, f"time of {model.name}", timed)


def _try(found, name, work):
    """Run a measurement; a failure becomes a failed check."""
    started_s = time.monotonic()
    try:
        work()
    except (XDiTError, RuntimeError, OSError) as error:
        text = logs.without_private(str(error)).strip() or type(error).__name__
        found["checks"].append(results.Check(name, False, time.monotonic() - started_s, "python -m xdit_backend report",
                                             text.splitlines()[0][:400]))


def version():
    """The pack's version in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^version = "([^"]+)"', text, re.MULTILINE)[1]
