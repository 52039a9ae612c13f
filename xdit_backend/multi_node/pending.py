"""Queue of connections to the host that are not authenticated yet, which strangers cannot block.

At most MAX_SERVED connections are served at a time, and of one address at most MAX_SERVED_PER_ADDRESS; each has
connections.AUTHENTICATE_S to authenticate. Others wait in a queue. While any waits, a connection that has been served
for TURN_S is dropped for it. The next one is taken from the address with the fewest served connections.
"""

import collections
import threading
import time

TURN_S = 1.0                               # for a handshake over a slow network: two round trips, and the host's work
MAX_SERVED, MAX_SERVED_PER_ADDRESS = 32, 16
# a waiting connection is an open file, and waits at most MAX_WAITING_PER_ADDRESS / MAX_SERVED_PER_ADDRESS x TURN_S
MAX_WAITING, MAX_WAITING_PER_ADDRESS = 160, 64


class Pending:
    """One thread calls `add` and `next`, and closes the Links that `add` returns. A Link's thread calls `remove`."""

    def __init__(self):
        self._waiting = []                                     # (Link, address), the oldest first
        self._served = {}                                      # Link -> (address, start time), the oldest first
        self._lock = threading.Lock()

    @property
    def num_waiting(self):
        return len(self._waiting)

    def add(self, link, address):
        """Append a new Link to the queue. Returns the Link to drop if the queue is too long, or None."""
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
        """Return the next Link to serve, after dropping another for it if necessary; None if all must wait."""
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
        """Remove a Link that was authenticated or closed."""
        with self._lock:
            self._served.pop(link, None)

    def close(self):
        """Remove all Links from the queue and return them."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return [link for link, _ in waiting]

    def _oldest(self, address=None):
        """The Link of this address, or of any, that has been served longest; None if that is less than TURN_S."""
        since_s, link = next(((since_s, link) for link, (of, since_s) in self._served.items()
                              if address in (None, of)), (0.0, None))
        return link if link is not None and time.monotonic() - since_s > TURN_S else None
