"""Malformed messages, mutated model files and faults of processes in one command, with one table of what came of them.

    OMP_NUM_THREADS=1 XDIT_COMFYUI=FOLDER python -m tests.programs.fuzz [--seed N] [--messages 100000] [--headers 1000]
                                                                        [--faults 200]

Exits with 1 where anything is wrong: an exception that is not of this project, a wrong result, a hang, something left
behind, or a file that took too long. The same seed draws the same messages, files and faults; `--headers` are mutated
files, and all of headers.HOSTILE come on top. tests/project/test_fuzz.py runs a few.
"""

import argparse
import collections
import logging
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs import faults, malformed
from tests.programs.headers import HOSTILE, Mutator, save_hostile
from tests.support.tiny_checkpoints import families
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.protocol.errors import XDiTError

HEADER_S = 0.5                             # CPU seconds in which a file is rejected by its header
LARGEST_S = 1.0                            # in which the largest header within the limits is read
MODEL_S = 10.0                             # in which the model of a header is made without weights, and compared
HANG_S = 60                                # of wall clock
SPARE_BYTES = 8 * 2 ** 30                  # of address space that reading a file may take
REJECTED = "refused", "messages, then refused", "sent away", "not heard"       # of malformed's outcomes


@dataclass
class Row:
    """What came of one kind of input."""

    what: str
    count: int = 0
    accepted: int = 0
    errors: collections.Counter = field(default_factory=collections.Counter)   # class or outcome -> how often
    wrong: list = field(default_factory=list)                  # in words
    slowest_s: float = 0.0

    def add(self, outcome, seconds=0.0):
        self.count += 1
        self.slowest_s = max(self.slowest_s, seconds)
        if outcome:
            self.errors[outcome] += 1
        else:
            self.accepted += 1

    def cells(self):
        errors = ", ".join(f"{name} {count:,}" for name, count in self.errors.most_common())
        return (self.what, f"{self.count:,}", f"{self.accepted:,}", errors or "-", str(len(self.wrong)),
                f"{self.slowest_s:.2f}" if self.slowest_s else "-")


class HangError(Exception):
    """One input took longer than anyone would wait."""


# --- messages ---

def run_messages(seed, count):
    """Rows of messages, frames and strangers, in the shares of tests.programs.malformed."""
    decoded, framed = int(malformed.DECODED * count), int(malformed.FRAMED * count)
    yield _run_outcomes("messages", malformed.decode_noise, seed, decoded)
    yield _run_outcomes("frames on a connection", malformed.receive_frames, seed, framed)
    row = Row("connections without the key")
    with _noting(row, "a group that starts"):
        for outcome, number in malformed.knock(seed, count - decoded - framed).items():
            row.count += number
            row.errors[outcome] += number
    yield row


def _run_outcomes(what, run, seed, count):
    row, since_s = Row(what), [time.process_time()]

    def add(outcome):
        now_s = time.process_time()
        row.add(outcome if outcome in REJECTED else "", now_s - since_s[0])
        since_s[0] = now_s
    with _noting(row, what):
        run(seed, count, add)
    return row


# --- files ---

def run_headers(seed, count, families_drawn=None):
    """Rows of hostile and mutated files, by their kind. families_drawn: of Mutator; None: all."""
    rows = collections.defaultdict(lambda: Row(""))
    with tempfile.TemporaryDirectory() as folder, _bounded_memory():
        folder = Path(folder)
        for name in HOSTILE:
            _read_one(rows["hostile files"], name, save_hostile(name, folder))
        mutator = Mutator(folder, random.Random(seed), families_drawn or sorted(families()))
        for number in range(count):
            kind, path = mutator.write(number)
            _read_one(rows[f"mutated files: {kind}"], f"{kind} {number}", path)
    for what, row in rows.items():
        row.what = what
        yield row


def _read_one(row, name, path):
    """Read a file as Load xDiT Model does, up to the model without weights."""
    began_s, outcome, opened_s = time.process_time(), "", None
    with _noting(row, name), _no_hang():
        try:
            checkpoint = open_checkpoint(str(path))
            opened_s = time.process_time() - began_s
            checkpoint.meta_model()
        except XDiTError as error:
            outcome = type(error).__name__
            assert len(str(error)) < 5000, f"an error of {len(str(error)):,} characters"
            assert error.__cause__ is None or not isinstance(error.__cause__, MemoryError), "it fills memory"
            str(error).encode()
    seconds = time.process_time() - began_s
    row.add(outcome, seconds)
    if opened_s is None and seconds > HEADER_S or opened_s is not None and opened_s > LARGEST_S or seconds > MODEL_S:
        opened = "" if opened_s is None else f", its header {opened_s:.2f} s"
        row.wrong.append(f"{name}: took {seconds:.2f} s{opened}")


@contextmanager
def _bounded_memory():
    """Let this process have no more than SPARE_BYTES of address space on top of what it has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + SPARE_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# --- faults ---

def run_faults(seed, count, report=lambda text: None):
    """The row of faults, as tests.programs.faults draws them."""
    row, since_s = Row("faults of processes and files"), [time.monotonic()]

    def on_each(text):
        now_s = time.monotonic()
        outcome = text.rpartition(": ")[2].rpartition(",")[0]
        row.add("" if outcome == "finished" else outcome, now_s - since_s[0])
        since_s[0] = now_s
        report(text)
    with _noting(row, "faults"):
        faults.suffer_all(range(seed * 1000, seed * 1000 + count), on_each)
    yield row


# --- what is wrong, and the table ---

@contextmanager
def _noting(row, name):
    """Note what must not be, and go on."""
    try:
        yield
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        row.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]} ({Path(last.filename).name}:"
                         f"{last.lineno})")


@contextmanager
def _no_hang():
    def too_long(*_):
        raise HangError(f"not done after {HANG_S} s")
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def table(rows):
    """The rows as lines of text, and below what was wrong."""
    cells = [("what", "count", "accepted", "rejected, by error", "wrong", "slowest s"), *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join([*lines, *(f"WRONG {words}" for row in rows for words in row.wrong)])


def run(options, report=lambda text: None, families_drawn=None):
    """All rows. families_drawn: of run_headers."""
    parts = ((options.messages, run_messages),
             (options.headers, lambda seed, count: run_headers(seed, count, families_drawn)),
             (options.faults, lambda seed, count: run_faults(seed, count, report)))
    rows = []
    for count, part in parts:
        for row in part(options.seed, count) if count else ():
            rows.append(row)
            report(f"{row.what}: {row.count:,}, {len(row.wrong)} wrong")
    return rows


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    for what, count in (("messages", 100_000), ("headers", 1000), ("faults", 200)):
        parser.add_argument(f"--{what}", type=int, default=count)
    return parser.parse_args(given)


def main():
    options = arguments()
    logging.disable()                                          # a channel logs what it refuses
    rows = run(options, lambda text: print(text, file=sys.stderr, flush=True))
    print(table(rows))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
