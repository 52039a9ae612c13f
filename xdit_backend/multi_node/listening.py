"""A file next to the key: the address at which ComfyUI listens for other machines, and those that it has waited for.
It has nothing secret."""

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
        """That of a folder; None: there is none."""
        try:
            address, *names = (Path(folder) / FILE).read_text(encoding="utf-8").split()
        except (OSError, ValueError):
            return None
        return cls(address, tuple(names))

    def write(self, folder):
        """Raises OSError."""
        unfinished = Path(folder) / f"{FILE}.new"
        with open(unfinished, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write("\n".join((self.address, *self.names)))
        unfinished.replace(Path(folder) / FILE)
