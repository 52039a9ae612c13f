"""Workers and hosts killed, stopped and cancelled, files written to, cut short and removed, copies of weights that
fail, and workers that get no more memory, at random moments: a run ends in time with its picture or in words, the next
is right.

    OMP_NUM_THREADS=1 python -m tests.programs.faults [--first N] [--count N] [--workers 2 or 4] [--coming] [--packed]

draws faults by their numbers and prints what came of them; the same number draws the same fault. --coming: as many of
those that meet steps whose weights come from host memory. --packed: of files in ComfyUI's quantised formats, each in
one that is drawn (with XDIT_COMFYUI=FOLDER). What is left behind at the end, processes, files, open files
or threads, counts as a failure too; of a host that was killed, after each. tests/unit/host/test_faults.py runs a few.
"""

import argparse
import collections
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from tests.conftest import ROOT, left_behind, still_there
from tests.support.comfy_quants import ROTATING, WRITTEN, packed_file
from tests.support.fault_actions import can_fail_copies, cut_short, fail_copies, removed, without_memory, written_to
from tests.support.model_zoo import example
from tests.support.worker_processes import below
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.host import handshake
from xdit_backend.host.autoencoders import Autoencoder
from xdit_backend.host.calls import Call
from xdit_backend.host.client import Client
from xdit_backend.partition import cut_patches
from xdit_backend.protocol.errors import XDiTError
from xdit_backend.protocol.shared_memory import SegmentStore
from xdit_backend.protocol.specs import ForwardOptions, Layout, Stages, WeightCopies
from xdit_backend.tools.bench.sampler import Method, Model, Sampling, sample
from xdit_backend.tools.bench.vae import random_decoder

SILENCE_S = 8                              # after which a stopped worker is noticed; 60 for people
START_S = 90                               # after which a start is given up; 300 for people
PATIENCE_S = 120                           # for one run, the start of a group included; longer is a hang
SIGMAS = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
LAYOUTS = {2: {"cfg": Layout(cfg_degree=2), "data": Layout(data_degree=2), "ulysses": Layout(ulysses_degree=2),
               "ring": Layout(ring_degree=2), "pipefusion": Layout(pipefusion_degree=2),
               "displaced": Layout(displaced_degree=2), "tensor": Layout(tensor_degree=2)},
           4: {"cfg x ulysses": Layout(cfg_degree=2, ulysses_degree=2),
               "ring x ulysses": Layout(ring_degree=2, ulysses_degree=2),
               "pipefusion x ulysses": Layout(pipefusion_degree=2, ulysses_degree=2),
               "pipefusion x tensor": Layout(pipefusion_degree=2, tensor_degree=2),
               "data x displaced": Layout(data_degree=2, displaced_degree=2)}}
# whose ranks bring a part each of weights that come, and exchange them
SHARING = {"ulysses", "displaced", "cfg x ulysses", "pipefusion x ulysses"}
# whose weights come from host memory in every step
COMING = {"cfg", "ulysses", "tensor", "pipefusion", "displaced", "cfg x ulysses", "pipefusion x ulysses"}
PHASES = ("idle", "starting", "loading", "computing", "decoding")
LONGEST_S = {"idle": 0.0, "starting": 3.0, "loading": 0.3, "computing": 1.5, "decoding": 0.4}          # until a fault
OF_FILES = ("write to file", "cut file", "remove file")       # while weights come from it
FAULTS = ("kill", "segfault", "stop", "cancel", "kill torchrun", "kill forkserver", "kill host", *OF_FILES, "memory",
          "copy")
SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "stop": signal.SIGSTOP, "kill torchrun": signal.SIGKILL,
           "kill forkserver": signal.SIGKILL}
HOST_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV, signal.SIGINT)
GONE_S = 5                                 # after which nothing of a host that was killed runs
NEVER = {("idle", "cancel"), ("loading", "kill host"), ("idle", "kill host"), ("decoding", "kill host"),
         *((phase, kind) for phase in PHASES if phase != "computing" for kind in (*OF_FILES, "memory", "copy"))}
# what errors say, each one of these
SAID = dict.fromkeys(FAULTS, ("queue the prompt again", "while starting", "use a smaller latent", "is cut short"))
SAID["write to file"] = ("was written to while a run was streaming weights from it",)
SAID["copy"] = ("could not be copied from system ram",)
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
    format: str = ""                       # of the file, of WRITTEN; "": a folder of plain weights

    @property
    def key(self):
        """What is run."""
        return "decode" if self.phase == "decoding" else (self.layout, self.format)

    @property
    def meets_weights(self):
        """Is it drawn for steps whose weights come from host memory?"""
        return self.phase == "computing" and self.layout in COMING

    def __str__(self):
        whom = "" if " " in self.kind or self.kind == "cancel" else f" rank {self.rank}"
        of = f" of a file in {self.format}" if self.format else ""
        return (f"{self.number}: {self.kind}{whom} while {self.phase} under {self.layout}{of}, after "
                f"{self.delay_s:.2f} s")


def draw(number, num_workers=2, packed=False):
    rng = random.Random(number)
    phase = rng.choice(PHASES)
    kind = rng.choice([kind for kind in FAULTS if (phase, kind) not in NEVER])
    layouts = [name for name in LAYOUTS[num_workers] if kind not in (*OF_FILES, "copy") or name in COMING]
    fault = Fault(number, rng.choice(layouts), phase, kind, rng.randrange(num_workers),
                  rng.uniform(0, LONGEST_S[phase]))
    # no rank can have a share of what rounds each token's inputs by themselves
    formats = [format_ for format_ in WRITTEN if format_ not in ROTATING or "tensor" not in fault.layout]
    return replace(fault, format=rng.choice(formats)) if packed else fault


class Host:
    """A client of CPU workers with a tiny model and a tiny VAE,
    and what its runs give where nothing happens to them."""

    def __init__(self, folder, num_workers):
        self.client, self.folder = Client(("cpu",) * num_workers), folder
        self.layouts, self.wanted, self._models = LAYOUTS[num_workers], {}, {}
        self._undo, self._vae = lambda: None, random_decoder(32)
        self._others = set(psutil.Process().children(recursive=True))          # of groups that other tests use
        self._latent = torch.randn(2, 4, 24, 24, generator=torch.Generator().manual_seed(0))

    def model(self, format_):
        """(Checkpoint, inputs) of a file in this format; "": of a folder of plain weights."""
        if format_ not in self._models:
            path = Path(self.folder) if not format_ else packed_file(self.folder, "sd3", format_)
            one = example("SD3", rows=48, columns=48, batch=2,
                          more=open_checkpoint(path).config if format_ else {"num_layers": 6})
            if not format_ and not Path(path, "transformer").exists():
                one.model.save_pretrained(Path(path, "transformer"))
            self._models[format_] = open_checkpoint(path), one
        return self._models[format_]

    def spec(self, layout, format_):
        degrees = self.layouts[layout]
        staged = degrees.pipefusion_degree > 1
        stages = Stages(degrees.pipefusion_degree, degrees.stage_ranks) if staged else None
        return self.model(format_)[0].spec("float64", "float64", stages, degrees.tensor_degree,
                                           weights_memory=int(layout in COMING))

    def run(self, layout, phase="computing", format_=""):
        """A decode, or Euler steps; under CFG parallelism of two branches, which are added up."""
        if phase == "decoding":
            vae = Autoencoder("vae", "float64", lambda: self._vae)
            return self.client.autoencoders.decode(vae, self._latent, (2, 192, 192, 3)).clone()
        one, spec, degrees = self.model(format_)[1], self.spec(layout, format_), self.layouts[layout]
        call = Call(one.latent, one.timestep, one.conditioning, options=ForwardOptions(
            copies=WeightCopies(is_shared=layout in SHARING)))
        channels = one.latent.shape[1]
        patches = cut_patches(one.latent.shape, (2, 2), 3) if degrees.pipefusion_degree > 1 else None
        try:
            if degrees.cfg_degree == 1:
                return sample(self.client, Model(spec, channels, 1000.0), call, Sampling(SIGMAS),
                              Method(degrees, 1, patches))
            x = call.latent
            for sigma, following in zip(SIGMAS, SIGMAS[1:]):
                requested = replace(call, latent=x, timestep=torch.full((2,), 1000.0 * sigma, dtype=x.dtype))
                x = x + (following - sigma) * sum(self.client.predict(spec, degrees, channels,
                                                                          [requested, requested])).to(x.dtype)
            return x
        finally:
            self.client.end_run()

    def run_of(self, fault):
        """What a fault meets, in time."""
        return in_time(lambda: self.run(fault.layout, fault.phase, fault.format))

    def check(self, result, fault, when):
        """Is it what such a run gives where nothing happens?"""
        assert (result - self.wanted[fault.key]).abs().max() < TOLERANCE, f"{fault}: a wrong picture {when}"

    def suffer(self, fault):
        """Let a fault happen; what came of it, in a word. Raises AssertionError or Hang for what must not be."""
        self.model(fault.format)                               # is written by this process
        if fault.kind == "kill host":
            return kill_host(fault, self.folder, len(self.client.devices))
        if fault.key not in self.wanted:
            self.wanted[fault.key] = self.run_of(fault)
        if fault.phase == "starting":
            self.client.close()
        else:
            self.client.models.load(self.spec(fault.layout, fault.format))
        if fault.phase == "loading":
            self.client.drop(self.spec(fault.layout, fault.format).name)
        cancel_s = time.monotonic() + fault.delay_s if fault.kind == "cancel" else None

        def check():
            if cancel_s is not None and time.monotonic() > cancel_s:
                raise Cancelled
        self.client.workers.check = check
        timer = threading.Timer(fault.delay_s, self._strike, [fault])
        timer.start()
        if fault.phase == "idle":
            timer.join()
        try:
            result = self.run_of(fault)
            outcome = "finished"
        except Cancelled:
            outcome = "cancelled"
        except XDiTError as error:
            outcome = "said so"
            check_words(error, fault)
        finally:
            timer.join()
            self.client.workers.check = lambda: None
        if outcome == "finished":
            self.check(result, fault, "")
            try:
                if fault.kind != "cancel":                     # perhaps too late for this run: the next one meets it
                    self.run_of(fault)
            except XDiTError as error:
                check_words(error, fault)
        self._undo()
        self._undo = lambda: None
        self.check(self.run_of(fault), fault, "afterwards")
        return outcome

    def _strike(self, fault):
        if fault.kind in OF_FILES:
            self._undo = {"write to file": written_to, "cut file": cut_short, "remove file": removed}[fault.kind](
                self.model(fault.format)[0].files[0])
            return
        if fault.kind == "copy":
            self._undo = fail_copies(self.folder, fault.rank)
            return
        victim = below(os.getpid(), self._others).get(fault.kind.removeprefix("kill ") if " " in fault.kind
                                                      else fault.rank)
        if victim is not None and fault.kind in SIGNALS:
            victim.send_signal(SIGNALS[fault.kind])
        elif victim is not None and fault.kind == "memory":
            self._undo = without_memory(victim)


def check_words(error, fault):
    """Does an error say what such a fault has to?"""
    assert any(words in str(error).lower() for words in SAID[fault.kind]), f"{fault}: {error}"


def kill_host(fault, folder, num_workers):
    """Have a host of its own start workers, and compute, until a signal ends it;
    says so when nothing of it runs or is left."""
    before = set(left_behind())
    number = HOST_SIGNALS[fault.number % len(HOST_SIGNALS)]
    command = [sys.executable, "-m", "tests.programs.faults", "--host", folder, "--layout", fault.layout, "--workers",
               str(num_workers), "--format", fault.format]
    host = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        while (line := host.stdout.readline()).strip() != fault.phase:
            assert line, f"{fault}: the host ended by itself"
        time.sleep(fault.delay_s)
        offspring = psutil.Process(host.pid).children(recursive=True)
        host.send_signal(number)
        host.wait(30)
    finally:
        host.kill()
        host.wait()
    _, running = psutil.wait_procs(offspring, GONE_S)
    assert not running, f"{fault} by {number.name}: {running} run on"
    SegmentStore().close()                                     # the next host, which removes what is nobody's
    assert not (left := still_there(before)), f"{fault} by {number.name}: left behind: {sorted(left)}"
    return "ended with its host"


def be_host(folder, layout, num_workers, format_):
    """What kill_host starts: says when workers start and when they compute, and goes on until it is ended."""
    # a shell has its background jobs ignore it, and nohup the other
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    host = Host(folder, num_workers)
    print("starting", flush=True)
    assert host.client.group.alive
    print("computing", flush=True)
    while True:
        host.run(layout, format_=format_)


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


def suffer_all(numbers, report=lambda text: None, num_workers=2, packed=False):
    """{outcome: count} of these faults. Raises at the first that must not be."""
    os.environ["XDIT_SILENCE_TIMEOUT_S"] = str(SILENCE_S)
    handshake.START_TIMEOUT_S = START_S
    outcomes, before = collections.Counter(), set(left_behind())
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        undo, host = can_fail_copies(folder), Host(folder, num_workers)
        try:
            assert host.client.group.alive
            held_before = held()
            for number in numbers:
                fault, started_s = draw(number, num_workers, packed), time.monotonic()
                outcomes[outcome := host.suffer(fault)] += 1
                report(f"{fault}: {outcome}, {time.monotonic() - started_s:.1f} s")
            held_after = held()
        finally:
            host.client.close()
            undo()
    assert not (left := still_there(before)), f"left behind: {sorted(left)}"
    assert all(after <= then + 3
               for after, then in zip(held_after, held_before)), f"files and threads: {held_before}, then {held_after}"
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2, choices=LAYOUTS)
    parser.add_argument("--coming", action="store_true", help="faults of steps whose weights come from host memory")
    parser.add_argument("--packed", action="store_true", help="faults of files in ComfyUI's quantised formats")
    parser.add_argument("--format", default="", help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.host:
        be_host(options.host, options.layout, options.workers, options.format)
    drawn = (number for number in itertools.count(options.first)
             if not options.coming or draw(number, options.workers).meets_weights)
    counts = suffer_all(itertools.islice(drawn, options.count),
                        lambda text: print(text, file=sys.stderr, flush=True), options.workers, options.packed)
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{options.count} faults{' of weights that come' * options.coming}{' of packed files' * options.packed}, "
          f"{options.workers} workers, from number {options.first}: {told}")
