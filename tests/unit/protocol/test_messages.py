"""Messages survive the wire, and what is no message is refused."""

import json

import pytest

from tests.programs.malformed import BETWEEN_MACHINES, EXAMPLES, decode_noise
from xdit_backend.multi_node import connections
from xdit_backend.protocol import messages, specs
from xdit_backend.protocol.errors import XDiTError
from xdit_backend.protocol.messages import decode, encode
from xdit_backend.protocol.shared_memory import Segment
from xdit_backend.protocol.validation import MAX_ITEMS, MAX_NAME, MAX_TEXT


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message):
    assert decode(encode(message)) == message


def test_every_message_is_tried():
    assert {type(message) for message in EXAMPLES} == set(messages.MESSAGES.values())


@pytest.mark.parametrize("raw", [
    b"", b"\x80\x04.", b"[]", b"Stop", b"Exec {}", b"Layout {}", b'Stop {"request": 0',
    b'Stop {"request": 0, "more": 1}', b"Stop []",
    b'LoadModel {"request": 1}', b'DropModel {"request": "1", "name": "x"}',
    b'DropModel {"request": true, "name": "x"}',
    b'DropConditioning {"request": 1, "names": "abc"}', b'DropConditioning {"request": 1, "names": ["a", 1]}',
    b"Stop " + b"[" * 100_000, b'Stop {"request": ' + b"9" * 100_000 + b"}", b"\xff {}"],
                         ids=lambda raw: repr(raw[:40]))
def test_what_is_no_message_is_refused(raw):
    with pytest.raises(XDiTError, match="Invalid message") as refused:
        decode(raw)
    assert len(str(refused.value)) < 2000


WRONG = {                                                      # type of a value -> what cannot stand in its place
    bool: [0, "true", None, [], {}],
    int: ["1", True, 1.5, -1, 2 ** 70, None, [], {}],
    float: ["1", True, None, [], {}],
    str: [1, True, None, [], {}],
    list: ["abc", 1, True, None, {}, ["abc", [1]]],
    dict: ["abc", 1, True, None, [], {"abc": {}}],
    type(None): ["abc", 1, True, [], {"abc": {}}]}
# fields whose keys are names, any names
FREE_NAMES = ("tensors", "weights", "settings", "facts", "numbers", "changes")
OPTIONAL = ("patch", "stages", "whole", "offset")


def spoilt(key, value):
    """Copies of a JSON value, each with one thing wrong:
    a type, a bound or an unknown field, at the top or anywhere inside."""
    yield from (wrong for wrong in WRONG[type(value)] if wrong is not None or key not in OPTIONAL)
    if isinstance(value, dict):
        for name, item in value.items():
            yield from ({**value, name: wrong} for wrong in spoilt(name, item))
        if key not in FREE_NAMES:
            yield {**value, "more": 1}
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from ([*value[:index], wrong, *value[index + 1:]] for wrong in spoilt(None, item))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_one_thing_wrong_anywhere_is_refused(message):
    name, _, fields = encode(message).partition(b" ")
    wrongs = list(spoilt(None, json.loads(fields)))

    assert len(wrongs) > 10
    for wrong in wrongs:
        with pytest.raises(XDiTError, match="Invalid message"):
            decode(name + b" " + json.dumps(wrong).encode())


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_refused_or_is_a_message(seed):
    """Whatever bytes come: XDiTError and nothing else, or a message that would have been sent in these words."""
    outcomes = decode_noise(seed, 2000)

    assert outcomes["refused"] > 1000 and outcomes["a message"] > 10


def test_a_mistake_is_told_where_it_is_made():
    with pytest.raises(ValueError, match="DropConditioning"):
        messages.DropConditioning(4, "conditioning-1")
    with pytest.raises(ValueError, match="ulysses_degree"):
        specs.Layout(ulysses_degree=0)
    with pytest.raises(ValueError, match="not a segment's dtype"):
        Segment("/dev/shm/xdit/1", "complex64", (1,))
    with pytest.raises(ValueError, match="is too large for a segment"):
        Segment("/dev/shm/xdit/1", "uint8", (0, 2 ** 40, 2 ** 40))


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), 0.1])
def test_every_number_can_be_reported(number):
    assert decode(encode(messages.Done(9, 0, {"seconds": number}))).numbers == {"seconds": number}


def test_a_failure_can_be_told_whatever_its_words():
    """As of a file name that is no UTF-8, or of an exception that quotes a tensor."""
    failed = decode(encode(messages.Failed(10, 1, "cpu", "OSError", "no \udcff", "line\n" * 10 ** 7)))

    assert failed.message == "no \\udcff" and len(failed.traceback) == 2 ** 20


LARGE = "what is larger than it may be"


def enlarged(key, value):
    """(copy of a JSON value with LARGE in one place, JSON that is larger than any that is sent there)"""
    if isinstance(value, str):
        yield LARGE, '"' + "x" * (MAX_TEXT + 1) + '"'
    if isinstance(value, list):
        if value:
            yield LARGE, f"[{','.join([json.dumps(value[0])] * (MAX_ITEMS + 1))}]"
        for index, item in enumerate(value):
            yield from (([*value[:index], one, *value[index + 1:]], raw) for one, raw in enlarged(None, item))
    if isinstance(value, dict):
        if key in (*FREE_NAMES, "control", "operations", "versions", "gpus") and value:
            item = json.dumps(next(iter(value.values())))
            yield LARGE, "{" + ",".join(f'"{number}":{item}' for number in range(MAX_ITEMS + 1)) + "}"
            yield LARGE, '{"' + "x" * (MAX_NAME + 1) + f'": {item}}}'
        for name, item in value.items():
            yield from (({**value, name: one}, raw) for one, raw in enlarged(name, item))


@pytest.mark.parametrize("message", [*EXAMPLES, *BETWEEN_MACHINES], ids=lambda message: type(message).__name__)
def test_every_text_and_collection_of_a_message_is_bounded(message):
    """What an error is for a person is cut, not refused."""
    adapters = connections.BETWEEN_MACHINES if message in BETWEEN_MACHINES else messages.ADAPTERS
    name, _, fields = encode(message, adapters).partition(b" ")
    for large, value in enlarged(None, json.loads(fields)):
        raw = name + b" " + json.dumps(large).replace(f'"{LARGE}"', value).encode()
        try:
            found = decode(raw, adapters)
        except XDiTError:
            continue
        assert len(encode(found, adapters)) < len(raw) and len(encode(found, adapters)) <= MAX_TEXT + 1000


def test_every_message_between_machines_is_tried():
    assert {type(message).__name__ for message in BETWEEN_MACHINES} == set(connections.BETWEEN_MACHINES)
