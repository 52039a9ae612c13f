"""Tensors go through shared memory bit by bit, and nothing is left of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xdit_backend import system
from xdit_backend.protocol import shared_memory
from xdit_backend.protocol.errors import XDiTError
from xdit_backend.protocol.shared_memory import DTYPES, SegmentStore, map_segment

PACKAGE = Path(shared_memory.__file__).parents[1]
# of another process, which needs no folder on its path
IMPORTS = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("xdit_backend", {str(PACKAGE / '__init__.py')!r},
                                              submodule_search_locations=[{str(PACKAGE)!r}])
sys.modules["xdit_backend"] = importlib.util.module_from_spec(spec)
"""
WRITE_AND_DIE = """
from xdit_backend.protocol.shared_memory import Segment, map_segment
map_segment(Segment(sys.argv[1], "float32", (4,))).fill_(7)
os._exit(9)
"""


@pytest.fixture
def store():
    store = SegmentStore()
    yield store
    store.close()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(store, name):
    raw = torch.randint(0, 2 if name == "bool" else 256, (4096 * DTYPES[name].itemsize,), dtype=torch.uint8)
    tensor = raw.view(DTYPES[name]).view(8, 512)

    result = map_segment(store.share(tensor))

    assert result.dtype == tensor.dtype and torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (3, 5, 7)])
def test_any_shape_and_layout(store, shape):
    tensor = torch.randn(shape)
    transposed = tensor.transpose(0, -1) if tensor.ndim > 1 else tensor

    assert torch.equal(map_segment(store.share(tensor)), tensor)
    assert torch.equal(map_segment(store.share(transposed)), transposed)


@pytest.mark.parametrize("num_bytes", [0, 5, 15])
def test_a_file_that_was_cut_short_is_refused_and_not_grown(store, num_bytes):
    segment = store.share(torch.ones(4))
    os.truncate(segment.path, num_bytes)

    with pytest.raises(XDiTError, match="fewer than 16 bytes.*Queue the prompt again"):
        map_segment(segment)
    assert os.path.getsize(segment.path) == num_bytes


def test_maps_stay_valid_after_removal(store):
    segment, view = store.create((4,), torch.float32)
    other = map_segment(segment)

    store.remove(segment)
    view.fill_(3)

    assert other.tolist() == [3, 3, 3, 3] and store.names() == []
    with pytest.raises(XDiTError, match="cannot be opened"):
        map_segment(segment)


def test_a_reader_that_dies_takes_nothing_along(store):
    segment, view = store.create((4,), torch.float32)
    view.zero_()

    process = subprocess.run([sys.executable, "-c", IMPORTS + WRITE_AND_DIE, segment.path])

    assert process.returncode == 9
    assert view.tolist() == [7, 7, 7, 7] and map_segment(segment).tolist() == [7, 7, 7, 7]


def test_only_this_user_can_read(store):
    for folder in (store.folder, store.overflow_folder):
        assert system.is_private(folder) and (os.name == "nt" or folder.stat().st_mode & 0o077 == 0)


def test_more_than_there_is_is_refused_before_it_is_written(store):
    with pytest.raises(XDiTError, match="Free some space.*MB of shared memory are needed"):
        store.create((2 ** 50,), torch.uint8)
    assert store.names() == []


def test_a_full_memory_falls_back_to_disk(store, monkeypatch):
    """As in containers with 64 MB of /dev/shm."""
    create = system.SharedMemory.create
    monkeypatch.setattr(system.SharedMemory, "create", lambda memory, path, num_bytes: not path.startswith(
        str(store.folder)) and create(memory, path, num_bytes))

    segment = store.share(torch.ones(3))

    assert segment.path.startswith(str(store.overflow_folder)) and torch.equal(map_segment(segment), torch.ones(3))


@pytest.mark.parametrize("which", ["folder", "overflow_folder"])
def test_a_folder_that_is_removed_while_it_is_in_use_is_made_again(store, which):
    """By who tidies /tmp, or as a login ends (RemoveIPC of systemd's logind)."""
    folder = getattr(store, which)
    shared_memory.discard(folder)

    assert system.SharedMemory().create(str(folder / "1"), 10)
    assert folder.stat().st_mode & 0o777 == 0o700
    store.close()
    assert not folder.exists()


def test_what_cannot_be_made_is_no_memory(tmp_path):
    assert not system.SharedMemory().create(str(tmp_path / "not there" / "nor this" / "1"), 10)


def test_a_store_that_cannot_be_made_whole_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "folders_of", lambda name: (tmp_path / name, tmp_path / "z is not there" / name))

    with pytest.raises(FileNotFoundError):
        SegmentStore()

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [
    lambda store, tensor: store.share(tensor),
    lambda store, tensor: store.share_all({"good": torch.ones(2), "bad": tensor})])
def test_what_cannot_be_shared_leaves_nothing(store, share):
    kept = store.share(torch.ones(3))

    with pytest.raises(NotImplementedError):
        share(store, torch.ones(2, device="meta"))

    assert store.names() == [Path(kept.path).name]


def test_close_removes_everything(store):
    store.share(torch.ones(3))

    store.close()

    assert not store.folder.exists() and not store.overflow_folder.exists()


OTHER_HOST = """
from xdit_backend.protocol.shared_memory import SegmentStore
store = SegmentStore()
store.create((100,), __import__("torch").uint8)
print(store.folder, store.overflow_folder, sep="\\n", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_host():
    """Another process with a store: (the process, its folders)."""
    process = subprocess.Popen([sys.executable, "-c", IMPORTS + OTHER_HOST], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    yield process, [Path(process.stdout.readline().strip()) for _ in range(2)]
    process.kill()
    process.wait()
    SegmentStore().close()                                     # which sweeps


def test_what_a_killed_host_has_left_is_removed_by_the_next(other_host):
    process, folders = other_host
    # asked now: when it is killed, any host may be the next
    assert all(folder.is_dir() for folder in folders)
    process.kill()
    process.wait()

    SegmentStore().close()

    assert not any(folder.exists() or folder.with_name(f"{folder.name}.lock").exists() for folder in folders)


def test_the_folders_of_a_living_host_stay_whatever_they_are_called(other_host):
    """Containers that share /dev/shm have process numbers of their own:
    the number in a name may be that of nobody here."""
    process, folders = other_host
    renamed = [folder.with_name(f"xdit-{2 ** 22 + 1}-{process.pid}-{index}") for index, folder in enumerate(folders)]
    for folder, name in zip(folders, renamed):
        folder.rename(name)
        folder.with_name(f"{folder.name}.lock").rename(name.with_name(f"{name.name}.lock"))

    SegmentStore().close()

    assert (all((folder / "1").exists() or folder == renamed[1] for folder in renamed)
            and all(folder.is_dir() for folder in renamed))


def test_a_folder_that_another_host_takes_for_left_behind_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Between the making and the locking of the file, a host that starts finds it unlocked."""
    fcntl = pytest.importorskip("fcntl")
    flock, swept = fcntl.flock, []

    def sweep_first(file, operation):
        if operation == fcntl.LOCK_EX and not swept:
            swept.append(True)
            shared_memory.sweep(tmp_path)
            assert not list(tmp_path.iterdir())
        flock(file, operation)
    monkeypatch.setattr(fcntl, "flock", sweep_first)

    with shared_memory.claim(tmp_path / "xdit-1-a"):
        shared_memory.sweep(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["xdit-1-a", "xdit-1-a.lock"]
    shared_memory.sweep(tmp_path)

    assert swept and not list(tmp_path.iterdir())


@pytest.mark.parametrize("times", [1, shared_memory.ATTEMPTS])
def test_what_a_worker_that_ends_still_writes_into_a_folder_does_not_keep_it_for_ever(tmp_path, monkeypatch, times):
    """As torch writes why a worker has failed, while another removes the folder of both."""
    folder, rmdir, written = tmp_path / "xdit-1-a", os.rmdir, []

    def write_first(path, **options):
        if len(written) < times:
            written.append(folder / "pytorch-errorfile.pickle")
            written[-1].touch()
        rmdir(path, **options)
    shared_memory.claim(folder).close()
    monkeypatch.setattr(os, "rmdir", write_first)

    shared_memory.discard(folder)
    left = sorted(path.name for path in tmp_path.iterdir())
    shared_memory.sweep(tmp_path)

    assert len(written) == times and left == ([] if times == 1 else ["xdit-1-a", "xdit-1-a.lock"])
    assert not list(tmp_path.iterdir())
