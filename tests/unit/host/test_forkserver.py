"""Workers are forked from one process that has imported all they need, where that is safe; its end is theirs."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest
import torch

from tests.conftest import ROOT, left_behind, still_there
from tests.support.worker_processes import kind_of
from xdit_backend import system
from xdit_backend.host import torchrun
from xdit_backend.host.client import Client
from xdit_backend.host.forkserver import OF_THE_SERVER, Forkserver
from xdit_backend.host.launcher import WorkerGroup
from xdit_backend.protocol.errors import WorkerStartError
from xdit_backend.protocol.messages import ReportMemory
from xdit_backend.protocol.shared_memory import SegmentStore
from xdit_backend.worker import bootstrap


def shared_bytes(pid):
    """What a process has in memory of pages that others have too."""
    maps = psutil.Process(pid).memory_full_info()
    return maps.rss - maps.uss


def pids(group):
    return [int(done.numbers["pid"]) for _, done in sorted(group.request(ReportMemory).items())]


def test_ranks_are_forked_and_share_the_pages_of_their_libraries(supervisor):
    group = WorkerGroup(("cpu", "cpu"), supervisor=supervisor)
    try:
        workers = pids(group)
        torchruns = {psutil.Process(pid).parent() for pid in workers}
        kinds = [*map(kind_of, (*torchruns, next(iter(torchruns)).parent()))]
        shared = [shared_bytes(pid) for pid in workers]
    finally:
        group.close()

    assert group.why_not_forked == "" and kinds == ["torchrun", "forkserver"]
    assert min(shared) > 2 ** 27                               # of some 300 MB


@pytest.mark.parametrize("early, why", [
    ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
     "the imported libraries have started 1 threads"),
    pytest.param("open_gpu = open('/dev/null')\nimport os\nlink = os.readlink\n"
                 "os.readlink = lambda path: '/dev/nvidiactl' if link(path) == '/dev/null' else link(path)",
                 "the imported libraries have opened a GPU", marks=pytest.mark.slow)], ids=["a thread", "a GPU"])
def test_where_forking_is_unsafe_each_rank_is_a_program_of_its_own(tmp_path, monkeypatch, supervisor, early, why):
    (tmp_path / "sitecustomize.py").write_text(early)
    (tmp_path / "xdit_backend").symlink_to(torchrun.ROOT / "xdit_backend")
    monkeypatch.setattr(torchrun, "ROOT", tmp_path)
    before, server = set(left_behind()), Forkserver()
    group = WorkerGroup(("cpu", "cpu"), supervisor=server)
    try:
        environments = [psutil.Process(pid).environ() for pid in pids(group)]
    finally:
        group.close()
        server.close()

    assert group.why_not_forked.startswith(why)
    assert [environment["RANK"] for environment in environments] == ["0", "1"]
    assert not still_there(before)


def test_several_groups_have_one_forkserver_and_the_end_of_one_is_not_that_of_another():
    server = Forkserver()
    one, two = (WorkerGroup(("cpu",), supervisor=server) for _ in range(2))
    try:
        [first], [second] = pids(one), pids(two)
        servers = {psutil.Process(pid).parent().parent().pid for pid in (first, second)}
        one.close()
        still = pids(two)
    finally:
        two.close()
        server.close()

    assert len(servers) == 1 and still == [second] and not psutil.pid_exists(first)


def test_a_killed_forkserver_ends_its_groups_and_the_next_starts_another():
    before, server = set(left_behind()), Forkserver()
    client = Client(("cpu", "cpu"), supervisor=server)
    try:
        workers = [psutil.Process(pid) for pid in pids(client.group)]
        torchrun = workers[0].parent()
        torchrun.parent().kill()
        _, running = psutil.wait_procs([*workers, torchrun], 30)
        again = pids(client.group)
    finally:
        client.close()
        server.close()

    assert not running and len(again) == 2
    assert not still_there(before)


@pytest.mark.slow
def test_a_forkserver_that_is_stopped_is_noticed_and_replaced(monkeypatch):
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", "3")
    server = Forkserver()
    WorkerGroup(("cpu",), supervisor=server).close()
    before = set(left_behind())
    process, = (psutil.Process(each.process.pid) for each in server._servers.values())
    process.suspend()
    try:
        with pytest.raises(WorkerStartError, match="The process that workers are forked from has given no sign of "
                                                   "life for"):
            WorkerGroup(("cpu",), supervisor=server)
        assert not process.is_running()
        WorkerGroup(("cpu",), supervisor=server).close()
    finally:
        server.close()

    assert not still_there(before)


def test_libraries_that_cannot_be_imported_are_an_error_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['diffusers'] = None")
    (tmp_path / "xdit_backend").symlink_to(torchrun.ROOT / "xdit_backend")
    monkeypatch.setattr(torchrun, "ROOT", tmp_path)
    before, server = set(left_behind()), Forkserver()
    try:
        with pytest.raises(WorkerStartError) as error:
            WorkerGroup(("cpu", "cpu"), supervisor=server)
    finally:
        server.close()

    assert ("ended while loading its libraries (exit code 1)" in str(error.value)
            and "diffusers" in str(error.value).splitlines()[-1])
    assert not still_there(before)


def test_giving_up_while_libraries_are_loaded_keeps_the_forkserver_for_the_next(monkeypatch):
    server = Forkserver()

    def cancel():
        raise KeyboardInterrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            WorkerGroup(("cpu",), check=cancel, supervisor=server)
        [process] = [each.process.pid for each in server._servers.values()]
        group = WorkerGroup(("cpu",), supervisor=server)
        parent = psutil.Process(pids(group)[0]).parent().parent().pid
        group.close()
    finally:
        server.close()

    assert parent == process


HOST = """
import os, sys, time
from xdit_backend.host.forkserver import OF_THE_SERVER, Forkserver
from xdit_backend.host.launcher import WorkerGroup
server = Forkserver()
group = WorkerGroup(('cpu', 'cpu'), supervisor=server)
from xdit_backend.protocol.messages import ReportMemory
group.request(ReportMemory)
if os.fork():
    print('ready', flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_host_that_ends_takes_its_forkserver_along_though_a_fork_of_it_lives_on(tmp_path, number):
    before = set(left_behind())
    host = subprocess.Popen([sys.executable, "-c", HOST], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
                            stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout.readline() == "ready\n"
        offspring = psutil.Process(host.pid).children(recursive=True)
        fork, = (process for process in offspring if process.cmdline()[:2] == host.args[:2])
        host.send_signal(number)
        host.wait(300)
        _, running = psutil.wait_procs([process for process in offspring if process != fork], 30)
    finally:
        fork.kill()
    assert not running
    SegmentStore().close()                                     # the next host, which removes what is nobody's
    assert not still_there(before)


# what a rank says that torchrun forks in a process with all libraries
FORKED = """
import os, sys, torch
from xdit_backend.worker import forkserver, torchrun
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
assert forkserver._prepare() == "", forkserver._prepare()
def rank_main():
    shown = os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("HIP_VISIBLE_DEVICES")
    assert not torch.cuda._is_in_bad_fork() and shown == ("1", None), shown
torchrun.run_forked([f"{sys.argv[1]}/failed", "--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d",
                     "--rdzv-endpoint=127.0.0.1:0", "--max-restarts=0", f"--log-dir={sys.argv[1]}", "-m", "none"],
                    rank_main)
"""


def test_ranks_that_are_forked_can_use_gpus(tmp_path):
    """PyTorch marks what is forked from a process that has asked CUDA for GPUs, whether there are any or not."""
    said = subprocess.run([sys.executable, "-c", FORKED, tmp_path], cwd=ROOT, env=os.environ | OF_THE_SERVER,
                          capture_output=True, text=True)

    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("package, is_found", [
    ("peft", False), ("xformers", True),
    *(pytest.param(*each, marks=pytest.mark.slow)
      for each in (("auto_round", False), ("bitsandbytes", True), ("flash_attn", True), ("kernels", True)))])
def test_packages_of_others_are_not_imported_with_the_libraries(package, is_found, tmp_path):
    """diffusers would where they are installed: they want transformers, or look at GPUs. Kernels are found later."""
    (tmp_path / f"{package}.py").write_text("raise ImportError('no GPU, no transformers')")
    about = tmp_path / f"{package}-9.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.0\n")
    code = ("import importlib.util\n"
            "from xdit_backend.worker import forkserver\n"
            "assert forkserver._prepare() == ''\n"
            "import diffusers\n"
            "diffusers.FluxTransformer2DModel.load_lora_adapter\n"
            f"assert (importlib.util.find_spec('{package}') is not None) == {is_found}\n")

    environment = os.environ | OF_THE_SERVER | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment).returncode == 0


def test_workers_find_packages_where_their_host_does(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert torchrun.environment_of(("cpu",))["PYTHONPATH"] == f"{torchrun.ROOT}{os.pathsep}/somewhere"

    monkeypatch.delenv("PYTHONPATH")
    assert torchrun.environment_of(("cpu",))["PYTHONPATH"] == str(torchrun.ROOT)
    code = "from xdit_backend.host import torchrun; print(torchrun.environment_of(('cpu',)).get('PYTHONNOUSERSITE'))"
    said = [subprocess.check_output([sys.executable, *options, "-c", code], cwd=ROOT, text=True).strip()
            for options in ([], ["-s"])]
    assert said == ["None", "1"]


# prints, on a signal, variables as the libraries of this process read them
SAY_VARIABLES = """
import os, signal, sys
def say(signum, frame):
    import ctypes
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    for name in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", "NCCL_DEBUG"):
        print("it has", name, getenv(name.encode()), file=sys.stderr, flush=True)
signal.signal(signal.SIGUSR2, say)
"""


@pytest.mark.parametrize("fork", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_variables_for_a_record_of_exchanges_reach_workers_without_another_forkserver(tmp_path, monkeypatch, fork):
    (tmp_path / "sitecustomize.py").write_text(SAY_VARIABLES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDIT_FORK", fork)
    server = Forkserver()
    try:
        for size in ("1000", "2000"):
            monkeypatch.setenv("XDIT_LOG_FOLDER", str(tmp_path / size))
            for name in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", "NCCL_DEBUG"):
                monkeypatch.setenv(name, size)
            group = WorkerGroup(("cpu",), supervisor=server)
            try:
                os.kill(pids(group)[0], signal.SIGUSR2)
                group.request(ReportMemory)
                log_file, = (tmp_path / size).rglob("rank-0.log")
                printed = log_file.read_text()
            finally:
                group.close()
        num_servers = len(server._servers)
    finally:
        server.close()

    assert num_servers == 1
    assert [line for line in printed.splitlines() if line.startswith("it has")] == [
        f"it has {name} b'2000'" for name in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE", "NCCL_DEBUG")]


@pytest.mark.parametrize("devices, is_program", [("cuda:0,cuda:1", True), ("another/cuda:0,cpu", True),
                                                 ("cpu,cpu", False)])
def test_a_rank_that_could_not_use_its_gpu_becomes_a_program(monkeypatch, devices, is_program):
    """Where something has asked for GPUs before it was forked."""
    started = []
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(arguments) or sys.exit())
    for module, name in ((system, "name_process"), (bootstrap, "run"), (signal, "signal"),
                         (torch, "set_num_threads")):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    with pytest.raises(SystemExit) if is_program else contextlib.nullcontext():
        bootstrap.run_forked("folder", devices, "1", "logs")

    assert started == [[sys.executable, "-m", "xdit_backend.worker", "folder", devices, "1", "logs"]] * is_program
