"""Two ranks of a Pair in one process, over a simulated segment whose stores and loads are as little ordered as a
processor may have them, and whose copies end late.

A store is seen by the other rank at any later time, in any order, but at the latest when its rank sends a byte. A load
may be answered by what the memory held at any time since its rank last received a byte.
"""

import itertools
import random

from xdit_backend.distributed.shared_memory.memory import HEADER
from xdit_backend.distributed.shared_memory.pair import Pair, Transfer, segment_bytes

CHUNK_BYTES, MAX_MESSAGE_BYTES, MAX_POSTED = 24, 100, 4


class Segment:
    """The bytes that both ranks see."""

    def __init__(self, num_slots):
        self.stored = bytearray(segment_bytes(CHUNK_BYTES, num_slots))


class Processor:
    """One rank's view of the segment: the memory and the link of its Pair."""

    def __init__(self, segment, rng, has_events):
        self._segment, self._rng, self._has_events = segment, rng, has_events
        self._unseen, self._early = [], None                   # [(offset, bytes)] stored; the segment as loaded early
        self._copies, self.arrived, self.other = [], [], None

    # --- memory ---

    def copy_in(self, offset, buffer, start, num_bytes):
        return self._copy(lambda: self._store(offset, bytes(buffer[start:start + num_bytes])))

    def copy_out(self, offset, buffer, start, num_bytes):
        def load():
            buffer[start:start + num_bytes] = self._load(offset, num_bytes)
        return self._copy(load)

    def write_header(self, offset, number, num_bytes):
        self._store(offset, HEADER.pack(number, num_bytes))

    def read_header(self, offset):
        return HEADER.unpack(self._load(offset, HEADER.size))

    def _copy(self, function):
        if not self._has_events:
            return function()
        event = Event(function)
        self._copies.append(event)
        return event

    def _store(self, offset, content):
        self._unseen.append((offset, content))

    def _load(self, offset, num_bytes):
        seen = bytearray(self._segment.stored if self._early is None else self._early)
        for stored_at, content in self._unseen:                # its own stores, it always sees
            seen[stored_at:stored_at + len(content)] = content
        return bytes(seen[offset:offset + num_bytes])

    # --- what may happen at any time ---

    def run_on(self):
        """Let a store be seen, a copy end, or load early."""
        chance = self._rng.random()
        if chance < 0.4 and self._unseen:
            self._see(self._rng.randrange(len(self._unseen)))
        elif chance < 0.8 and self._copies:
            self._copies.pop(0).end()
        elif self._early is None:
            self._early = bytes(self._segment.stored)

    def _see(self, index):
        offset, content = self._unseen.pop(index)
        self._segment.stored[offset:offset + len(content)] = content

    # --- link ---

    def send(self, notice):
        while self._unseen:
            self._see(0)
        self.other.arrived.append(notice)

    def receive(self):
        count = self._rng.randint(0, len(self.arrived))
        notices, self.arrived = b"".join(self.arrived[:count]), self.arrived[count:]
        if notices:
            self._early = None
        return notices


class Event:
    """The end of a copy, which is when it happens."""

    def __init__(self, function):
        self._function = function

    def query(self):
        return self._function is None

    def end(self):
        self._function()
        self._function = None


def run(num_messages, seed, pair=Pair, processor=Processor, num_slots=2):
    """Exchange so many messages of random sizes in random interleavings; returns the number of chunks.

    pair, processor: classes, or mutants of them. Raises AssertionError where a message is wrong, and whatever the pair
    raises.
    """
    rng, segment = random.Random(seed), Segment(num_slots)
    ends = [processor(segment, rng, has_events=bool(seed % 2)) for _ in range(2)]
    ends[0].other, ends[1].other = ends[1], ends[0]
    pairs = [pair(1 - side, ends[side], ends[side], side == 0, CHUNK_BYTES, num_slots) for side in range(2)]
    contents, sent, received, num_chunks = [[], []], [0, 0], [0, 0], 0         # of each direction
    numbers = itertools.count(1)

    def content(direction, number):
        while len(contents[direction]) <= number:
            unique = next(numbers).to_bytes(8, "little")
            contents[direction].append((unique * (MAX_MESSAGE_BYTES // 8 + 1))[:rng.randint(1, MAX_MESSAGE_BYTES)])
        return contents[direction][number]

    posted = [[], []]                                          # [(number, buffer)] of receives that are not done
    idle_rounds = 0
    while min(*sent, *received) < num_messages // 2:
        side = rng.randrange(2)
        action = rng.random()
        if action < 0.2 and sent[side] < num_messages // 2 and len(pairs[side].sends) < MAX_POSTED:
            message = content(side, sent[side])
            pairs[side].sends.append(Transfer(bytearray(message), len(message), lambda: None))
            num_chunks += -(-len(message) // CHUNK_BYTES)
            sent[side] += 1
        elif action < 0.4 and received[side] + len(posted[side]) < num_messages // 2 and len(posted[side]) < MAX_POSTED:
            number = received[side] + len(posted[side])
            buffer = bytearray(len(content(1 - side, number)))
            posted[side].append([number, buffer, False])

            def done(entry=posted[side][-1]):
                entry[2] = True
            pairs[side].receives.append(Transfer(buffer, len(buffer), done))
        elif action < 0.7:
            ends[side].run_on()
        else:
            idle_rounds = 0 if pairs[side].advance() else idle_rounds + 1
            assert idle_rounds < 10_000, "nothing moves: a chunk was lost"
            while posted[side] and posted[side][0][2]:
                number, buffer, _ = posted[side].pop(0)
                assert bytes(buffer) == contents[1 - side][number], f"message {number} arrived wrong"
                received[side] += 1
                contents[1 - side][number] = b""
    return num_chunks
