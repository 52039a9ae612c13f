"""Malformed messages, frames and strangers by the thousand: each is refused or is a message, and a group that starts
meanwhile works.

    python -m tests.programs.malformed [--seed N] [--count N]

The same seed draws the same bytes. Half of them are given to `decode`; a tenth goes as frames through connections of a
real door, of which a group's host has the other end; the rest are what strangers say at the door of a group of two
workers while it starts, who have no key. tests/unit/protocol runs a few.
"""

import argparse
import collections
import dataclasses
import logging
import math
import random
import socket
import struct
import tempfile
import threading
import time
from pathlib import Path

from tests.conftest import left_behind, still_there
from xdit_backend.host.launcher import WorkerGroup
from xdit_backend.multi_node import connections
from xdit_backend.protocol import messages, specs
from xdit_backend.protocol.channel import ADDRESS_FILE, MAX_BYTES, ChannelListener, connect
from xdit_backend.protocol.errors import ChannelClosedError, XDiTError
from xdit_backend.protocol.messages import decode, encode
from xdit_backend.protocol.shared_memory import Segment

SEGMENT = Segment("/dev/shm/xdit/1", "bfloat16", (1, 16, 8, 8))
SPEC = specs.ModelSpec("flux-1", "Flux.1", "/models/flux.safetensors", "bfloat16", "bfloat16")
EXAMPLES = [
    messages.LoadModel(1, SPEC),
    messages.LoadModel(1, dataclasses.replace(SPEC, stages=specs.Stages(2, num_blocks=(3, 4), offload=True))),
    messages.DropModel(2, "flux-1"),
    messages.ChangeWeights(2, "flux-1", {"img_in.weight": specs.Change(None, (
        specs.LowRank(SEGMENT, SEGMENT, 0.5),
        specs.LowRank(SEGMENT, SEGMENT, 0.5, (0, 8, 8))), "bfloat16", "float32")}),
    messages.ChangeWeights(2, "flux-1", {"img_in.weight": specs.Change(SEGMENT, ())}, version=2, begins=False),
    messages.ReturnWeights(2, "flux-1", 1, 2),
    messages.ParkModel(2, "flux-1", [0, 4096], [SEGMENT]),
    messages.RestoreModel(2, "flux-1"),
    messages.Conditioning(3, "conditioning-1", {"context": SEGMENT}),
    messages.DropConditioning(4, ["conditioning-1"]),
    messages.Predict(5, "flux-1", specs.Layout(cfg_degree=2),
                     [specs.Branch(SEGMENT, SEGMENT, "conditioning-1", SEGMENT)]),
    messages.Predict(5, "flux-1", specs.Layout(), [specs.Branch(
        SEGMENT, SEGMENT, "conditioning-1", SEGMENT,
        networks=(specs.NetworkUse("network-1", "blocks", 0.5, "image.0"),))]),
    messages.Predict(5, "flux-1", specs.Layout(), [], specs.Patch(2, 4, 16), keep=True),
    messages.LoadAutoencoder(6, specs.AutoencoderSpec("vae-1", "float32", {"conv_in.weight": SEGMENT}, {"scale": "8"})),
    messages.LoadNetwork(6, specs.NetworkSpec("network-1", {"320.0.0.weight": SEGMENT}, {"320.0": "linear relu"})),
    messages.Estimate(7, "vae-1", (1, 16, 8, 8), 1),
    messages.Decode(7, "vae-1", SEGMENT, SEGMENT),
    messages.Encode(7, "vae-1", SEGMENT, SEGMENT),
    messages.LoadUpscaler(6, specs.UpscalerSpec("upscaler-1", {"model.0.weight": SEGMENT}, {"scale": "4"})),
    messages.Upscale(7, "upscaler-1", [specs.Tile(1, SEGMENT, SEGMENT)], 2, 6),
    messages.Probe(8, "bfloat16"),
    messages.ReportMemory(8, 12.5),
    messages.GiveBack(8),
    messages.Abort(6),
    messages.StoreRequest(1, 4, "compare_set", ("default_pg/0//cpu//0/1",), "00ff", "01"),
    messages.StoreReply(4, "00ff"),
    messages.Stop(),
    messages.Ready(0, 4711, "cuda:0"),
    messages.StartFailed(1, "no room", by_links=True),
    messages.Phase(1, "loading weights", 3, 40, True),
    messages.Heartbeat(3, 9, 41, True, {"reserved_bytes": 1024.0}),
    messages.Done(9, 0, {"sent_bytes": 1024.0}, [messages.Span("patch", 1.5, 2.5, 900.0, 8)]),
    messages.Failed(10, 1, "cuda:1", "OutOfMemoryError", "no", "Traceback"),
    messages.Failed(10, 1, "cuda:1", "OutOfMemoryError", "no", "Traceback", {"requested_bytes": 2e9},
                    {"0,1": 3, "0>1": 1},
                    True, "3 of 12"),
]

BETWEEN_MACHINES = [
    connections.JoinRequest("machine", "", "other-pc", {"torch": "2.11.0"}, {"cuda:0": ("RTX 3090", 24e9)}),
    connections.JoinRequest("replies", "0" * 32),
    connections.JoinAccepted("0" * 32, 12.5),
    connections.Refused("torch is 2.6 there and 2.11 here"),
    connections.Start(("cuda:0", "other-pc/cuda:0"), {"NCCL_P2P_DISABLE": "1"}),
    connections.Find("/models/flux.safetensors", f"23802932552-{'0' * 64}"),
    connections.Found("/models/flux.safetensors"),
    connections.Missing("/models/flux.safetensors", "no file here has this content"),
    connections.Searching(2 ** 30, 2 ** 34),
    connections.Tensor(SEGMENT),
    connections.Piece("/dev/shm/xdit/1", 0, 2 ** 20),
    connections.Ping(),
    connections.Ended(1, "no room", "Traceback"),
]
OF_A_GROUP = EXAMPLES, messages.ADAPTERS
# which messages are drawn, in turn
KINDS = (OF_A_GROUP, OF_A_GROUP, OF_A_GROUP, (BETWEEN_MACHINES, connections.BETWEEN_MACHINES))
DECODED, FRAMED = 0.5, 0.1                 # shares of all
PATIENCE_S = 0.3                           # of a host for the rest of a frame; 60 for people


def noise(chance, examples=EXAMPLES, adapters=messages.ADAPTERS):
    """Bytes of a message with a few pieces of it removed, repeated, or in the place of others."""
    raws = [encode(message, adapters) for message in examples]
    raw = bytearray(chance.choice(raws))
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(raw) + 1)
        stop = min(len(raw), start + chance.choice([0, 1, 1, 2, 8, 64, 10 ** 6]))
        other = chance.choice(raws)
        first = chance.randrange(len(other))
        raw[start:stop] = chance.choice([b"", chance.randbytes(2), b'"', b"0", b"[", b"-",
                                         other[first:first + chance.randint(1, 40)]])
    return bytes(raw)


def decode_noise(seed, count, on_each=lambda outcome: None):
    """{outcome: how often}. A quarter are messages between machines. Raises AssertionError for bytes that are taken for
    a message which would be sent in other words."""
    chance, outcomes = random.Random(seed), collections.Counter()
    for number in range(count):
        outcomes[outcome := _decode_one(chance, *KINDS[number % len(KINDS)])] += 1
        on_each(outcome)
    return outcomes


def _decode_one(chance, examples, adapters):
    try:
        message = decode(noise(chance, examples, adapters), adapters)
    except XDiTError:
        return "refused"
    assert decode(encode(message, adapters), adapters) == message
    return "a message"


def frame(chance):
    """Bytes as they go over a connection: a length, and a message of another length, or none;
    a good frame may stand before."""
    raw = noise(chance)
    said = chance.choice([len(raw), len(raw), len(raw) - 1, len(raw) + 1, 0, -1, -2 ** 31, 2 ** 31 - 1, MAX_BYTES,
                          MAX_BYTES + 1])
    head = (struct.pack("!iQ", -1, chance.choice([len(raw), 2 ** 62, MAX_BYTES + 1])) if chance.random() < 0.1
            else struct.pack("!i", said))
    good = encode(chance.choice(EXAMPLES))
    before = struct.pack("!i", len(good)) + good if chance.random() < 0.3 else b""
    whole = before + head + raw
    return whole[:chance.randrange(len(whole) + 1)] if chance.random() < 0.3 else whole


def receive_frames(seed, count, on_each=lambda outcome: None):
    """{outcome: how often} of frames, each on an authenticated connection of its own, at the host's end of it."""
    chance, outcomes = random.Random(seed), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        channel_listener = ChannelListener(folder, PATIENCE_S)
        try:
            for _ in range(count):
                host, other = _pair(channel_listener, folder)
                sent = frame(chance)
                # the host waits for the rest, as of a worker that was stopped
                stays_open = chance.random() < 0.01
                limit_s = 10 * _wait_s(host) if stays_open else math.inf
                write(other, sent)
                if not stays_open:
                    other.close()
                outcomes[outcome := _receive_all(host, stays_open, limit_s)] += 1
                on_each(outcome)
                other.close()
                host.close()
        finally:
            channel_listener.close()
    return outcomes


def _pair(channel_listener, folder):
    """(host's end, worker's end) of a connection."""
    made = []
    worker = threading.Thread(target=lambda: made.append(connect(folder)))
    worker.start()
    host = channel_listener.accept(5)
    worker.join()
    assert host is not None, "a worker with the key was not let in"
    return host, made[0]


def _wait_s(host):
    """How long it takes now to wait for PATIENCE_S on a connection that says nothing."""
    started_s = time.monotonic()
    assert not host.raw.poll(PATIENCE_S)
    return time.monotonic() - started_s


def _receive_all(host, stays_open, limit_s):
    """What a host makes of all that a connection says, in a word."""
    started_s, num_messages = time.monotonic(), 0
    try:
        while not stays_open or host.raw.poll(0.01):
            host.receive()
            num_messages += 1
    except ChannelClosedError:
        pass
    took_s = time.monotonic() - started_s
    assert took_s < limit_s, f"waited {took_s:.1f} s, where {limit_s:.1f} s are ten times its patience"
    return "refused" if not num_messages else "messages, then refused"


def write(channel, raw):
    """Send bytes over a Channel that are no frame of its own."""
    with socket.socket(fileno=socket.dup(channel.raw.fileno())) as connected:
        connected.sendall(raw)


def dial(address):
    """A socket that is connected to a ChannelListener's address, without the key."""
    if address.isdigit():                                      # of Windows
        return socket.create_connection(("127.0.0.1", int(address)))
    knocking = socket.socket(socket.AF_UNIX)
    knocking.connect(address)
    return knocking


def knock(seed, count):
    """{outcome: how often} of strangers at the door of a group of two workers while it starts;
    the group serves afterwards."""
    chance, outcomes, over = random.Random(seed), collections.Counter(), threading.Event()
    before, strangers = set(left_behind()), []

    def stranger(address, number):
        own = random.Random(number)
        while sum(outcomes.values()) < count and not over.is_set():
            try:
                with dial(address) as knocking:
                    knocking.settimeout(1)
                    knocking.sendall(own.choice([frame(own), own.randbytes(20), b"#CHALLENGE#" * 3, b""]))
                    if own.random() < 0.5:
                        knocking.recv(own.choice([1, 64]))
                outcomes["sent away"] += 1
            except OSError:                                    # the door was full, or closed on the words
                outcomes["not heard"] += 1

    class Watched(WorkerGroup):
        def _complete_handshake(self, group_start, on_phase, check):
            address = (Path(self.segments.folder) / ADDRESS_FILE).read_text()
            strangers.extend(threading.Thread(target=stranger, args=(address, chance.random()), daemon=True)
                             for _ in range(4))
            for one in strangers:
                one.start()
            super()._complete_handshake(group_start, on_phase, check)
    group = Watched(("cpu", "cpu"))
    try:
        while sum(outcomes.values()) < count:
            assert group.request(messages.ReportMemory).keys() == {0, 1}
    finally:
        over.set()
        group.close()
        for one in strangers:
            one.join(5)
    assert not (left := still_there(before)), f"left behind: {sorted(left)}"
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100_000)
    options = parser.parse_args()
    logging.disable()                                          # a channel logs what it refuses
    decoded, framed = int(DECODED * options.count), int(FRAMED * options.count)
    for what, run, count in (("messages", decode_noise, decoded), ("frames", receive_frames, framed),
                             ("strangers at a group's door", knock, options.count - decoded - framed)):
        started_s = time.monotonic()
        outcomes = run(options.seed, count)
        told = ", ".join(f"{number} {name}" for name, number in sorted(outcomes.items()))
        print(f"{sum(outcomes.values())} {what}, seed {options.seed}: {told} ({time.monotonic() - started_s:.0f} s)")


if __name__ == "__main__":
    main()
