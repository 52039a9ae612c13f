"""Custom operators for compiled blocks, in a namespace per copy of this package.

torch has one operator of a name in a process, and ComfyUI may load two copies of this package: the second would replace
the operators of the first.
"""

import re
import typing

import torch

PACKAGE = __name__.rpartition(".protocol.")[0]


def namespace_of(package):
    """Namespace for a package's name, which is a path under ComfyUI: torch accepts letters of ASCII only."""
    if package == "xdit_backend":
        return "xdit"
    return "xdit_" + re.sub(r"\W", "_", "".join(each if each.isascii() else f"_{ord(each):x}_" for each in package))


NAMESPACE = namespace_of(PACKAGE)


def operator(function):
    """Register a function that mutates none of its inputs with torch.library.custom_op, as xdit::NAME."""
    # torch before 2.7 infers no schema from list[...], only from typing.List[...]
    function.__annotations__ = {
        name: typing.List[typing.get_args(hint)[0]] if typing.get_origin(hint) is list else hint  # noqa: UP006
        for name, hint in function.__annotations__.items()}
    return torch.library.custom_op(f"{NAMESPACE}::{function.__name__}", function, mutates_args=())
