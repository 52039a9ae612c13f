"""A worker group reads nothing pickled, opens no store to other users, and cannot abort its host."""

import os
import pickle
import socket
import struct
import subprocess
import sys

import psutil
import pytest
import torch.distributed as dist

from tests.conftest import ROOT
from tests.support import audit_pickle
from tests.support.model_zoo import example
from tests.support.tolerances import within
from tests.unit.host.conftest import call_of, layout
from xdit_backend.host.client import Client
from xdit_backend.host.forkserver import Forkserver
from xdit_backend.protocol.channel import STORE_FILE
from xdit_backend.protocol.errors import WorkerDiedError


class CancelledError(Exception):
    """The user cancelled."""


@pytest.mark.parametrize("fork", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_no_process_of_a_group_unpickles_a_name(fork, spec_of, tmp_path, monkeypatch):
    """From start to end, with a prompt, a cancelled prompt and a killed worker between."""
    monkeypatch.setenv("PYTHONPATH", audit_pickle.install(tmp_path / "code", tmp_path / "events"))
    monkeypatch.setenv("XDIT_FORK", fork)
    one, server = example("SD3"), Forkserver()
    client = Client(("cpu", "cpu"), supervisor=server)

    def predict(check=lambda: None):
        client.workers.check = check
        return client.predict(spec_of("SD3"), layout(ulysses=2), 4, [call_of(one)])[0]

    def cancel():
        raise CancelledError
    try:
        within((predict() - one.run()).abs().max(), 1e-5)
        workers = [psutil.Process(int(numbers["pid"])) for numbers in client.report_memory().values()]
        torchrun = workers[0].parent()
        with pytest.raises(CancelledError):
            predict(cancel)
        within((predict() - one.run()).abs().max(), 1e-5)
        workers[1].kill()
        with pytest.raises(WorkerDiedError):
            predict()
        within((predict() - one.run()).abs().max(), 1e-5)
        again = [int(numbers["pid"]) for numbers in client.report_memory().values()]
    finally:
        client.close()
        server.close()

    recorded = audit_pickle.audited(tmp_path / "events")
    assert {torchrun.pid, *(worker.pid for worker in workers), *again} <= set(recorded)
    assert not {pid: text for pid, text in recorded.items() if text}


def test_the_audit_hook_records_an_unpickled_name(tmp_path):
    path = audit_pickle.install(tmp_path / "code", tmp_path / "events")
    code = f"import pickle; pickle.loads({pickle.dumps(os.path.join)!r})"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True)
    assert all("pickle.find_class" in text for text in audit_pickle.audited(tmp_path / "events").values())


# of torch's TCPStore: VALIDATE with its magic number, PING with a number that it sends back
VALIDATE_AND_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 2026)


def accepts_store_commands(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connected:
            connected.sendall(VALIDATE_AND_PING)
            return connected.recv(4) == struct.pack("<I", 2026)
    except OSError:
        return False


def listening_ports(process):
    return {connection.laddr.port for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN}


def ports_of(client):
    """Ports on which a client's workers and their torchrun listen. Its store is a file that only its user can read."""
    workers = [psutil.Process(int(numbers["pid"])) for numbers in client.report_memory().values()]
    folder = client.group.segments.folder

    assert (folder / STORE_FILE).is_file() and folder.stat().st_mode & 0o777 == 0o700
    assert not listening_ports(workers[0].parent())
    return set().union(*map(listening_ports, workers))


def test_no_port_of_a_group_accepts_store_commands(client, spec_of):
    before = listening_ports(psutil.Process())
    client.predict(spec_of("SD3"), layout(ring=2), 4, [call_of(example("SD3"))])
    ports = ports_of(client)

    assert ports and listening_ports(psutil.Process()) <= before                       # of gloo
    assert not [port for port in ports if accepts_store_commands(port)]


def test_a_tcp_store_would_be_found():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert accepts_store_commands(store.port)


NO_MORE_THREADS = """
import ctypes, os, resource, sys, threading
from xdit_backend.host.client import Client
from xdit_backend.host.forkserver import Forkserver
from xdit_backend.host.launcher import WorkerGroup
from xdit_backend.host.torchrun import environment_of
from xdit_backend.protocol.errors import WorkerStartError
from xdit_backend.protocol.messages import ReportMemory


def forbid_threads():
    if os.getuid() == 0:                   # the limit is of a real user that is not root, without two capabilities
        os.setresuid(65534, 0, 0)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)          # linux/capability.h: version 3
        data, libc = (ctypes.c_uint32 * 6)(), ctypes.CDLL(None, use_errno=True)
        assert libc.capget(header, data) == 0
        data[0] &= ~(1 << 21 | 1 << 24)                        # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
        data[1] &= ~(1 << 21 | 1 << 24)
        assert libc.capset(header, data) == 0, ctypes.get_errno()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


if __name__ == "__main__":
    server = Forkserver()
    WorkerGroup(("cpu",), supervisor=server).close()           # starts the process that workers are forked from
    forbid_threads()
    try:
        threading.Thread(target=print).start()
        sys.exit("threads are not limited here")
    except RuntimeError:
        pass
    group = WorkerGroup(("cpu", "cpu"), supervisor=server)
    print("workers:", len(group.request(ReportMemory)), flush=True)
    group.close()
    try:
        WorkerGroup(("cpu", "cpu"))
    except WorkerStartError as error:
        print("error:", error, flush=True)
    server.close()
"""


def test_a_host_that_can_make_no_thread_is_not_aborted(tmp_path):
    """A group starts from a forkserver that runs; where no process can be made, the error has a name."""
    (tmp_path / "program.py").write_text(NO_MORE_THREADS)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=600,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "XDIT_LOG_FOLDER": str(tmp_path / "logs")})
    if "threads are not limited here" in done.stderr:
        pytest.skip("this system does not limit the threads of a user (RLIMIT_NPROC)")
    assert done.returncode == 0, done.stderr
    assert "workers: 2" in done.stdout and "the workers cannot be started" in done.stdout
