"""What the client sends of weights that are to change and of ControlNets, without workers."""

import torch

from xdit_backend.host.calls import Call
from xdit_backend.host.weight_updates import BATCH_BYTES, Change, Changes, batches


def change(of, num_bytes=1):
    return Change((of,), num_bytes, lambda share: of)


def test_what_a_control_gives_to_many_places_is_made_once():
    shared, own, made = torch.zeros(1), torch.ones(1), []
    call = Call(None, None, {}, control={"output.0": shared, "output.1": own, "output.2": shared})

    assert call.control_by(lambda tensor: made.append(tensor)
                           or len(made)) == {"output.0": 1, "output.1": 2, "output.2": 1}


def test_changes_lead_from_those_in_effect_to_those_asked_for():
    changes = Changes()
    changes.request("model", {"a": change(1), "b": change(2)})
    assert changes.pending("model") == changes.requested("model") and not changes.are_in_effect("model")
    changes.take_effect("model", changes.requested("model"))

    changes.request("model", {"b": change(2), "c": change(3)})

    back = changes.pending("model")
    assert list(back) == ["a", "c"] and back["a"].make(None).whole is None and back["c"] == change(3)
    changes.loaded("model")                                    # anew, from the file
    assert list(changes.pending("model")) == ["b", "c"]


def test_versions_that_a_run_leaves_keep_their_numbers_until_no_run_is_under_way():
    changes = Changes()
    numbers = []
    for wanted in ({}, {"a": change(1)}, {}, {"a": change(1)}):
        changes.request("model", wanted)
        numbers.append((changes.left("model"), changes.leave("model")))
        changes.take_effect("model", wanted)
    assert numbers == [(None, 1), (None, 1), (1, 2), (2, 1)]

    changes.end_runs()
    assert changes.left("model") is None and changes.leave("model") == 3


def test_changes_are_sent_by_as_many_as_there_is_room_for_twice():
    sizes = {"a": 2 * BATCH_BYTES, "b": BATCH_BYTES // 2, "c": BATCH_BYTES // 2, "d": 1}

    found = list(batches({name: change(name, size) for name, size in sizes.items()}))

    assert [list(batch) for batch in found] == [["a"], ["b", "c"], ["d"]]
