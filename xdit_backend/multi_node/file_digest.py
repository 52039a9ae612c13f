"""What is in model files, as a digest: the same content has the same one on every machine,
whatever its name and place."""

import hashlib
import os
from pathlib import Path

from ..checkpoints.diffusers_folder import files_of
from ..protocol.errors import CheckpointError

READ_BYTES = 2 ** 24
SUFFIXES = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".bin")


class Contents:
    """Digests of files, each read once for as long as its size and time stay."""

    def __init__(self):
        self._known = {}                                       # (path, size, time) -> SHA-256

    def of(self, path, on_read=lambda done, total: None):
        """The content of a file, or of what is read of a diffusers folder: "BYTES-SHA256".

        on_read(bytes, of how many) is called now and then, and may raise to give up.
        """
        files = files_of(path)
        total, done, digests = sum(map(os.path.getsize, files)), 0, []
        for file in files:
            about = os.stat(file)
            key = file, about.st_size, about.st_mtime_ns
            if key not in self._known:
                digest = hashlib.sha256()
                with open(file, "rb", buffering=0) as opened:
                    while part := opened.read(READ_BYTES):
                        digest.update(part)
                        done += len(part)
                        on_read(min(done, total), total)
                self._known[key] = digest.hexdigest()
            digests.append((os.path.basename(file), self._known[key]))
        digest = digests[0][1] if not os.path.isdir(path) else hashlib.sha256(repr(digests).encode()).hexdigest()
        return f"{total}-{digest}"

    def find(self, name, content, folders, on_read=lambda done, total: None):
        """The path of what has this content, whose name may be another; None: there is none."""
        every = candidates(name, int(content.partition("-")[0]), folders)
        return next((path for path in every if self.of(path, on_read) == content), None)


def candidates(name, num_bytes, folders):
    """Paths below folders that could be it, by the size of what is read of them: those of the same name first."""
    found = []
    for folder in folders:
        for place, inner, files in os.walk(folder, followlinks=True):
            models = [one for one in inner if _is_folder(Path(place, one))]
            for one in models + [file for file in files if file == name or file.lower().endswith(SUFFIXES)]:
                parts = files_of(Path(place, one))
                if all(map(os.path.isfile, parts)) and sum(map(os.path.getsize, parts)) == num_bytes:
                    found.append(os.path.join(place, one))
    return sorted(found, key=lambda path: os.path.basename(path) != name)


def same_name(name, folders):
    """Paths below folders of this name, whatever is in them."""
    return [os.path.join(place, name) for folder in folders for place, inner, files in os.walk(folder, followlinks=True)
            if name in files or name in inner]


def _is_folder(folder):
    """Is it a diffusers folder with a diffusion model, or one?"""
    try:
        return bool(files_of(folder))
    except CheckpointError:
        return False
