"""Two machines, each a network namespace, with a link between them that is cut in the middle of a step, and comes back.

    python -m tests.two_machines [--cuts N]

Needs root, or a user who may make namespaces (unshare -Urn). The link loses and delays nothing of itself: not every kernel has netem.
Prints how long starting, a step, noticing the cut and coming back took; every result is compared with one process's.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.conftest import ROOT, left_behind, still_there

HOST, OTHER = "10.99.0.1", "10.99.0.2"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=2)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:                                     # in namespaces of our own, where we may change links
        prefix = ["unshare", "-n"] if os.getuid() == 0 else ["unshare", "-Urn"]
        sys.exit(subprocess.run([*prefix, sys.executable, "-m", "tests.two_machines", "--inside", "--cuts", str(options.cuts)]).returncode)
    before = set(left_behind())
    holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])          # it holds the other machine's namespace
    try:
        connect(holder.pid)
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), holder.pid, options.cuts)
    finally:
        holder.kill()
        holder.wait()
    left = still_there(before, 20)
    print(f"left behind: {sorted(left) or 'nothing'}")
    sys.exit(bool(left))


def connect(pid):
    """Join this namespace and that of a process by a pair of interfaces."""
    deadline_s = time.monotonic() + 10
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert time.monotonic() < deadline_s, "no namespace was made"
        time.sleep(0.05)
    ip("link add here type veth peer name there")
    ip(f"link set there netns {pid}")
    for where, name, address in (([], "here", HOST), (inside(pid), "there", OTHER)):
        ip("link set lo up", where)
        ip(f"addr add {address}/24 dev {name}", where)
        ip(f"link set {name} up", where)


def inside(pid):
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def cut(when_s):
    when_s.append(time.monotonic())
    ip("link set here down")


def ip(words, prefix=()):
    subprocess.run([*prefix, "ip", *words.split()], check=True)


def run(folder, pid, cuts):
    from tests.host.conftest import call_of, layout
    from tests.models.zoo import example
    from xdit_backend.checkpoints.header import model_spec, read_header, recognise
    from xdit_backend.host.client import Client
    from xdit_backend.machines.listener import Listener
    from xdit_backend.protocol.errors import WorkerDiedError
    from xdit_backend.protocol.messages import Stages
    one = example("Flux.1")
    one.model.save_pretrained(folder / "there" / "transformer")
    header = read_header(folder / "there")
    spec = model_spec(header, recognise(header), "float32", "float32", Stages(2))
    listener = Listener(HOST, folder / "key")
    command = [sys.executable, *listener.command("other-pc").split()[1:], "--models", str(folder)]
    joined = subprocess.Popen([*inside(pid), *command], cwd=ROOT)
    client = Client(("cpu", "other-pc/cpu"), listener)
    wanted = one.run()

    def predict():
        result, = client.predict(spec, layout(pipefusion=2), 4, [call_of(one)])
        assert (result - wanted).abs().max() < 1e-5

    def timed(what, act):
        started_s = time.monotonic()
        act()
        print(f"{what}: {time.monotonic() - started_s:.1f} s", flush=True)
    try:
        timed("join, start and load", predict)
        timed("20 steps", lambda: [predict() for _ in range(20)])
        for _ in range(cuts):
            cut_s = []
            threading.Timer(0.5, cut, (cut_s,)).start()
            try:
                while True:
                    predict()
            except WorkerDiedError as error:
                print(f"cut, and noticed after {time.monotonic() - cut_s[0]:.1f} s: {str(error)[:300]}", flush=True)
            ip("link set here up")
            timed("link is back: join, start, load and a step", predict)
    finally:
        client.close()
        listener.close()
        joined.terminate()
        joined.wait(60)


if __name__ == "__main__":
    main()
