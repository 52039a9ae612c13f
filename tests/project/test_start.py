"""start.py: which versions --newest takes for the newest and what it refuses;
what the options of the tests' order come to; how it ends what it has started."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.support.comfyui_server import ROOT


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start.py, with a .host of its own and no network: what git and the registry answer is the test's."""
    spec = importlib.util.spec_from_file_location("start", ROOT / "start.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HOST", tmp_path / "host")
    monkeypatch.setattr(module, "comfyui_tags", list)
    monkeypatch.setattr(module, "versions_on_registry", lambda python, project: [])
    return module


@pytest.mark.parametrize("versions, highest", [
    (["v0.9.1", "v0.30.0", "v0.31.0-rc1", "latest", "v0.4.10"], "v0.30.0"),
    (["2.15.0rc1", "2.13.0+cpu", "2.9.1", "2.14.0.post1", "2.13.0"], "2.13.0"),
    (["1.10", "1.9.2"], "1.10"),
    (["nightly", "0"], None),
    ([], None)])
def test_the_newest_is_the_highest_finished_release(start, versions, highest):
    assert start.newest(versions) == highest
    assert start.newest(versions[::-1]) == highest


def test_a_newer_tag_of_comfyui_is_cloned_once_into_a_folder_of_its_own(start, monkeypatch):
    cloned = []
    monkeypatch.setattr(start, "comfyui_tags", lambda: ["v0.30.0", "v99.1.0", "v99.0.5"])
    monkeypatch.setattr(start, "clone_comfyui", lambda part, tag: cloned.append(tag) or not lay(part, "99.1.0"))

    folders = [start.newer_comfyui("python") for _ in range(2)]

    assert folders == [start.HOST / "ComfyUI-99.1.0"] * 2 and cloned == ["v99.1.0"]
    assert start.version_of_comfyui(folders[0]) == "99.1.0"


def test_a_newer_tag_that_does_not_come_is_an_error(start, monkeypatch):
    monkeypatch.setattr(start, "comfyui_tags", lambda: ["v99.0.0"])
    monkeypatch.setattr(start, "clone_comfyui", lambda part, tag: False)

    with pytest.raises(start.SetUpError, match="v99.0.0"):
        start.newer_comfyui("python")


@pytest.mark.parametrize("carried, taken", [("0.30.0", None), ("0.30.1", "ComfyUI-0.30.1")])
def test_without_the_repository_a_newer_source_distribution_is_looked_into(
    start, monkeypatch, tmp_path, carried, taken):
    """Its own version says nothing of ComfyUI's."""
    monkeypatch.setattr(start, "versions_on_registry", lambda python, project: ["2.6.0", "99.0.0"])
    monkeypatch.setattr(start, "run_logged", lambda command, what: pack(command, tmp_path, carried))

    folder = start.newer_comfyui("python")

    assert folder == (taken and start.HOST / taken)
    assert {path.name for path in start.HOST.iterdir()} == ({taken} if taken else set())


@pytest.mark.parametrize("has_repository", [True, False])
def test_a_version_of_comfyui_is_fetched_once(start, monkeypatch, tmp_path, has_repository):
    """From its tag, else from the newest source distribution."""
    cloned = []
    monkeypatch.setattr(start, "clone_comfyui", lambda part, tag: cloned.append(tag) or (
        has_repository and not lay(part, "0.33.0")))
    monkeypatch.setattr(start, "versions_on_registry", lambda python, project: ["99.0.0"])
    monkeypatch.setattr(start, "run_logged", lambda command, what: pack(command, tmp_path, "0.33.0"))

    folders = [start.comfyui_of_version("python", "0.33.0") for _ in range(2)]

    assert folders == [start.HOST / "ComfyUI-0.33.0"] * 2 and cloned == ["v0.33.0"]


def test_a_version_of_comfyui_that_cannot_be_fetched_is_an_error(start, monkeypatch, tmp_path):
    monkeypatch.setattr(start, "clone_comfyui", lambda part, tag: False)
    monkeypatch.setattr(start, "run_logged", lambda command, what: pack(command, tmp_path, "0.31.0"))

    with pytest.raises(start.SetUpError, match="ComfyUI 0.33.0 did not come from .* carries 0.31.0.*--comfyui FOLDER"):
        start.comfyui_of_version("python", "0.33.0")
    assert not [*start.HOST.glob("ComfyUI*")]


@pytest.mark.parametrize("tags, versions", [([], []), (["v0.30.0", "v0.29.9"], ["99.0.0"]), ([], ["2.6.0", "2.5.9"])],
                         ids=["no-answer", "tags", "distributions"])
def test_where_no_comfyui_is_newer_none_is_fetched(start, monkeypatch, tags, versions):
    monkeypatch.setattr(start, "comfyui_tags", lambda: tags)
    monkeypatch.setattr(start, "versions_on_registry", lambda python, project: versions)

    assert start.newer_comfyui("python") is None


# What the registry has, newest first; what clashes with its companions, and what is taken. {torch} and {comfyui} are
# what is tested.
@pytest.mark.parametrize("torches, clashing, comfyui, taken", [
    (["{torch}.2", "{torch}.1"], [], "{comfyui}", "{torch}.2"),
    (["{torch}.2+cu1", "{torch}.1+cu1"], ["{torch}.2+cu1"], "{comfyui}", "{torch}.1+cu1"),
    (["{torch}.2", "{torch}"], ["{torch}.2"], "{comfyui}.1", "{torch}"),
    (["{torch}.2", "{torch}"], ["{torch}.2"], "{comfyui}", None),
    (["{torch}+cu1"], [], "{comfyui}", None),
    (["1.99"], [], "0.29.9", None)])
def test_the_newest_torch_that_its_companions_work_with_is_taken(
    start, monkeypatch, tmp_path, capsys, torches, clashing, comfyui, taken):
    """What clashed is noted, and not installed a second time.
    With nothing newer than what is tested anyway, nothing is run."""
    tested = {"torch": start.TORCH[0].split("==")[1], "comfyui": start.COMFYUI_TAG.removeprefix("v")}
    torches, clashing = ([name.format(**tested) for name in names] for names in (torches, clashing))
    taken = taken and taken.format(**tested)
    refusal = re.escape("none of ComfyUI {comfyui}, torch {torch} has a newer release".format(**tested))
    lay(tmp_path / "ComfyUI", comfyui.format(**tested))
    installed = []

    def pip_install(python, packages, files):
        refused = [package.removeprefix("torch!=") for package in packages if package.startswith("torch!=")]
        installed.append(next(torch for torch in torches if torch.split("+")[0] not in refused))

    monkeypatch.setattr(start, "pip_install", pip_install)
    monkeypatch.setattr(start, "installed_versions",
                        lambda python, names: {"torchvision": "0", "torchaudio": "0", "torch": installed[-1]})
    monkeypatch.setattr(start, "error_of_import", lambda python, modules: "OSError: no symbol"
                        if installed[-1] in clashing else None)
    stamp = tmp_path / "stamp.json"

    for tries in [*clashing, taken or torches[-1]], [taken or torches[-1]]:
        installed.clear()
        with nullcontext() if taken else pytest.raises(start.SetUpError, match=refusal):
            start.install_newest("python", stamp, tmp_path / "ComfyUI", [])

        assert installed == tries
        shown = capsys.readouterr().out
        assert ("OSError: no symbol" in shown) == (len(tries) > 1)
        assert (f"torch {taken}" in shown.splitlines()[-1]) if taken else ("The newest" not in shown)


def test_an_import_that_fails_is_told_by_its_last_line(start):
    assert start.error_of_import(sys.executable, ["json", "re"]) is None
    assert start.error_of_import(sys.executable,
                                 ["json", "not_there"]) == "ModuleNotFoundError: No module named 'not_there'"


@pytest.mark.parametrize("given, has, lacks", [
    ([], ["-n", "not slow or drawn"], ["--order=random"]),
    (["--order", "random", "--order-seed", "7"], ["-n", "not slow or drawn", "--order=random", "--order-seed=7"], []),
    (["--rest", "--background-load", "2"], ["-n", "slow and not quantisers", "--background-load=2"], []),
    (["--rest", "--portion", "commit", "--record", "a"], ["-n", "slow and not quantisers", "--portion=commit",
                                                          "--record=a"], []),
    (["--smoke", "--smoke-seed=3"], ["smoke", "--smoke-seed=3"], ["-n"]),
    (["-k", "vae", "--order", "reverse"], ["-k", "vae", "--order=reverse"], ["-n", "-m"])], ids=" ".join)
def test_what_chooses_no_tests_leaves_them_in_two_processes(start, monkeypatch, given, has, lacks):
    commands = []
    monkeypatch.setattr(start, "set_up", lambda options: ("bin/python", "ComfyUI"))
    monkeypatch.setattr(start, "set_up_quantisers", lambda python: "bin/other")
    monkeypatch.setattr(start, "subprocess", SimpleNamespace(Popen=lambda command, **options: commands.append(command)))
    monkeypatch.setattr(start, "wait", lambda process: 0)
    monkeypatch.setattr(sys, "argv", ["start.py", "test", *given])

    assert start.main() == 0
    assert set(has) <= set(commands[-1]) and not set(lacks) & set(commands[-1]), commands[-1]


def test_minutes_count_from_the_start_with_all_that_is_installed_in_them(start, monkeypatch):
    commands = []
    monkeypatch.setattr(start, "set_up", lambda options: ("bin/python", "ComfyUI"))
    monkeypatch.setattr(start, "subprocess", SimpleNamespace(Popen=lambda command, **options: commands.append(command)))
    monkeypatch.setattr(start, "wait", lambda process: 0)
    monkeypatch.setattr(start, "START_S", time.monotonic() - 60)
    monkeypatch.setattr(sys, "argv", ["start.py", "test", "--minutes", "3"])

    assert start.main() == 0
    until, = [float(argument.removeprefix("--until=")) for argument in commands[-1] if argument.startswith("--until=")]
    assert until == pytest.approx(time.time() + 120, abs=5)


def lay(folder, version):
    folder.mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "requirements.txt").touch()
    (folder / "comfyui_version.py").write_text(f'# generated\n__version__ = "{version}"\n')


def pack(command, tmp_path, version):
    """What pip would have downloaded."""
    lay(tmp_path / "packed", version)
    download, name = command[command.index("--dest") + 1], command[-1].replace("-", "_").replace("==", "-")
    download.mkdir()
    with tarfile.open(download / f"{name}.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "packed", f"{name}/vendor/ComfyUI")


STARTED = """
import signal, subprocess, sys, time
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
one = subprocess.Popen([sys.executable, "-c", "import time; print('there', flush=True); time.sleep(300)"],
                       start_new_session=True, stdout=subprocess.PIPE)
one.stdout.readline()
print(one.pid, flush=True)
time.sleep(300)
"""
STARTS = """
import subprocess, sys
from types import SimpleNamespace
import start
start.END_S = 1
start.parse_arguments = lambda: (SimpleNamespace(job="demo"), [])
start.set_up = lambda options: (sys.executable, "comfyui")
start.run_demo = lambda *given: start.wait(subprocess.Popen([sys.executable, *sys.argv[1:]]))
start.handle_signals()
sys.exit(start.main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of what has lost its parent Linux alone tells")
@pytest.mark.parametrize("number, how", [(signal.SIGTERM, "heeds"), (signal.SIGHUP, "heeds"), (signal.SIGTERM, "deaf")])
def test_a_signal_ends_all_that_was_started(number, how):
    """Also what is in a session of its own, and what does not heed SIGTERM; the terminal may be gone."""
    process = subprocess.Popen([sys.executable, "-c", STARTS, "-c", STARTED, how], cwd=ROOT, stdout=subprocess.PIPE,
                               text=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    started = int(process.stdout.readline())
    if number == signal.SIGHUP:
        process.stdout.close()
    process.send_signal(number)

    assert process.wait(300) == 130
    assert not os.path.exists(f"/proc/{started}")


ORPHANS = """
import os, subprocess, sys, time
START = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True)"
parent = subprocess.Popen([sys.executable, "-c", START, "import time; time.sleep(0.5)"], stdout=subprocess.PIPE)
orphan = int(parent.stdout.readline())
parent.wait()
deadline_s = time.monotonic() + 20
while os.path.exists(f"/proc/{orphan}") and time.monotonic() < deadline_s:
    time.sleep(0.05)
sys.exit(os.path.exists(f"/proc/{orphan}"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere another process takes what has lost its parent")
def test_what_lost_its_parent_and_ended_is_gone():
    """Tests of workers look whether processes are there, and one of whose end nobody took notice is."""
    assert subprocess.run([sys.executable, "-c", STARTS, "-c", ORPHANS], cwd=ROOT, stdout=subprocess.DEVNULL,
                          timeout=1200).returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_a_closed_terminal_ends_nothing_that_nohup_has_started():
    check = f"{STARTS.partition('start.handle_signals')[0]}import signal\nstart.handle_signals()\n" \
            "sys.exit(signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)"

    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, timeout=1200,
                          preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))

    assert done.returncode == 0
