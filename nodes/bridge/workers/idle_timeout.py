"""Frees the memory of workers that have been idle for a while, as ComfyUI's settings say. Started by
worker_groups.py."""

import logging
import threading
import time
import weakref

from ....xdit_backend.protocol.errors import XDiTError
from .settings import chosen_idle

log = logging.getLogger(__name__)

TICK_S = 5.0


def apply_idle_setting(groups, residency):
    """Park or end the workers that have been idle for long enough. Not while a prompt runs."""
    for client in groups.clients if residency.how != "keep" else ():
        if client.workers.idle_s < 60 * residency.minutes:
            continue
        if residency.how == "release":
            log.info("workers on %s end: nothing to do for %.0f minutes", ",".join(client.devices), residency.minutes)
            groups.end_idle(client)
        else:
            groups.give_back([client])


def watch(groups):
    """Apply the setting now and then, as long as the groups exist."""
    threading.Thread(target=_watch, args=(weakref.ref(groups),), daemon=True).start()


def _watch(reference):
    logged = ""
    while True:
        time.sleep(TICK_S)
        groups = reference()
        if groups is None:
            return
        try:
            if any(client.running for client in groups.clients) and not _is_prompt_running():
                apply_idle_setting(groups, chosen_idle())
        except XDiTError as error:
            # of a setting: logged once; of workers: whoever needs them next gets the error
            if str(error) != logged:
                log.warning("%s", error)
            logged = str(error)


def _is_prompt_running():
    from server import PromptServer
    server = getattr(PromptServer, "instance", None)
    return server is not None and bool(server.prompt_queue.currently_running)
