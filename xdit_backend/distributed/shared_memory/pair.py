"""Exchange between this rank and one other through the segment of the pair. docs/design/transports.md.

The segment has a lane for each direction, which is a ring of NUM_SLOTS chunks: while one is copied in by the sender,
the receiver copies out another. Nothing in the segment is a flag. A chunk is announced, and its slot given back, by one
byte through the pair's socket, after the copy is done; the kernel orders what was stored before a byte was sent ahead
of what is loaded after it was received, on every processor. Headers in the segment are checked, never waited for.

This file does no input or output: memory and link are objects of process_group.py, or a test's.
"""

import collections

NUM_SLOTS = 4
CHUNK_BYTES = 2 ** 19
HEADER_BYTES = 64                          # a cache line, so that two ranks never write to the same one
FILLED, EMPTIED = b"\1", b"\2"             # bytes through the socket


class ExchangeError(RuntimeError):
    """Ranks disagree on what they exchange, or one of them is gone."""


def segment_bytes(chunk_bytes=CHUNK_BYTES, num_slots=NUM_SLOTS):
    """Size of a pair's segment: both lanes' chunks, then their headers."""
    return 2 * num_slots * (chunk_bytes + HEADER_BYTES)


class Transfer:
    """Bytes of one tensor that are sent to, or received from, another rank.

    buffer: what the pair's memory copies from or to. on_done: called when all bytes are copied. is_ready: a transfer
    that is not blocks those behind it.
    """

    __slots__ = ("buffer", "num_bytes", "num_done", "num_started", "is_ready", "_on_done")

    def __init__(self, buffer, num_bytes, on_done, is_ready=True):
        self.buffer, self.num_bytes, self.is_ready, self._on_done = buffer, num_bytes, is_ready, on_done
        self.num_started = self.num_done = 0

    def done(self, num_bytes):
        self.num_done += num_bytes
        if self.num_done == self.num_bytes:
            self._on_done()


class Pair:
    """Both lanes between this rank and another, as this rank sees them.

    memory: copy_in(offset, buffer, start, num_bytes) and copy_out(...) begin a copy to or from the segment and return
    an event with `query()`, or None if the copy is done; read_header and write_header. link: send(byte), and receive(),
    the bytes that arrived, b"" for none, or None once the other end is closed. is_first: whether this is the pair's
    lower rank. Not thread-safe.
    """

    def __init__(self, other, memory, link, is_first, chunk_bytes=CHUNK_BYTES, num_slots=NUM_SLOTS):
        self.other, self.sends, self.receives, self.is_closed = other, collections.deque(), collections.deque(), False
        self._memory, self._link = memory, link
        self._out_lane, self._in_lane = (0, 1) if is_first else (1, 0)
        self._chunk_bytes, self._num_slots = chunk_bytes, num_slots
        # chunks of the lane to the other rank: copies begun, announced, and given back by the other rank
        self._num_begun = self._num_filled = self._num_returned = 0
        # of the lane from it: announced by the other rank, copies begun, and given back
        self._num_announced = self._num_taken = self._num_emptied = 0
        self._copying_in, self._copying_out = collections.deque(), collections.deque()

    @property
    def is_idle(self):
        """Whether there is nothing to wait for."""
        return not (self.sends or self.receives or self._copying_in or self._copying_out)

    @property
    def copying(self):
        """Events of unfinished copies, the oldest of each direction."""
        return [copies[0][0] for copies in (self._copying_in, self._copying_out) if copies and copies[0][0] is not None]

    def advance(self):
        """Do all that can be done without waiting; returns whether anything was. Raises ExchangeError."""
        moved = bool(self._copying_in or self._copying_out) and self._finish()
        while self.sends or self.receives:
            sent = self._send_chunk()
            if self._receive_chunk() or sent:
                moved = True
            elif not self._take_notices():
                break
        if self.is_closed and (self.sends or self.receives):
            raise ExchangeError(f"rank {self.other} closed its connection during an exchange")
        return moved

    def _take_notices(self):
        notices = self._link.receive()
        if notices is None:
            self.is_closed = True
            return False
        self._num_announced += notices.count(FILLED)
        self._num_returned += notices.count(EMPTIED)
        return bool(notices)

    def _send_chunk(self):
        if not self.sends or self._num_begun - self._num_returned >= self._num_slots or not self.sends[0].is_ready:
            return False
        transfer = self.sends[0]
        num_bytes = min(self._chunk_bytes, transfer.num_bytes - transfer.num_started)
        event = self._memory.copy_in(self._offset(self._out_lane, self._num_begun), transfer.buffer,
                                     transfer.num_started, num_bytes)
        self._num_begun += 1
        transfer.num_started += num_bytes
        if transfer.num_started == transfer.num_bytes:
            self.sends.popleft()
        if event is None and not self._copying_in:
            self._filled(transfer, num_bytes)
        else:
            self._copying_in.append((event, transfer, num_bytes))
        return True

    def _filled(self, transfer, num_bytes):
        """A chunk has been copied in: announce it."""
        self._memory.write_header(self._header(self._out_lane, self._num_filled), self._num_filled + 1, num_bytes)
        self._num_filled += 1
        self._link.send(FILLED)
        transfer.done(num_bytes)

    def _receive_chunk(self):
        if not self.receives or self._num_taken == self._num_announced:
            return False
        transfer = self.receives[0]
        num_bytes = min(self._chunk_bytes, transfer.num_bytes - transfer.num_started)
        found = self._memory.read_header(self._header(self._in_lane, self._num_taken))
        if found != (self._num_taken + 1, num_bytes):
            raise ExchangeError(f"rank {self.other} sent chunk {found[0]} of {found[1]} bytes, and chunk "
                                f"{self._num_taken + 1} of {num_bytes} bytes was expected: the ranks disagree on "
                                "the order or the sizes of their exchanges")
        event = self._memory.copy_out(self._offset(self._in_lane, self._num_taken), transfer.buffer,
                                      transfer.num_started, num_bytes)
        self._num_taken += 1
        transfer.num_started += num_bytes
        if transfer.num_started == transfer.num_bytes:
            self.receives.popleft()
        if event is None and not self._copying_out:
            self._emptied(transfer, num_bytes)
        else:
            self._copying_out.append((event, transfer, num_bytes))
        return True

    def _emptied(self, transfer, num_bytes):
        """A chunk has been copied out: give its slot back."""
        self._num_emptied += 1
        self._link.send(EMPTIED)
        transfer.done(num_bytes)

    def _finish(self):
        """Announce and give back the chunks whose copies are done; returns whether there were any."""
        moved = False
        for copies, finish in ((self._copying_in, self._filled), (self._copying_out, self._emptied)):
            while copies and (copies[0][0] is None or copies[0][0].query()):
                _, transfer, num_bytes = copies.popleft()
                finish(transfer, num_bytes)
                moved = True
        return moved

    def _offset(self, lane, number):
        return (lane * self._num_slots + number % self._num_slots) * self._chunk_bytes

    def _header(self, lane, number):
        return (2 * self._num_slots * self._chunk_bytes
                + (lane * self._num_slots + number % self._num_slots) * HEADER_BYTES)
