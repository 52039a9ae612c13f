"""A person's choices in Settings > xDiT, which ComfyUI keeps in a file for its user. Read anew each time; texts are in
web/xdit.js.

The address at which other machines may join is a setting and no widget, so that no workflow can open a port.
"""

import json
import os
from dataclasses import dataclass

import folder_paths

from ....xdit_backend.protocol.errors import ConfigError

# the ids of the settings in web/xdit.js
HOW, MINUTES, ADDRESS = "xdit.Residency", "xdit.IdleMinutes", "xdit.Address"
IDLE_WAYS = ("keep", "park", "release")
LONGEST_MINUTES = 24 * 60


@dataclass(frozen=True)
class Idle:
    """What becomes of the memory of workers that are idle.

    keep: weights stay on the devices. park: they go to host memory, and VAEs are dropped. release: the workers end.
    """

    how: str = "keep"
    minutes: float = 10.0          # without anything to do, until then


def chosen_idle():
    """The person's choice, an Idle. Raises ConfigError where the file has none that is valid."""
    settings = _settings()
    how, minutes = settings.get(HOW, Idle.how), settings.get(MINUTES, Idle.minutes)
    if how not in IDLE_WAYS:
        raise ConfigError(f"Choose one of {', '.join(IDLE_WAYS)} in Settings > xDiT: {HOW} is {how!r} in ComfyUI's "
                          "settings.")
    if type(minutes) not in (int, float) or not 0 < minutes <= LONGEST_MINUTES:
        raise ConfigError(f"Give minutes above 0, at most {LONGEST_MINUTES}, in Settings > xDiT: {MINUTES} is "
                          f"{minutes!r} in ComfyUI's settings.")
    return Idle(how, float(minutes))


def chosen_address():
    """The address of this machine at which others may join; "" where none is set.
    Raises ConfigError where that is no text."""
    address = _settings().get(ADDRESS, "")
    if not isinstance(address, str):
        raise ConfigError(f"Give an address of this machine as text, or nothing, in Settings > xDiT: {ADDRESS} is "
                          f"{address!r} in ComfyUI's settings.")
    return address.strip()


def _settings():
    try:
        with open(os.path.join(folder_paths.get_user_directory(), "default", "comfy.settings.json"),
                  encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):                              # none has been chosen yet, or it is being written
        return {}
