"""Location and version of the ComfyUI installation, found without importing it."""

import os
import re
import sys
from pathlib import Path

FOLDER = "XDIT_COMFYUI"                    # environment variable with ComfyUI's folder
PACK = Path(__file__).resolve().parents[2]
VERSION_FILE = "comfyui_version.py"


def find_comfyui():
    """ComfyUI's folder: of this process, from XDIT_COMFYUI, or the one in whose custom_nodes this pack is; None if
    there is none."""
    loaded = getattr(sys.modules.get("comfy"), "__path__", None)
    named = os.environ.get(FOLDER)
    found = Path(next(iter(loaded))).parent if loaded else Path(named) if named else PACK.parent.parent
    return found.resolve() if (found / "comfy" / "ldm").is_dir() else None


def comfyui_version(folder):
    """Version of the ComfyUI in a folder, e.g. "0.30.0"; "" if unknown."""
    try:
        text = (folder / VERSION_FILE).read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r'__version__\s*=\s*"([^"]+)"', text)
    return "" if found is None else found[1]
