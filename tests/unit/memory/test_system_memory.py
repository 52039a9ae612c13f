"""Host memory is the machine's, or what a container has left of its limit."""

import collections
import math
import time

import psutil
import pytest

from xdit_backend.memory import system_memory
from xdit_backend.memory.system_memory import available_memory

GB = 2 ** 30


def cgroup(folder, version, limit, used, cache):
    names = {2: ("memory.max", "memory.current", "memory.stat", "inactive_file"),
             1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
                 "total_inactive_file")}[version]
    (folder / "memory").mkdir()
    for name, text in zip(names, (str(limit), str(used), f"anon 5\n{names[3]} {cache}\nslab 7\n")):
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts_and_files_it_has_read_do_not(tmp_path, monkeypatch, version):
    memory = collections.namedtuple("memory", "available total")(9 * GB, 16 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    assert available_memory(cgroup(tmp_path, version, 3 * GB, 2 * GB, GB // 2)) == (3 * GB // 2, 3 * GB)


def test_a_limit_beyond_the_machine_is_none(tmp_path):
    assert available_memory(cgroup(tmp_path, 1, 2 ** 63 - 4096, 0, 0))[1] == psutil.virtual_memory().total
    assert available_memory(cgroup(tmp_path / "memory", 2, "max", 0, 0))[1] == psutil.virtual_memory().total


def test_a_file_is_read_at_the_rate_at_which_its_pages_come(tmp_path, monkeypatch):
    """Pages that take longer to come make it slower. All of a small file is read, of a large one a part."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(2 ** 22))
    pages = system_memory.mmap.mmap
    requested = []

    class Slow:
        def __init__(self, *args, **options):
            self.pages = pages(*args, **options)
            requested.append(options["offset"])

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.pages.close()

        def __getitem__(self, part):
            time.sleep(0.2)
            return self.pages[part]
    fast = system_memory.disk_bytes_s(path)
    monkeypatch.setattr(system_memory.mmap, "mmap", Slow)

    assert system_memory.disk_bytes_s(path) == pytest.approx(2 ** 22 / 0.2, rel=0.3) and fast > 2 ** 22 / 0.1
    assert system_memory.disk_bytes_s(path, 2 ** 20) == pytest.approx(2 ** 20 / 0.2, rel=0.3)
    assert requested == [0, 3 * 2 ** 19]


def test_a_file_that_host_memory_has_room_for_is_not_timed(tmp_path):
    """Of several, the largest is, once there is not room for all."""
    files = [tmp_path / name for name in ("small", "large")]
    for path, size in zip(files, (2 ** 12, 2 ** 16)):
        path.write_bytes(bytes(size))

    assert system_memory.pages_of(files, lambda: (2 ** 12 + 2 ** 16, 0)) == system_memory.AMPLE
    free_bytes, bytes_s = system_memory.pages_of(files, lambda: (2 ** 16, 0))
    assert free_bytes == 2 ** 16 and 0 < bytes_s < math.inf
