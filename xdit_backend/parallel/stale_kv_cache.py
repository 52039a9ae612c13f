"""The keys and values of other patches that attention uses, for PipeFusion: those of the last step, on the device or in
host memory.

# B batch, N heads, T tokens, H head size
"""

import itertools
import math
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from .displaced_exchange import extrapolation_weight

# (K, B, N, T, H) -> (B, T, K, N, H), and back
TO_TOKEN_MAJOR, FROM_TOKEN_MAJOR = (1, 3, 0, 2, 4), (2, 0, 3, 1, 4)
PAGE_BYTES = 2 ** 16           # what the system may pin is whole pages; of no system are they larger


@dataclass
class KeyValueEntry:
    """Keys and values of all tokens of one attention: text and the like first, then the image. The first `num_filled`
    are valid."""

    # K: 0 keys, 1 values. On the device, or in host memory where they are offloaded
    both_KBNTH: torch.Tensor
    num_text: int
    num_filled: int = 0
    time: float = math.nan                 # of the call that they are of, or that is filling them
    before_KBNTH: torch.Tensor | None = None           # of the call before, where they are to be forecast
    time_before: float = math.nan

    @property
    def num_bytes(self):
        return sum(both.numel() * both.element_size() for both in (self.both_KBNTH, self.before_KBNTH)
                   if both is not None)

    def turn(self, time, strength, allocate):
        """Let `both` and `before` change places as another call begins, so that `both` is for the new call's.

        Returns the weight w with which `both` + w (`before` - `both`), of what they hold now, is the new call's
        forecast; 1.0 where there is no slope yet; None where nothing has turned: a call at the same time overwrites.
        allocate(shape, like): memory.
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
    """Keeps keys and values in host memory; the device holds those of the attention at hand and, arriving, of the next.

    Attentions come in the same order in every forward, so the next one is known. Host memory is pinned where there is
    CUDA, until close(), and transfers run on a stream of their own, in order. Both sides are token-major, (B, T, K, N,
    H) in memory: any tokens of an image are in one piece, which is what an asynchronous copy needs. What attention sees
    are views of it as (K, B, N, T, H).
    """

    def __init__(self, device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: list[torch.Tensor | None] = [None, None, None]          # the third: of the call before the last
        self._turn, self._arriving = 0, None
        self._pinned = []                                      # (address, tensor) of all host memory

    @property
    def num_bytes(self):
        """Bytes on the device."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers if buffer is not None)

    def host_buffer(self, shape, like):
        """Host memory for an entry of shape (K, B, N, T, H)."""
        kinds, batch, heads, tokens, size = shape
        num_bytes = math.prod(shape) * like.element_size()
        needs_pin = self._stream is not None and num_bytes > 0
        memory = self._pin(num_bytes) if needs_pin else torch.empty(num_bytes, dtype=torch.uint8)
        return memory.view(like.dtype).view(batch, tokens, kinds, heads, size).permute(FROM_TOKEN_MAJOR)

    def close(self):
        """Wait until nothing is on its way any more, and give back all memory.

        Without the wait, whoever has the memory next would find copies arriving there.
        """
        if self._stream is not None:
            self._stream.synchronize()
        self._arriving, self._buffers = None, [None] * len(self._buffers)
        while self._pinned:
            address, _ = self._pinned.pop()
            code = int(torch.cuda.cudart().cudaHostUnregister(address))
            if code:
                raise RuntimeError(f"CUDA error: cudaHostUnregister: {code}")

    def _pin(self, num_bytes):
        """Host memory of just so many bytes, on pages of its own.

        What torch pins is up to twice as much, and stays pinned.
        """
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE_BYTES
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr() + start, size, 0))
        if code:
            with suppress(RuntimeError):                       # PyTorch would raise it of whatever is asked for next
                torch.zeros(1, device=self._device)
            pinned_bytes = sum(own.numel() for _, own in self._pinned)
            raise RuntimeError(f"CUDA error: offload_keys_values has {pinned_bytes / 1e9:.3g} GB of host memory "
                               f"pinned, and the system gives no {num_bytes / 1e9:.3g} GB more (cudaHostRegister: "
                               f"{code}). Free host memory, use fewer pixels or frames, or turn offload_keys_values "
                               f"off.")
        self._pinned.append((memory.data_ptr() + start, memory))
        return memory[start:start + num_bytes]

    def take(self, entry, following):
        """The entry's keys and values on the device; those of the following entry start to arrive."""
        entry_here, here, arrived = self._arriving or (None, None, None)
        if entry_here is not entry:
            here, arrived = self._fetch(entry, self._next_buffer(entry))
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        self._arriving = ((following, *self._fetch(following, self._next_buffer(following))) if following is not entry
                          else None)
        return here

    def buffer(self, entry):
        """A place on the device for the entry's keys and values, all of which are about to be made anew."""
        self._arriving = None                                  # it would be what they were before
        # what this place held may still be on its way to host memory
        self._wait_for_copies()
        return self._next_buffer(entry)

    def extrapolation(self, entry, here, weight):
        """`here`, what the attention last saw, becomes what it is to see now. entry: as KeyValueEntry.turn leaves
        it."""
        if weight != 1.0:
            older, arrived = self._fetch(entry, self._buffer(2, entry))
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)
            torch.lerp(older, here, weight, out=here)

    def keep(self, entry, here, rows, slots):
        """Start copying tokens, which have been changed `here`, to host memory. rows: the images.
        slots: of tokens, slices."""
        with self._copying():
            memory, changed = (both.permute(TO_TOKEN_MAJOR) for both in (entry.both_KBNTH, here))
            for image in range(rows.start, rows.stop):
                for slot in slots:
                    memory[image, slot].copy_(changed[image, slot], non_blocking=True)

    def _fetch(self, entry, here):
        """Start copying an entry to the device; returns where, and the event after which it is there."""
        with self._copying():
            here.permute(TO_TOKEN_MAJOR).copy_(entry.both_KBNTH.permute(TO_TOKEN_MAJOR), non_blocking=True)
            return here, self._stream and self._stream.record_event()

    def _next_buffer(self, entry):
        """The buffer that the attention before the one at hand has used, shaped as the entry."""
        self._turn = 1 - self._turn
        return self._buffer(self._turn, entry)

    def _buffer(self, index, entry):
        size, buffer = entry.both_KBNTH.numel(), self._buffers[index]
        if buffer is None or buffer.numel() < size:
            if buffer is not None:                             # copies to and from it, whose memory is used anew
                self._wait_for_copies()
            buffer = self._buffers[index] = torch.empty(size, dtype=entry.both_KBNTH.dtype, device=self._device)
        return buffer[:size].view(entry.both_KBNTH.permute(TO_TOKEN_MAJOR).shape).permute(FROM_TOKEN_MAJOR)

    def _wait_for_copies(self):
        """What the device is asked for from here on follows all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def _copying(self):
        """Copies under this follow all that the device has been asked for, on their own stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


@dataclass
class KeyValues:
    """What the attentions of one conditioning last saw, on this rank. Belongs to a run and is dropped with it."""

    offload: Offload | None = None
    cached: dict = field(default_factory=dict)           # (block, attention, number of the call) -> KeyValueEntry
    # outputs that are the same for all patches of a step, or of the run
    once: dict = field(default_factory=dict)
    edges: dict = field(default_factory=dict)  # module -> (images, C, token rows, 2, columns): see `neighbours`

    @property
    def num_bytes(self):
        """Bytes on the device."""
        edges = sum(edges.nbytes for edges in self.edges.values())
        return edges + (sum(entry.num_bytes for entry in self.cached.values()) if self.offload is None
                        else self.offload.num_bytes)

    def neighbours(self, name, image_BCHW, side, context):
        """The rows of a picture next above and below a forward's, (B, C, 0 or 1, columns) each, as they were last; its
        own are kept for its neighbours. What no forward has given yet is zeros, as beyond the picture. name: of the
        module. side: rows to a row of tokens, of which the first and the last are kept.
        """
        own = image_BCHW.unflatten(2, (-1, side))[:, :, :, ::side - 1]
        first = 0 if context.patch is None else context.patch.start // side
        end, whole = first + own.shape[2], own.shape[2] if context.rows is None else context.rows.whole_token_rows
        if name not in self.edges:
            self.edges[name] = own.new_zeros(context.num_images, own.shape[1], whole, *own.shape[3:])
        known = self.edges[name][context.first_image:context.first_image + len(own)]
        known[:, :, first:end] = own
        return known[:, :, max(first - 1, 0):first, 1:].flatten(2, 3), known[:, :, end:end + 1, :1].flatten(2, 3)

    def update(self, key, keys_BNTH, values_BNTH, context, streams):
        """Overwrite the forward's tokens and return keys and values to attend to: fresh ones of this forward, else
        stale ones.

        keys, values: (batch of the forward, N, its tokens by sequence rank, H). Tokens that no step has seen yet
        (warmup_steps = 0) are left out, not zero.
        """
        entry = self.cached.get(key) or self._begin(key, keys_BNTH, context, streams)
        rows, slots = slice(context.first_image,
                            context.first_image + keys_BNTH.shape[0]), _slots(entry, context, streams)
        here, has_turned = self._ready(key, entry, context, rows, slots)
        for place, fresh in zip(here, (keys_BNTH, values_BNTH)):
            for slot, piece in zip(slots, fresh.split([slot.stop - slot.start for slot in slots], 2)):
                place[rows, :, slot].copy_(piece)
        if self.offload is not None:
            self.offload.keep(entry, here, rows, [slice(None)] if has_turned else slots)
        if context.patch is None:
            entry.num_filled = entry.both_KBNTH.shape[3]
            return keys_BNTH, values_BNTH
        if "image" in streams:
            start = entry.num_text + context.first_token
            assert context.opens or start <= entry.num_filled, "patches came out of order"
            entry.num_filled = max(entry.num_filled, start + context.tokens.counts["image"])
        else:
            entry.num_filled = entry.num_text                  # the first patch has brought all of them
        return here[0][rows, :, :entry.num_filled], here[1][rows, :, :entry.num_filled]

    def _ready(self, key, entry, context, rows, slots):
        """An entry's keys and values on the device, where the forward's are to go, into these slots of these images;
        and whether they are turned as another call begins."""
        whole = context.patch is None
        if self.offload is not None:
            here = self.offload.buffer(entry) if whole else self.offload.take(entry, self._following(key))
        weight = (entry.turn(max(context.step), context.extrapolation, self._buffer_for) if context.extrapolation
                  and context.opens
                  else None)
        if self.offload is None:
            here = entry.both_KBNTH
        if weight is not None and not whole:
            # a step's first patch brings the text and the first rows
            brings_all = rows.stop - rows.start == here.shape[1]
            self._extrapolated(entry, here, weight, max(slot.stop for slot in slots) if brings_all else 0)
        return here, weight is not None

    def _extrapolated(self, entry, here, weight, start):
        """Fill an entry that has turned for a call's patches:
        what no patch has brought yet goes on as it went before. start: the first token of that."""
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
        """Called before they are dropped."""
        if self.offload is not None:
            self.offload.close()

    def _buffer_for(self, shape, like):
        return like.new_empty(shape) if self.offload is None else self.offload.host_buffer(shape, like)

    def _following(self, key):
        """The entry that the next attention of this or the next forward will ask for."""
        keys = list(self.cached)
        return self.cached[keys[(keys.index(key) + 1) % len(keys)]]


def _slots(entry, context, streams):
    """Where in an entry each piece of a forward's tokens belongs, as slices, in the order of Tokens.pieces."""
    others = [stream for stream in streams if stream != "image"]
    starts = dict(zip(others, itertools.accumulate((context.tokens.held(stream) for stream in others), initial=0)))
    starts["image"] = entry.num_text + context.first_token
    return [slice(starts[stream] + start, starts[stream] + start + size)
            for stream, start, size in context.tokens.gathered_order(streams) if size]
