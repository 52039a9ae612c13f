"""What the node says of the phases before the first step: in their order, and never backwards."""

import importlib

import pytest


@pytest.fixture
def runs(comfyui):
    module = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.progress")
    messages = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.protocol.messages")
    runs = module.Runs()
    runs.tell = lambda *phase: runs.describe_phase(messages.Phase(*phase))
    return runs


def test_phases_of_ranks_that_start_at_different_times_only_advance(runs):
    """As two workers on two busy cores sent them."""
    told = [runs.tell(*phase) for phase in (
        (0, "starting workers", 0, 2), (1, "joining the devices"), (0, "starting workers"), (0, "joining the devices"),
        (1, "trying the links between the devices"), (0, "joining the devices"), (0, "starting workers", 1, 2),
        (1, "starting workers", 2, 2), (0, "loading weights", 0, 10, True), (1, "joining the devices"))]

    assert [text for text in told if text] == [
        "starting workers 0 of 2", "joining the devices", "joining the devices", "trying the links between the devices",
        "loading weights 0 of 0 MB"]


def test_the_slowest_rank_counts_and_a_later_one_does_not_turn_the_count_back(runs):
    told = [runs.tell(rank, "decoding", done, 10) for rank, done in (
        (0, 0), (0, 4), (1, 0), (1, 2), (0, 6), (1, 5), (1, 10), (0, 10))]

    assert [text for text in told if text] == [f"decoding {done} of 10" for done in (0, 4, 5, 6, 10)]
    assert runs.phase["done"] == 10


def test_a_rank_that_begins_again_counts_from_the_start(runs):
    """Such as the weights of a second model, or another image of a batch."""
    assert [runs.tell(0, "loading weights", done, 4) for done in (2, 4, 0, 1)] == [
        f"loading weights {done} of 4" for done in (2, 4, 0, 1)]


def test_another_start_is_told_from_its_beginning(runs):
    for phase in ((0, "starting workers", 0, 2), (0, "joining the devices"), (0, "loading weights", 1, 2)):
        runs.tell(*phase)

    assert runs.tell(0, "starting workers", 0, 2) == "starting workers 0 of 2"
    assert runs.tell(1, "joining the devices") == "joining the devices"


def test_waiting_for_another_machine_is_part_of_a_start(runs):
    told = [runs.tell(*phase) for phase in ((0, "starting workers", 0, 2), (0, "waiting for other-pc"),
                                            (0, "joining the devices"))]

    assert told == ["starting workers 0 of 2", "waiting for other-pc", "joining the devices"]
