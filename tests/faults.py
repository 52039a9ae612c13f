"""Workers killed, stopped and cancelled at random moments: each run ends in time with its picture or in words, and the next is right.

    OMP_NUM_THREADS=1 python -m tests.faults [--first N] [--count N]

draws faults by their numbers and prints what came of them; the same number draws the same fault. What is left behind at the end,
processes, files, open files or threads, counts as a failure too. tests/host/test_faults.py runs a few.
"""

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tests.conftest import left_behind, still_there
from tests.models.zoo import example
from xdit_backend.bench.sampler import sample
from xdit_backend.checkpoints.header import model_spec, read_header, recognise
from xdit_backend.host import launcher
from xdit_backend.host.client import Call, Client
from xdit_backend.partition import cut_patches
from xdit_backend.protocol.errors import XDiTError
from xdit_backend.protocol.messages import Layout, Stages

SILENCE_S = 8                              # after which a stopped worker is noticed; 60 for people
START_S = 60                               # after which a start is given up; 300 for people
PATIENCE_S = 90                            # for one run, the start of a group included; longer is a hang
SIGMAS = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
LAYOUTS = {"cfg": Layout(cfg_degree=2), "data": Layout(data_degree=2), "ulysses": Layout(ulysses_degree=2), "ring": Layout(ring_degree=2),
           "pipefusion": Layout(pipefusion_degree=2)}
PHASES = ("idle", "starting", "loading", "computing")
FAULTS = ("kill", "segfault", "stop", "cancel", "kill torchrun")
SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "stop": signal.SIGSTOP, "kill torchrun": signal.SIGKILL}
TOLERANCE = 1e-9


class Cancelled(Exception):
    """What ComfyUI's cancel button raises, for this host."""


class Hang(Exception):
    """A run took longer than anyone would wait."""


@dataclass(frozen=True)
class Fault:
    number: int
    layout: str
    phase: str
    kind: str
    rank: int
    delay_s: float

    def __str__(self):
        return f"{self.number}: {self.kind} rank {self.rank} while {self.phase} under {self.layout}, after {self.delay_s:.2f} s"


def draw(number):
    rng = random.Random(number)
    phase = rng.choice(PHASES)
    longest_s = {"idle": 0.0, "starting": 8.0, "loading": 0.3, "computing": 1.5}[phase]
    kinds = [kind for kind in FAULTS if not (phase == "idle" and kind == "cancel")]
    return Fault(number, rng.choice(list(LAYOUTS)), phase, rng.choice(kinds), rng.randrange(2), rng.uniform(0, longest_s))


class Host:
    """A client of two CPU workers with a tiny model, and what its runs give where nothing happens to them."""

    def __init__(self, folder):
        self.client = Client(("cpu", "cpu"))
        self.one = example("SD3", rows=48, columns=48, batch=2)
        self.one.model.save_pretrained(Path(folder, "transformer"))
        header = read_header(folder)
        family = recognise(header)
        self.specs = {stages: model_spec(header, family, "float64", "float64", stages) for stages in (None, Stages(2))}
        self.wanted = {name: self.run(name) for name in LAYOUTS}

    def spec(self, layout):
        return self.specs[Stages(2) if layout == "pipefusion" else None]

    def run(self, layout):
        """Euler steps; under CFG parallelism of two branches, which are added up."""
        call, spec = Call(self.one.latent, self.one.timestep, self.one.conditioning), self.spec(layout)
        patches = cut_patches(self.one.latent.shape, (2, 2), 3) if layout == "pipefusion" else None
        try:
            if layout != "cfg":
                return sample(self.client, spec, LAYOUTS[layout], call, SIGMAS, 1, patches, 4, 1000.0)
            x = call.latent
            for sigma, following in zip(SIGMAS, SIGMAS[1:]):
                asked = Call(x, torch.full((2,), 1000.0 * sigma, dtype=x.dtype), call.conditioning)
                x = x + (following - sigma) * sum(self.client.predict(spec, LAYOUTS[layout], 4, [asked, asked])).to(x.dtype)
            return x
        finally:
            self.client.end_run()

    def processes(self):
        """(torchrun, [workers by rank]) as far as they are there."""
        mine = psutil.Process().children(recursive=True)
        with_lines = [(process, line) for process in mine if (line := _line(process))]
        torchrun = next((process for process, line in with_lines if "xdit_backend.host.torchrun" in line), None)
        return torchrun, [process for process, line in with_lines if "xdit_backend.worker" in line and process != torchrun]

    def suffer(self, fault):
        """Let a fault happen; what came of it, in a word. Raises AssertionError or Hang for what must not be."""
        if fault.phase == "starting":
            self.client.close()
        else:
            self.client.load_model(self.spec(fault.layout))
        if fault.phase == "loading":
            self.client.drop(self.spec(fault.layout).name)
        cancel_s = time.monotonic() + fault.delay_s if fault.kind == "cancel" else None

        def check():
            if cancel_s is not None and time.monotonic() > cancel_s:
                raise Cancelled
        self.client.check = check
        timer = threading.Timer(fault.delay_s, self._strike, [fault])
        timer.start()
        if fault.phase == "idle":
            timer.join()
        try:
            result = in_time(lambda: self.run(fault.layout))
            outcome = "finished"
            assert (result - self.wanted[fault.layout]).abs().max() < TOLERANCE, f"{fault}: a wrong picture"
        except Cancelled:
            outcome = "cancelled"
        except XDiTError as error:
            outcome = "said so"
            words = ("queue the prompt again", "while starting", "were ready after")
            assert any(each in str(error).lower() for each in words), f"{fault}: {error}"
        finally:
            timer.join()
            self.client.check = lambda: None
        if outcome == "finished" and fault.kind != "cancel":   # too late for this run: the next one meets it
            try:
                in_time(lambda: self.run(fault.layout))
            except XDiTError:
                pass
        result = in_time(lambda: self.run(fault.layout))
        assert (result - self.wanted[fault.layout]).abs().max() < TOLERANCE, f"{fault}: a wrong picture afterwards"
        return outcome

    def _strike(self, fault):
        torchrun, workers = self.processes()
        victims = [torchrun] if fault.kind == "kill torchrun" else workers[fault.rank:fault.rank + 1]
        for victim in victims:
            if victim is not None and fault.kind in SIGNALS:
                victim.send_signal(SIGNALS[fault.kind])


def in_time(run):
    def late(*_):
        raise Hang(f"not done after {PATIENCE_S} s")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE_S)
    try:
        return run()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def held():
    """(open files, threads) of this process."""
    own = psutil.Process()
    return own.num_fds(), own.num_threads()


def suffer_all(numbers, report=lambda text: None):
    """{outcome: count} of these faults. Raises at the first that must not be."""
    os.environ["XDIT_SILENCE_TIMEOUT_S"] = str(SILENCE_S)
    launcher.START_TIMEOUT_S = START_S
    torch.set_grad_enabled(False)
    outcomes, before = collections.Counter(), set(left_behind())
    with tempfile.TemporaryDirectory() as folder:
        host = Host(folder)
        try:
            held_before = held()
            for number in numbers:
                fault, started_s = draw(number), time.monotonic()
                outcomes[outcome := host.suffer(fault)] += 1
                report(f"{fault}: {outcome}, {time.monotonic() - started_s:.1f} s")
            held_after = held()
        finally:
            host.client.close()
    assert not (left := still_there(before)), f"left behind: {sorted(left)}"
    assert all(after <= then + 3 for after, then in zip(held_after, held_before)), f"files and threads: {held_before}, then {held_after}"
    return outcomes


def _line(process):
    try:
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    counts = suffer_all(range(options.first, options.first + options.count), lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{options.count} faults from number {options.first}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
