"""The memory of a run, as the system says it, and when it is given back:
kept between the prompts of a queue, not for longer."""

import queue
import threading
from pathlib import Path

import pytest
import torch

from tests.unit.host.conftest import layout
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.host.client import Client
from xdit_backend.tools.bench.synthetic_model import Setting, calls, write_model
from xdit_backend.worker import memory as memory_module
from xdit_backend.worker.command_loop import _next
from xdit_backend.worker.memory import Memory

SAYS = pytest.mark.skipif(not memory_module.STATUS.exists(), reason="the system does not say")
MB = 2 ** 20


def test_memory_is_told_where_the_system_says_little(tmp_path, monkeypatch):
    """As in gVisor, under which some clouds run containers."""
    monkeypatch.setattr(memory_module, "STATUS", tmp_path / "status")
    memory_module.STATUS.write_text("Name:\tpython\nVmSize:\t  100 kB\nVmRSS:\t  90 kB\n")
    memory = Memory(torch.device("cpu"))
    memory.begin_run()
    memory.end_run(2 ** 40)

    assert memory.report()["reserved_bytes"] > 2 ** 20 and memory.report()["activation_bytes"] == 0


@SAYS
def test_a_run_s_memory_is_what_it_took_and_gave_back():
    memory, size = Memory(torch.device("cpu")), 300 * 2 ** 20
    # or the block goes where an earlier test's were, and takes nothing more
    memory.give_back()
    memory.begin_run()
    before = memory.report()
    block = torch.ones(size, dtype=torch.uint8)
    during = memory.report()
    del block

    # The system may take pages of libraries back meanwhile.
    assert during["reserved_bytes"] - before["reserved_bytes"] > 0.4 * size
    assert 0.4 * size < memory.report()["activation_bytes"] < 1.6 * size
    assert memory.report()["total_bytes"] > 2 ** 30


def take(num_bytes):
    """Memory as a run takes it: blocks of the C library's own heap, which it keeps when they are freed,
    but for the last."""
    blocks = [torch.ones(MB // 16, dtype=torch.uint8) for _ in range(16 * num_bytes // MB)]
    last = torch.ones(16)
    blocks.clear()
    return last


@SAYS
def test_runs_of_a_queue_count_alike_and_memory_is_given_back_after_a_while(monkeypatch):
    monkeypatch.setattr(memory_module, "IDLE_S", 0.2)
    memory, commands, given_back = Memory(torch.device("cpu")), queue.SimpleQueue(), []
    memory.give_back()
    monkeypatch.setattr(memory, "give_back", lambda: given_back.append(1) or Memory.give_back(memory))
    took = []
    for _ in range(3):
        memory.begin_run()
        # in a run nothing is given back, however long the host computes
        assert memory.idle_timeout_s is None
        last = take(200 * MB)
        memory.end_run(2 ** 40)
        took.append(memory.report()["activation_bytes"])
        del last
    before = memory.report()["reserved_bytes"]
    assert not given_back and all(150 * MB < size < 300 * MB for size in took), took

    threading.Timer(1.0, commands.put, ["a command"]).start()

    assert _next(commands, memory) == "a command"
    assert given_back == [1] and memory.idle_timeout_s is None  # once, and then it waits for commands alone
    assert memory.report()["reserved_bytes"] <= before
    assert memory.report()["activation_bytes"] > 150 * MB      # it is still told what the last run took
    memory.begin_run()
    assert memory.report()["activation_bytes"] < 50 * MB       # another run's


@SAYS
def test_a_command_in_time_finds_the_memory(monkeypatch):
    """Questions alone do not put it off."""
    memory, commands = Memory(torch.device("cpu")), queue.SimpleQueue()
    memory.begin_run()
    memory.end_run(2 ** 40)
    first = memory.idle_timeout_s
    commands.put("ReportMemory")

    assert _next(commands, memory) == "ReportMemory"
    assert 0 < memory.idle_timeout_s <= first <= memory_module.IDLE_S


@SAYS
@pytest.mark.parametrize("unused_bytes, is_cached", [(4.2 * 200 * MB, True), (2 * 200 * MB, False)])
def test_where_memory_is_short_a_run_s_is_given_back_at_once(unused_bytes, is_cached, monkeypatch):
    memory = Memory(torch.device("cpu"))
    memory.give_back()
    monkeypatch.setattr(memory_module, "_status",
                        lambda: {"RssAnon": grown[0], "VmHWM": 0, "VmRSS": 0, "RssFile": 0, "RssShmem": 0})
    grown = [100 * MB]
    memory.begin_run()
    grown[0] += 200 * MB

    memory.end_run(unused_bytes)

    assert (memory.idle_timeout_s is not None) == is_cached


@pytest.mark.parametrize("unused_bytes, num_emptied", [(4.1 * 200 * MB, 0), (3.9 * 200 * MB, 2)])
def test_on_a_gpu_a_run_s_memory_is_kept_for_the_next_one_where_much_is_unused(unused_bytes, num_emptied, monkeypatch):
    """ComfyUI's own models use the card too, and look at what is free."""
    emptied, reserved = [], [300 * MB]

    def empty():
        emptied.append(1)
        reserved[0] = 100 * MB
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 * MB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    memory = Memory(torch.device("cuda"))
    for _ in range(2):
        reserved[0] = 300 * MB
        memory.begin_run()
        memory.end_run(unused_bytes)

    assert len(emptied) == num_emptied and (memory.idle_timeout_s is None) == bool(num_emptied)
    assert memory.give_back() == {"given_bytes": 0 if num_emptied else 200 * MB} and memory.idle_timeout_s is None


@SAYS
def test_the_next_run_of_a_queue_has_its_memory_mapped(tmp_path):
    """A worker's page faults in a run after one of the same size, and after its memory was asked for."""
    setting = Setting(256, 1, 1, 2304, 64, "float32")
    write_model(setting, tmp_path)
    header = open_checkpoint(tmp_path)
    spec, requested = header.spec("float32", "float32"), calls(setting, 1)
    client = Client(("cpu",))

    def run():
        """(page faults, activation_bytes) of a run of two steps."""
        before = faults()
        for _ in range(2):
            client.predict(spec, layout(), 16, requested, run="a run")
        client.end_run("a run")
        return faults() - before, client.report_memory()[0]["activation_bytes"]

    def faults():
        pid = int(client.report_memory()[0]["pid"])
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])

    try:
        run()
        client.give_back()
        first, second = run(), run()
        client.give_back()
        third = run()
    finally:
        client.close()

    assert 0.7 < second[1] / first[1] < 1.3 and first[1] > 10 * MB, (first, second)
    assert second[0] < first[0] / 4 and second[0] < third[0] / 4, (first, second, third)
