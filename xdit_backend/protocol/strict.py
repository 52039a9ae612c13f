"""How what travels between processes is checked: types exactly, numbers within bounds, no field that is not known."""

from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field

MAX_RANKS, MAX_TEXT = 2 ** 16, 2 ** 20

Natural: TypeAlias = Annotated[int, Field(ge=0, lt=2 ** 63)]
Rank: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Degree: TypeAlias = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Speed: TypeAlias = Annotated[int, Field(ge=1, le=2 ** 20)]
Exchange: TypeAlias = Annotated[str, Field(pattern=r"^[0-9]{1,5}([,>][0-9]{1,5})*$", max_length=2 ** 16)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


def _printable(text):
    """As much of a text as anyone reads, without the lone surrogates that stand for bytes of file names that are no
    UTF-8."""
    return text[:MAX_TEXT].encode(errors="backslashreplace").decode() if isinstance(text, str) else text


# for a person alone: a report must not fail by what it reports
Printable: TypeAlias = Annotated[str, BeforeValidator(_printable)]

STRICT = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")
