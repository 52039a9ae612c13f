"""Digests of model files, by which a file is identified across machines whatever its name and folder."""

import hashlib
import os
from pathlib import Path

from ..checkpoints.diffusers_folder import files_of
from ..protocol.errors import CheckpointError

READ_BYTES = 2 ** 24
SUFFIXES = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".bin")


class Contents:
    """Cached digests of files; a file is read again only if its size or modification time changes."""

    def __init__(self):
        self._known = {}                                       # (path, size, time) -> SHA-256

    def of(self, path, on_read=lambda done, total: None):
        """Digest of a file, or of the files used of a diffusers folder: "BYTES-SHA256".

        on_read(bytes read, total) is called repeatedly, and may raise to abort.
        """
        files = files_of(path)
        total, done, digests = sum(map(os.path.getsize, files)), 0, []
        for file in files:
            about = os.stat(file)
            key = file, about.st_size, about.st_mtime_ns
            if key not in self._known:
                digest = hashlib.sha256()
                with open(file, "rb", buffering=0) as opened:
                    while chunk := opened.read(READ_BYTES):
                        digest.update(chunk)
                        done += len(chunk)
                        on_read(min(done, total), total)
                self._known[key] = digest.hexdigest()
            digests.append((os.path.basename(file), self._known[key]))
        digest = digests[0][1] if not os.path.isdir(path) else hashlib.sha256(repr(digests).encode()).hexdigest()
        return f"{total}-{digest}"

    def find(self, name, content, folders, on_read=lambda done, total: None):
        """Path of the file or folder with this digest, preferably of this name; None if there is none."""
        every = candidates(name, int(content.partition("-")[0]), folders)
        return next((path for path in every if self.of(path, on_read) == content), None)


def candidates(name, num_bytes, folders):
    """Paths below folders whose files have num_bytes in total, those of the same name first."""
    found = []
    for folder in folders:
        for parent, inner, files in os.walk(folder, followlinks=True):
            models = [one for one in inner if _is_folder(Path(parent, one))]
            for one in models + [file for file in files if file == name or file.lower().endswith(SUFFIXES)]:
                model_files = files_of(Path(parent, one))
                if all(map(os.path.isfile, model_files)) and sum(map(os.path.getsize, model_files)) == num_bytes:
                    found.append(os.path.join(parent, one))
    return sorted(found, key=lambda path: os.path.basename(path) != name)


def same_name(name, folders):
    """Paths of this name below folders, whatever their contents."""
    return [os.path.join(parent, name) for folder in folders
            for parent, inner, files in os.walk(folder, followlinks=True) if name in files or name in inner]


def _is_folder(folder):
    """Whether it is a diffusers folder of a pipeline, or of a diffusion model."""
    try:
        return bool(files_of(folder))
    except CheckpointError:
        return False
