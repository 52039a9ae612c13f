"""The environment variables XDIT_..._TIMEOUT_S: timeouts in seconds, for debugging."""

import os

from .errors import ConfigError

# name -> (default in seconds, minimum; to a socket, 0 means no limit).
# XDIT_LINK_TIMEOUT_S: after 3 s without traffic, TCP retransmits 3.0 or 6.2 s after its first attempt. With a shorter
# limit, a brief network fault would close the connection.
TIMEOUTS = {"XDIT_SILENCE_TIMEOUT_S": (60.0, 0.1), "XDIT_STAGE_TIMEOUT_S": (1800.0, 0.1),
            "XDIT_LINK_TIMEOUT_S": (8.0, 0.1), "XDIT_JOIN_TIMEOUT_S": (300.0, 0.0)}
MAX_S = 10 ** 6                            # more than a week; sockets do not accept infinity


def seconds(name):
    """Value of a variable, or its default. Raises ConfigError for an invalid value."""
    usual_s, least_s = TIMEOUTS[name]
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else usual_s
        if not least_s <= value <= MAX_S:                      # nan is neither
            raise ValueError
    except ValueError:
        raise ConfigError(f"Set the environment variable {name} to a number of seconds from {least_s:g} to {MAX_S}, or "
                          f"remove it (default {usual_s:g}), and start again: it is \"{text}\".") from None
    return value


def check():
    """Validate all variables at once. Raises ConfigError."""
    for name in TIMEOUTS:
        seconds(name)
