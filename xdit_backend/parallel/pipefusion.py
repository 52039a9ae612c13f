"""PipeFusion (arXiv 2405.14430) on one rank: attention with stale keys and values, and transfers between stages.
docs/design/pipefusion.md.

# B batch, N heads, T tokens, H head size
"""

import datetime
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from ..attention.masks import gathered_mask
from ..distributed.collectives import all_gather, on_wire
from ..distributed.mesh import wait_timeout_s
from ..partition import shard_sizes
from ..protocol.errors import UnsupportedError, XDiTError
from .sequence_parallel import all_keys, gather_heads, scatter_heads
from .sparse_layout import layout_of, stream_counts

MAX_SENT = 16                  # sent messages to the next stage that may be unfinished


def patch_attention(q_BNTH, k_BNTH, v_BNTH, attention, context, layer):
    """Attention of a forward's queries over all tokens of the image, most of them stale. Every rank of the ring and
    ulysses axes calls it.

    Fresh keys and values are replicated in the sequence group before they are cached: this rank's heads by Ulysses, all
    tokens by an all-gather along the ring axis (docs/design/pipefusion.md). With grouped queries k and v have fewer
    heads, in the cache too.
    attention: a sequence_parallel.Attention without its mask. layer: hooks.attention_dispatch.RunningAttention.
    Returns like q.
    """
    mesh, traffic, query = context.mesh, context.traffic, q_BNTH
    (q_BNTH, k_BNTH, v_BNTH), scattered = scatter_heads(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic)
    k_BNTH, v_BNTH = all_keys(k_BNTH, v_BNTH, attention, mesh, traffic)
    order = context.tokens.gathered_order(layer.key_streams)
    if context.caches(layer.key[0]):
        k_BNTH, v_BNTH = context.key_values.update(layer.key, k_BNTH, v_BNTH, context, layer.key_streams)
        order = order if context.patch is None else _cached_order(context, layer.key_streams, k_BNTH.shape[2])
    if not any(attention.sizes):                               # this patch only has keys for the next step's first one
        return query
    mask = gathered_mask(context.state.masks, order, q_BNTH)
    if attention.sparse is not None:
        first_token = 0 if context.caches(layer.key[0]) else context.first_token
        keys = layout_of(order, stream_counts(layer.key_streams, context), first_token)
        attention = replace(attention, sparse=replace(attention.sparse, keys=(keys,)))
    return gather_heads(attention.local(q_BNTH, k_BNTH, v_BNTH, mask, mesh, traffic), scattered, mesh, traffic)


def _cached_order(context, streams, num_keys):
    """Order of the cached keys, as from Tokens.gathered_order: other streams first, then the image."""
    if "image" in context.state.masks:
        raise UnsupportedError("Use cfg_degree, ulysses_degree or ring_degree instead: this model masks tokens of "
                               "its image, which PipeFusion does not support yet.")
    others = [(stream, 0, context.tokens.held(stream)) for stream in streams if stream != "image"]
    return [*others, ("image", 0, num_keys - sum(size for _, _, size in others))]


class Link:
    """This rank's connections in the pipeline: receives hidden states from the previous stage, sends to the next.

    Each pair of neighbours communicates in one direction only, in the order of the host's commands: receives are posted
    early, and transfers overlap with computation. If all tensor ranks of a stage have the same message, each sends its
    chunk to its counterpart in the next stage, which all-gathers it. Sent tensors are referenced until the transfer has
    finished. gloo reports that only to a wait, so that the sender waits for the message sent MAX_SENT messages earlier,
    which has long arrived.
    """

    def __init__(self, mesh, device):
        self._before_group, self._after_group, self._device = mesh.before_group, mesh.after_group, device
        self._mesh, self.stage = mesh, mesh.ranks["pipefusion"]
        self._before = dist.get_process_group_ranks(self._before_group)[0] if self._before_group else None
        self._after = dist.get_process_group_ranks(self._after_group)[1] if self._after_group else None
        self._sent = []
        self._timeout_s = wait_timeout_s()
        backend = dist.get_backend(self._before_group or self._after_group)
        self._on_nccl, self._wire_device = backend == "nccl", "cpu" if backend == "gloo" else device
        self.num_posted = self.num_received = self.num_sent = 0

    def post_receive(self, num_elements, dtype):
        """Post a receive of the previous stage's next message. Returns a handle for `receive`."""
        sizes = shard_sizes(num_elements, self._mesh.degrees["tensor"])
        buffer = torch.empty(sizes[self._mesh.ranks["tensor"]], dtype=dtype, device=self._wire_device)
        self.num_posted += 1
        return buffer, dist.irecv(buffer, self._before, group=self._before_group), sizes

    @property
    def arriving(self):
        """(rank of the previous stage, this rank): sender and receiver of the messages that this rank receives."""
        return self._before, dist.get_rank()

    def receive(self, handle, traffic=None):
        """Wait for a posted message. Every rank of the tensor axis calls it. traffic: of their all-gather.

        Raises XDiTError naming the stage that sent nothing; with NCCL the watchdog ends the process instead.
        """
        buffer, work, sizes = handle
        with nullcontext() if traffic is None else traffic.waiting(buffer, recorded=False):
            self._wait(work, f"Stage {self.stage - 1} (rank {self._before}) sent nothing to stage {self.stage}")
        self.num_received += 1
        buffer = buffer.to(self._device)
        return buffer if len(sizes) == 1 else all_gather(buffer, sizes, 0, self._mesh.tensor_group, traffic)

    def send(self, message, traffic):
        """Begin to send to the next stage, and release messages that have arrived there. Raises XDiTError if that stage
        receives nothing."""
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
        """Release messages that have arrived."""
        self._sent = [(work, cached) for work, cached in self._sent if not work.is_completed()]

    def _wait(self, work, otherwise):
        # NCCL: the stream waits; with a timeout this process would wait and poll
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
