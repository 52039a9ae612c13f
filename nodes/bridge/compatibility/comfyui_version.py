"""Errors about a ComfyUI that is newer than the pack knows."""

from ....xdit_backend.comfyui.install_location import comfyui_version, find_comfyui
from ....xdit_backend.protocol.errors import UnsupportedError


def newer_comfyui(family_name, what):
    """The UnsupportedError of something in ComfyUI's model that the pack does not know. what: a clause that says it."""
    folder = find_comfyui()
    version = comfyui_version(folder) if folder is not None else ""
    return UnsupportedError(f"Update xDiT, or use Load Diffusion Model: this ComfyUI {f'({version}) ' * bool(version)}"
                            f"is newer than the pack knows, and in its model of {family_name} {what}.")
