"""PipeFusion on one rank: stale keys and values, and the way of hidden states from stage to stage (arXiv 2405.14430).

The attention seam calls patch_attention; the engine owns a Link and the KeyValues. ALGORITHMS.md sections 2 and 3.

# B batch, N heads, T tokens, H head size
"""

import datetime
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..protocol.errors import XDiTError
from .collectives import all_gather, on_wire
from .usp import heads_apart, heads_together, repeat_heads

STAGE_TIMEOUT_S = 1800


@dataclass
class Kept:
    """Keys and values of all tokens of one attention: text first, then the image. The first `num_filled` are valid."""

    keys_BNTH: torch.Tensor
    values_BNTH: torch.Tensor
    num_text: int
    num_filled: int = 0


@dataclass
class KeyValues:
    """What the attentions of one conditioning last saw, on this rank. Belongs to a run and is dropped with it."""

    kept: dict = field(default_factory=dict)
    once: dict = field(default_factory=dict)           # outputs that are the same for all patches of a step, or of the run

    @property
    def num_bytes(self):
        return sum(2 * entry.keys_BNTH.numel() * entry.keys_BNTH.element_size() for entry in self.kept.values())

    def update(self, key, keys_BNTH, values_BNTH, trip, streams):
        """Overwrite the trip's tokens and return keys and values to attend to: fresh ones of this trip, else stale ones.

        keys, values: (batch of the trip, N, tokens of the trip by sequence rank, H). Tokens that no step has seen yet
        (warmup_steps = 0) are left out, not zero.
        """
        entry = self.kept.get(key)
        if entry is None:
            assert trip.opens, f"the patch at token {trip.first_token} came before the first one"
            num_text = sum(trip.tokens.counts[stream] for stream in streams if stream != "image")
            shape = (trip.num_images, keys_BNTH.shape[1], num_text + trip.num_image_tokens, keys_BNTH.shape[3])
            entry = self.kept[key] = Kept(keys_BNTH.new_empty(shape), keys_BNTH.new_empty(shape), num_text)
        rows = slice(trip.first_image, trip.first_image + keys_BNTH.shape[0])
        offset = 0
        for stream, start, size in trip.tokens.pieces(streams):
            slot = start if stream == "text" else entry.num_text + trip.first_token + start
            entry.keys_BNTH[rows, :, slot:slot + size] = keys_BNTH[:, :, offset:offset + size]
            entry.values_BNTH[rows, :, slot:slot + size] = values_BNTH[:, :, offset:offset + size]
            offset += size
        if trip.patch is None:
            entry.num_filled = entry.keys_BNTH.shape[2]
            return keys_BNTH, values_BNTH
        start = entry.num_text + trip.first_token
        assert trip.opens or start <= entry.num_filled, "patches came out of order"
        entry.num_filled = max(entry.num_filled, start + trip.tokens.counts["image"])
        return entry.keys_BNTH[rows, :, :entry.num_filled], entry.values_BNTH[rows, :, :entry.num_filled]


def patch_attention(q_BNTH, k_BNTH, v_BNTH, trip, key, streams, attention):
    """Attention of a trip's queries over all tokens of the image, most of them stale. Every rank of the axes calls it.

    Fresh keys and values are replicated in the sequence group before they are kept: by Ulysses for the rank's heads, by an
    all-gather along the ring axis (ALGORITHMS.md section 3, design i). key: (block, name and number of the attention).
    attention(q, k, v): plain attention. Returns like q.
    """
    mesh, traffic, sizes = trip.mesh, trip.traffic, trip.tokens.sizes(streams)
    degree = mesh.degrees["ulysses"]
    if degree > 1:
        k_BNTH, v_BNTH = repeat_heads(q_BNTH, k_BNTH, v_BNTH)
        region = sizes[mesh.ranks["ring"] * degree:][:degree]
        q_BNTH, k_BNTH, v_BNTH = heads_apart(q_BNTH, k_BNTH, v_BNTH, region, mesh, traffic)
    if mesh.degrees["ring"] > 1:
        regions = [sum(sizes[rank * degree:][:degree]) for rank in range(mesh.degrees["ring"])]
        k_BNTH, v_BNTH = all_gather(torch.stack([k_BNTH, v_BNTH]), regions, 3, mesh.ring_group, traffic)
    if trip.keeps(key[0]):
        k_BNTH, v_BNTH = trip.key_values.update(key, k_BNTH, v_BNTH, trip, streams)
    out = attention(q_BNTH, k_BNTH, v_BNTH)
    return heads_together(out, region, mesh, traffic) if degree > 1 else out


class Link:
    """This rank's place in the pipeline: hidden states arrive from the stage before and leave for the stage after.

    Each pair of neighbours talks in one direction only, in the order of the host's commands, so a receive can be posted
    long before its tensor is sent, and the transfer runs beside compute. Sent tensors are kept until they are gone.
    """

    def __init__(self, mesh, device):
        self._group, self._device = mesh.pipefusion_group, device
        ranks = dist.get_process_group_ranks(self._group)
        stage = mesh.ranks["pipefusion"]
        self.stage = stage
        self._before = ranks[stage - 1] if stage > 0 else None
        self._after = ranks[stage + 1] if stage + 1 < len(ranks) else None
        self._sent = []
        self._timeout_s = float(os.environ.get("XDIT_STAGE_TIMEOUT_S", STAGE_TIMEOUT_S))
        self.num_posted = self.num_received = self.num_sent = 0

    def post_receive(self, num_elements, dtype):
        """Make room for the next message of the stage before. Returns a handle for `receive`."""
        on_cpu = dist.get_backend(self._group) == "gloo"
        buffer = torch.empty(num_elements, dtype=dtype, device="cpu" if on_cpu else self._device)
        self.num_posted += 1
        return buffer, dist.irecv(buffer, self._before, group=self._group)

    def receive(self, handle):
        """Wait for a posted message. Raises XDiTError naming the stage that is silent."""
        buffer, work = handle
        try:
            work.wait(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise XDiTError(f"Stage {self.stage - 1} (rank {self._before}) sent nothing to stage {self.stage} for "
                            f"{self._timeout_s:g} s. Queue the prompt again to start a new group. ({error})") from error
        self.num_received += 1
        return buffer.to(self._device)

    def send(self, message, traffic):
        """Start sending to the stage after, and let go of what has arrived there."""
        message = on_wire(message, self._group)
        traffic.count(message.numel(), message)
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        self._sent.append((dist.isend(message, self._after, group=self._group), message))
        self.num_sent += 1

    def drain(self):
        """Wait until everything sent has been received."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
