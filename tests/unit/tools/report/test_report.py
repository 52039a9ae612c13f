"""python -m xdit_backend report: it names each injected fault, and its files hold nothing private."""

import dataclasses
import getpass
import json
import socket
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from xdit_backend.host import logs
from xdit_backend.protocol.errors import ConfigError, WorkerDiedError, XDiTError
from xdit_backend.tools.bench.worker_groups import start_clients
from xdit_backend.tools.report import checks, document, links, machine_facts, results
from xdit_backend.tools.report.report import Progress, make

FACTS = {"system": "Linux 6.1", "processor": "A CPU", "cores": 8, "system_ram_bytes": 64e9,
         "python": "3.12.1", "packages": {"torch": "2.11.0"}, "cuda": "12.8", "cudnn": 91000, "nccl": "2.28.1",
         "listed_gpus": 2, "peer_access": [[True, True], [True, True]], "topology": {"GPU0 GPU1": "PHB"},
         "gpus": [{"name": "NVIDIA GeForce RTX 4090", "memory_bytes": 24e9, "capability": "8.9",
                   "pcie_generation": "4", "pcie_width": "16", "power_limit_w": "450.00", "driver": "570.1"}] * 2}
DEVICES = "cuda:0", "cuda:1"


def timing(layout, seconds, estimate_s=None, model="Flux.1"):
    measured = results.statistics_of([seconds, seconds])
    return results.Timing(model, layout, 1 if layout == "one" else 2, measured, 1e12, estimate_s, 10 ** 9, 2 * 10 ** 9,
                          2 * 10 ** 9)


@pytest.fixture
def report():
    return results.Report(
        schema=1, date="2026-11-29", version="0.2.0", devices=DEVICES, machine=FACTS, notes=(),
        checks=(results.Check("Flux.1 ring2", True, 0.2, "again", error=2e-7),
                results.Check("killed worker", True, 1.0, "again")),
        links=(results.LinkTime("nccl", "hop", 2 ** 20, results.statistics_of([1e-3, 2e-3])),),
        sizes={"Flux.1": "small"},
        timings=(timing("ulysses2", 0.55, 0.5), timing("one", 1.0, 0.95), timing("ring2", 0.7, 0.7)),
        chosen={"Flux.1": "ulysses2"}, seconds=300.0, is_complete=True)


def test_the_verdict_says_whether_it_is_right_how_fast_and_whether_the_estimates_hold(report):
    right, fast, estimated = results.verdict(report)

    assert right.startswith("All 2 checks passed")
    assert "Ulysses 2 for Flux.1, 1.82 times as fast" in fast
    assert estimated.startswith("3 of 3 estimates are within 10%") and "1 of 1 models" in estimated


def test_the_verdict_names_failed_checks_slow_methods_and_wrong_estimates(report):
    failed = results.Check("Flux.1 ring2", False, 0.2, "again", "0.3 off")
    worse = dataclasses.replace(report, checks=(*report.checks, failed), chosen={"Flux.1": "ring2"},
                                timings=(timing("ulysses2", 1.1, 0.5), timing("one", 1.0, 0.5)))

    right, fast, estimated = results.verdict(worse)

    assert right == "1 of 3 checks failed: Flux.1 ring2."
    assert fast == "No method is faster than one device here."
    assert estimated.startswith("0 of 2 estimates") and "0 of 1 models" in estimated


def test_files_are_read_again_and_the_page_shows_every_part(report, tmp_path):
    paths = document.write(report, tmp_path)

    assert [path.name for path in paths] == [f"xdit-report-2-x-nvidia-geforce-rtx-4090-2026-11-29.{ending}"
                                             for ending in ("json", "md", "png")]
    assert results.read_report(paths[0]) == report
    page = paths[1].read_text()
    for text in ("2 x NVIDIA GeForce RTX 4090", "PCIe 4 x16", "GPU0 GPU1 PHB", "**Ulysses 2**", "| nccl | hop | 1 MiB",
                 "Checks: 2 of 2 passed", paths[2].name, "3.00 GB"):
        assert text in page
    from PIL import Image
    assert Image.open(paths[2]).size[0] == document.WIDTH


@pytest.mark.parametrize("change", [
    lambda values: values.update(schema=2), lambda values: values.update(more=1), lambda values: values.pop("checks"),
    lambda values: values["timings"][0].update(layout=7)])
def test_files_of_another_form_are_rejected(report, tmp_path, change):
    values = json.loads(results.to_json(report))
    change(values)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(values))

    with pytest.raises(ConfigError, match="Make report.json again"):
        results.read_report(path)


def test_limits_of_the_machine_are_named():
    apart = FACTS | {"peer_access": [[True, False], [False, True]]}
    missing = FACTS | {"gpus": FACTS["gpus"][:1], "peer_access": [[True]]}

    assert machine_facts.notes_of(FACTS, DEVICES, (100e12, 90e12)) == []
    assert machine_facts.notes_of(apart, DEVICES) == [
        "No peer access between cuda:0 and cuda:1: they exchange through system RAM."]
    assert machine_facts.notes_of(missing, ("cuda:0", "cuda:0")) == [
        "The driver lists 2 GPUs, and PyTorch finds 1: check CUDA_VISIBLE_DEVICES and the PyTorch build.",
        "2 workers share 1 GPU: methods are checked, and cannot be faster than one device."]
    assert machine_facts.notes_of(FACTS, DEVICES, (100e12, 60e12)) == [
        "Rank 1 (cuda:1) multiplies matrices 0.60 times as fast as the fastest device."]


def test_the_topology_and_columns_of_nvidia_smi_are_read(monkeypatch):
    answers = {"topo": "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\t X \t0-7\n\nLegend:\n",
               "--query": "570.1, 4, 16, 450.00, [N/A], P8, [N/A]\n570.1, 4, 8, 350.00, [N/A], P8, [N/A]\n"}
    monkeypatch.setattr(machine_facts, "_run", lambda command: next(
        text for key, text in answers.items() if any(part.startswith(key) for part in command)))

    assert machine_facts.topology() == {"GPU0 GPU1": "PHB"}
    assert [gpu["pcie_width"] for gpu in machine_facts._queried()] == ["16", "8"]
    assert "driver_model" not in machine_facts._queried()[0]


def test_a_dead_link_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "missing0")

    with pytest.raises(links.LinkError, match=r"gloo fails on rank \d \(cpu\)"):
        links.measure_links(("cpu", "cpu"), "gloo")


def test_links_are_timed_by_collective_and_size():
    found = links.measure_links(("cpu", "cpu"), "gloo")

    assert [(link.collective, link.num_bytes) for link in found] == [
        (collective, size) for size in links.SIZES for collective in links.COLLECTIVES]
    assert all(link.bytes_s > 0 and link.seconds.rounds == links.ROUNDS for link in found)


class Perturbed:
    """A client whose predictions are wrong under one method."""

    def __init__(self, client, method):
        self._client, self._method = client, method

    def __getattr__(self, name):
        return getattr(self._client, name)

    def wait(self, handles):
        handle, predictions = self._client.wait(handles)
        return handle, [prediction * 1.01 for prediction in predictions]

    def submit(self, spec, layout, *args, **kwargs):
        self.is_wrong = getattr(layout, f"{self._method}_degree") > 1
        return self._client.submit(spec, layout, *args, **kwargs)


@pytest.fixture(scope="module")
def clients():
    started = start_clients({1, 2}, 0)
    yield started
    for client in started.values():
        client.close()


@pytest.fixture(scope="module")
def planned(clients, tmp_path_factory):
    return {check.name: check for check in checks.planned_checks(clients, tmp_path_factory.mktemp("models"))}


@pytest.mark.parametrize("name", ["Flux.1 data2", "SD3 pipefusion2", "Wan tensor2", "SD 1.5 displaced2", "VAE encode",
                                  "cancel in a step", "killed worker"])
def test_checks_pass_here(planned, name):
    check = checks.run_check(planned[name])

    assert check.passed, check.message
    assert check.error is None or check.error < 1e-5


@pytest.mark.slow
def test_all_checks_pass_here(planned):
    made = [checks.run_check(one) for one in planned.values()]

    assert [check.message for check in made if not check.passed] == [] and len(made) == 37


def test_a_wrong_method_is_named(clients, tmp_path):
    wrong = checks.planned_checks({1: clients[1], 2: Perturbed(clients[2], "ring")}, tmp_path)

    check = checks.run_check(next(one for one in wrong if one.name == "Flux.1 ring2"))

    assert not check.passed and "differs from one device's by" in check.message
    assert check.command == 'python -m xdit_backend report --no-times --only "Flux.1 ring2"'


def test_a_wrong_result_that_is_not_a_number_fails():
    import torch
    with pytest.raises(checks.WrongResultError):
        checks.relative([torch.tensor([float("nan")])], [torch.tensor([1.0])])


def test_an_error_that_does_not_name_the_killed_worker_fails(planned, clients, monkeypatch):
    def predict(*args, **kwargs):
        monkeypatch.undo()
        raise WorkerDiedError("something ended")
    check = checks.Planned("killed worker", lambda: checks.kill(SimpleNamespace(
        devices=("cpu", "cpu"), predict=_second(clients[1], predict), report_memory=lambda: {1: {"pid": 2 ** 22 - 1}}),
        _subject(planned)))
    monkeypatch.setattr(checks.psutil, "Process", lambda pid: SimpleNamespace(kill=lambda: None))

    assert "does not name the killed worker" in checks.run_check(check).message


def _second(client, then):
    calls = []

    def predict(*args, **kwargs):
        calls.append(True)
        return then() if len(calls) == 2 else []
    return predict


def _subject(planned):
    return SimpleNamespace(spec=lambda: None, num_channels=4, calls=[])


def test_nothing_private_is_in_a_report(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostname", lambda: "odd-host-name")
    monkeypatch.setattr(getpass, "getuser", lambda: "odduser")
    monkeypatch.setenv("HOME", "/home/odduser")

    def fail():
        raise XDiTError("odduser cannot read /home/odduser/my models/secret.safetensors on odd-host-name, nor "
                        f"{tempfile.gettempdir()}/odd-folder/file")
    check = checks.run_check(checks.Planned("a check", fail))
    report = results.Report(schema=1, date="2026-11-29", version="0.2.0", devices=("cpu", "cpu"),
                            machine=machine_facts.machine_facts(), notes=(), checks=(check,), links=(), sizes={},
                            timings=(), chosen={}, seconds=1.0, is_complete=False)

    paths = document.write(report, tmp_path)

    assert len(paths) == 2
    for path in paths:
        text = path.read_text()
        for private in ("odduser", "odd-host-name", "/home", tempfile.gettempdir(), str(ROOT), sys.prefix):
            assert private not in text
    assert logs.without_private("odduser") == "..."


def test_the_command_checks_writes_and_ends_with_what_failed(tmp_path):
    command = [sys.executable, "-m", "xdit_backend", "report", "--devices", "cpu,cpu", "--only", "SD3 ring2"]

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)

    assert result.returncode == 0 and result.stdout.startswith("passed  SD3 ring2"), result.stderr


def test_a_check_that_does_not_exist_is_named():
    options = SimpleNamespace(only="nothing", no_times=True, no_checks=False)

    with pytest.raises(ConfigError, match='none begins with "nothing"'):
        make(("cpu", "cpu"), options, Progress(60, lambda text: None))


@pytest.mark.slow
def test_a_whole_report_is_written_in_its_time(tmp_path):
    command = [sys.executable, "-m", "xdit_backend", "report", "--devices", "cpu,cpu", "--folder", str(tmp_path)]

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)

    assert result.returncode == 0, result.stderr
    report = results.read_report(next(tmp_path.glob("*.json")))
    assert not report.failed and {timing.model for timing in report.timings} and len(report.links) == 6


def test_a_stage_has_the_ranks_of_the_other_methods():
    """With a tensor degree too: the four workers of a product have two of each stage's blocks."""
    found = [checks.stages_of({"pipefusion": 2} | others).sequence_degree
             for others in ({}, {"tensor": 2}, {"ring": 2}, {"ulysses": 2, "tensor": 2}, {"cfg": 2})]

    assert found == [1, 2, 2, 4, 1]
