"""What the package `system` promises, on the system that runs this; on Windows too (start.py test --windows)."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.conftest import ROOT
from tests.support.windows import is_wine
from xdit_backend import system
from xdit_backend.protocol.channel import ADDRESS_FILE, ChannelListener
from xdit_backend.worker import log_rotation

on_windows = pytest.mark.skipif(os.name != "nt", reason="of Windows alone")
NAME = "Jürgen 图片 folder"                 # of a user, as part of paths


def program(code, *arguments, **options):
    """Another process, which runs this code with the package importable; its Popen."""
    lines = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(code)}"
    return subprocess.Popen([sys.executable, "-X", "utf8", "-c", lines, *map(str, arguments)], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, encoding="utf-8", **options)


def within(seconds, condition):
    deadline_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return condition()


def test_a_held_file_cannot_be_taken_until_its_holder_ends_in_whatever_way(tmp_path):
    path = tmp_path / "lock"
    holder = program("""
        from xdit_backend import system
        file = open(sys.argv[1], "x"); system.lock(file); print("held", flush=True); sys.stdin.read()""", path)
    assert holder.stdout.readline() == "held\n"

    assert system.open_unlocked(path) is None
    holder.kill()
    holder.wait()
    file = system.open_unlocked(path)

    assert file is not None
    system.remove_locked(path, file)
    file.close()
    assert not path.exists()


def test_a_missing_file_is_told_from_a_held_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        system.open_unlocked(tmp_path / "lock")


def test_a_link_is_not_taken(tmp_path):
    (tmp_path / "file").touch()
    try:
        (tmp_path / "link").symlink_to(tmp_path / "file")
    except OSError:
        pytest.skip("this user may not create links")

    try:
        assert system.open_unlocked(tmp_path / "link") is None
    except OSError:
        pass


def test_a_private_folder_is_private_and_what_others_may_write_to_is_not(tmp_path):
    folder = tmp_path / NAME
    system.make_private(folder)

    assert system.is_private(folder) and not system.is_private(Path(__file__))
    with pytest.raises(FileExistsError):
        system.make_private(folder)
    system.make_private(folder / "a" / "b", parents=True)
    system.make_private(folder / "a" / "b", parents=True)
    assert (folder / "a" / "b").is_dir()
    with pytest.raises(OSError):
        system.is_private(folder / "missing")


@on_windows
def test_the_list_of_a_private_folder_names_this_user_administrators_and_the_system_alone(tmp_path):
    import re

    from xdit_backend.system import windows_security
    system.make_private(tmp_path / "new")
    (tmp_path / "old").mkdir()
    system.restrict(tmp_path / "old")
    for folder in (tmp_path / "new", tmp_path / "old"):
        (folder / "key").write_bytes(b"secret")
        for path in (folder,) if is_wine() else (folder, folder / "key"):      # where files inherit no lists
            owner, entries = windows_security.owner_and_list(path)
            allowed = {entry.split(";")[-1] for entry in re.findall(r"\((A;[^)]*)\)", entries)}
            assert windows_security.is_owned(path)
            assert allowed <= {"SY", "BA", "OW", "CO", windows_security.user_sid(), owner}, entries


@on_windows
def test_a_list_that_lets_everyone_in_is_told_apart(tmp_path):
    """The check above can fail."""
    from xdit_backend.system import windows_security
    folder = tmp_path / "open"
    with windows_security.attributes("D:P(A;OICI;FA;;;WD)") as security:
        windows_security.check(windows_security.kernel32().CreateDirectoryW(
            str(folder), windows_security.ctypes.byref(security)))

    assert "WD)" in windows_security.owner_and_list(folder)[1]


def test_the_socket_is_reached_from_this_machine_alone(tmp_path):
    listener = ChannelListener(tmp_path)
    address = (tmp_path / ADDRESS_FILE).read_text(encoding="utf-8")
    ours = [each.laddr for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
    listener.close()

    assert {each.ip for each in ours} <= {"127.0.0.1", "::1"}
    assert address.startswith(str(tmp_path)) or int(address) in {each.port for each in ours}


@on_windows
def test_no_other_program_can_listen_at_the_same_port(tmp_path):
    listening, address = system.listen(tmp_path)
    with listening, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", int(address)))


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_segment_is_mapped_by_its_path_and_gone_when_it_is_removed(tmp_path, count):
    memory, path = system.SharedMemory(), tmp_path / f"xdit-{os.getpid()}-{count}" / "1"
    path.parent.mkdir()
    assert memory.create(path, 4 * count) and memory.names(path.parent) == ["1"]
    if count:
        mapped = system.map_shared(path, count, torch.float32)
        mapped.fill_(3)
        assert system.map_shared(path, count, torch.float32).tolist() == [3.0] * count
    with pytest.raises((OSError, RuntimeError)):
        system.map_shared(path, 2 ** 20, torch.float32)        # beyond its end

    memory.remove(path)
    memory.remove(path)

    assert memory.names(path.parent) == []
    if os.name != "nt" or not count:
        with pytest.raises((OSError, RuntimeError)):
            system.map_shared(path, 1, torch.float32)
    memory.close()


@on_windows
def test_a_segment_whose_name_is_taken_is_not_made(tmp_path):
    """Another process that guessed it would read the tensors."""
    first, second = system.SharedMemory(), system.SharedMemory()
    assert first.create(tmp_path / "xdit-1-a" / "1", 100)

    assert not second.create(tmp_path / "xdit-1-a" / "1", 100)
    first.close()
    assert second.create(tmp_path / "xdit-1-a" / "1", 100)
    second.close()


def test_a_file_is_mapped_and_unchanged_by_it(tmp_path):
    path = tmp_path / f"{NAME}.bin"
    path.write_bytes(bytes(range(256)))
    with open(path, "rb") as file:
        mapped = torch.frombuffer(system.map_file(file), dtype=torch.uint8)

    assert torch.equal(mapped, torch.arange(256).to(torch.uint8)) and path.read_bytes() == bytes(range(256))


def test_a_store_s_path_with_other_letters_is_one_that_torch_can_open(tmp_path):
    folder = tmp_path / NAME
    folder.mkdir()
    code = """
        import torch.distributed as dist
        from xdit_backend import system
        store = dist.FileStore(system.store_path(sys.argv[1]), -1)
        store.set("key", "value"); print(store.get("key").decode(), flush=True)"""
    with program(code, folder / "store") as other:
        assert other.stdout.readline() == "value\n"
    assert (folder / "store").is_file()


def test_output_goes_on_after_a_log_file_has_become_too_long(tmp_path, monkeypatch):
    path = tmp_path / f"{NAME}.log"
    monkeypatch.setattr(log_rotation, "MAX_BYTES", 100)
    code = """
        from xdit_backend.worker import log_rotation
        log_rotation.MAX_BYTES = 100
        log_rotation.take_over(sys.argv[1])
        print("a" * 200, flush=True); log_rotation.keep_small(sys.argv[1]); print("after", flush=True)"""
    with program(code, path) as other:
        other.wait()

    assert path.read_bytes().strip() == b"after"
    assert Path(f"{path}.before").read_bytes().strip() == b"a" * 200


def test_a_pair_of_sockets_is_connected():
    one, other = system.socket_pair()
    with one, other:
        one.sendall(b"hello")
        assert other.recv(5) == b"hello"


def test_a_program_runs_a_module_that_this_python_s_path_lacks(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "module.py").write_text("import sys; print(__name__, sys.argv[1:], sys.flags.utf8_mode)")
    command, variables = system.python_program("package.module", NAME, 7)

    told = subprocess.run(command, env=os.environ | variables | {"PYTHONPATH": str(tmp_path), "PYTHONUTF8": "1"},
                          capture_output=True, text=True, encoding="utf-8", check=True).stdout

    assert told.strip() == f"__main__ ['{NAME}', '7'] 1"


SLEEPER = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']" \
          ").pid, flush=True); time.sleep(60)"


def test_a_job_ends_its_processes_and_theirs():
    job = system.Job()
    process = job.start([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    child = psutil.Process(int(process.stdout.readline()))

    job.end()

    assert within(30, lambda: process.poll() is not None and not child.is_running())
    process.stdout.close()


@on_windows
def test_a_job_ends_with_the_process_that_made_it():
    code = """
        import subprocess
        from xdit_backend import system
        job = system.Job()
        process = job.start([sys.executable, "-c", "import time; time.sleep(60)"])
        print(process.pid, flush=True); sys.stdin.read()"""
    host = program(code)
    child = psutil.Process(int(host.stdout.readline()))
    assert child.is_running()

    host.kill()

    assert within(30, lambda: not child.is_running())
    host.wait()


def test_exit_codes_have_words():
    from xdit_backend.host.startup_watchdog import describe_exit
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    psutil.Process(process.pid).kill()

    assert describe_exit(process.wait()).endswith(", killed)") and describe_exit(12345) == " (exit code 12345)"


def test_the_doctor_has_facts_of_the_system_s_own():
    facts = "\n".join(system.facts(1))

    assert (facts == "") == (os.name != "nt")
    if facts:
        for text in ("driver model", "commit limit", "TdrDelay", "msvcp140", "LongPathsEnabled"):
            assert text in facts
