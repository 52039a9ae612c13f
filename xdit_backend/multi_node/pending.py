"""Connections to the host that have not shown the key yet: who of them is listened to, and who waits.

Strangers cannot keep a machine out. At most MAX_SERVED connections are listened to at a time, of one address at most
MAX_SERVED_PER_ADDRESS; each has connections.WELCOME_S to be let in. Others wait in a line. While any waits, a
connection that has been listened to for TURN_S makes way for it. The next one comes from the address of which the
fewest are listened to.
"""

import collections
import threading
import time

TURN_S = 1.0                               # of a handshake over a slow network: two round trips, and the host's work
MAX_SERVED, MAX_SERVED_PER_ADDRESS = 32, 16
# who waits has an open file here, and waits at most for MAX_WAITING_PER_ADDRESS / MAX_SERVED_PER_ADDRESS x TURN_S
MAX_WAITING, MAX_WAITING_PER_ADDRESS = 160, 64


class Pending:
    """One thread calls `add` and `next`, and closes the Links that `add` returns. That of a Link calls `remove`."""

    def __init__(self):
        self._waiting = []                                     # (Link, address), the first to come first
        self._served = {}                                      # Link -> (address, since when), the oldest first
        self._lock = threading.Lock()

    @property
    def num_waiting(self):
        return len(self._waiting)

    def add(self, link, address):
        """Put a new Link in the line. Returns the Link that has to leave it, since it is too long, or None."""
        with self._lock:
            counts = collections.Counter(of for _, of in self._waiting)
            if counts[address] >= MAX_WAITING_PER_ADDRESS:
                return link
            self._waiting.append((link, address))
            counts[address] += 1
            if len(self._waiting) <= MAX_WAITING:
                return None
            most = max(counts.values())
            last = max(index for index, (_, of) in enumerate(self._waiting) if counts[of] == most)
            return self._waiting.pop(last)[0]

    def next(self):
        """The next Link to be listened to; None: nobody waits, or all have to wait. Ends the Link that makes way."""
        with self._lock:
            counts = collections.Counter(of for of, _ in self._served.values())
            for link, address in sorted(self._waiting, key=lambda one: counts[one[1]]):
                is_address_full = counts[address] >= MAX_SERVED_PER_ADDRESS
                if is_address_full or len(self._served) >= MAX_SERVED:
                    replaced = self._oldest(address if is_address_full else None)
                    if replaced is None:
                        continue
                    del self._served[replaced]
                    replaced.end()
                self._waiting.remove((link, address))
                self._served[link] = address, time.monotonic()
                return link
        return None

    def remove(self, link):
        """A Link was let in, or is closed."""
        with self._lock:
            self._served.pop(link, None)

    def close(self):
        """Take all Links out of the line, and return them."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return [link for link, _ in waiting]

    def _oldest(self, address=None):
        """The Link that has been listened to for longest, and for TURN_S; of this address, or of any."""
        since_s, link = next(((since_s, link) for link, (of, since_s) in self._served.items()
                              if address in (None, of)), (0.0, None))
        return link if link is not None and time.monotonic() - since_s > TURN_S else None
