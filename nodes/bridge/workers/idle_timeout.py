"""Idle timeout: frees the memory of idle workers, as set in ComfyUI's settings."""

import logging
import threading
import time
import weakref

from ....xdit_backend.protocol.errors import XDiTError
from .settings import chosen_idle

log = logging.getLogger(__name__)

TICK_S = 5.0


def apply_idle_setting(groups, residency):
    """Park the weights of, or end, workers that have been idle long enough. Must not be called while a prompt runs."""
    for client in groups.clients if residency.how != "keep" else ():
        if client.workers.idle_s < 60 * residency.minutes:
            continue
        if residency.how == "release":
            log.info("ending the workers on %s: idle for %.0f minutes", ",".join(client.devices), residency.minutes)
            groups.end_idle(client)
        else:
            groups.give_back([client])


def watch(groups):
    """Start a thread that applies the setting every TICK_S seconds for the lifetime of the groups."""
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
            # an invalid setting is logged once; a worker's error is raised again where the workers are next used
            if str(error) != logged:
                log.warning("%s", error)
            logged = str(error)


def _is_prompt_running():
    from server import PromptServer
    server = getattr(PromptServer, "instance", None)
    return server is not None and bool(server.prompt_queue.currently_running)
