"""Exchanges of every layer's tensors between the ranks of a group: at once, or for the next call while this one
computes on.

The part of DistriFusion (arXiv 2402.19481) that communicates; displaced.py says what is sent. docs/design/displaced.md.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..distributed.collectives import Traffic, all_gather, on_wire, start_all_gather
from ..partition import slot_bytes

# that travel together: fewer, larger messages cost less, and the first should leave early
BUCKET_BYTES = 2 ** 21
MAX_STRIDE = 2.0               # a step is forecast as at most so many times as long as the one before it


def extrapolation_weight(strength, time, last, before):
    """The weight w with which x_before + w (x_last - x_before) is the forecast for `time`,
    by what was at the other two times."""
    return 1.0 + strength * min(max((time - last) / (last - before), -1.0), MAX_STRIDE)


@dataclass(frozen=True)
class Slot:
    """A layer's place in a bucket."""

    bucket: int
    sides: tuple                           # of each side of the bucket: each rank's tensor, there


class Exchange:
    """What the ranks last sent each other, layer by layer, for the calls of one conditioning. Dropped with it, after
    drain().

    Each call of the model is synchronous (everything sent is used at once) or stale (what the last call sent is used,
    and what this one sends arrives for the next). share() is called for the same layers, in the same order, in every
    call and on every rank. Consecutive layers lie in buckets, (ranks, bytes): as soon as the layers of one have run,
    its own row goes to all other ranks in one all-gather, which is waited for where the next call comes to it. Buckets
    stay where they are in memory.

    forecast: how far what drifts goes on as it went between the last two calls, docs/design/pipefusion.md. A
    bucket then has two sides, of the last call and of the one before, which change places: layer by layer the older is
    overwritten with what both lead to, and read; when the bucket's layers have run, what this call sends arrives there.
    """

    def __init__(self, group, num_ranks, rank, bucket_bytes=BUCKET_BYTES, extrapolation=0.0):
        self.group, self.num_ranks, self.rank, self._extrapolation = group, num_ranks, rank, extrapolation
        self.once = {}                         # layer -> (which images, output), of layers that read the text alone
        self.layers, self.shares = {}, {}      # layer -> displaced.StaleSplit, and what those share
        self.derived = {}                      # by them in this call, of what the last one sent
        self.is_stale, self.norms = False, "corrected"         # of the call at hand
        self._bucket_bytes = bucket_bytes
        self._slots, self._buckets, self._works = {}, [], {}   # of a bucket: its sides
        self._last, self._next = 0, 0          # which side is of the last call, and which is for the call at hand
        # of the last two calls that were kept; of the forecast of the call at hand
        self._times, self._weight = (), 1.0
        self._first_call = None                # layer -> what a first call has sent, until there are buckets
        self._leaving = []                     # [(Slot, tensor, or None: it is there)] of the bucket at hand
        self._publishes, self._traffic = True, Traffic()

    @property
    def is_filled(self):
        """Has a call sent what a stale one needs?"""
        return bool(self._slots)

    @property
    def num_bytes(self):
        return sum(side.numel() for sides in self._buckets for side in sides)

    @property
    def num_in_flight(self):
        return len(self._works)

    @property
    def addresses(self):
        """Where the buckets are in memory."""
        return [tuple(side.data_ptr() for side in sides) for sides in self._buckets]

    @contextmanager
    def call(self, traffic, is_stale, publishes=True, norms="corrected", time=0.0):
        """One call of the model runs under this. publishes: what it sends is for the next call, too. norms: of
        displaced_modes.Mode. time: the model's timestep; calls at one time overwrite each other.

        A stale call that publishes nothing leaves what the last one that did has sent.
        """
        assert self.is_filled or not is_stale, "nothing was sent yet"
        self.is_stale, self.norms, self._publishes = is_stale, norms, publishes
        self._traffic, self.derived = traffic, {}
        self._first_call = {} if publishes and not self.is_filled else None
        turns = publishes and self._extrapolation > 0 and time not in self._times[:1]
        self._next = 1 - self._last if turns and self.is_filled else self._last
        has_two = turns and len(self._times) == 2
        self._weight = extrapolation_weight(self._extrapolation, time, *self._times) if has_two else 1.0
        try:
            yield self
            self._leave()
            if self._first_call:
                self._lay_out(self._first_call)
            self._last, self._times = self._next, (time, *self._times[:1]) if turns else self._times
        finally:                                               # also of a call that failed, which leaves nothing
            self._first_call, self._leaving = None, []

    def share(self, key, fresh, shapes, drifts=False):
        """Every rank's tensor of a layer, by rank: of this call if it is synchronous, else of the last one, this rank's
        too.

        fresh: this rank's, of shapes[rank], which nobody may change in this call; or several tensors, for one that is
        them stacked, which are copied: of a stale call this rank's is then of this one. drifts: of a stale call, the
        others' are to be forecast, where the exchange does that. What is returned is good until the next share.
        """
        is_apart = isinstance(fresh, tuple)
        if not self.is_stale:
            return self._share_now(key, torch.stack(fresh) if is_apart else fresh, shapes)
        slot = self._slots[key]
        if self._leaving and self._leaving[0][0].bucket != slot.bucket:
            self._leave()
        self._wait(slot.bucket)
        if self._publishes:
            if is_apart:                                       # a compiled block uses their memory for what comes next
                for place, tensor in zip(slot.sides[self._next][self.rank], fresh):
                    place.copy_(tensor)
            # else later: what the own row has of the last call may still be read
            self._leaving.append((slot, None if is_apart else fresh))
        known = slot.sides[self._last]
        if not drifts or self._weight == 1.0:
            return list(known)
        extrapolated = slot.sides[self._next]
        for rank, (older, last) in enumerate(zip(extrapolated, known)):
            if rank != self.rank:
                older.lerp_(last, self._weight)
        return list(extrapolated)

    def same_shaped(self, key):
        """{layer: every rank's tensor, of the last call} of all layers in the same bucket whose tensors have the same
        shape."""
        slot = self._slots[key]
        return {other: place.sides[self._last] for other, place in self._slots.items()
                if place.bucket == slot.bucket and place.sides[0][0].shape == slot.sides[0][0].shape}

    def gather(self, fresh):
        """Every rank's tensor of one shape, of this call, by rank; nothing is kept."""
        return all_gather(fresh[None], [1] * self.num_ranks, 0, self.group, self._traffic).unbind(0)

    def drain(self):
        """Wait for all that is under way. Every rank calls it, between the same two calls."""
        for index in list(self._works):
            self._wait(index)

    def _share_now(self, key, fresh, shapes):
        size = slot_bytes(shapes, fresh.dtype)
        everyone = all_gather(_as_bytes(fresh, size)[None], [1] * self.num_ranks, 0, self.group, self._traffic)
        if self._first_call is not None:
            self._first_call[key] = everyone, tuple(map(tuple, shapes)), fresh.dtype
        elif self._publishes:
            slot = self._slots[key]
            self._wait(slot.bucket)
            for part, row in zip(slot.sides[self._next], everyone):
                part.copy_(_as_tensor(row, part.shape, part.dtype))
        return [_as_tensor(row, shape, fresh.dtype) for row, shape in zip(everyone, shapes)]

    def _leave(self):
        """Send this rank's row of the bucket whose layers have all run."""
        if not self._leaving:
            return
        index = self._leaving[0][0].bucket
        bucket = self._buckets[index][self._next]
        for slot, fresh in self._leaving:
            if fresh is not None:
                slot.sides[self._next][self.rank].copy_(fresh)
        self._leaving = []
        own = on_wire(bucket[self.rank], self.group)
        arriving = bucket
        if own.device != bucket.device:
            arriving = torch.empty(bucket.shape, dtype=bucket.dtype)
            arriving[self.rank].copy_(own)
        self._works[index] = start_all_gather(arriving, self.rank, self.group, self._traffic), arriving, bucket

    def _wait(self, index):
        if index in self._works:
            wait, arriving, bucket = self._works.pop(index)
            wait()
            if arriving is not bucket:
                bucket.copy_(arriving)

    def _lay_out(self, first_call):
        """Make buckets of what a first call has sent, and free each layer of it as its bucket is made, since both would
        not fit."""
        slots, buckets = {}, []
        for index, keys in enumerate(fill_buckets({key: rows.shape[1] for key, (rows, _, _) in first_call.items()},
                                                  self._bucket_bytes)):
            bucket, start = first_call[keys[0]][0] if len(keys) == 1 else torch.cat([first_call[key][0]
                                                                                     for key in keys], 1), 0
            sides = (bucket, torch.empty_like(bucket)) if self._extrapolation else (bucket,)
            for key in keys:
                rows, shapes, dtype = first_call.pop(key)
                slots[key] = Slot(index, tuple(tuple(_as_tensor(row[start:], shape, dtype)
                                                     for row, shape in zip(side, shapes))
                                               for side in sides))
                start += rows.shape[1]
            buckets.append(sides)
            del rows
        self._slots, self._buckets = slots, buckets


def fill_buckets(sizes, bucket_bytes=BUCKET_BYTES):
    """Layers (in their order) of each bucket: as many as it has room for, or one. sizes: {layer: bytes}."""
    buckets, filled = [], bucket_bytes
    for key, size in sizes.items():
        if filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(key)
        filled += size
    return buckets


def _as_bytes(tensor, size):
    flat = tensor.reshape(-1).view(torch.uint8)
    return flat if len(flat) == size else torch.cat([flat, flat.new_zeros(size - len(flat))])


def _as_tensor(flat, shape, dtype):
    return flat[:torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
