"""Recognition of a ComfyUI that is newer than the pack knows, and the errors about it."""

import inspect

from ....xdit_backend.comfyui.install_location import comfyui_version, find_comfyui
from ....xdit_backend.protocol.errors import UnsupportedError

# conditioning that a model of ComfyUI 0.30 reads and the pack does not run: a node has added it
REFUSED_KEYS = frozenset()


def newer_comfyui(family_name, what):
    """The UnsupportedError of something in ComfyUI's model that the pack does not know. what: a clause that says it."""
    folder = find_comfyui()
    version = comfyui_version(folder) if folder is not None else ""
    return UnsupportedError(f"Update xDiT, or use Load Diffusion Model: this ComfyUI {f'({version}) ' * bool(version)}"
                            f"is newer than the pack knows, and in its model of {family_name} {what}.")


def new_keys(net, names):
    """Those of these names of conditioning that ComfyUI's class of the model reads itself, and not in 0.30.

    net: ComfyUI's diffusion model. A name in a dict has that dict's name and a dot before it."""
    read = words_of(type(net))
    return [name for name in names if name not in REFUSED_KEYS and {*name.split(".")} <= read]


def words_of(cls):
    """Names of arguments and strings in the code of ComfyUI's methods of a class."""
    methods = [method for each in cls.__mro__ if each.__module__.partition(".")[0] == "comfy"
               for method in vars(each).values() if inspect.isfunction(method)]
    return {word for method in methods for word in _words(method.__code__)}


def _words(code):
    yield from code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif inspect.iscode(constant):
            yield from _words(constant)
