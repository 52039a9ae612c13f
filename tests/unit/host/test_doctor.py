"""What `python -m xdit_backend doctor` tells, and that it tells nothing private."""

import argparse
import getpass
import re
import socket
from types import SimpleNamespace

import pytest
import torch

from xdit_backend import system
from xdit_backend.host import doctor
from xdit_backend.protocol.devices import resolve_devices
from xdit_backend.protocol.errors import WorkerStartError
from xdit_backend.system import accelerator


def report(capsys, *arguments):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    doctor.main(parser.parse_args(arguments))
    return capsys.readouterr().out


@pytest.mark.slow
def test_it_starts_workers_and_says_what_they_have(capsys):
    told = report(capsys, "--devices", "cpu,cpu")

    assert all(f"\n{section}\n" in f"\n{told}"
               for section in ("Versions", "Machine", "Devices", "Links", "Environment", "Workers"))
    assert "torch " in told and "start on cpu, cpu in" in told
    assert "import their libraries in" in told
    assert re.search(r"exchange 16 MiB with a neighbour at \d+\.\d\d GB/s", told)
    assert ("are forked from one process" if system.HAS_TORCHRUN else "are separate programs") in told
    assert "rank 0 (cpu): " in told and "rank 1 (cpu): " in told


def test_it_says_why_workers_do_not_start(capsys, monkeypatch):
    def fails(devices, on_phase):
        raise WorkerStartError("A worker ended while starting.")
    monkeypatch.setattr(doctor, "WorkerGroup", fails)

    assert "do not start on cpu:\n  A worker ended while starting." in report(capsys, "--devices", "cpu")


def test_gpus_of_a_kind_that_nobody_has_tried_are_marked(monkeypatch):
    class Xpu:
        """In place of torch.xpu, which has no compute capability."""
        @staticmethod
        def get_device_properties(device):
            return SimpleNamespace(name="Arc", total_memory=2 ** 34)

        @staticmethod
        def mem_get_info(device):
            return 2 ** 33, 2 ** 34
    Xpu.is_available, Xpu.device_count = staticmethod(lambda: True), staticmethod(lambda: 2)
    monkeypatch.setattr(accelerator, "device_type", lambda: "xpu")
    monkeypatch.setattr(accelerator, "module", lambda device=None: Xpu)

    lines = doctor.devices()

    assert "not been tried on GPUs of this kind" in lines[0] and lines[1].startswith("xpu:0 Arc, ")
    assert len(lines) == 3 and doctor.links() == ["xpu:0 to xpu:1: through system RAM",
                                                  "xpu:1 to xpu:0: through system RAM"]
    assert resolve_devices("auto", 2) == ("xpu:0", "xpu:1") == resolve_devices("xpu,xpu:1", 2)
    assert doctor.page_lock_limit() == [] and not accelerator.has_nccl()


@pytest.mark.parametrize("hip, marked", [(None, False), ("6.4", True)])
def test_amd_gpus_are_marked(monkeypatch, hip, marked):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if not marked else 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 ** 33, 2 ** 34))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="Radeon", major=11,
                                                                                            minor=0))

    assert accelerator.is_tried() != marked
    if marked:
        assert "ROCm 6.4" in doctor.devices()[0] and "not been tried" in doctor.devices()[0]
        assert doctor.devices()[1].startswith("cuda:0 Radeon, capability 11.0, ")


def test_of_the_environment_it_tells_names_alone(capsys, monkeypatch):
    monkeypatch.setenv("XDIT_SECRET", "hush")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/home/someone/log")
    monkeypatch.setenv("TOKEN_OF_SOMETHING", "hush")

    told = report(capsys, "--no-workers")

    assert "XDIT_SECRET is set" in told and "NCCL_DEBUG_FILE is set" in told
    assert not any(private in told
                   for private in ("hush", "someone", "TOKEN", socket.gethostname(), f"/{getpass.getuser()}"))


@pytest.mark.parametrize("fails_at, found", [(3, "stops at 0.5 GiB (CUDA error 2)"), (99, "1.0 GiB can be locked")])
def test_memory_is_locked_in_steps_and_released(monkeypatch, fails_at, found):
    locked, most = {}, []

    def lock(address, num_bytes):
        if len(locked) + 1 >= fails_at:
            return 2
        locked[address] = num_bytes
        most.append(sum(locked.values()))
        return 0
    told, = doctor.page_lock_limit(lock, locked.pop, max_bytes=2 ** 30 + 100)

    assert found in told and not locked
    assert most[-1] == min(fails_at - 1, 4) * doctor.LOCK_STEP_BYTES
