"""File next to the key with the address at which ComfyUI listens, and the names of machines that it has waited for.

It contains nothing secret.
"""

import os
from dataclasses import dataclass
from pathlib import Path

FILE = "listening"


@dataclass(frozen=True)
class Listening:
    """address: "192.168.1.10:29431". names: of machines."""

    address: str
    names: tuple = ()

    @classmethod
    def read(cls, folder):
        """Read the file in a folder; returns None if there is none."""
        try:
            address, *names = (Path(folder) / FILE).read_text(encoding="utf-8").split()
        except (OSError, ValueError):
            return None
        return cls(address, tuple(names))

    def write(self, folder):
        """Write the file into a folder, atomically. Raises OSError."""
        unfinished = Path(folder) / f"{FILE}.new"
        with open(unfinished, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write("\n".join((self.address, *self.names)))
        unfinished.replace(Path(folder) / FILE)
