"""The c10d store of a group as ranks on another machine use it, and what such a machine can do to it."""

import os
import queue
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from pydantic import ValidationError

from tests.conftest import ROOT
from tests.support import audit_pickle
from xdit_backend.multi_node import store_access
from xdit_backend.multi_node.store_access import StoreAccess
from xdit_backend.protocol.errors import XDiTError
from xdit_backend.protocol.messages import StoreReply, StoreRequest, decode, encode
from xdit_backend.worker.host_store import HostStore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(path):
    """A HostStore whose host is a thread; messages travel as bytes."""
    requests, access = queue.SimpleQueue(), StoreAccess(path)
    store = HostStore(1, lambda message: requests.put(encode(message)))

    def host():
        while (raw := requests.get()) is not None:
            store.take(decode(encode(access.answer(decode(raw)))))
    thread = threading.Thread(target=host)
    thread.start()
    yield store
    requests.put(None)
    thread.join()


def test_a_rank_on_another_machine_has_the_store_of_the_group(store, path):
    theirs = dist.FileStore(str(path), -1)
    store.set("a", "1")
    theirs.set("b", bytes(range(256)))

    assert theirs.get("a") == b"1" and store.get("b") == bytes(range(256))
    assert [store.add("n", 2), theirs.add("n", 3), store.add("n", 0)] == [2, 5, 5]
    assert store.check(["a", "b"]) and not store.check(["a", "c"])
    assert store.compare_set("a", "1", "2") == b"2" and theirs.get("a") == b"2"
    assert store.compare_set("a", "1", "3") == b"2"
    assert store.num_keys() == theirs.num_keys()
    assert store.delete_key("a") and not store.check(["a"])


def test_get_waits_for_a_key_that_another_rank_sets(store, path):
    timer = threading.Timer(0.3, lambda: dist.FileStore(str(path), -1).set("late", "1"))
    timer.start()
    assert store.get("late") == b"1"
    timer.join()


def test_a_key_that_no_rank_sets_is_an_error_after_the_time_out(store):
    with pytest.raises(dist.DistStoreError, match="no other rank set never within 0 s"):
        store.wait(["never"], timedelta(seconds=0.2))


def test_torch_uses_it_under_prefixes(store, path):
    dist.PrefixStore("group", store).set("key", "value")
    assert dist.PrefixStore("group", dist.FileStore(str(path), -1)).get("key") == b"value"


@pytest.mark.parametrize("fields", [
    {"keys": ("k" * 513,)}, {"keys": ("",)}, {"keys": ("new\nline",)}, {"keys": ("ümlaut",)}, {"value": "0"},
    {"value": "zz"}, {"value": "00" * (2 ** 16 + 1)}, {"amount": 2 ** 31}, {"operation": "clear"},
    {"keys": ("k",) * (2 ** 16 + 1)}], ids=lambda fields: f"{next(iter(fields))} {len(str(fields))}")
def test_requests_have_bounds(fields):
    with pytest.raises(ValidationError):
        StoreRequest(0, 1, **{"operation": "set", "keys": ("k",)} | fields)


@pytest.mark.parametrize("operation, keys", [("set", ()), ("get", ("a", "b")), ("delete", ())])
def test_an_operation_on_one_key_has_one(path, operation, keys):
    with pytest.raises(XDiTError, match="instead of one"):
        StoreAccess(path).answer(StoreRequest(0, 1, operation, keys))


def test_a_machine_cannot_fill_the_host_s_memory(path, monkeypatch):
    monkeypatch.setattr(store_access, "MAX_BYTES", 2 ** 20)
    access, value = StoreAccess(path), "00" * 2 ** 16
    for number in range(15):
        access.answer(StoreRequest(0, number, "set", ("key",), value))
    with pytest.raises(XDiTError, match="wrote more than 1 MB"):
        access.answer(StoreRequest(0, 16, "set", ("key",), value))


def test_a_failed_operation_is_an_error_on_the_rank_that_asked(path):
    access = StoreAccess(path)
    access.answer(StoreRequest(0, 1, "set", ("key",), b"text".hex()))
    reply = access.answer(StoreRequest(0, 2, "add", ("key",), amount=1))
    assert isinstance(reply, StoreReply) and reply.error


@pytest.mark.slow
def test_no_process_of_two_machines_unpickles_a_name(tmp_path):
    """Two network namespaces; prompts, cuts of the link at several moments, and the end."""
    if not os.path.exists("/dev/net/tun") or subprocess.run(["unshare", "-n", "true"]).returncode:
        pytest.skip("this user cannot make network namespaces, or there is no /dev/net/tun")
    path = audit_pickle.install(tmp_path / "code", tmp_path / "events")
    done = subprocess.run([sys.executable, "-m", "tests.programs.network_namespaces", "--steps", "2"], cwd=ROOT,
                          text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": path})
    recorded = audit_pickle.audited(tmp_path / "events")

    assert done.returncode == 0, done.stdout + done.stderr
    # host and joined machine, and on each several times torchrun and a worker
    assert len(recorded) > 12
    assert not {pid: text for pid, text in recorded.items() if "xdit_backend.worker" in text}
