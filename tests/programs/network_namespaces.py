"""Two machines, each a network namespace, and a link between them that delays, loses, stalls, is cut at bad moments,
and comes back.

    python -m tests.programs.network_namespaces [--delay MS] [--jitter MS] [--loss PERCENT] [--seed N] [--steps N]

Needs root, or a user who may make namespaces (unshare -Urn), and /dev/net/tun: the link is a process between two TUN
devices.
Prints how long starting, a step, noticing a cut and coming back took; every result is compared with one process's.
Fails where a cut is no error after 10 s that says rank, device and phase, or where anything less than a cut is one.
"""

import argparse
import collections
import fcntl
import multiprocessing
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.conftest import ROOT, left_behind, still_there

HOST, OTHER = "10.99.0.1", "10.99.0.2"
NOTICED_S, STALL_S = 10.0, 3.0
SET_INTERFACE, TUN_OF_BARE_PACKETS = 0x400454CA, 0x1001        # linux/if_tun.h: TUNSETIFF; IFF_TUN | IFF_NO_PI


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="of every packet, one way")
    parser.add_argument("--jitter", type=float, default=0.0, metavar="MS",
                        help="of which a packet takes up to so much more")
    parser.add_argument("--loss", type=float, default=0.0, metavar="PERCENT", help="of packets, drawn one by one")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:                                     # in namespaces of our own, where we may make links
        prefix = ["unshare", "-n"] if os.getuid() == 0 else ["unshare", "-Urn"]
        sys.exit(subprocess.run([*prefix, sys.executable, "-m", "tests.programs.network_namespaces", "--inside",
                                 *sys.argv[1:]]).returncode)
    before = set(left_behind())
    holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])          # it holds the other machine's namespace
    try:
        link = Link(holder.pid, options)
        try:
            with tempfile.TemporaryDirectory() as folder:
                run(Path(folder), holder.pid, link, options.steps)
        finally:
            link.close()
    finally:
        holder.kill()
        holder.wait()
    left = still_there(before, 20)
    print(f"left behind: {sorted(left) or 'nothing'}")
    sys.exit(bool(left))


class Link:
    """Joins this namespace and that of a process, until it is cut:
    from then on every packet is lost, and nobody is told."""

    def __init__(self, pid, options):
        deadline_s = time.monotonic() + 10
        while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert time.monotonic() < deadline_s, "no namespace was made"
            time.sleep(0.05)
        ends = [tun(name) for name in ("here", "there")]
        ip(f"link set there netns {pid}")
        for where, name, address in (([], "here", HOST), (inside(pid), "there", OTHER)):
            ip("link set lo up", where)
            ip(f"addr add {address}/24 dev {name}", where)
            ip(f"link set {name} up", where)
        fork = multiprocessing.get_context("fork")             # both ends are open files
        self.is_cut = fork.Event()
        self._carrier = fork.Process(target=carry, args=(ends, options, self.is_cut), daemon=True)
        self._carrier.start()

    def cut(self):
        self.is_cut.set()
        self.cut_s = time.monotonic()

    def heal(self):
        self.is_cut.clear()

    def close(self):
        self._carrier.kill()
        self._carrier.join()


def tun(name):
    """A new network interface in this namespace, as the open file that its packets come from and go to."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, SET_INTERFACE, struct.pack("16sH22x", name.encode(), TUN_OF_BARE_PACKETS))
    return end


def carry(ends, options, is_cut):
    """Pass packets between two ends, for ever. None overtakes another, as on a cable."""
    # by where they go: (when, packet)
    rng, in_flight = random.Random(options.seed), {end: collections.deque() for end in ends}
    while True:
        soonest_s = min((packets[0][0] for packets in in_flight.values() if packets), default=None)
        ready, _, _ = select.select(ends, [], [], None if soonest_s is None else max(0.0, soonest_s - time.monotonic()))
        for end, other in (ends, ends[::-1]):
            packets, now_s = in_flight[other], time.monotonic()
            if end in ready:
                packet = os.read(end, 2 ** 16)
                if 100 * rng.random() >= options.loss and not is_cut.is_set():
                    due_s = now_s + (options.delay + rng.uniform(0, options.jitter)) / 1000
                    packets.append((max(due_s, packets[-1][0]) if packets else due_s, packet))
            while packets and packets[0][0] <= now_s:
                os.write(other, packets.popleft()[1])


def inside(pid):
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def ip(words, prefix=()):
    subprocess.run([*prefix, "ip", *words.split()], check=True)


def run(folder, pid, link, steps):
    from tests.support.model_zoo import example
    from tests.unit.host.conftest import call_of, decode, decoded, layout
    from xdit_backend.checkpoints.checkpoint import open_checkpoint
    from xdit_backend.host import machine_profiles
    from xdit_backend.host.client import Client
    from xdit_backend.multi_node.listener import Listener
    from xdit_backend.protocol.errors import WorkerDiedError, WorkerStartError
    from xdit_backend.protocol.messages import LoadModel
    from xdit_backend.protocol.specs import Stages
    one = example("Flux.1")
    one.model.save_pretrained(folder / "there" / "transformer")
    header = open_checkpoint(folder / "there")
    spec = header.spec("float32", "float32", Stages(2))
    listener = Listener(HOST, folder / "key")
    command = [sys.executable, "-m", "xdit_backend", "join", f"{HOST}:{listener.port}", "other-pc",
               "--models", str(folder)]
    joined = subprocess.Popen([*inside(pid), *command], cwd=ROOT, stdin=subprocess.PIPE, text=True)
    joined.stdin.write(f"{listener._key.text}\n")
    joined.stdin.close()
    client = Client(("cpu", "other-pc/cpu"), listener)
    image, wanted = one.run(), decoded()

    def predict():
        result, = client.predict(spec, layout(pipefusion=2), 4, [call_of(one)])
        assert (result - image).abs().max() < 1e-5

    def show():
        assert (decode(client) - wanted).abs().max() < 1e-5

    def timed(what, act):
        started_s = time.monotonic()
        act()
        print(f"{what}: {time.monotonic() - started_s:.1f} s", flush=True)

    def run_steps():
        for _ in range(steps):
            predict()

    def measure():
        links = machine_profiles.measure(client, "float32", lambda device: ("CPU", 1e12)).links
        print(f"a hop takes {1000 * links.latency('hop', 2):.1f} ms, and passes {links.rate('hop', 2) / 1e6:.1f} MB/s",
              flush=True)

    def stall():
        link.cut()
        threading.Timer(STALL_S, link.heal).start()
        run_steps()

    def step():
        threading.Timer(0.5, link.cut).start()
        while True:
            predict()

    def start():
        client.close()
        client.workers.on_phase = (lambda phase: phase.text == "starting workers" and not link.is_cut.is_set()
                                   and link.cut())
        try:
            predict()
        finally:
            client.workers.on_phase = lambda phase: None

    def find():
        client.drop(spec.name)
        link.cut()
        predict()

    def load():
        client.drop(spec.name)
        client.group.find_file(spec.path, client.workers.on_phase, client.workers.check)
        link.cut()
        client.group.request(lambda request: LoadModel(request, spec))

    def see():
        link.cut()
        show()
    moments = {"the workers started": start, "computing a step": step, "looking for": find, "loading a model": load,
               "decoding": see}
    try:
        timed("join, start and load", predict)
        timed(f"{steps} steps", run_steps)
        timed("a VAE and an image", show)
        timed("measuring", measure)
        timed(f"{steps} steps, and nothing passes for {STALL_S:.0f} s", stall)
        for doing, act in moments.items():
            try:
                act()
            except (WorkerDiedError, WorkerStartError) as error:
                noticed_s = time.monotonic() - link.cut_s
                print(f"cut while {doing}, and noticed after {noticed_s:.1f} s: {str(error)[:250]}", flush=True)
                assert (noticed_s < NOTICED_S and "rank 1 (other-pc/cpu)" in str(error)
                        and f"while {doing}" in str(error))
            else:
                raise AssertionError(f"a cut while {doing} was no error")
            link.heal()
            timed("link is back: join, start, load and a step", predict)
            timed("a VAE and an image", show)
    finally:
        client.close()
        listener.close()
        joined.terminate()
        joined.wait(60)


if __name__ == "__main__":
    main()
