"""What is kept of workers' output: the last few folders, none that another user could read or change,
no file without bound."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from xdit_backend.host import logs
from xdit_backend.protocol.errors import WorkerDiedError
from xdit_backend.worker import log_rotation

PRINTS = """
import os, sys
from xdit_backend.worker import log_rotation as output
output.take_over(sys.argv[1])
output.MAX_BYTES = 100
for number in range(50):
    print("line", number, flush=True)
    os.write(2, b"x" * 10)
    output.keep_small(sys.argv[1])
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDIT_LOG_FOLDER", str(tmp_path / "my logs"))
    return tmp_path / "my logs"


def test_the_last_groups_and_those_that_run_are_kept(place):
    """And nothing that is not a group's."""
    (place / "mine").mkdir(parents=True, mode=0o700)
    place.chmod(0o700)
    first = logs.make("xdit-1-00aa", None)
    with logs.start(first):
        ended = [logs.make(f"xdit-2-{number:04x}", None) for number in range(2 * logs.MAX_FOLDERS)]
        left = set(place.iterdir())

    assert left == {place / "mine", first, *ended[-logs.MAX_FOLDERS:]}
    logs.make("xdit-3-00aa", None)
    assert first not in set(place.iterdir())


def test_where_files_cannot_be_locked_folders_are_made_and_stay(place, monkeypatch):
    """As on a network's disk without a lock daemon."""
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    for number in range(logs.MAX_FOLDERS + 2):
        logs.start(logs.make(f"xdit-{number}-00aa", None)).close()

    assert len(list(place.iterdir())) == logs.MAX_FOLDERS + 2


def test_a_clock_that_goes_back_has_no_new_folder_taken_for_an_old_one(place, monkeypatch):
    for year in range(2040, 2040 + logs.MAX_FOLDERS):
        monkeypatch.setattr(logs.time, "strftime", lambda *args, year=year: f"{year}0101-000000")
        logs.make("xdit-1-00aa", None)
    monkeypatch.setattr(logs.time, "strftime", lambda *args: "20200101-000000")

    with logs.start(logs.make("xdit-2-00aa", None)) as file:
        assert file.name.startswith(str(place / "2020"))


def test_a_place_is_told_to_workers_whole(tmp_path, monkeypatch):
    """They run in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDIT_LOG_FOLDER", "logs")
    assert logs.base_folder() == tmp_path / "logs"


@pytest.mark.parametrize("spoil", ["link", "open to others", "file", "another user's"])
def test_a_place_that_is_not_ours_alone_is_not_used(place, tmp_path, caplog, monkeypatch, spoil):
    """Nor read by the doctor."""
    logs.note(logs.make("xdit-0-00aa", None), "an error of before")
    logs.note_machines(["other joined"])
    assert logs.last_errors() and logs.machines()
    shutil.move(place, tmp_path / "elsewhere")
    if spoil == "link":
        place.symlink_to(tmp_path / "elsewhere")
    elif spoil == "file":
        place.touch()
    else:
        shutil.move(tmp_path / "elsewhere", place)
        if spoil == "open to others":
            place.chmod(0o777)
        else:
            monkeypatch.setattr(os, "getuid", lambda: place.stat().st_uid + 1)

    assert logs.make("xdit-1-00aa", tmp_path / "own" / "logs") == tmp_path / "own" / "logs"
    assert (tmp_path / "own" / "logs").stat().st_mode & 0o777 == 0o700 and "will be lost" in caplog.text
    assert "Set XDIT_LOG_FOLDER to a folder that only you can write to" in caplog.text or spoil == "file"
    assert not logs.last_errors() and not logs.machines()


def test_a_file_of_output_begins_anew_when_it_is_large(tmp_path):
    path = tmp_path / "rank-0.log"
    subprocess.run([sys.executable, "-c", PRINTS, path], cwd=ROOT, check=True)
    before = tmp_path / "rank-0.log.before"

    assert path.stat().st_size <= 100 and before.stat().st_size <= 100 + 20
    assert (before.read_text() + path.read_text()).endswith(
        "".join(f"xxxxxxxxxxline {number}\n" for number in range(45, 50)) + "x" * 10)
    assert sorted(tmp_path.iterdir()) == [path, before] and log_rotation.MAX_BYTES > 2 ** 20


@pytest.mark.parametrize("left", ["folder", "nothing"])
def test_output_that_is_removed_while_a_worker_runs_ends_nothing(tmp_path, left):
    """As by who tidies /tmp: the thread that sees to the file is the one that tells the host that the worker lives."""
    path = tmp_path / "logs" / "rank-0.log"
    path.parent.mkdir()
    removed = f"import shutil; shutil.rmtree({str(path.parent)!r})\n" + f"os.mkdir({str(path.parent)!r})\n" * (
        left == "folder")
    begun = PRINTS.partition("for ")[0]
    subprocess.run([sys.executable, "-c", f"{begun}{removed}output.keep_small(sys.argv[1])\nprint('on')", path],
                   cwd=ROOT, check=True)

    assert not path.exists() if left == "nothing" else path.read_text() == "on\n"


def test_the_last_errors_are_told_without_what_is_private(place, monkeypatch):
    monkeypatch.setattr(logs.getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(logs.socket, "gethostname", lambda: "engine")
    for number in range(2):
        folder = logs.make(f"xdit-{number}-00aa", None)
        for count in range(4):
            logs.note(folder, WorkerDiedError(f"no {number} {count}\n\nin /home/ada/models/sd3.safetensors of engine, "
                                              f"~/x/serve.py: ada, '/mnt/ada lovelace (new)/a b.gguf', "
                                              f"{place / 'x.log'}, it's 1/2"))

    told = logs.last_errors()

    assert [line.split(": ")[1] for line in told
            if "Error" in line] == ["no 1 3", "no 1 2", "no 1 1", "no 1 0", "no 0 3"]
    assert told[1] == "  in .../sd3.safetensors of ..., .../serve.py: ..., '.../a b.gguf', .../x.log, it's 1/2"
    assert not any(private in line for line in told for private in ("ada", "engine", "home", "lovelace", "logs"))


def test_errors_do_not_grow_without_bound(place, monkeypatch):
    monkeypatch.setattr(logs, "MAX_BYTES", 1000)
    folder = logs.make("xdit-1-00aa", None)
    for number in range(100):
        logs.note(folder, ValueError(f"{number} " + "x" * 50))

    assert (folder / logs.ERRORS).stat().st_size < 1200 and "99 x" in logs.last_errors()[0]


@pytest.mark.parametrize("text, told", [
    (r"C:\Users\ada\x.safetensors is missing", r".../x.safetensors is missing"),
    (r"'C:\Users\Ada Lovelace\my models\x.gguf'", "'.../x.gguf'"),
    (r"'\\\\engine\share\Ada L\x.gguf'", "'.../x.gguf'"),
    ("D:/ComfyUI/models/m.bin and /home/ada/a.txt", ".../m.bin and .../a.txt"),
    ("a ratio of 1:2, a key: value", "a ratio of 1:2, a key: value")])
def test_paths_of_both_systems_lose_their_folders(text, told):
    assert logs.without_private(text) == told
