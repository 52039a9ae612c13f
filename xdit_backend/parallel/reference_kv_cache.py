"""Cache of the keys and values of reference images' tokens: a run's first call fills it, and later calls omit the
reference images. Equivalent to ComfyUI's Flux KV Cache.

# K: 0 keys, 1 values. B batch, N heads, T tokens, H head size
"""

import dataclasses
from dataclasses import dataclass, field

import torch

from .sequence_parallel import gather_heads, ring_attention, scatter_heads


@dataclass
class References:
    """This rank's cache of all runs: after Ulysses' all-to-all, its heads of its ring rank's tokens."""

    # images of a call, as specs.CachedReferences names them -> {attention: (K, B, N, T, H)}
    cached: dict[tuple, dict] = field(default_factory=dict)
    sizes: dict[tuple, list[int]] = field(default_factory=dict)            # same key -> T of every sequence rank

    @property
    def num_bytes(self):
        return sum(both.nbytes for cached in self.cached.values() for both in cached.values())

    def drop(self, names):
        """Free the entries of these names."""
        for rows in [rows for rows in self.cached if rows[0][0] in names]:
            del self.cached[rows], self.sizes[rows]

    def of(self, rows, key):
        """(keys and values of an attention, (K, B, N, T, H), T of every sequence rank), for these images."""
        if rows in self.cached:
            return self.cached[rows][key], self.sizes[rows]
        found = {row: (cached, index) for cached in self.cached for index, row in enumerate(cached)}
        assert all(row in found for row in rows), f"other ranks cache the references of some of the images {rows}"
        images = [self.cached[found[row][0]][key][:, found[row][1]] for row in rows]
        return torch.stack(images, 1), self.sizes[found[rows[0]][0]]


@dataclass(frozen=True)
class ReferenceUse:
    """A forward's use of the cache: fill it, or attend to it. rows: the forward's images, as in References.
    stream: of the reference tokens, in a call that has them."""

    references: References
    rows: tuple
    fills: bool
    stream: str

    def __call__(self, key, k_BNTH, v_BNTH, attention, context, streams):
        """(keys, values, Attention) that the queries attend to. k, v: from scatter_heads. streams: of their tokens."""
        if not self.fills:
            (more_keys, more_values), sizes = self.references.of(self.rows, key)
            both = [own + cached for own, cached in zip(attention.sizes, sizes)]
            return (torch.cat([k_BNTH, more_keys], 2), torch.cat([v_BNTH, more_values], 2),
                    dataclasses.replace(attention, key_sizes=both))
        chunks = [torch.stack([k_BNTH[:, :, slot], v_BNTH[:, :, slot]]) for slot in self._slots(context, streams)]
        self.references.cached.setdefault(self.rows, {})[key] = torch.cat(chunks, 3)
        self.references.sizes[self.rows] = context.tokens.shards(self.stream)
        return k_BNTH, v_BNTH, attention

    def _slots(self, context, streams):
        """Slices of the references' tokens among this ring rank's tokens, which are in Tokens.gathered_order."""
        degree, start, slots = context.mesh.degrees["ulysses"], 0, []
        first = context.mesh.ranks["ring"] * degree * len(streams)
        for stream, _, size in context.tokens.gathered_order(streams)[first:first + degree * len(streams)]:
            if stream == self.stream:
                slots.append(slice(start, start + size))
            start += size
        return slots


def attention_with_references(q_BNTH, k_BNTH, v_BNTH, attention, context, layer):
    """usp_attention with the forward's ReferenceUse. Every rank of the ring and ulysses axes calls it."""
    mesh, traffic = context.mesh, context.traffic
    (q_BNTH, k_BNTH, v_BNTH), scattered = scatter_heads(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic)
    k_BNTH, v_BNTH, attention = context.references(layer.key, k_BNTH, v_BNTH, attention, context, layer.streams)
    if mesh.degrees["ring"] > 1:
        return gather_heads(ring_attention(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic), scattered, mesh, traffic)
    return gather_heads(attention.local(q_BNTH, k_BNTH, v_BNTH, None, mesh, traffic), scattered, mesh, traffic)
