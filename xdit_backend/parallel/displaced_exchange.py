"""Communication of displaced patch parallelism (DistriFusion, arXiv 2402.19481): layers' tensors are exchanged within a
call, or asynchronously for the next call. docs/algorithms.md section 9.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..distributed.collectives import Traffic, all_gather, on_wire, start_all_gather
from ..partition import slot_bytes

# Fewer, larger messages have less overhead; smaller ones start earlier.
BUCKET_BYTES = 2 ** 21
MAX_STRIDE = 2.0               # longest extrapolated step, in units of the previous one


def extrapolation_weight(strength, time, last, before):
    """Weight w of the extrapolation to `time`, x_before + w (x_last - x_before), from the values at `before` and
    `last`. strength: 0 keeps x_last, 1 is linear extrapolation."""
    return 1.0 + strength * min(max((time - last) / (last - before), -1.0), MAX_STRIDE)


@dataclass(frozen=True)
class Slot:
    """Position of a layer in a bucket."""

    bucket: int
    sides: tuple                           # for each side of the bucket: each rank's tensor, a view of it


class Exchange:
    """Tensors that the ranks last sent each other, by layer, for the calls of one conditioning. Call drain() before
    dropping it.

    A call of the model is synchronous (uses what is sent in it) or stale (uses what the previous call sent, while its
    own tensors arrive for the next). In every call and on every rank, share() is called for the same layers in the same
    order. Consecutive layers lie in buckets, (ranks, bytes): when the layers of a bucket have run, this rank's row is
    sent to all others in one all-gather, which the next call awaits when it reaches the bucket. Buckets keep their
    addresses.

    extrapolation: strength with which drifting tensors are extrapolated from the last two calls, docs/algorithms.md
    section 2.9. A bucket then has two sides, of the last call and of the one before it, which alternate: layer by layer
    the older side is overwritten with the extrapolation and read; when the bucket's layers have run, this call's
    tensors arrive there.
    """

    def __init__(self, group, num_ranks, rank, bucket_bytes=BUCKET_BYTES, extrapolation=0.0):
        self.group, self.num_ranks, self.rank, self._extrapolation = group, num_ranks, rank, extrapolation
        self.once = {}                         # layer -> (image indices, output), of layers that read the text alone
        self.layers, self.fractions = {}, {}   # layer -> displaced.StaleSplit, and the cache of their `fractions`
        self.derived = {}                      # per call: their results from what the last call sent
        self.is_stale, self.norms = False, "corrected"         # of the current call
        self._bucket_bytes = bucket_bytes
        self._slots, self._buckets, self._works = {}, [], {}   # a bucket is a tuple of its sides
        self._last, self._next = 0, 0          # side of the last call, side of the current call
        # times of the last two calls that were published; weight of the current call's extrapolation
        self._times, self._weight = (), 1.0
        self._first_call = None                # layer -> tensors of the first call, until there are buckets
        self._leaving = []                     # [(Slot, tensor, or None if it is in the slot)] of the current bucket
        self._publishes, self._traffic = True, Traffic()

    @property
    def is_filled(self):
        """True once a call has sent what a stale call needs."""
        return bool(self._slots)

    @property
    def num_bytes(self):
        return sum(side.numel() for sides in self._buckets for side in sides)

    @property
    def num_in_flight(self):
        return len(self._works)

    @property
    def addresses(self):
        """Addresses of the buckets' memory."""
        return [tuple(side.data_ptr() for side in sides) for sides in self._buckets]

    @contextmanager
    def call(self, traffic, is_stale, publishes=True, norms="corrected", time=0.0):
        """Context of one call of the model.

        publishes: its tensors are also for the next call; a stale call that publishes nothing leaves those of the last
        publishing call. norms: of specs.Mode. time: the model's timestep; calls at the same time overwrite each other.
        """
        assert self.is_filled or not is_stale, "nothing was sent yet"
        self.is_stale, self.norms, self._publishes = is_stale, norms, publishes
        self._traffic, self.derived = traffic, {}
        self._first_call = {} if publishes and not self.is_filled else None
        alternates = publishes and self._extrapolation > 0 and time not in self._times[:1]
        self._next = 1 - self._last if alternates and self.is_filled else self._last
        has_two = alternates and len(self._times) == 2
        self._weight = extrapolation_weight(self._extrapolation, time, *self._times) if has_two else 1.0
        try:
            yield self
            self._leave()
            if self._first_call:
                self._lay_out(self._first_call)
            self._last, self._times = self._next, (time, *self._times[:1]) if alternates else self._times
        finally:                                               # a failed call leaves nothing to send
            self._first_call, self._leaving = None, []

    def share(self, key, fresh, shapes, drifts=False):
        """Every rank's tensor of a layer, as a list by rank: of this call if it is synchronous, else of the last one,
        this rank's included. Every rank calls it.

        fresh: this rank's tensor, of shapes[rank], which must not be modified during this call; or a tuple of tensors
        to stack, which are copied: then a stale call returns this rank's fresh tensor. drifts: in a stale call,
        extrapolate the others' if the exchange does that. The result is valid until the next share().
        """
        is_apart = isinstance(fresh, tuple)
        if not self.is_stale:
            return self._share_now(key, torch.stack(fresh) if is_apart else fresh, shapes)
        slot = self._slots[key]
        if self._leaving and self._leaving[0][0].bucket != slot.bucket:
            self._leave()
        self._wait(slot.bucket)
        if self._publishes:
            if is_apart:                                       # compiled blocks reuse the tensors' memory
                for target, tensor in zip(slot.sides[self._next][self.rank], fresh):
                    target.copy_(tensor)
            # Otherwise copied later: this rank's row of the last call may still be read.
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
        """{layer: every rank's tensor, of the last call} of the layers in the same bucket with the same shape."""
        slot = self._slots[key]
        return {other: other_slot.sides[self._last] for other, other_slot in self._slots.items()
                if other_slot.bucket == slot.bucket and other_slot.sides[0][0].shape == slot.sides[0][0].shape}

    def gather(self, fresh):
        """Gather a tensor of the same shape on all ranks, without caching it. Every rank calls it."""
        return all_gather(fresh[None], [1] * self.num_ranks, 0, self.group, self._traffic).unbind(0)

    def drain(self):
        """Wait for all operations in flight. Every rank calls it, between the same two calls."""
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
            for tensor, row in zip(slot.sides[self._next], everyone):
                tensor.copy_(_as_tensor(row, tensor.shape, tensor.dtype))
        return [_as_tensor(row, shape, fresh.dtype) for row, shape in zip(everyone, shapes)]

    def _leave(self):
        """Send this rank's row of the bucket whose layers have run."""
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
        """Make buckets of the first call's tensors, freeing each layer's as its bucket is made to save memory."""
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
    """Assign consecutive layers to buckets of at most bucket_bytes, or of one layer. sizes: {layer: bytes}."""
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
