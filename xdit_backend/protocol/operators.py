"""How operators of compiled blocks are defined: torch has one operator of a name in a process, and a ComfyUI may hold
two copies of this package, of which the second would take away the first one's."""

import re

import torch

PACKAGE = __name__.rpartition(".protocol.")[0]
NAMESPACE = "xdit" if PACKAGE == "xdit_backend" else "xdit_" + re.sub(r"\W", "_", PACKAGE)


def operator(function):
    """torch.library.custom_op of a function that changes none of its inputs, xdit::NAME."""
    return torch.library.custom_op(f"{NAMESPACE}::{function.__name__}", function, mutates_args=())
