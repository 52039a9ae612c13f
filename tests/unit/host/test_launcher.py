"""Worker groups start, fail and end in defined ways, and leave nothing behind."""

import os
import re
import stat
import subprocess
import sys
import time

import psutil
import pytest
import torch

from tests.conftest import ROOT, left_behind, still_there
from tests.support.model_zoo import example
from tests.support.tolerances import within
from tests.support.worker_processes import below
from tests.unit.host.conftest import call_of, layout
from xdit_backend.host import group_resources, logs, preflight, torchrun
from xdit_backend.host.client import Client
from xdit_backend.host.launcher import WorkerGroup
from xdit_backend.host.torchrun import environment_of
from xdit_backend.protocol import shared_memory
from xdit_backend.protocol.errors import WorkerDiedError, WorkerStartError
from xdit_backend.protocol.messages import TRYING_LINKS, ReportMemory
from xdit_backend.protocol.shared_memory import SegmentStore


def gone(before, within_s=120):
    return not still_there(before, within_s)


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(monkeypatch, supervisor):
    before, phases = set(left_behind()), []
    monkeypatch.setattr(preflight, "check_devices", lambda devices: None)      # as for a device that fails later

    with pytest.raises(WorkerStartError) as error:
        WorkerGroup(("cuda:99",), phases.append, supervisor=supervisor)

    assert "cuda:99" in str(error.value) and "Error" in str(error.value)
    assert phases and phases[0].text == "starting workers"
    assert gone(before)


@pytest.mark.slow
def test_workers_take_nothing_from_the_environment_that_changes_results(spec_of, monkeypatch, supervisor):
    """The first of these sends diffusers' attention past the hook, the second is read by CPU kernels."""
    one = example("Flux.1")
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "_native_math")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("LC_ALL", "C")
    client = Client(("cpu", "cpu"), supervisor=supervisor)
    try:
        pid = int(client.report_memory()[0]["pid"])
        theirs = psutil.Process(pid).environ()
        result, = client.predict(spec_of("Flux.1"), layout(ring=2), 4, [call_of(one)])
    finally:
        client.close()

    assert theirs["LC_ALL"] == "C" and "PATH" in theirs
    assert not {"DIFFUSERS_ATTN_BACKEND", "ATEN_CPU_CAPABILITY"} & theirs.keys()
    within((result - one.run()).abs().max(), 1e-6)             # predictions come back in float32


def test_cuda_workers_have_an_allocator_of_their_own(monkeypatch):
    """ComfyUI sets its own, under which an allocation may wait for a receive that is posted ahead."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")

    for devices, allocator in ((("cuda:0", "cuda:1"), "expandable_segments:True"), (("cpu", "cpu"), None)):
        environment = environment_of(devices)
        assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == allocator and "PYTORCH_ALLOC_CONF" not in environment


def test_communicators_are_blocking_and_variables_for_a_record_of_exchanges_are_inherited(monkeypatch):
    """torch 2.6.0 to 2.7.0 hang at random with others."""
    requested = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_CPP_STACK": "1", "NCCL_DEBUG": "INFO"}
    for name, value in {**requested, "TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "TORCH_LOGS": "all"}.items():
        monkeypatch.setenv(name, value)

    for devices in (("cuda:0", "cuda:1"), ("cpu", "cpu")):
        environment = environment_of(devices)
        assert environment["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "0" and "TORCH_LOGS" not in environment
        assert requested.items() <= environment.items()


def test_interfaces_are_named_exactly_and_streams_have_queues_of_their_own(monkeypatch):
    """To NCCL "eth1" is also eth10; CUDA has eight queues by default, fewer than a worker's streams."""
    two = environment_of(("cuda:0", "cuda:1"), 2, "eth1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    chosen = environment_of(("cuda:0", "cuda:1"))

    assert two["NCCL_SOCKET_IFNAME"] == "=eth1" and two["GLOO_SOCKET_IFNAME"] == "eth1"
    assert two["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and chosen["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
    assert chosen["NCCL_SOCKET_IFNAME"] == "=lo"


def test_giving_up_while_starting_leaves_nothing():
    before = set(left_behind())

    def cancel():
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        WorkerGroup(("cpu", "cpu"), check=cancel)

    assert gone(before)


def test_a_group_starts_serves_and_ends(tmp_path, monkeypatch):
    """Also where the nodes are in a folder whose name has a colon, which Python takes for two in PYTHONPATH."""
    place = tmp_path / "a:b"
    place.mkdir()
    (place / "xdit_backend").symlink_to(torchrun.ROOT / "xdit_backend")
    monkeypatch.setattr(torchrun, "ROOT", place)
    before = set(left_behind())
    group = WorkerGroup(("cpu", "cpu"))

    first = {rank: reply.numbers["pid"] for rank, reply in group.request(ReportMemory).items()}
    second = {rank: reply.numbers["pid"] for rank, reply in group.request(ReportMemory).items()}
    group.close()
    group.close()

    assert first == second and len(set(first.values())) == 2
    assert not group.alive and gone(before)


@pytest.mark.slow
def test_a_killed_worker_fails_the_request_by_name_and_the_client_starts_anew(
    spec_of, tmp_path, monkeypatch, supervisor):
    """What the workers printed stays, in the private folder that the error names; the doctor tells of the error, but
    not of folders.

    The exit code is known though torchrun could write nothing, as on a full disk.
    """
    monkeypatch.setenv("XDIT_LOG_FOLDER", str(tmp_path / "logs"))
    before = set(left_behind())
    client, call = Client(("cpu", "cpu"), supervisor=supervisor), call_of(example("SD3"))
    try:
        want, = client.predict(spec_of("SD3"), layout(ring=2), 4, [call])
        victim = int(client.report_memory()[1]["pid"])
        (client.group._resources.exit_report.folder / logs.TORCHRUN).unlink()
        monkeypatch.setattr(logs, "MIN_BYTES", 2 ** 62)
        psutil.Process(victim).kill()
        with pytest.raises(WorkerDiedError, match=r"Worker rank 1 \(cpu\) died \(exit code -9, killed\)") as died:
            client.predict(spec_of("SD3"), layout(ring=2), 4, [call])
        result, = client.predict(spec_of("SD3"), layout(ring=2), 4, [call])
    finally:
        client.close()

    assert torch.equal(result, want)
    assert gone(before)
    folder, second = sorted((tmp_path / "logs").iterdir())
    assert f"All output of the workers is in {folder}." in str(died.value)
    assert str(died.value).endswith(f"(The last lines are missing: the disk of {folder} is full.)")
    assert {(path.name, stat.S_IMODE(path.stat().st_mode)) for path in (*folder.iterdir(), *second.iterdir())} == {
        ("torchrun.log", 0o600), ("rank-0.log", 0o600), ("rank-1.log", 0o600), ("errors.log", 0o600)}
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, second)} == {0o700}
    told = "\n".join(logs.last_errors())
    assert "WorkerDiedError: Worker rank" in told and f".../{folder.name}" in told and str(tmp_path) not in told


FORKING = """
import os
import time
import torch.distributed as dist
init = dist.init_process_group

def init_process_group(*args, **kwargs):
    init(*args, **kwargs)
    if os.fork() == 0:
        time.sleep(120)
        os._exit(0)
dist.init_process_group = init_process_group
"""


@pytest.mark.slow
def test_a_killed_worker_is_named_though_a_process_that_it_forked_has_its_connection(tmp_path, monkeypatch, supervisor):
    """As a compiler's or a third-party package's process has. Its silence would be noticed after a minute only."""
    (tmp_path / "sitecustomize.py").write_text(FORKING)
    (tmp_path / "xdit_backend").symlink_to(torchrun.ROOT / "xdit_backend")
    monkeypatch.setattr(torchrun, "ROOT", tmp_path)
    before = set(left_behind())
    group = WorkerGroup(("cpu", "cpu"), supervisor=supervisor)
    try:
        pids = {rank: int(done.numbers["pid"]) for rank, done in group.request(ReportMemory).items()}
        psutil.Process(pids[1]).kill()
        with pytest.raises(WorkerDiedError, match=r"^Worker rank 1 \(cpu\) died"):
            while True:
                group.request(ReportMemory)
    finally:
        group.close()

    assert gone(before)


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_and_replaced(client, spec_of, monkeypatch):
    """One that takes part in no exchange, as under CFG parallelism, would never be missed otherwise."""
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", "5")
    call = call_of(example("SD3"))
    both = client.predict(spec_of("SD3"), layout(cfg=2), 4, [call, call])
    psutil.Process(int(client.report_memory()[1]["pid"])).suspend()
    with pytest.raises(WorkerDiedError, match=r"Worker rank 1 \(cpu\) has given no sign of life for \d+ s while "
                                              r"computing a step"):
        client.predict(spec_of("SD3"), layout(cfg=2), 4, [call, call])
    again = client.predict(spec_of("SD3"), layout(cfg=2), 4, [call, call])

    assert all(torch.equal(*pair) for pair in zip(again, both))


SLOW = """
import os, threading, time
if os.environ.get("RANK") == "1":
    for _ in range(70):
        time.sleep(0.1)
elif "RANK" not in os.environ:
    threading.Thread(target=threading.Event().wait, daemon=True).start()       # so that nothing is forked
"""


@pytest.mark.slow
@pytest.mark.parametrize("activity", ["loading its libraries", TRYING_LINKS])
def test_a_rank_that_is_stopped_while_the_group_starts_is_noticed_and_named(tmp_path, monkeypatch, activity):
    """But not one whose libraries come slowly, for longer than a silence may last, nor the one that waits for it.
    Each is a program."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    (tmp_path / "xdit_backend").symlink_to(torchrun.ROOT / "xdit_backend")
    monkeypatch.setattr(torchrun, "ROOT", tmp_path)
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", "5")
    # of groups that other tests use
    before, others = set(left_behind()), set(psutil.Process().children(recursive=True))

    def stop(rank):
        process = below(os.getpid(), others).get(rank)
        if process is not None:
            process.suspend()

    def on_phase(phase):
        if phase.text == activity and phase.rank == 1:
            stop(1)
    error = None
    # it may have tried its links before it is stopped; then again
    for _ in range(3):
        try:
            group = WorkerGroup(("cpu", "cpu"), on_phase, check=(lambda: None) if activity == TRYING_LINKS
                                else lambda: stop(1))
        except WorkerStartError as raised:
            error = raised
            break
        below(os.getpid(), others)[1].resume()
        group.close()

    assert re.match(rf"Worker rank 1 \(cpu\) has given no sign of life for \d+ s while {activity}: it was stopped",
                    str(error))
    assert gone(before)


@pytest.mark.slow
def test_a_killed_torchrun_is_replaced_by_a_new_group(client, spec_of):
    """Nothing was lost, so nothing is said; the orphaned workers end."""
    call = call_of(example("SD3"))
    want, = client.predict(spec_of("SD3"), layout(ring=2), 4, [call])
    old, folder = [psutil.Process(int(numbers["pid"]))
                   for numbers in client.report_memory().values()], client.group.segments.folder
    torchrun = client.group._resources.processes
    torchrun.kill()
    assert torchrun.wait_ended(30)
    result, = client.predict(spec_of("SD3"), layout(ring=2), 4, [call])
    new = {int(numbers["pid"]) for numbers in client.report_memory().values()}

    assert torch.equal(result, want) and not {process.pid for process in old} & new
    assert not psutil.wait_procs(old, 120)[1] and not folder.exists()


@pytest.mark.slow
def test_a_dying_host_takes_its_group_along(tmp_path):
    """kill -9 on the host: its workers, also one that is stopped, and files are gone."""
    code = ("import time; from xdit_backend.host.launcher import WorkerGroup\n"
            "group = WorkerGroup(('cpu', 'cpu')); from xdit_backend.protocol.messages import ReportMemory\n"
            "print(*(int(done.numbers['pid']) for done in group.request(ReportMemory).values()), flush=True); "
            "time.sleep(60)")
    before = set(left_behind())
    host = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                            stdout=subprocess.PIPE, text=True)
    pids = list(map(int, host.stdout.readline().split()))
    assert len(pids) == 2 and set(left_behind()) - before
    psutil.Process(pids[0]).suspend()

    host.kill()
    host.wait()

    assert gone(before)


def test_a_host_killed_while_its_workers_start_leaves_nothing_to_the_next(tmp_path):
    """No worker has connected yet that would notice."""
    code = ("import time; from xdit_backend.host import launcher\n"
            "def started(phase): print(group.segments.folder, flush=True); time.sleep(60)\n"
            "class Group(launcher.WorkerGroup):\n"
            "    def _complete_handshake(self, *args):\n"
            "        global group; group = self; started(None)\n"
            "Group(('cpu', 'cpu'))")
    before = set(left_behind())
    host = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                            stdout=subprocess.PIPE, text=True)
    folder = host.stdout.readline().strip()
    # asked now: when it is killed, whoever starts next removes it
    assert os.path.isdir(folder)

    host.kill()
    host.wait()
    SegmentStore().close()

    assert gone(before)


HOST_WITH_A_FORK = """
import os, signal, subprocess, sys
code = f"from xdit_backend.worker.torchrun import end_with_parent; end_with_parent({os.getpid()})"
torchrun = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
fork = os.fork()
if fork:
    print(torchrun.pid, fork, flush=True)
signal.pause()
"""


def test_a_host_that_is_killed_is_missed_though_a_process_it_forked_lives_on(tmp_path):
    """As other nodes make them: it holds the host's end of the pipe, and of the workers' connections."""
    host = subprocess.Popen([sys.executable, "-c", HOST_WITH_A_FORK], cwd=tmp_path,
                            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    torchrun, fork = map(psutil.Process, map(int, host.stdout.readline().split()))
    try:
        time.sleep(1)                                          # none is let go of while the host lives
        assert torchrun.status() != psutil.STATUS_ZOMBIE and torchrun.is_running()
        host.kill()
        host.wait()
        _, running = psutil.wait_procs([torchrun], 120)
    finally:
        fork.kill()
    assert not running


HOST_WITH_SEGMENTS = """
import atexit, os, sys, time
from xdit_backend.protocol.shared_memory import SegmentStore
store = SegmentStore()
atexit.register(store.close)
if os.fork() == 0:
    if os.fork() == 0:
        print(os.getpid(), *{store.folder, store.overflow_folder}, flush=True)
        time.sleep(600)
    sys.exit()         # with what is to be done at the end of Python, as the host would
os.wait()
assert store.folder.is_dir() and store.overflow_folder.is_dir()
time.sleep(600)
"""


def test_a_process_that_a_host_forked_neither_removes_its_files_nor_keeps_them_when_it_is_killed(tmp_path):
    host = subprocess.Popen([sys.executable, "-c", HOST_WITH_SEGMENTS], cwd=tmp_path,
                            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    fork, *folders = host.stdout.readline().split()
    try:
        time.sleep(0.5)
        assert host.poll() is None and all(map(os.path.isdir, folders))
        host.kill()
        host.wait()
        SegmentStore().close()
        left = [folder for folder in folders if os.path.exists(folder)]
    finally:
        psutil.Process(int(fork)).kill()
    assert not left


def test_what_the_system_refuses_at_the_start_is_told_with_what_to_do(tmp_path, monkeypatch):
    place = tmp_path / ("long" * 30)
    place.mkdir()
    for module in (group_resources, shared_memory):
        monkeypatch.setattr(module, "folders_of", lambda name: (place / name, place / name))

    with pytest.raises(WorkerStartError, match=rf"^Make sure that this user can write to {place}, .* cannot be started "
                                               r"\(AF_UNIX path too long\)"):
        WorkerGroup(("cpu",))

    assert not list(place.iterdir())
