"""Stored results of comparisons between ComfyUI's own classes and the pack's, next to the machine profiles.

A result is valid for one version of ComfyUI, of the source files of its class, of the pack, and of the packages that
compute.
"""

import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import re
import sys
from pathlib import Path

import torch

import folder_paths

from ....xdit_backend.comfyui.install_location import comfyui_version, find_comfyui

PACK = Path(__file__).parents[3]
# files of the pack that decide what the workers compute
OWN = "nodes/bridge", "xdit_backend/autoencoders", "xdit_backend/checkpoints", "xdit_backend/models"
CLASSES = "comfy.ldm."                     # ComfyUI's modules whose imports are followed

# "from base import names", with the names in one line or in parentheses; "import direct"
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)|import[ \t]+(comfy[.\w]*))",
                    re.MULTILINE)

log = logging.getLogger(__name__)


def key_of(*modules):
    """Everything that a comparison depends on. modules: names of ComfyUI's modules that it runs; those in comfy.ldm
    with everything that they import from ComfyUI."""
    folder = find_comfyui()
    files = _files(folder, modules)
    return {"comfyui": comfyui_version(folder), "sources": _digest([*files.values(), *_patched_in(files)]),
            "pack": _digest(sorted(path for own in OWN for path in (PACK / own).rglob("*.py"))),
            "diffusers": importlib.metadata.version("diffusers"), "torch": torch.__version__,
            "precision": torch.get_float32_matmul_precision()}


def stored(name, key):
    """Return the result that `store` was given for this name and key; None if there is none."""
    path = _path(name)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found["result"] if found["key"] == key else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("the stored comparison of %s with ComfyUI's class is ignored (%s): %s", name, path, error)
        return None


def store(name, key, result):
    """Store a result, in place of the former one of this name. Only logs a warning if the folder cannot be written
    to."""
    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({"name": name, "key": key, "result": result}, indent=1), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        log.warning("the comparison of %s with ComfyUI's class cannot be stored in %s: %s", name, path.parent, error)


def code_of(function):
    """Text that changes with the code of a function."""
    code = inspect.unwrap(function).__code__
    return f"{code.co_code.hex()} {code.co_consts} {code.co_names}"


def _path(name):
    file = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Path(folder_paths.get_user_directory()) / "xdit" / "classes" / f"{file}.json"


def _files(folder, modules):
    """{name of a module of ComfyUI: its file} for these modules and those that they import."""
    found, waiting = {}, [*modules]
    while waiting:
        name = waiting.pop()
        path = folder.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in found or not path.is_file():
            continue
        found[name] = path
        if name.startswith(CLASSES):
            waiting += _imports(path, name)
    return dict(sorted(found.items()))


def _imports(path, name):
    """Names that a module imports from ComfyUI, some of which are not modules."""
    package = (name if path.name == "__init__.py" else name.rpartition(".")[0]).split(".")
    for base, names, direct in IMPORT.findall(path.read_text(encoding="utf-8")):
        level = len(base) - len(base.lstrip("."))
        base = ".".join([*package[:len(package) + 1 - level], base[level:]]).strip(".") if level else base or direct
        if base.partition(".")[0] == "comfy":
            yield from (base, *(f"{base}.{each}" for each in re.findall(r"\w+", names)))


def _patched_in(files):
    """Files with functions that other packs have set as methods on the classes of these modules."""
    found = set()
    for name, path in files.items():
        for value in vars(sys.modules[name]).values() if name in sys.modules and name.startswith(CLASSES) else ():
            if inspect.isclass(value) and value.__module__ == name:
                found |= {Path(method.__code__.co_filename) for method in vars(value).values()
                          if inspect.isfunction(method)} - {path}
    return sorted(found)


def _digest(paths):
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
