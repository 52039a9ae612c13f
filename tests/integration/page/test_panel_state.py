"""What the panel is told of a run: memory that adds up, the steps that ran on the ranks that ran them,
and what its buttons do."""

import importlib
import json
import time

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def panel(comfyui):
    return importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.server.panel")


def adds_up(state):
    for device in state["devices"]:
        assert (all(size >= 0 for size in device["owners"].values())
                and sum(device["owners"].values()) == device["total"] > 2 ** 30)
    return {device["name"]: device["owners"] for device in state["devices"]}


@pytest.mark.parametrize("kinds, degrees", [(("whole",), {"cfg": 2}), (("exchange", "whole"), {"ulysses": 2}),
                                            (("patch", "wait", "whole"), {"pipefusion": 2, "num_patches": 4})], ids=str)
def test_the_timeline_is_of_the_ranks_and_steps_that_ran(comfyui, panel, kinds, degrees):
    comfyui.sample(comfyui.ours("sd3", comfyui.config("cpu,cpu", **degrees)), "sd3", steps=5)

    state, times = panel.state(), panel.timeline()

    run = state["run"]
    assert (run["state"], run["step"], run["steps"], run["devices"]) == ("done", 5, 5, ["cpu", "cpu"])
    assert (times["run"] == run["number"] and times["steps"] == 5
            and [rank["name"] for rank in times["ranks"]] == ["0: cpu", "1: cpu"])
    for rank in times["ranks"]:
        steps = [span for span in rank["spans"] if span[0] in ("whole", "patch")]
        assert ({span[0] for span in rank["spans"]} - {"exchange"} <= set(kinds)
                and {span[3] for span in steps} == {1, 2, 3, 4, 5})
        assert all(0 <= start <= end <= times["seconds"] for _, start, end, _, _ in rank["spans"])
        assert [span[3] for span in steps] == sorted(span[3] for span in steps)
        # one warm-up step, then four pieces of each branch or of both
        if "patch" in kinds:
            patches = [span[4] for span in steps if span[3] == 3]
            assert len(set(patches)) == 4 and 0 in patches
    assert set(kinds) <= {span[0] for rank in times["ranks"] for span in rank["spans"]} | {"exchange"}
    events = [event for event in panel.trace()["traceEvents"] if event["ph"] == "X"]
    assert (len(events) == sum(len(rank["spans"]) for rank in times["ranks"])
            and json.loads(json.dumps(events)) == events)


@pytest.mark.parametrize("degrees", [{"cfg": 2}, {"pipefusion": 2, "num_patches": 2}], ids=str)
def test_waits_for_weights_are_in_the_timeline_in_the_step_that_waited(comfyui, panel, monkeypatch, degrees):
    """And the panel is told what of a model stays on each device, and what comes."""
    monkeypatch.setattr(panel, "SHORT_S", 0.0)                 # what comes of a tiny model takes no longer
    least = comfyui.ours("sd3", comfyui.config("cpu,cpu", **degrees), size="demo").model.remote.memory.group.least_bytes
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", weights_memory=f"{1.01 * least / 1e9}", **degrees),
                         size="demo")
    memory = model.model.remote.memory
    comfyui.sample(model, "sd3", steps=3)

    state, times = panel.state(), panel.timeline()

    for rank in times["ranks"]:
        steps = {span[3]: span for span in rank["spans"] if span[0] == "whole"}
        waits = [span for span in rank["spans"] if span[0] == "weights"]
        assert waits and {wait[3] for wait in waits} <= {1, 2, 3}
        for _, start, end, step, _ in waits if "cfg" in degrees else ():
            assert steps[step][1] <= start <= end <= steps[step][2]
    own, = (one for group in state["groups"] for one in group["models"]
            if one["name"] == model.model.remote.spec.name)
    assert own["offloaded"] == memory.offloaded_bytes and min(own["offloaded"]) > 0
    assert own["weights"] == memory.weight_bytes and state["run"]["streamed"] == memory.streamed_bytes


def test_a_group_that_took_no_part_has_no_row_in_the_timeline(comfyui, panel):
    comfyui.sample(comfyui.ours("sd3", comfyui.config()), "sd3", steps=2)
    comfyui.sample(comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2)), "sd3", steps=2)

    # what was dropped has its answers without anybody's asking
    deadline = time.monotonic() + 120
    while any(client.workers.state == "working" for client in panel.GROUPS.clients) and time.monotonic() < deadline:
        time.sleep(0.05)
    panel.state()                                              # asks all groups that are idle

    assert [rank["name"] for rank in panel.timeline()["ranks"]] == ["0: cpu", "1: cpu"]


def test_memory_adds_up_and_is_given_back(comfyui, panel):
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2))
    comfyui.sample(model, "sd3", steps=2)
    before = panel.state()
    held = sum(sum(one["weights"]) for group in before["groups"] for one in group["models"])

    panel.ACTIONS["give_back"]()
    after = panel.state()

    assert adds_up(before)["cpu"]["weights"] > 0 and before["groups"][-1]["state"] == "idle"
    assert adds_up(after)["cpu"]["weights"] == 0 and adds_up(after)["cpu"]["parked"] > 0
    assert sum(sum(one["parked"]) for group in after["groups"] for one in group["models"]) == held
    comfyui.sample(model, "sd3", steps=2)                      # the next run has them again
    assert adds_up(panel.state())["cpu"]["weights"] > 0


def test_what_fails_is_said(comfyui, panel, monkeypatch):
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2))

    def fail(*arguments):
        raise RuntimeError("a test")

    monkeypatch.setattr(type(model.remote), "predict", fail)
    with pytest.raises(RuntimeError):
        comfyui.sample(model, "sd3", steps=2)
    assert (panel.state()["run"]["state"], panel.state()["run"]["error"]) == ("failed", "a test")


@pytest.mark.parametrize("total, owners, expected", [
    (100, {"weights": 40, "other": 10}, {"weights": 40, "other": 10, "free": 50}),
    (100, {"weights": 40, "activations": 80, "other": 10}, {"weights": 40, "activations": 60, "other": 0, "free": 0}),
    (100, {"weights": 40, "other": -5}, {"weights": 40, "other": 0, "free": 60})])
def test_owners_add_up_to_the_device(panel, total, owners, expected):
    result = panel.add_up(total, owners)

    assert sum(result.values()) == total and expected.items() <= result.items()
