"""How operators of compiled blocks are defined: torch has one operator of a name in a process, and a ComfyUI may hold
two copies of this package, of which the second would take away the first one's."""

import re
import typing

import torch

PACKAGE = __name__.rpartition(".protocol.")[0]
NAMESPACE = "xdit" if PACKAGE == "xdit_backend" else "xdit_" + re.sub(r"\W", "_", PACKAGE)


def operator(function):
    """torch.library.custom_op of a function that changes none of its inputs, xdit::NAME."""
    # torch before 2.7 infers no schema from list[...], only from typing.List[...]
    function.__annotations__ = {
        name: typing.List[typing.get_args(hint)[0]] if typing.get_origin(hint) is list else hint  # noqa: UP006
        for name, hint in function.__annotations__.items()}
    return torch.library.custom_op(f"{NAMESPACE}::{function.__name__}", function, mutates_args=())
