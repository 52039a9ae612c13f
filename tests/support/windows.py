"""The tests that run with Windows' Python (start.py test --windows, on Windows itself or under Wine), and those among
them that cannot, each with the reason."""

import ctypes
import os
import sys
from pathlib import Path

import pytest

FILES = (
    "tests/unit/system",
    "tests/unit/protocol",
    "tests/unit/worker",
    "tests/unit/multi_node",
    *(f"tests/unit/host/test_{name}.py" for name in (
        "attention_backends", "cancels", "client", "concurrent_groups", "copies", "doctor", "failures", "faults",
        "hangs", "launcher", "logs", "offloading", "out_of_memory", "parking", "pipefusion", "preflight", "programs",
        "shared_copies", "startup_watchdog", "weight_updates")),
    # the file's other tests, of one method each, take hours under Wine
    "tests/integration/test_smoke.py::test_steps_under_products_of_two_methods_that_are_drawn_equal_one_device",
    "tests/integration/server",
    "tests/integration/failures/test_server.py",
)
# part of a test's identifier: why it is skipped on Windows
SKIPPED = {
    "test_shared_memory.py::test_a_file_that_was_cut_short": "a section of the page file cannot be cut short",
    "test_shared_memory.py::test_maps_stay_valid_after_removal": "a section has its name until its last mapping ends",
    "test_shared_memory.py::test_a_full_memory_falls_back_to_disk": "the page file is on disk",
    "test_shared_memory.py::test_a_folder_that_is_removed_while": "segments are in no folder",
    "test_shared_memory.py::test_what_cannot_be_made_is_no_memory": "segments are in no folder",
    "test_shared_memory.py::test_the_folders_of_a_living_host_stay": "an open file cannot be renamed",
    "test_shared_memory.py::test_what_a_worker_that_ends_still_writes": "rmtree removes by path, not by descriptor",
    "test_shared_memory.py::test_a_folder_that_another_host_takes": "an open file is locked, without flock",
    "test_channel.py::test_the_key_is_for_this_user_only": "files have no mode: tests/unit/system checks the folder",
    "test_logs.py::test_a_place_that_is_not_ours_alone": "files have no mode, and links need a privilege",
    "test_logs.py::test_output_that_is_removed_while": "the folder of an open file cannot be removed",
    "test_launcher.py::test_what_the_system_refuses_at_the_start": "a limit of Unix sockets' paths",
    "test_launcher.py::test_a_host_that_is_killed_is_missed_though": "needs fork",
    "test_launcher.py::test_a_process_that_a_host_forked": "needs fork",
    "test_launcher.py::test_a_killed_worker_is_named_though": "needs fork",
    "test_launcher.py::test_a_killed_torchrun": "has no torchrun",
    "test_preflight.py::test_little_shared_memory": "is of /dev/shm",
    "test_parking.py": "reads /proc",
    "worker/test_memory.py": "reads /proc",
    "test_copies.py": "reads /proc",
    "memory/test_numa.py": "reads sysfs",
    "test_key.py::test_nothing_else_shows_the_key": "files have no mode",
    "test_connections.py::test_the_doctor_knows_of_no_machine": "files have no mode",
    "test_connections.py::test_the_key_stays_and_is_private": "files have no mode",
}
# those that also need a module sitecustomize from PYTHONPATH
NEED_PYTHONPATH = ("test_attention_backends.py", "test_hangs.py", "test_faults.py::test_workers_that_are_killed",
                   "test_launcher.py::test_a_rank_that_is_stopped_while_the_group_starts",
                   "test_preflight.py::test_workers_whose_peer_to_peer", "test_preflight.py::test_workers_that_cannot")
NO_PYTHONPATH = "Python with a ._pth file, as in ComfyUI's portable package, does not read PYTHONPATH"


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
    skipped = dict(SKIPPED)
    if any(Path(sys.executable).parent.glob("python*._pth")):
        skipped |= dict.fromkeys(NEED_PYTHONPATH, NO_PYTHONPATH)
    for item in items:
        reason = next((reason for part, reason in skipped.items() if part in item.nodeid), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
