"""PipeFusion on one rank: stale keys and values, and the way of hidden states from stage to stage (arXiv 2405.14430).

The attention hook calls patch_attention; the engine owns a Link and the KeyValues. docs/design/pipefusion.md.

# B batch, N heads, T tokens, H head size
"""

import datetime
from contextlib import nullcontext

import torch
import torch.distributed as dist

from ..attention.masks import gathered_mask
from ..distributed.collectives import all_gather, on_wire
from ..distributed.mesh import wait_timeout_s
from ..partition import shard_sizes
from ..protocol.errors import UnsupportedError, XDiTError
from .sequence_parallel import all_keys, gather_heads, scatter_heads

MAX_SENT = 16                  # messages that are kept for the stage after


def patch_attention(q_BNTH, k_BNTH, v_BNTH, attention, context, layer):
    """Attention of a forward's queries over all tokens of the image, most of them stale. Every rank of the axes calls
    it.

    Fresh keys and values are replicated in the sequence group before they are kept: by Ulysses for the rank's heads, by
    an all-gather along the ring axis (docs/design/pipefusion.md). Grouped queries: k and v have fewer heads, and are
    kept so.
    attention: a sequence_parallel.Attention, whose mask is made here. layer: hooks.attention_dispatch.RunningAttention.
    Returns like q.
    """
    mesh, traffic, given = context.mesh, context.traffic, q_BNTH
    (q_BNTH, k_BNTH, v_BNTH), scattered = scatter_heads(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic)
    k_BNTH, v_BNTH = all_keys(k_BNTH, v_BNTH, attention, mesh, traffic)
    pieces = context.tokens.pieces(layer.key_streams)
    if context.caches(layer.key[0]):
        k_BNTH, v_BNTH = context.key_values.update(layer.key, k_BNTH, v_BNTH, context, layer.key_streams)
        pieces = pieces if context.patch is None else _cached_pieces(context, layer.key_streams, k_BNTH.shape[2])
    if not any(attention.sizes):                               # this patch only brings keys for the next step's first
        return given
    mask = gathered_mask(context.masks, pieces, q_BNTH)
    return gather_heads(attention.whole(q_BNTH, k_BNTH, v_BNTH, mask), scattered, mesh, traffic)


def _cached_pieces(context, streams, num_keys):
    """Where kept keys come from, as Tokens.pieces says it: other streams first, then the image."""
    if "image" in context.masks:
        raise UnsupportedError("Use cfg_degree, ulysses_degree or ring_degree instead: this model masks tokens of "
                               "its image, which PipeFusion does not support yet.")
    others = [(stream, 0, context.tokens.held(stream)) for stream in streams if stream != "image"]
    return [*others, ("image", 0, num_keys - sum(size for _, _, size in others))]


class Link:
    """This rank's place in the pipeline: hidden states arrive from the stage before and leave for the stage after.

    Each pair of neighbours talks in one direction only, in the order of the host's commands, so a receive can be posted
    long before its tensor is sent, and the transfer runs beside compute. Of a message that all tensor ranks of a stage
    have, each sends its part to its like in the stage after, where they put it together. Sent tensors are kept until
    they are gone; gloo reports that only to those who wait, so the sender waits for what it sent MAX_SENT messages ago,
    which has long arrived.
    """

    def __init__(self, mesh, device):
        self._before_group, self._after_group, self._device = mesh.before_group, mesh.after_group, device
        self._mesh, self.stage = mesh, mesh.ranks["pipefusion"]
        self._before = dist.get_process_group_ranks(self._before_group)[0] if self._before_group else None
        self._after = dist.get_process_group_ranks(self._after_group)[1] if self._after_group else None
        self._sent = []
        self._timeout_s = wait_timeout_s()
        self._on_nccl = dist.get_backend(self._before_group or self._after_group) == "nccl"
        self.num_posted = self.num_received = self.num_sent = 0

    def post_receive(self, num_elements, dtype):
        """Make room for the next message of the stage before. Returns a handle for `receive`."""
        sizes = shard_sizes(num_elements, self._mesh.degrees["tensor"])
        buffer = torch.empty(sizes[self._mesh.ranks["tensor"]], dtype=dtype,
                             device=self._device if self._on_nccl else "cpu")
        self.num_posted += 1
        return buffer, dist.irecv(buffer, self._before, group=self._before_group), sizes

    @property
    def arriving(self):
        """(rank of the stage before, this rank): by whom and to whom messages are sent that this rank receives."""
        return self._before, dist.get_rank()

    def receive(self, handle, traffic=None):
        """Wait for a posted message; every rank of the tensor axis does. traffic: of what they then tell each other.

        Raises XDiTError naming the stage that is silent; NCCL's watchdog ends the process instead.
        """
        buffer, work, sizes = handle
        with nullcontext() if traffic is None else traffic.waiting(buffer, recorded=False):
            self._wait(work, f"Stage {self.stage - 1} (rank {self._before}) sent nothing to stage {self.stage}")
        self.num_received += 1
        buffer = buffer.to(self._device)
        return buffer if len(sizes) == 1 else all_gather(buffer, sizes, 0, self._mesh.tensor_group, traffic)

    def send(self, message, traffic):
        """Start sending to the stage after, and let go of what has arrived there.
        Raises XDiTError if that stage takes nothing."""
        sizes = shard_sizes(message.numel(), self._mesh.degrees["tensor"])
        message = on_wire(message.split(sizes)[self._mesh.ranks["tensor"]], self._after_group)
        traffic.count(message.numel(), message)
        self.let_go()
        while len(self._sent) >= MAX_SENT:
            work, _ = self._sent.pop(0)
            with traffic.waiting(message, recorded=False):
                self._wait(work, f"Stage {self.stage + 1} (rank {self._after}) took nothing from stage {self.stage}")
        with traffic.entering((dist.get_rank(), self._after)):
            self._sent.append((dist.isend(message, self._after, group=self._after_group), message))
        self.num_sent += 1

    def let_go(self):
        """Keep no message that has arrived."""
        self._sent = [(work, cached) for work, cached in self._sent if not work.is_completed()]

    def _wait(self, work, otherwise):
        # the stream waits; with a time-out this process would, and poll
        if self._on_nccl:
            work.wait()
            return
        try:
            work.wait(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise XDiTError(f"{otherwise} for {self._timeout_s:g} s. Queue the prompt again to start a new group. "
                            f"({error})") from error

    def drain(self):
        """Wait until everything sent has been received."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
