"""Where ComfyUI is, and which version. Nothing of it is imported. Used by native_models.py, by the host, which tells
workers, and by machines that join."""

import os
import re
import sys
from pathlib import Path

FOLDER = "XDIT_COMFYUI"                    # the environment variable that says where ComfyUI is
PACK = Path(__file__).resolve().parents[2]
VERSION_FILE = "comfyui_version.py"


def find_comfyui():
    """ComfyUI's folder: the one of this process, the one that XDIT_COMFYUI names, or the one around this pack; None
    where there is none."""
    loaded = getattr(sys.modules.get("comfy"), "__path__", None)
    named = os.environ.get(FOLDER)
    found = Path(next(iter(loaded))).parent if loaded else Path(named) if named else PACK.parent.parent
    return found.resolve() if (found / "comfy" / "ldm").is_dir() else None


def comfyui_version(folder):
    """The version of the ComfyUI in a folder, e.g. "0.30.0"; "" where it does not say."""
    try:
        text = (folder / VERSION_FILE).read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r'__version__\s*=\s*"([^"]+)"', text)
    return "" if found is None else found[1]
