"""A ComfyUI that loads the pack while packages are missing, in a process of its own. Prints as JSON which nodes there
are, and what those say that need the packages. Started by test_missing_packages.py:

    XDIT_COMFYUI=FOLDER python -m tests.support.without_packages BASE PACKAGE ...

BASE has a folder diffusion_models, whose models it loads one after the other.
"""

import json
import sys
from pathlib import Path


class Without:
    """One of Python's finders, for which these packages are not there."""

    def __init__(self, finder, packages):
        self._finder, self._packages = finder, packages

    def find_spec(self, name, *arguments):
        return None if name.partition(".")[0] in self._packages else self._finder.find_spec(name, *arguments)

    def __getattr__(self, name):
        return getattr(self._finder, name)


def answer(run, *arguments):
    """What a node says: its error; "ran" where it has none."""
    try:
        run(*arguments)
    except Exception as error:  # noqa: BLE001 - a person sees whatever it is
        return f"{type(error).__name__}: {error}"
    return "ran"


def main(base, *packages):
    sys.meta_path[:] = [Without(finder, packages) for finder in sys.meta_path]
    from tests.support.comfyui_server import ROOT, run_async
    from tests.support.tiny_checkpoints import import_comfyui
    import_comfyui()
    # our nodes/ would shadow ComfyUI's nodes.py
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    import torch

    import folder_paths
    import nodes
    folder_paths.add_model_folder_path("diffusion_models", str(Path(base) / "diffusion_models"), is_default=True)
    loaded, classes = run_async(nodes.load_custom_node(str(ROOT))), nodes.NODE_CLASS_MAPPINGS
    said = {"loaded": loaded, "nodes": sorted(name for name in classes if name.startswith("XDiT")),
            "missing": [name for name in packages if name not in sys.modules]}
    if loaded:
        for path in sorted((Path(base) / "diffusion_models").iterdir()):
            said[path.name] = answer(classes["XDiTLoadModel"].execute, path.name, "default", None)
        vae = nodes.VAELoader().load_vae("xdit_demo_vae.safetensors")[0]
        said["decode"] = answer(classes["XDiTVAEDecode"].execute, {"samples": torch.zeros(1, 16, 16, 16)}, vae, None)
        said["prompt"] = answer(classes["XDiTDemoPrompt"].execute, "cat face on a blue background")
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
