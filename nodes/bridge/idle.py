"""What becomes of the memory of workers that have nothing to do for a while, as ComfyUI's settings say. Used by groups and the panel.

The address at which other machines may join is a setting too, not a widget: what a workflow says opens no port.
"""

import json
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass

import folder_paths

from ...xdit_backend.protocol.errors import ConfigError, XDiTError

log = logging.getLogger(__name__)

HOW, MINUTES, ADDRESS = "xdit.Residency", "xdit.IdleMinutes", "xdit.Address"        # the ids of the settings in web/xdit.js
RESIDENCIES = ("keep", "park", "release")
LONGEST_MINUTES = 24 * 60
TICK_S = 5.0


@dataclass(frozen=True)
class Residency:
    """keep: weights stay on the devices. park: they go to host memory, and VAEs are dropped. release: the workers end."""

    how: str = "keep"
    minutes: float = 10.0          # without anything to do, until then


def chosen_residency():
    """What a person has chosen in ComfyUI's settings, which it keeps in a file of its user. Raises ConfigError where that is none."""
    settings = _settings()
    how, minutes = settings.get(HOW, Residency.how), settings.get(MINUTES, Residency.minutes)
    if how not in RESIDENCIES:
        raise ConfigError(f"{HOW} is {how!r} in ComfyUI's settings. There are {', '.join(RESIDENCIES)}.")
    if type(minutes) not in (int, float) or not 0 < minutes <= LONGEST_MINUTES:
        raise ConfigError(f"{MINUTES} is {minutes!r} in ComfyUI's settings. It takes minutes, above 0, at most {LONGEST_MINUTES}.")
    return Residency(how, float(minutes))


def chosen_address():
    """The address of this machine at which others may join; "" where none is set. Raises ConfigError where that is no text."""
    address = _settings().get(ADDRESS, "")
    if not isinstance(address, str):
        raise ConfigError(f"{ADDRESS} is {address!r} in ComfyUI's settings. It takes an address of this machine, as text, or nothing.")
    return address.strip()


def _settings():
    try:
        with open(os.path.join(folder_paths.get_user_directory(), "default", "comfy.settings.json"), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):                              # none has been chosen yet, or it is being written
        return {}


def tend(groups, residency):
    """Park or end the workers that have had nothing to do for so long. Not while a prompt runs."""
    for client in groups.clients if residency.how != "keep" else ():
        if client.idle_s < 60 * residency.minutes:
            continue
        if residency.how == "release":
            log.info("workers on %s end: nothing to do for %.0f minutes", ",".join(client.devices), residency.minutes)
            client.close()
        else:
            groups.give_back([client])


def watch(groups):
    """Tend the groups now and then, as long as they exist."""
    threading.Thread(target=_watch, args=(weakref.ref(groups),), daemon=True).start()


def _watch(reference):
    told = ""
    while True:
        time.sleep(TICK_S)
        groups = reference()
        if groups is None:
            return
        try:
            if any(client.running for client in groups.clients) and not _is_prompt_running():
                tend(groups, chosen_residency())
        except XDiTError as error:                             # of a setting: said once; of workers: who needs them next is told
            if str(error) != told:
                log.warning("%s", error)
            told = str(error)


def _is_prompt_running():
    from server import PromptServer
    server = getattr(PromptServer, "instance", None)
    return server is not None and bool(server.prompt_queue.currently_running)
