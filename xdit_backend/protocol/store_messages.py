"""Messages for access to the group's c10d store, a file on the host, from ranks on other machines."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field
from pydantic.dataclasses import dataclass

from .validation import MAX_RANKS, STRICT, Natural, Printable, Rank

# gloo's and NCCL's own keys have fewer than 200 characters, their values fewer than 1,000 bytes
StoreKey: TypeAlias = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,512}$")]
StoreValue: TypeAlias = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=2 ** 17)]


@dataclass(frozen=True, config=STRICT)
class StoreRequest:
    """An operation on the group's c10d store, sent by a rank on another machine and answered with StoreReply.

    No operation blocks. value, expected: raw bytes, in hexadecimal. amount: of "add".
    """

    rank: Rank
    number: Natural
    operation: Literal["set", "get", "add", "compare_set", "check", "delete", "num_keys"]
    keys: Annotated[tuple[StoreKey, ...], Field(max_length=MAX_RANKS)] = ()
    value: StoreValue = ""
    expected: StoreValue = ""
    amount: Annotated[int, Field(ge=0, lt=2 ** 31)] = 0


@dataclass(frozen=True, config=STRICT)
class StoreReply:
    """The host's reply to a StoreRequest.

    value: of "get" and "compare_set". count: result of the other operations; for "get", 1 if the key was found.
    """

    number: Natural
    value: StoreValue = ""
    count: Natural = 0
    error: Printable = ""
