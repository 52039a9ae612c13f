"""A report for the panel: JSON lines on standard output, and an early end when standard input is closed."""

import signal
import sys
import threading

from ... import system
from ...host.report_process import LINE, Step, Written
from . import document, results


def make_for_panel(make, progress, folder):
    """Make a report and write its files into `folder`, with JSON lines on standard output. make() -> Report."""
    progress.show = lambda text: _print(Step("step", text, progress.left_s))
    progress.done = int
    signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell has its background jobs ignore it
    threading.Thread(target=_interrupt_at_end_of_input, daemon=True).start()
    report = make()
    if not report.checks:                                      # ended before anything was measured
        return
    paths = document.write(report, folder)
    _print(Written("written", tuple(path.name for path in paths), tuple(results.verdict(report)), report.is_complete,
                   len(report.failed)))


def _print(line):
    print(LINE.dump_json(line).decode(), flush=True)


def _interrupt_at_end_of_input():
    while sys.stdin.buffer.read(1):
        pass
    system.interrupt_main_thread()
