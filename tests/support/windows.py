"""The tests that run with Windows' Python (start.py test --windows, on Windows itself or under Wine), and those among
them that cannot, each with the reason."""

import ctypes
import os

import pytest

FILES = (
    "tests/unit/system",
    "tests/unit/protocol",
    "tests/unit/worker",
    "tests/unit/multi_node",
    *(f"tests/unit/host/test_{name}.py" for name in (
        "attention_backends", "cancels", "client", "concurrent_groups", "copies", "doctor", "failures", "faults",
        "hangs", "launcher", "logs", "offloading", "out_of_memory", "parking", "pipefusion", "preflight",
        "shared_copies", "startup_watchdog", "weight_updates")),
    "tests/integration/test_windows.py",
    "tests/integration/server",
    "tests/integration/failures/test_server.py",
)
# part of a test's identifier: why it is skipped on Windows
SKIPPED: dict[str, str] = {}


def is_wine():
    """Whether this is Windows' Python under Wine."""
    return os.name == "nt" and hasattr(ctypes.windll.ntdll, "wine_get_version")


def pytest_arguments(arguments):
    """Arguments of pytest for the tier: FILES, unless others are given."""
    chosen = arguments or FILES
    return ["-p", "no:cacheprovider", "-q", "-rs", "-m", "not slow and not drawn", *chosen]


def skip(items):
    """Mark tests that cannot run on Windows, there."""
    if os.name != "nt":
        return
    for item in items:
        reason = next((reason for part, reason in SKIPPED.items() if part in item.nodeid), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
