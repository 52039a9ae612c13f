"""Threads that copy run near their card: real threads, and a folder in place of /sys."""

import logging
import os
import re
import threading
import types

import pytest
import torch

from xdit_backend.memory import copy_thread
from xdit_backend.memory.copy_thread import CopyThread
from xdit_backend.memory.numa import numbers_of, pci_address, stay_near

CARD = "0000:3b:00.0"
OWN = sorted(os.sched_getaffinity(0))


def sysfs(folder, nodes=(f"{OWN[0]}", f"{OWN[-1]}"), of_gpu="1"):
    """A machine with these processors in each node. of_card: what it says of the card's node; None: nothing."""
    for number, processors in enumerate(nodes):
        node = folder / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{processors}\n")
    if of_gpu is not None:
        gpu = folder / "bus/pci/devices" / CARD
        gpu.mkdir(parents=True)
        (gpu / "numa_node").write_text(f"{of_gpu}\n")
    return folder


def affinities(work):
    """What a thread of its own may run on, after some work there, and a thread that it begins; what the work returned.
    """
    found = []

    def note():
        found.append(os.sched_getaffinity(0))

    def run():
        found.append(work())
        note()
        below = threading.Thread(target=note)
        below.start()
        below.join()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    given, own, of_child = found
    return own, of_child, given


@pytest.mark.skipif(len(OWN) < 2, reason="a machine with one processor")
@pytest.mark.parametrize("node, processor", [("0", OWN[0]), ("1", OWN[-1])])
def test_a_thread_and_those_that_it_begins_belong_to_the_node_of_the_gpu(tmp_path, caplog, node, processor):
    with caplog.at_level(logging.INFO):
        own, of_child, given = affinities(lambda: stay_near(CARD, sysfs(tmp_path, of_gpu=node)))

    assert own == of_child == given == {processor}
    assert os.sched_getaffinity(0) == set(OWN)                 # no other thread's
    message, = caplog.messages
    assert message == f"weights for the GPU at {CARD} are copied by CPUs of its NUMA node {node}"


@pytest.mark.parametrize("of_gpu, nodes, address, why", [
    (None, None, CARD, "No such file"),
    ("-1", None, CARD, "the system does not know its NUMA node"),
    ("1", (f"{OWN[0]}", "100000-100003"), CARD, "this process may use none of the CPUs of its NUMA node 1"),
    ("1", (f"{OWN[0]}", ""), CARD, "this process may use none of the CPUs of its NUMA node 1"),
    ("1", (f"{OWN[0]}", "all"), CARD, "invalid literal"),
    ("7", None, CARD, "No such file"),
    ("1", None, "", "this PyTorch does not provide its PCI address")])
def test_where_the_node_is_not_known_or_not_this_process_s_a_thread_stays_as_it_is_and_says_so_once(
        tmp_path, caplog, of_gpu, nodes, address, why):
    folder = sysfs(tmp_path, *([nodes] if nodes else []), of_gpu=of_gpu)
    with caplog.at_level(logging.INFO):
        own, _, given = affinities(lambda: stay_near(address, folder))

    assert own == set(OWN) and given == set()
    message, = caplog.messages
    assert re.search(f"are copied by any CPU: .*{why}", message)


def test_a_container_that_forbids_it_is_told(tmp_path, caplog, monkeypatch):
    def forbidden(thread, processors):
        raise PermissionError(1, "Operation not permitted")
    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    with caplog.at_level(logging.INFO):
        _, _, given = affinities(lambda: stay_near(CARD, sysfs(tmp_path)))

    assert given == set() and ["Operation not permitted" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("nodes", [(), (f"{OWN[0]}",)], ids=["no sysfs", "one node"])
def test_a_machine_of_one_node_says_nothing(tmp_path, caplog, nodes):
    with caplog.at_level(logging.INFO):
        own, _, given = affinities(lambda: stay_near(CARD, sysfs(tmp_path, nodes)))

    assert own == set(OWN) and given == set() and not caplog.messages


def test_a_list_of_processors_is_read_as_linux_writes_it():
    assert numbers_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11} and numbers_of("\n") == set()


@pytest.mark.skipif(len(OWN) < 2, reason="a machine with one processor")
def test_copies_are_made_near_the_gpu_and_what_asks_for_them_stays(tmp_path, monkeypatch):
    """By the thread, with its page-locked memory, which it makes when it copies for the first time."""
    found, folder = [], sysfs(tmp_path)
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3b, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(copy_thread, "stay_near", lambda address: stay_near(address, folder))
    staging = types.SimpleNamespace(copy=lambda *pair: found.append(os.sched_getaffinity(0)))
    thread = CopyThread(torch.device("cuda"), staging)

    thread.start([(1, 2)]).result()

    assert found == [{OWN[-1]}] and os.sched_getaffinity(0) == set(OWN)
    assert pci_address(torch.device("cuda")) == CARD
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    assert pci_address(torch.device("cuda")) == ""
