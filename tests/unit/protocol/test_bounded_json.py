"""JSON is parsed as Python's parser does, within limits that are checked before."""

import json
import math
import random
import time

import pytest

from xdit_backend.protocol.bounded_json import MAX_DEPTH, parse_json, shown

LIMITS = 2 ** 20, 2 ** 12
REAL = {"text": 'a "quoted" \\ back\\\\slash [{,:}] \\" é \U0001f600 \n', "": [], "numbers": [0, -1, 2 ** 63 - 1, 1.5],
        "nested": [[[{"a": [None, True, False, {}]}]]], '"\\': '\\"', "long": ",:[]{}" * 3000}


@pytest.mark.parametrize("value", [REAL, [], {}, 7, "x", None, "\\", '\\"', ["\\\\", '"'], -math.inf], ids=repr)
@pytest.mark.parametrize("how", [{}, {"indent": 2}, {"ensure_ascii": False}], ids=str)
def test_what_is_within_the_limits_is_parsed_as_json_does(value, how):
    raw = json.dumps(value, **how).encode()

    assert parse_json(raw, *LIMITS) == json.loads(raw) == value


def test_any_text_is_parsed_as_json_does():
    chance = random.Random(0)
    for _ in range(300):
        values = ["".join(chance.choices('ab\\"[]{},:\n', k=chance.randrange(8))) for _ in range(6)]
        value = dict(zip(values, [*values[1:], [values]]))
        assert parse_json(json.dumps(value).encode(), *LIMITS) == value


@pytest.mark.parametrize("raw, words", [
    (b" " * (2 ** 20 + 1), "1,048,577 bytes of JSON"), (b"[" * 100_000, "values"), (b"[" * 1000, "brackets"),
    (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels"), (b"]" * 10, "brackets"),
    (b"[" + b"0," * 5000 + b"0]", "more than 4,096 values"), (b'""' * 5000, "strings"),
    (b"9" * 4000, "more than 32 digits"), (b"-0." + b"9" * 4000, "more than 32 digits"),
    (b'{"a": 1, "a": 2}', "'a' twice"), (b"{'a': 1}", "property name"),
    (b'["\\ud800"]', "surrogates"), (b'["\\uDFFF"]', "surrogates"), (b"\xff", "decode"), (b'"', "Unterminated"),
    (b'"\\', "Unterminated"), (b"", "Expecting value"), (b"nul", "Expecting value"), (b"[1,]", ".")],
    ids=lambda value: repr(value[:20]))
def test_what_is_over_a_limit_or_no_json_is_an_error(raw, words):
    with pytest.raises(ValueError, match=words):
        parse_json(raw, *LIMITS)


def test_a_pair_of_surrogates_is_text():
    assert parse_json(b'["\\ud83d\\ude00"]', *LIMITS) == ["\U0001f600"]


@pytest.mark.parametrize("raw", [b"[" * 2 ** 23, b"[]," * 2 ** 21, b'"",' * 2 ** 21, b'\\"' * 2 ** 22, b"9" * 2 ** 23,
                                 b'"' * 2 ** 23, b'{"a":' * 2 ** 20],
                         ids=lambda value: repr(value[:8]))
def test_megabytes_are_refused_before_they_are_parsed(raw):
    """Their parsing takes seconds, or a recursion for each bracket."""
    started_s = time.process_time()
    with pytest.raises(ValueError):
        parse_json(raw, 2 ** 24, 2 ** 16)

    assert time.process_time() - started_s < 0.5


def test_an_error_quotes_the_beginning_of_a_value():
    assert shown("a") == "'a'" and len(shown(["x"] * 1000)) < 70
