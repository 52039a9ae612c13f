"""Cache of stale keys and values for PipeFusion: of all patches at their last forward, in VRAM or system RAM.

# K: 0 keys, 1 values. B batch, N heads, T tokens, H head size
"""

import itertools
import math
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from ..system import accelerator
from .displaced_exchange import extrapolation_weight

# (K, B, N, T, H) -> (B, T, K, N, H), and back
TO_TOKEN_MAJOR, FROM_TOKEN_MAJOR = (1, 3, 0, 2, 4), (2, 0, 3, 1, 4)
PAGE_BYTES = 2 ** 16           # memory is pinned in pages, on no system larger than this


@dataclass
class KeyValueEntry:
    """Keys and values of all tokens of one attention: first text and other streams, then the image. The first
    `num_filled` are valid."""

    # on the device, or in system RAM if offloaded
    both_KBNTH: torch.Tensor
    num_text: int
    num_filled: int = 0
    time: float = math.nan                 # timestep of the call that filled or is filling them
    before_KBNTH: torch.Tensor | None = None           # of the previous call, if they are extrapolated
    time_before: float = math.nan

    @property
    def num_bytes(self):
        return sum(both.numel() * both.element_size() for both in (self.both_KBNTH, self.before_KBNTH)
                   if both is not None)

    def begin_call(self, time, strength, allocate):
        """Swap `both` and `before` at the start of another call, so that `both` receives the new call's tokens.

        Returns the weight w of the extrapolation to the new call, `both` + w (`before` - `both`) of the swapped fields;
        1.0 if there is no slope yet; None if nothing was swapped, since a call at the same time overwrites.
        strength: see extrapolation_weight. allocate(shape, like): returns memory.
        """
        if time == self.time or self.num_filled < self.both_KBNTH.shape[3]:
            self.time = time
            return None
        weight = 1.0
        if self.before_KBNTH is None:
            self.before_KBNTH = allocate(self.both_KBNTH.shape, self.both_KBNTH)
        else:
            weight = extrapolation_weight(strength, time, self.time, self.time_before)
        self.both_KBNTH, self.before_KBNTH = self.before_KBNTH, self.both_KBNTH
        self.time, self.time_before = time, self.time
        return weight


class Offload:
    """Offloads keys and values to system RAM; the device holds those of the current attention and, prefetched, of the
    next.

    Attentions run in the same order in every forward, so that the next one is known. On a GPU, host memory is pinned
    until close(), and copies run in order on their own stream. Both sides are token-major in memory, (B, T, K, N, H):
    consecutive tokens of an image are contiguous, as asynchronous copies require. Attention gets views of shape
    (K, B, N, T, H).
    """

    def __init__(self, device):
        self._device = device
        self._module = accelerator.module(device)
        self._stream = self._module.Stream(device) if device.type != "cpu" else None
        self._buffers: list[torch.Tensor | None] = [None, None, None]          # the third: for the previous call's
        self._active, self._arriving = 0, None
        self._pinned = []                                      # (address, tensor) of all pinned memory

    @property
    def num_bytes(self):
        """Size of the buffers on the device, in bytes."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers if buffer is not None)

    def host_buffer(self, shape, like):
        """Allocate host memory for an entry of shape (K, B, N, T, H)."""
        kinds, batch, heads, tokens, size = shape
        num_bytes = math.prod(shape) * like.element_size()
        needs_pin = self._stream is not None and num_bytes > 0
        memory = self._pin(num_bytes) if needs_pin else torch.empty(num_bytes, dtype=torch.uint8)
        return memory.view(like.dtype).view(batch, tokens, kinds, heads, size).permute(FROM_TOKEN_MAJOR)

    def close(self):
        """Wait for all copies and free all memory. Without the wait, copies would write to memory that is in use again.
        """
        if self._stream is not None:
            self._stream.synchronize()
        self._arriving, self._buffers = None, [None] * len(self._buffers)
        while self._pinned:
            address, _ = self._pinned.pop()
            code = int(self._module.cudart().cudaHostUnregister(address))
            if code:
                raise RuntimeError(f"CUDA error: cudaHostUnregister: {code}")

    def _pin(self, num_bytes):
        """Pin host memory of this size. torch's pinned allocator rounds up to a power of two and keeps the memory;
        it serves GPUs without cudaHostRegister."""
        if not hasattr(self._module, "cudart"):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE_BYTES
        code = int(self._module.cudart().cudaHostRegister(memory.data_ptr() + start, size, 0))
        if code:
            with suppress(RuntimeError):                       # clears the error that the next CUDA call would raise
                torch.zeros(1, device=self._device)
            pinned_bytes = sum(own.numel() for _, own in self._pinned)
            raise RuntimeError(f"CUDA error: free system RAM, use fewer pixels or frames, or turn offload_keys_values "
                               f"off: offload_keys_values has {pinned_bytes / 1e9:.3g} GB of system RAM pinned, and "
                               f"the system cannot pin {num_bytes / 1e9:.3g} GB more (cudaHostRegister: {code}).")
        self._pinned.append((memory.data_ptr() + start, memory))
        return memory[start:start + num_bytes]

    def take(self, entry, following):
        """The entry's keys and values on the device, (K, B, N, T, H); begins to prefetch those of `following`."""
        entry_here, here, arrived = self._arriving or (None, None, None)
        if entry_here is not entry:
            here, arrived = self._fetch(entry, self._next_buffer(entry))
        if arrived is not None:
            self._module.current_stream(self._device).wait_event(arrived)
        self._arriving = ((following, *self._fetch(following, self._next_buffer(following))) if following is not entry
                          else None)
        return here

    def buffer(self, entry):
        """Device memory for the entry's keys and values, all of which will be overwritten."""
        self._arriving = None                                  # a prefetch would be of the old values
        # copies from this memory to the host may be in flight
        self._wait_for_copies()
        return self._next_buffer(entry)

    def extrapolation(self, entry, here, weight):
        """Extrapolate `here`, which has the last call's keys and values, in place. weight: from the entry's
        begin_call."""
        if weight != 1.0:
            older, arrived = self._fetch(entry, self._buffer(2, entry))
            if arrived is not None:
                self._module.current_stream(self._device).wait_event(arrived)
            torch.lerp(older, here, weight, out=here)

    def keep(self, entry, here, rows, slots):
        """Begin to copy changed tokens of `here` to host memory. rows: slice of images. slots: slices of tokens."""
        with self._copying():
            memory, changed = (both.permute(TO_TOKEN_MAJOR) for both in (entry.both_KBNTH, here))
            for image in range(rows.start, rows.stop):
                for slot in slots:
                    memory[image, slot].copy_(changed[image, slot], non_blocking=True)

    def _fetch(self, entry, here):
        """Begin to copy an entry to the device; returns the memory, and the event that marks the end of the copy."""
        with self._copying():
            here.permute(TO_TOKEN_MAJOR).copy_(entry.both_KBNTH.permute(TO_TOKEN_MAJOR), non_blocking=True)
            return here, self._stream and self._stream.record_event()

    def _next_buffer(self, entry):
        """The buffer that the previous attention used, shaped like the entry."""
        self._active = 1 - self._active
        return self._buffer(self._active, entry)

    def _buffer(self, index, entry):
        size, buffer = entry.both_KBNTH.numel(), self._buffers[index]
        if buffer is None or buffer.numel() < size:
            if buffer is not None:                             # copies may use its memory, which will be reused
                self._wait_for_copies()
            buffer = self._buffers[index] = torch.empty(size, dtype=entry.both_KBNTH.dtype, device=self._device)
        return buffer[:size].view(entry.both_KBNTH.permute(TO_TOKEN_MAJOR).shape).permute(FROM_TOKEN_MAJOR)

    def _wait_for_copies(self):
        """Make the device's current stream wait for all copies."""
        if self._stream is not None:
            self._module.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def _copying(self):
        """Context in which copies run on their own stream, after all work queued on the device."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield


@dataclass
class KeyValues:
    """Stale keys and values of one conditioning, on this rank, for the length of a run."""

    offload: Offload | None = None
    cached: dict = field(default_factory=dict)           # (block, attention, number of the call) -> KeyValueEntry
    # outputs that are the same for all patches of a step, or for the run
    once: dict = field(default_factory=dict)
    edges: dict = field(default_factory=dict)  # module -> (images, C, token rows, 2, columns): see `neighbours`

    @property
    def num_bytes(self):
        """Size on the device, in bytes."""
        edges = sum(edges.nbytes for edges in self.edges.values())
        return edges + (sum(entry.num_bytes for entry in self.cached.values()) if self.offload is None
                        else self.offload.num_bytes)

    def neighbours(self, name, image_BCHW, side, context):
        """Halo of a forward's image rows: the row above and the one below, (B, C, 0 or 1, columns) each, as last
        cached. Caches the forward's own edge rows for its neighbours. Rows not computed yet are zeros, like those
        beyond the image. name: of the module. side: image rows per token row; the first and the last are cached.
        """
        own = image_BCHW.unflatten(2, (-1, side))[:, :, :, ::side - 1]
        first = 0 if context.patch is None else context.patch.start // side
        end = first + own.shape[2]
        num_token_rows = own.shape[2] if context.rows is None else context.rows.whole_token_rows
        if name not in self.edges:
            self.edges[name] = own.new_zeros(context.num_images, own.shape[1], num_token_rows, *own.shape[3:])
        known = self.edges[name][context.first_image:context.first_image + len(own)]
        known[:, :, first:end] = own
        return known[:, :, max(first - 1, 0):first, 1:].flatten(2, 3), known[:, :, end:end + 1, :1].flatten(2, 3)

    def update(self, key, keys_BNTH, values_BNTH, context, streams):
        """Cache the forward's tokens and return the keys and values to attend to: its own fresh ones, and stale ones of
        the other patches.

        keys, values: (batch of the forward, N, its tokens in the order of sequence ranks, H). Tokens that no step has
        computed yet (warmup_steps = 0) are left out, not zero.
        """
        entry = self.cached.get(key) or self._begin(key, keys_BNTH, context, streams)
        rows, slots = slice(context.first_image,
                            context.first_image + keys_BNTH.shape[0]), _slots(entry, context, streams)
        here, is_new_call = self._ready(key, entry, context, rows, slots)
        for target, fresh in zip(here, (keys_BNTH, values_BNTH)):
            for slot, tokens in zip(slots, fresh.split([slot.stop - slot.start for slot in slots], 2)):
                target[rows, :, slot].copy_(tokens)
        if self.offload is not None:
            self.offload.keep(entry, here, rows, [slice(None)] if is_new_call else slots)
        if context.patch is None:
            entry.num_filled = entry.both_KBNTH.shape[3]
            return keys_BNTH, values_BNTH
        if "image" in streams:
            start = entry.num_text + context.first_token
            assert context.opens or start <= entry.num_filled, "patches came out of order"
            entry.num_filled = max(entry.num_filled, start + context.tokens.counts["image"])
        else:
            entry.num_filled = entry.num_text                  # the first patch carried all of them
        return here[0][rows, :, :entry.num_filled], here[1][rows, :, :entry.num_filled]

    def _ready(self, key, entry, context, rows, slots):
        """(the entry's keys and values on the device, ready for the forward's tokens at these slots of these images;
        whether this begins a new call)."""
        is_full = context.patch is None
        if self.offload is not None:
            here = self.offload.buffer(entry) if is_full else self.offload.take(entry, self._following(key))
        strength = context.options.extrapolation
        weight = (entry.begin_call(max(context.step), strength, self._buffer_for) if strength and context.opens
                  else None)
        if self.offload is None:
            here = entry.both_KBNTH
        if weight is not None and not is_full:
            # a step's first patch carries the text and the first rows
            brings_all = rows.stop - rows.start == here.shape[1]
            self._extrapolated(entry, here, weight, max(slot.stop for slot in slots) if brings_all else 0)
        return here, weight is not None

    def _extrapolated(self, entry, here, weight, start):
        """Fill an entry of a new call with extrapolated keys and values, from token `start` on, which no patch has
        computed yet."""
        if self.offload is not None:
            self.offload.extrapolation(entry, here, weight)
            return
        stale, before = here[:, :, :, start:], entry.before_KBNTH[:, :, :, start:]
        if weight == 1.0:
            stale.copy_(before)
        else:
            stale.lerp_(before, weight)

    def _begin(self, key, keys_BNTH, context, streams):
        assert context.opens, f"the patch at token {context.first_token} came before the first one"
        num_text = sum(context.tokens.counts[stream] for stream in streams if stream != "image")
        num_image = context.num_image_tokens if "image" in streams else 0
        shape = (2, context.num_images, keys_BNTH.shape[1], num_text + num_image, keys_BNTH.shape[3])
        self.cached[key] = KeyValueEntry(self._buffer_for(shape, keys_BNTH), num_text)
        return self.cached[key]

    def close(self):
        """Free the offloaded memory. Call before dropping this."""
        if self.offload is not None:
            self.offload.close()

    def _buffer_for(self, shape, like):
        return like.new_empty(shape) if self.offload is None else self.offload.host_buffer(shape, like)

    def _following(self, key):
        """The entry of the next attention, of this or the next forward."""
        keys = list(self.cached)
        return self.cached[keys[(keys.index(key) + 1) % len(keys)]]


def _slots(entry, context, streams):
    """Slices of an entry for the shards of a forward's tokens, in the order of Tokens.gathered_order."""
    others = [stream for stream in streams if stream != "image"]
    starts = dict(zip(others, itertools.accumulate((context.tokens.held(stream) for stream in others), initial=0)))
    starts["image"] = entry.num_text + context.first_token
    return [slice(starts[stream] + start, starts[stream] + start + size)
            for stream, start, size in context.tokens.gathered_order(streams) if size]
