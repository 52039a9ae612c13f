"""JSON parser with limits on size, nesting and digits, which are checked before the text is parsed.

Python's parser has no limit on the number of values, and before 3.11 none on digits: a few megabytes of brackets or
digits would block the GIL for seconds.
"""

import collections
import json
import re

MAX_DEPTH = 16
MAX_DIGITS = 32                            # of a number; a 64-bit integer has 20, a float in full precision 17
MAX_SHOWN = 60                             # characters of a value that an error quotes

STRING = re.compile(rb'"[^"]*"?')          # where no quote is escaped
LONG_NUMBER = re.compile(rb"\d{%d}" % (MAX_DIGITS + 1))
OTHER_THAN_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parse_json(raw, max_bytes, max_values):
    """Parse JSON bytes. Raises ValueError for invalid JSON, for repeated names, and for what exceeds a limit.

    max_values: upper bound of all lists, objects, items and names together.
    """
    if len(raw) > max_bytes:
        raise ValueError(f"{len(raw):,} bytes of JSON, at most {max_bytes:,} are allowed")
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') // 2 > max_values + 1:
        raise ValueError(f"more than {max_values + 1:,} strings")
    structure = STRING.sub(b"", unescaped)
    if sum(map(structure.count, (b"[", b"{", b",", b":"))) > max_values:
        raise ValueError(f"more than {max_values:,} values")
    if LONG_NUMBER.search(structure):
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    brackets = structure.translate(None, OTHER_THAN_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise ValueError(f"unclosed brackets, or more than {MAX_DEPTH} levels")
    value = json.loads(raw.decode(), object_pairs_hook=_unique)
    if b"\\ud" in raw.lower():                                 # a lone surrogate cannot be encoded
        json.dumps(value, ensure_ascii=False).encode()
    return value


def shown(value):
    """A value's repr, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _unique(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        (name, _), = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(name)} twice")
    return found
