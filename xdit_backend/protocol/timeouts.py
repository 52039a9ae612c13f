"""The environment variables XDIT_..._TIMEOUT_S: seconds, which a person may set while looking for a fault.
Used by all rooms."""

import os

from .errors import ConfigError

# name -> (seconds where it is not set, the fewest that mean something: to a socket, 0 is "without end").
# Of a link: where nothing passes for 3 s, TCP tries again 3.0 or 6.2 s after it began. Sooner than that, a short fault
# would be the end.
TIMEOUTS = {"XDIT_SILENCE_TIMEOUT_S": (60.0, 0.1), "XDIT_STAGE_TIMEOUT_S": (1800.0, 0.1),
            "XDIT_LINK_TIMEOUT_S": (8.0, 0.1), "XDIT_JOIN_TIMEOUT_S": (300.0, 0.0)}
MAX_S = 10 ** 6                            # more than a week; a socket takes no infinity


def seconds(name):
    """What is set, or else holds. Raises ConfigError for what is no such number."""
    usual_s, least_s = TIMEOUTS[name]
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else usual_s
        if not least_s <= value <= MAX_S:                      # nan is neither
            raise ValueError
    except ValueError:
        raise ConfigError(f"{name}={text} in the environment is no such number of seconds as it takes: {least_s:g} to "
                          f"{MAX_S}. Set it to one, or remove it (then it is {usual_s:g}), and start again.") from None
    return value


def check():
    """Refuse what a process would stumble over later. Raises ConfigError."""
    for name in TIMEOUTS:
        seconds(name)
