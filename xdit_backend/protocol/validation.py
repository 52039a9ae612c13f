"""How what travels between processes is checked: types exactly, numbers within bounds, no field that is not known."""

from typing import Annotated, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

MAX_RANKS, MAX_TEXT = 2 ** 16, 2 ** 20
MAX_NAME, MAX_REASON = 2 ** 14, 2 ** 12    # characters of a name or path, and of an error on another machine
# of a list or of names; a model has at most checkpoints.header_limits.MAX_TENSORS
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
    """As much of a text as anyone reads, without the lone surrogates that stand for bytes of file names that are no
    UTF-8."""
    if not isinstance(text, str):
        return text
    return text[:MAX_TEXT].encode(errors="backslashreplace").decode()[:MAX_TEXT]


def _reason(text):
    return _printable(text[:MAX_REASON])[:MAX_REASON] if isinstance(text, str) else text


# for a person alone: a report must not fail by what it reports
Printable: TypeAlias = Annotated[str, Field(max_length=MAX_TEXT), BeforeValidator(_printable)]
Reason: TypeAlias = Annotated[str, Field(max_length=MAX_REASON), BeforeValidator(_reason)]
# collections of messages, which are bounded
Many: TypeAlias = Annotated[tuple[T, ...], Field(max_length=MAX_ITEMS)]
ManyListed: TypeAlias = Annotated[list[T], Field(max_length=MAX_ITEMS)]
ByName: TypeAlias = Annotated[dict[K, T], Field(max_length=MAX_ITEMS)]

STRICT = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants", str_max_length=MAX_NAME)
