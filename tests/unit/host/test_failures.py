"""Worker groups of which a rank fails: they go on unless an exchange is left over that other ranks have entered."""

import functools
import subprocess
import sys
from unittest import mock

import psutil
import pytest

from xdit_backend.host import group_resources, hang_watchdog, launcher, pending_requests
from xdit_backend.host.launcher import WorkerGroup
from xdit_backend.host.unmatched_collectives import is_unmatched, lost_device
from xdit_backend.protocol.channel import pair
from xdit_backend.protocol.errors import WorkerDiedError, WorkerFailedError
from xdit_backend.protocol.messages import (
    Abort,
    Decode,
    Done,
    Failed,
    Heartbeat,
    LoadModel,
    Phase,
    Probe,
    ReportMemory,
)
from xdit_backend.protocol.shared_memory import Segment
from xdit_backend.protocol.specs import ModelSpec

TWO_GPUS = ("cuda:0", "cuda:1")


class PretendedGroup(WorkerGroup):
    """A worker group whose workers are ends of pipes, so that devices may be any and answers come in any order."""

    def _launch(self, variables, check):
        self.workers = {}

    def _complete_handshake(self, group_start, on_phase, check):
        for rank in range(len(self.devices)):
            self._resources.channels[rank], self.workers[rank] = pair()

    def answer(self, request, failed=(), done=(), entered=None):
        """entered: {rank: the exchanges that it has entered}."""
        entered = entered or {}
        for rank in failed:
            self.workers[rank].send(failure(rank, entered.get(rank), request))
        for rank in done:
            self.workers[rank].send(Done(request, rank, entered=entered.get(rank, {})))

    @property
    def goes_on(self):
        return len(self._resources.channels) == len(self.devices)


def all_that_came(worker):
    while worker.raw.poll():
        yield worker.receive()


def failure(rank, entered=None, request=1, kind="OutOfMemoryError", message="no room", is_broken=False):
    return Failed(request, rank, f"device {rank}", kind, message, "Traceback", {}, entered or {}, is_broken)


class Clock:
    """What the launcher takes for the module time: it goes on when a test says so, however busy the machine is."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (launcher, group_resources, pending_requests, hang_watchdog):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def group(request, clock):
    group = PretendedGroup(request.param)
    yield group
    group.close()


def with_devices(*devices):
    return pytest.mark.parametrize("group", devices, indirect=True, ids=str)


@pytest.mark.parametrize("failed, done, running, is_left", [
    ([failure(0)], {}, {1: {}}, False),                                            # the other one computes its part
    ([failure(0)], {1: {}}, {}, False),                                            # and has answered
    ([failure(0)], {}, {1: {"0,1": 1}}, True),                                     # it waits for the failed one
    ([failure(0)], {1: {"0,1": 1}}, {}, True),                                     # or its device does
    ([failure(0, {"0,1": 3})], {}, {1: {"0,1": 3}}, False),                        # it is not further
    ([failure(0, {"0,1": 3})], {}, {1: {"0,1": 2}}, False),                        # it has yet to come there
    ([failure(0, {"0,1": 3})], {1: {"0,1": 2}}, {}, True),                         # it never came there
    ([failure(0, {"0,1": 3})], {}, {1: {"0,1": 4}}, True),
    ([failure(0, {"0,1": 3}), failure(1, {"0,1": 3})], {}, {}, False),             # both at one place
    ([failure(0, {"0,1": 3}), failure(1, {"0,1": 4})], {}, {}, True),
    ([failure(0, {"0,1": 1}, is_broken=True)], {}, {1: {"0,1": 1}}, True),
    ([failure(0, {"0": 1}, is_broken=True)], {}, {}, False),                       # alone
    ([failure(1, {"2,3": 1})], {}, {0: {"0,1": 1}, 2: {"2,3": 1}, 3: {}}, True),   # one group of several
    ([failure(1)], {}, {0: {}, 2: {"2,3": 5}, 3: {"2,3": 4}}, False),              # others go on between themselves
    ([failure(0)], {}, {1: {"0>1": 1}}, True),                                     # a stage waits for the one before
    ([failure(1, {"0>1": 2})], {0: {"0>1": 2}}, {}, False),                        # all that was sent is received
    ([failure(1, {"0>1": 1})], {0: {"0>1": 2}}, {}, True)])
def test_exchanges_that_others_have_entered_without_a_failed_rank_are_left_over(failed, done, running, is_left):
    failed = {each.rank: each for each in failed}
    done = {rank: Done(1, rank, entered=entered) for rank, entered in done.items()}

    assert is_unmatched(failed, done, running) is is_left


@pytest.mark.parametrize("kind, message, is_lost", [
    ("OutOfMemoryError", "no room", False), ("AcceleratorError", "", True), ("CopyError", "no memory", True),
    ("RuntimeError", "CUDA error: an illegal memory access", True)])
def test_a_device_that_is_lost_ends_the_group_whatever_was_exchanged(kind, message, is_lost):
    assert lost_device([failure(0, kind=kind, message=message)]) is is_lost


@with_devices(TWO_GPUS, ("cpu", "cpu"))
@pytest.mark.parametrize("entered, goes_on", [({}, True), ({0: {"0,1": 2}, 1: {"0,1": 2}}, True),
                                              ({0: {"0,1": 1}, 1: {"0,1": 2}}, False)], ids=str)
def test_a_group_outlives_a_failed_rank_where_no_exchange_is_left_over(group, entered, goes_on):
    request = group.post(ReportMemory)
    group.answer(request, failed=[0], done=[1], entered=entered)

    with pytest.raises(WorkerFailedError, match=r"rank 0 \(device 0\) failed with OutOfMemoryError: no room"):
        group.wait([request])

    assert group.goes_on is goes_on
    if goes_on:
        following = group.post(ReportMemory)
        group.answer(following, done=[0, 1])
        assert group.wait([following])[1].keys() == {0, 1}


@with_devices(TWO_GPUS)
def test_others_may_take_as_long_as_they_need_for_a_part_without_exchanges(group, clock):
    request = group.post(ReportMemory)
    group.answer(request, failed=[0])
    heartbeats = iter(range(30))

    def heartbeat():
        clock.sleep(launcher.STRAGGLER_S / 5)
        if next(heartbeats, None) is None:
            group.answer(request, done=[1])
        else:
            group.workers[1].send(Heartbeat(1, request, 0, False))
    with pytest.raises(WorkerFailedError, match="no room"):
        group.wait([request], check=heartbeat)

    assert group.goes_on and next(heartbeats, None) is None


@with_devices(TWO_GPUS, ("cpu", "cpu"))
def test_a_rank_that_waits_for_a_failed_one_is_ended_by_its_next_heartbeat(group, clock):
    request, before_s = group.post(ReportMemory), clock.now_s
    group.answer(request, failed=[0], entered={0: {"0,1": 4}})
    group.workers[1].send(Heartbeat(1, request, 4, True, entered={"0,1": 5}))

    with pytest.raises(WorkerFailedError, match="no room"):
        group.wait([request], check=lambda: clock.sleep(0.2))

    assert not group.goes_on and clock.now_s - before_s < 1


@with_devices(TWO_GPUS)
def test_a_failure_of_a_cancelled_step_ends_the_group_also_where_nobody_asks_for_more(group):
    """The answers are taken in by who looks at the group's state."""
    cancelled, request = abandon(group)
    group.answer(request, done=[0, 1])
    group.wait([request])
    group.answer(cancelled, failed=[0], done=[1], entered={1: {"0,1": 1}})

    group.receive_pending()

    assert not group.goes_on and not group.alive


def abandon(group):
    """A request that nobody waits for any more; returns the next one."""
    class Cancelled(Exception):
        pass

    def cancel():
        raise Cancelled
    request = group.post(ReportMemory)
    with pytest.raises(Cancelled):
        group.wait([request], check=cancel)
    return request, group.post(ReportMemory, answering={1})


@with_devices(TWO_GPUS, ("cpu", "cpu"))
def test_a_failure_in_a_cancelled_step_is_not_passed_over(group):
    """The next command's answer is there: what it holds may come of the exchange that the failed rank never joined."""
    cancelled, request = abandon(group)
    group.answer(cancelled, failed=[0], done=[1], entered={1: {"0,1": 1}})
    group.answer(request, done=[0, 1])

    with pytest.raises(WorkerDiedError, match=r"ended because rank 0 \(device 0\) failed with OutOfMemoryError"):
        group.wait([request])
    assert not group.goes_on


@with_devices(("cpu", "cpu"))
def test_ranks_are_told_of_a_load_or_a_decode_that_was_given_up_and_of_nothing_that_they_do_not_leave(group):
    spec = ModelSpec("name", "SD3", "file.safetensors", "float32", "float32")
    decode = functools.partial(Decode, autoencoder="vae", latent=Segment("/a", "float32", (1,)),
                               image=Segment("/b", "float32", (1,)))
    for command, told in ((lambda request: LoadModel(request, spec), [Abort(1)]), (decode, [Abort(2)]),
                          (ReportMemory, [])):
        request = group.post(command)
        group.answer(request, done=[0])
        with pytest.raises(KeyboardInterrupt):
            group.wait([request], check=mock.Mock(side_effect=[None, None, KeyboardInterrupt]))
        heard = {rank: list(all_that_came(worker)) for rank, worker in group.workers.items()}

        assert not any(isinstance(message, Abort) for message in heard[0])         # it has answered
        assert heard[1][1:] == told, command


@with_devices(("cpu", "cpu"))
def test_a_rank_that_is_stuck_in_a_cancelled_step_ends_the_next(group, clock):
    cancelled, request = abandon(group)
    group.answer(cancelled, failed=[0])

    def heartbeat():
        clock.sleep(launcher.STRAGGLER_S / 2)
        group.workers[1].send(Heartbeat(1, cancelled, 0, True))
    with pytest.raises(WorkerDiedError, match="Queue the prompt again"):
        group.wait([request], check=heartbeat)

    assert not group.goes_on


@with_devices(("cpu", "cpu"))
def test_a_worker_that_beats_may_take_as_long_as_it_needs(group, clock, monkeypatch):
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", "0.5")
    request = group.post(lambda request: Decode(request, "vae", Segment("/a", "float32", (1,)),
                                                Segment("/b", "float32", (1,))))
    group.answer(request, done=[0])
    heartbeats = iter(range(8))

    def heartbeat():
        clock.sleep(0.1)
        if next(heartbeats, None) is not None:
            group.workers[1].send(Heartbeat(1, request, 0, False))
    with pytest.raises(WorkerDiedError, match=r"rank 1 \(cpu\) has given no sign of life for \d s while decoding"):
        group.wait([request], check=heartbeat)

    assert next(heartbeats, None) is None and not group.goes_on


@pytest.mark.parametrize("code", [3, 0])
@with_devices(("cpu", "cpu"))
def test_a_worker_that_ended_is_named_though_its_connection_is_open(group, clock, code):
    """As where a process that it forked has a copy of its socket."""
    process = subprocess.Popen([sys.executable, "-c", f"input(); raise SystemExit({code})"], stdin=subprocess.PIPE)
    group._resources.workers[1] = psutil.Process(process.pid)
    request = group.post(ReportMemory)
    rounds = iter(range(6))

    def check():
        clock.sleep(1)
        number = next(rounds)                                  # long before a silence counts
        group.workers[0].send(Heartbeat(0, request, 0, True))
        if number == 1:
            process.communicate(b"\n")
    with pytest.raises(WorkerDiedError, match=r"^Worker rank 1 \(cpu\) died"):
        group.wait([request], check=check)

    assert next(rounds) >= 2 and not group.goes_on


@with_devices(("cpu", "cpu"))
def test_ranks_that_all_wait_for_each_other_and_get_nothing_hang(group, clock, monkeypatch):
    """Rank 0 has done its part, or lies in another exchange; rank 1 beats, and waits, for ever."""
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", "0.5")
    request = group.post(lambda request: Probe(request, "float32"), activity="step 2 of 9")
    group.workers[0].send(Phase(0, "measuring", 3, 4))

    def heartbeat():
        clock.sleep(0.1)
        group.workers[0].send(Heartbeat(0, request, 7, True))
        group.workers[1].send(Heartbeat(1, request, 8, True))
    with pytest.raises(WorkerDiedError, match=r"rank 0 \(cpu\) hangs while measuring \(step 2 of 9\), measuring 3 of "
                                              r"4: rank 0 \(cpu\) and rank 1 \(cpu\) waited for other ranks "
                                              r"without progress for \d s"):
        group.wait([request], check=heartbeat)

    assert not group.goes_on


@with_devices(("cpu", "cpu"))
def test_who_waits_for_a_rank_that_has_said_why_it_failed_does_not_hang(group, clock, monkeypatch):
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", "0.5")
    request = group.post(ReportMemory)
    group.answer(request, failed=[0])

    def heartbeat():
        clock.sleep(0.1)
        group.workers[1].send(Heartbeat(1, request, 8, True))
    with pytest.raises(WorkerFailedError, match="no room"):
        group.wait([request], check=heartbeat)

    assert not group.goes_on


@pytest.mark.parametrize("gets_on", ["computes", "gets what it waits for", "began anew", "answers"])
@with_devices(("cpu", "cpu"))
def test_who_waits_for_a_rank_that_gets_on_does_not_hang(group, clock, monkeypatch, gets_on):
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", "0.5")
    request = group.post(ReportMemory)
    heartbeats = iter(range(12))

    def heartbeat():
        clock.sleep(0.1)
        if (index := next(heartbeats, None)) is None:
            group.answer(request, done=[0, 1])
        elif gets_on == "answers" and index == 8:
            # the other one got what it waited for then, and beats later
            group.answer(request, done=[1])
        elif gets_on == "answers" and index > 3:
            group.workers[0].send(Heartbeat(0, request, 7, True))
            group.workers[1].send(Heartbeat(1, request, 0, False))
        else:
            group.workers[0].send(Heartbeat(0, request, 7, True))
            group.workers[1].send(Heartbeat(1, request + index * (gets_on == "began anew"),
                                       8 + index * (gets_on == "gets what it waits for"), gets_on != "computes"))

    assert group.wait([request], check=heartbeat)[0] == request and group.goes_on


@with_devices(("cpu", "cpu"))
def test_time_in_which_nobody_listened_or_a_rank_owed_nothing_is_no_silence(group, clock, monkeypatch):
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", "0.5")
    cancelled, request = abandon(group)
    clock.sleep(hang_watchdog.AWAY_S + 1)                           # ComfyUI did something else
    group.answer(request, done=[1])
    assert group.wait([request])[0] == request

    following = group.post(ReportMemory)                       # rank 0 owes three answers, rank 1 two
    for number in (cancelled, request, following):
        group.answer(number, done=[0])
    for number in (cancelled, following):
        group.answer(number, done=[1])
    assert group.wait([following])[0] == following and group.goes_on
