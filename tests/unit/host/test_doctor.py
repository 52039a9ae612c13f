"""What `python -m xdit_backend doctor` tells, and that it tells nothing private."""

import argparse
import getpass
import socket

import pytest

from xdit_backend.host import doctor
from xdit_backend.protocol.errors import WorkerStartError


def report(capsys, *arguments):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    doctor.main(parser.parse_args(arguments))
    return capsys.readouterr().out


@pytest.mark.slow
def test_it_starts_workers_and_says_what_they_have(capsys):
    told = report(capsys, "--devices", "cpu")

    assert all(f"\n{section}\n" in f"\n{told}"
               for section in ("Versions", "Machine", "Devices", "Links", "Environment", "Workers"))
    assert "torch " in told and "start on cpu in" in told
    assert "are forked from one process" in told and "rank 0 (cpu): " in told and "shared memory" in told


def test_it_says_why_workers_do_not_start(capsys, monkeypatch):
    def fails(devices):
        raise WorkerStartError("A worker ended while starting.")
    monkeypatch.setattr(doctor, "WorkerGroup", fails)

    assert "do not start on cpu:\n  A worker ended while starting." in report(capsys, "--devices", "cpu")


def test_of_the_environment_it_tells_names_alone(capsys, monkeypatch):
    monkeypatch.setenv("XDIT_SECRET", "hush")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/home/someone/log")
    monkeypatch.setenv("TOKEN_OF_SOMETHING", "hush")

    told = report(capsys, "--no-workers")

    assert "XDIT_SECRET is set" in told and "NCCL_DEBUG_FILE is set" in told
    assert not any(private in told
                   for private in ("hush", "someone", "TOKEN", socket.gethostname(), f"/{getpass.getuser()}"))
