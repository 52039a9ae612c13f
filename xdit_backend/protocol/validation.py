"""Field types of messages: strictly typed, bounded, and without unknown fields."""

from typing import Annotated, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

MAX_RANKS, MAX_TEXT = 2 ** 16, 2 ** 20
MAX_NAME, MAX_REASON = 2 ** 14, 2 ** 12    # characters of a name or path, and of another machine's error
# of a list or mapping; a model has at most checkpoints.header_limits.MAX_TENSORS
MAX_ITEMS = 2 ** 14
K = TypeVar("K")
T = TypeVar("T")

Natural: TypeAlias = Annotated[int, Field(ge=0, lt=2 ** 63)]
Rank: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Degree: TypeAlias = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Speed: TypeAlias = Annotated[int, Field(ge=1, le=2 ** 20)]
Exchange: TypeAlias = Annotated[str, Field(pattern=r"^[0-9]{1,5}([,>][0-9]{1,5})*$", max_length=2 ** 16)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


def _printable(text):
    """Truncate a text, and escape lone surrogates, which represent bytes of file names that are not UTF-8."""
    if not isinstance(text, str):
        return text
    return text[:MAX_TEXT].encode(errors="backslashreplace").decode()[:MAX_TEXT]


def _reason(text):
    return _printable(text[:MAX_REASON])[:MAX_REASON] if isinstance(text, str) else text


# text for the user only: it is made valid instead of rejected, so that a report cannot fail by its content
Printable: TypeAlias = Annotated[str, Field(max_length=MAX_TEXT), BeforeValidator(_printable)]
Reason: TypeAlias = Annotated[str, Field(max_length=MAX_REASON), BeforeValidator(_reason)]
# bounded collections
Many: TypeAlias = Annotated[tuple[T, ...], Field(max_length=MAX_ITEMS)]
ManyListed: TypeAlias = Annotated[list[T], Field(max_length=MAX_ITEMS)]
ByName: TypeAlias = Annotated[dict[K, T], Field(max_length=MAX_ITEMS)]

STRICT = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants", str_max_length=MAX_NAME)
