"""What is looked at before workers start, and workers whose links fail:
real processes, with torch's transfer replaced in them."""

import collections
import functools
import importlib.metadata
import itertools
import os
import re
import shutil

import pytest
import torch

from tests.conftest import left_behind, still_there
from xdit_backend import system
from xdit_backend.host import handshake, preflight, torchrun
from xdit_backend.host.exit_report import ExitReport
from xdit_backend.host.launcher import WorkerGroup
from xdit_backend.protocol.channel import Channel, pair
from xdit_backend.protocol.errors import LinkError, WorkerStartError
from xdit_backend.protocol.messages import JOINING, TRYING_LINKS, Phase, StartFailed

GB = 2 ** 30


@pytest.mark.parametrize("release, works", [((2, 6), True), ((2, 7), True), ((2, 8), False), ((2, 9), False),
                                            ((2, 10), False), ((2, 11), True), ((2, 14), True)])
def test_releases_of_torch_whose_gloo_fails_on_windows_are_rejected_there_with_what_to_install(release, works):
    version = f"{release[0]}.{release[1]}.0+cu128"
    if works:
        preflight.check_gloo(release, version, ((2, 8), (2, 11)))
    else:
        with pytest.raises(WorkerStartError, match=rf"^Install PyTorch 2\.11 or newer .* and {re.escape(version)}"):
            preflight.check_gloo(release, version, ((2, 8), (2, 11)))
    if system.HAS_TORCHRUN:
        preflight.check_gloo(release, version)


@pytest.mark.parametrize("package, version, words", [
    ("torch", "2.5.1", "Update torch .*2.6 or newer, and 2.5.1 is installed"),
    ("diffusers", "0.34.0", "Update diffusers .*0.35 or newer, and 0.34.0"),
    ("diffusers", None, "diffusers 0.35 or newer, and this Python does not have it")])
def test_packages_that_are_too_old_or_missing_are_named(monkeypatch, package, version, words):
    real = importlib.metadata.version

    def fake(name):
        if name != package:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version
    preflight.check_versions()
    monkeypatch.setattr(importlib.metadata, "version", fake)

    with pytest.raises(WorkerStartError, match=words):
        preflight.check_versions()


@pytest.mark.parametrize("built, count, devices, words", [
    (None, 0, ("cuda:0",), "is built for CPUs"),
    ("12.8", 0, ("cuda:0", "cuda:1"), "there is no cuda:0, cuda:1. PyTorch finds none: check that the driver"),
    ("12.8", 2, ("cuda:1", "cuda:2"), "to devices of this machine: there is no cuda:2. PyTorch finds cuda:0, "
                                      "cuda:1.")])
def test_devices_that_are_not_there_are_named(monkeypatch, built, count, devices, words):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    preflight.check_devices(("cpu", "cpu"))
    preflight.check_devices(tuple(f"cuda:{index}" for index in range(count)))
    with pytest.raises(WorkerStartError, match=words):
        preflight.check_devices(devices)


def test_too_little_host_memory_is_refused_in_numbers(monkeypatch):
    monkeypatch.setattr(preflight, "available_memory", lambda: (0.75 * GB, 4 * GB))

    preflight.check_memory(3)
    with pytest.raises(WorkerStartError, match=r"4 workers need at least 1.0 GB of system RAM .* 768 MB of 4.0 GB "
                                               r"are free"):
        preflight.check_memory(4)


@pytest.mark.parametrize("free, disk_free, outcome", [
    (GB, GB, None), (50 * 2 ** 20, GB, "warning"), (50 * 2 ** 20, 20 * 2 ** 20, "refused"), (GB, 0, None),
    (4096, GB, "full")])
def test_little_shared_memory_is_told_and_too_little_refused(monkeypatch, free, disk_free, outcome):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage",
                        lambda folder: usage(0, 0, free if folder.startswith("/dev/shm") else disk_free))

    if outcome == "full":
        with pytest.raises(WorkerStartError, match=r"^Delete unneeded files in /dev/shm: it is full"):
            preflight.check_shared_memory("/dev/shm/xdit-1", "/tmp/xdit-1")
        return
    if outcome == "refused":
        with pytest.raises(WorkerStartError,
                           match=r"/dev/shm, which has 50 MB free, or /tmp, which has 20 MB; at least 64 MB"):
            preflight.check_shared_memory("/dev/shm/xdit-1", "/tmp/xdit-1")
        return
    warnings = preflight.check_shared_memory("/dev/shm/xdit-1", "/tmp/xdit-1")
    assert [warning.startswith("/dev/shm has 50 MB free") for warning in warnings] == [True] * (outcome == "warning")


def test_only_what_is_not_off_already_is_another_way(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    offs = lambda devices, **environment: [off for off, _ in preflight.fallbacks(devices, environment)]  # noqa: E731

    assert offs(("cuda:0", "cuda:1")) == ["", "peer-to-peer copies",
                                          "peer-to-peer copies and shared memory between the devices"]
    assert len(offs(("cuda:0", "cuda:1"), NCCL_P2P_DISABLE="1")) == 2
    assert len(offs(("cuda:0", "cuda:1"), NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")) == 1
    assert len(offs(("cuda:0", "other/cuda:0"))) == 3
    assert offs(("cpu", "cpu")) == offs(("cuda:0", "cuda:0")) == offs(("cuda:0",)) == [""]


FAULTY = """
import os
import signal
import torch.distributed as dist
transfer = dist.all_to_all_single

def faulty(receive, send, *args, **kwargs):
    if os.environ["RANK"] == "1" and not os.environ.get("NCCL_P2P_DISABLE"):
        {fault}
    return transfer(receive, send, *args, **kwargs)
dist.all_to_all_single = faulty
"""
HANG, WRONG = "signal.pause()", "send = send + 1"


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Have the workers' transfers fail so, where peer-to-peer copies are not off."""
    def make(fault, ways=2):
        (tmp_path / "sitecustomize.py").write_text(FAULTY.format(fault=fault))
        (tmp_path / "xdit_backend").symlink_to(torchrun.ROOT / "xdit_backend")
        monkeypatch.setattr(torchrun, "ROOT", tmp_path)
        monkeypatch.setattr(handshake, "LINK_TIMEOUT_S", 5)
        monkeypatch.setattr(preflight, "fallbacks", lambda devices: list(preflight.FALLBACKS[:ways]))
    return make


@pytest.mark.slow
def test_workers_whose_peer_to_peer_copies_fail_start_without_and_say_so(faulty):
    before, phases = set(left_behind()), []
    faulty(HANG)

    group = WorkerGroup(("cpu", "cpu"), phases.append)
    group.close()

    assert group.num_fallbacks == 1
    warning, = (warning for warning in group.warnings if not warning.startswith("/dev/shm"))
    assert warning.startswith("Peer-to-peer copies are disabled between cpu, cpu") and "NCCL_P2P_DISABLE=1" in warning
    assert re.search(r"a transfer between them was not complete after 5 s on rank 0 \(cpu\), rank 1 \(cpu\)", warning)
    assert warning in [phase.text for phase in phases]
    assert not still_there(before)


@pytest.mark.slow
def test_workers_that_cannot_reach_each_other_in_any_way_are_refused(faulty):
    before = set(left_behind())
    faulty(WRONG, ways=1)

    with pytest.raises(WorkerStartError, match=r"cannot exchange tensors: data from cpu arrived "
                                               r"corrupted on cpu \(rank \d\)"):
        WorkerGroup(("cpu", "cpu"))

    assert not still_there(before)


class Torchrun:
    """Test double of WorkerProcesses, and of the ChannelListener that its workers connect to."""

    def __init__(self, num_workers):
        self.pid, self.failure, self.code = os.getpid(), None, None
        pairs = [[each.raw for each in pair()] for _ in range(num_workers)]
        self.hosts, self.channels = [Channel(host) for host, _ in pairs], [Channel(worker) for _, worker in pairs]

    def workers(self):
        return {}

    def first_failure(self):
        return self.failure

    def accept(self, timeout_s):
        return self.hosts.pop(0) if self.hosts else None

    @property
    def has_ended(self):
        return self.code is not None

    def says(self, rank, told):
        self.channels[rank].send(told)

    def loses(self, rank, code):
        """A worker ends; torchrun ends the others for it."""
        self.channels[rank].close()
        self.failure = rank, code

    def ends(self):
        self.code = 1
        for worker in self.channels:
            worker.close()


def greet(torchrun, folder, check, ways=2):
    """Wait for the workers of two CUDA devices of this machine."""
    exit_report = ExitReport(("cuda:0", "cuda:1"), {}, folder)
    exit_report.processes = torchrun
    group_start = handshake.GroupStart(("cuda:0", "cuda:1"), [0, 1], torchrun, torchrun, [], {}, exit_report, ways > 1)
    handshake.Handshake(group_start, {}, {}, lambda phase: None, check).run()


@pytest.mark.parametrize("said, words", [
    ([JOINING], None), ([JOINING, TRYING_LINKS], "a transfer between them was not complete after 0 s"),
    (["joins for too long"], "they had not joined after 0 s")])
def test_links_are_blamed_for_what_takes_long_after_all_have_joined(tmp_path, monkeypatch, said, words):
    """Joining itself may take minutes: NCCL's libraries come from a disk."""
    monkeypatch.setattr(handshake, "LINK_TIMEOUT_S", 0)
    if said == ["joins for too long"]:
        said = [JOINING]
        monkeypatch.setattr(handshake, "JOIN_TIMEOUT_S", 0)
    torchrun, looks = Torchrun(2), itertools.count()
    for text in said:
        for rank in range(2):
            torchrun.says(rank, Phase(rank, text))

    def look():
        if next(looks) == 10:
            raise TimeoutError
    with pytest.raises(LinkError if words else TimeoutError, match=words):
        greet(torchrun, tmp_path, look)


NO_DEVICE, NO_LINK = StartFailed(0, "cuda:0 cannot be used"), StartFailed(
    0, "cuda:1 sent cuda:0 (rank 0) other numbers", by_links=True)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("told, code, error, words", [
    (NO_DEVICE, -9, WorkerStartError, "cuda:0 cannot be used"),
    (NO_DEVICE, -6, WorkerStartError, "cuda:0 cannot be used"),
    (NO_LINK, -6, LinkError, "cuda:1 sent cuda:0"), (NO_LINK, -9, None, "exit code -9, killed")])
def test_why_workers_cannot_start_does_not_hang_on_who_is_seen_first(
    tmp_path, monkeypatch, told, code, error, words, ways):
    """A rank says why, another ends, and torchrun ends: in every order, each as the host looks, or all before."""
    for order, at_once in itertools.product(itertools.permutations(range(3)), (False, True)):
        if order.index(0) > order.index(2):                    # torchrun ends the worker that would say why
            continue
        torchrun = Torchrun(2)
        for rank in range(2):
            torchrun.says(rank, Phase(rank, JOINING))
        whys = functools.partial(torchrun.says, 0, told), functools.partial(torchrun.loses, 1, code), torchrun.ends
        events = [whys[number] for number in order]
        torchrun.failure = None

        def look(events=events, at_once=at_once):
            for event in events[:] if at_once else events[:1]:
                events.remove(event)
                event()
        with pytest.raises((WorkerStartError, LinkError)) as raised:
            greet(torchrun, tmp_path, look, ways)

        assert type(raised.value) is (error or (LinkError if ways > 1 else WorkerStartError)), order
        assert (words in str(raised.value)
                or (error is None and ways > 1 and "a worker ended in a transfer" in str(raised.value))), order
