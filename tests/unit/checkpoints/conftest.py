"""Tiny checkpoints in ComfyUI's formats, with ComfyUI's own loader importable."""

import pytest


@pytest.fixture(scope="session")
def file_of(tmp_path_factory):
    from tests.support.comfyui_server import comfyui_folder
    from tests.support.tiny_checkpoints import detect_thin, import_comfyui, save
    if comfyui_folder() is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`, or name one in XDIT_COMFYUI")
    import_comfyui(comfyui_folder())
    detect_thin()
    folder = tmp_path_factory.mktemp("files")

    def file(kind):
        path = folder / f"{kind}.safetensors"
        if not path.exists():
            save(kind, path)
        return path
    return file
