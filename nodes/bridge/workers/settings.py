"""User's choices in Settings > xDiT, read from ComfyUI's settings file at each use. Their texts are in web/xdit.js.

The address for other machines is a setting rather than a widget, so that no workflow can open a port.
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
    """Policy for the memory of idle workers.

    keep: weights stay in VRAM. park: weights move to system RAM and VAEs are dropped. release: the workers end.
    """

    how: str = "keep"
    minutes: float = 10.0          # of idleness before the policy applies


def chosen_idle():
    """Return the user's Idle policy. Raises ConfigError if the settings file has an invalid one."""
    settings = _settings()
    how, minutes = settings.get(HOW, Idle.how), settings.get(MINUTES, Idle.minutes)
    if how not in IDLE_WAYS:
        raise ConfigError(f"Choose one of {', '.join(IDLE_WAYS)} in Settings > xDiT: {HOW} is {how!r} in ComfyUI's "
                          "settings.")
    if type(minutes) not in (int, float) or not 0 < minutes <= LONGEST_MINUTES:
        raise ConfigError(f"Set the idle minutes above 0 and at most {LONGEST_MINUTES} in Settings > xDiT: {MINUTES} "
                          f"is {minutes!r} in ComfyUI's settings.")
    return Idle(how, float(minutes))


def chosen_address():
    """Return this machine's address at which other machines may join, or "" if none is set.
    Raises ConfigError if the setting is not a string."""
    address = _settings().get(ADDRESS, "")
    if not isinstance(address, str):
        raise ConfigError(f"Enter an address of this machine, or nothing, in Settings > xDiT: {ADDRESS} is "
                          f"{address!r} in ComfyUI's settings, which is not a text.")
    return address.strip()


def _settings():
    try:
        with open(os.path.join(folder_paths.get_user_directory(), "default", "comfy.settings.json"),
                  encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):                              # not created yet, or being written
        return {}
