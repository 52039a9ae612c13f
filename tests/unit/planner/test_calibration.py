"""What runs teach: one factor a family and card, which follows what runs take and never touches the links."""

import dataclasses
import importlib.metadata

import pytest

from tests.support.tolerances import within
from xdit_backend.attention.backends import BACKENDS
from xdit_backend.host import machine_profiles
from xdit_backend.planner.calibration import MIN_FACTOR, Calibration, after, calibrated
from xdit_backend.planner.cost_model import Degrees, Device, Job, Links, ModelDims
from xdit_backend.planner.descriptions import SHOWN_S, describe_plan
from xdit_backend.planner.layout_search import Machine, estimate

FLUX, JOB = ModelDims(57, 3072, 24, 12.0, 11.9e9), Job(4096, 512, 20)
CARD = Device(1e14, 1e14, 1e12, name="a card")
PAIR = Machine((CARD, CARD), Links({("all_to_all", 2): 1e10, ("hop", 2): 1e10}))


def test_a_factor_becomes_what_runs_take():
    calibration = after(None, 1.3)
    within(abs(calibration.factor - 1.3), 1e-12)
    for _ in range(20):
        calibration = after(calibration, 0.8)

    within(abs(calibration.factor - 0.8), 0.01)
    assert calibration.count == 21 and after(None, 1e9).factor == 1 / MIN_FACTOR


def test_one_device_takes_what_was_learnt_and_links_stay():
    known = {("Flux.1", "a card"): Calibration(1.5, 3), ("Wan", "a card"): Calibration(2.0, 1),
             ("Flux.1", "another"): Calibration(3.0, 1)}
    machine = calibrated(PAIR, known, "Flux.1")

    one, before = (estimate(FLUX, JOB, Degrees(data=2), each).seconds for each in (machine, PAIR))
    within(abs(one / before - 1.5), 1e-9)
    assert machine.links is PAIR.links and calibrated(PAIR, known, "SD3") is PAIR


def test_a_measurement_is_of_the_packages_that_it_timed(tmp_path, monkeypatch):
    """A newer one, or one more, is measured anew; and what is kept is what was measured."""
    assert {kernel.package for kernel in BACKENDS.values() if kernel.module} <= set(machine_profiles.PACKAGES)
    versions = {"sageattention": "2.1.1"}

    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]
    monkeypatch.setattr(importlib.metadata, "version", version)
    devices, gpu = ["cpu", "cpu"], lambda device: ("a card", 1e9)
    machine = Machine((dataclasses.replace(CARD, products={"nvfp4": 2.5}, kernels={"sage 128": 1.5}),) * 2, PAIR.links)
    machine_profiles.store_machine(tmp_path, devices, "float32", machine, gpu)

    cached = machine_profiles.stored_machine(tmp_path, devices, "float32", gpu).devices[0]
    assert (cached.products, cached.kernels) == ({"nvfp4": 2.5}, {"sage 128": 1.5})
    for changed in ({"sageattention": "2.2.0"}, {"comfy-kitchen": "0.3"}):
        versions = {"sageattention": "2.1.1"} | changed
        assert machine_profiles.stored_machine(tmp_path, devices, "float32", gpu) is None


def test_what_was_learnt_is_kept_beside_the_probe(tmp_path):
    for ratio in (1.2, 1.2):
        machine_profiles.record_run(tmp_path / "xdit", "Flux.1", "a card", ratio)
    known = machine_profiles.calibrations(tmp_path / "xdit")

    assert known["Flux.1", "a card"].count == 2 and machine_profiles.calibrations(tmp_path) == {}
    within(abs(known["Flux.1", "a card"].factor - 1.2), 1e-12)


@pytest.mark.parametrize("said", ["{", "[]", '{"Flux.1": [1, 1]}', '{"Flux.1 | a card": "fast"}',
                                  '{"Flux.1 | a card": [1e9, 1]}'])
def test_what_cannot_be_read_teaches_nothing(tmp_path, said):
    (tmp_path / machine_profiles.RUNS).write_text(said)

    assert machine_profiles.calibrations(tmp_path) == {}


def test_words_say_a_range_until_it_was_measured():
    chosen, one = (estimate(FLUX, JOB, degrees, PAIR) for degrees in (Degrees(ulysses=2), Degrees(data=2)))
    faster = one.seconds / chosen.seconds

    text = describe_plan(chosen, one, [chosen, one])
    words = f"about {faster:.1f}x as fast as one device ({faster * 0.85:.1f}x to {faster * 1.15:.1f}x, "
    assert words in text and "measured" not in text


@pytest.mark.parametrize("measured_s, words", [
    ((10.0, None), "Plan: Ulysses 2, 10 s the last time. "),
    ((10.0, 18.0), "Plan: Ulysses 2, 10 s the last time (1.8x as fast as one device). ")])
def test_what_was_measured_stands_beside_what_was_measured_and_no_forecast(measured_s, words):
    chosen, one = (estimate(FLUX, JOB, degrees, PAIR) for degrees in (Degrees(ulysses=2), Degrees(data=2)))

    text = describe_plan(chosen, one, [chosen, one], measured_s)
    assert words in text and text.count("as fast") == (measured_s[1] is not None)


def test_a_short_run_is_described_without_an_estimate():
    """Its error is as large as the run: 0.3 s stood next to a measured 0.9 s."""
    job = Job(256, 16, 4)
    chosen, one = (estimate(FLUX, job, degrees, PAIR) for degrees in (Degrees(ulysses=2), Degrees(data=2)))

    assert chosen.seconds < SHOWN_S
    assert describe_plan(chosen, one, [chosen, one]) == "Plan: Ulysses 2. Next best: one device"
    assert describe_plan(chosen, None, [chosen]) == "Plan: Ulysses 2"


def test_estimates_stand_next_to_estimates_only():
    chosen, one = (estimate(FLUX, JOB, degrees, PAIR) for degrees in (Degrees(ulysses=2), Degrees(data=2)))

    measured, estimated = (describe_plan(chosen, one, [chosen, one], times) for times in ((10.0, 18.0), (None, None)))
    assert measured.endswith(" Next best: one device") and estimated.endswith(" s")
    assert measured.count(" s") == 1 and "GB" not in estimated
