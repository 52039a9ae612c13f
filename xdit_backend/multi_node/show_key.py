"""Show the key that another machine needs to join, and the command to run there.

ComfyUI creates the key when a prompt first uses a device of another machine. Only this command shows it. Everyone who
has the key can join: transfer it over a trusted channel, such as ssh.
"""

from pathlib import Path

from ..comfyui.install_location import find_comfyui
from ..protocol.errors import ConfigError
from .connections import is_name
from .listening import Listening
from .tls_keys import key_folder, read_identity


def add_arguments(parser):
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="names of the machines to join, as in devices of xDiT Parallel Config: other-pc; "
                             "default: those that ComfyUI has waited for")
    parser.add_argument("--folder", type=Path,
                        help="folder of the key, xdit/machines in ComfyUI's user folder; default: that of the ComfyUI "
                             "in whose custom_nodes this is installed, or of the one in XDIT_COMFYUI")


def main(options):
    comfyui = find_comfyui()
    folder = options.folder or (key_folder(comfyui) if comfyui is not None else None)
    if folder is None:
        raise ConfigError("Add --folder and the folder of the key, xdit/machines in ComfyUI's user folder: this is not "
                          "installed in a ComfyUI's custom_nodes, and XDIT_COMFYUI is not set to a ComfyUI.")
    listening, key = Listening.read(folder), read_identity(folder)
    if listening is None or key is None:
        raise ConfigError(f"Queue a prompt that uses a device of another machine, then run this again: {folder} has no "
                          f"key, which ComfyUI creates then. If ComfyUI has another user folder (--user-directory), "
                          f"add --folder and xdit/machines in that one.")
    for name in options.names:
        if not is_name(name):
            raise ConfigError(f'Use small letters, digits, dots and hyphens, such as "other-pc": "{name}" is not a '
                              f"name of a machine.")
    names = options.names or listening.names
    if not names:
        raise ConfigError("Name the machine to join, as in devices of xDiT Parallel Config: python -m "
                          "xdit_backend key other-pc.")
    for name in names:
        print(f"On {name}, in the folder of the xDiT nodes there, run:\n\n"
              f"    python -m xdit_backend join {listening.address} {name}\n")
    print(f"When it asks for the key, paste this:\n\n    {key.text}\n")
