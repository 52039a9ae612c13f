"""Keys and values of the tokens of reference pictures, which a run's first call keeps for its later ones: these come
without the pictures. What ComfyUI's Flux KV Cache is to a model. Called by the attention hook.

# K: 0 keys, 1 values. B batch, N heads, T tokens, H head size
"""

import dataclasses
from dataclasses import dataclass, field

import torch

from .sequence_parallel import gather_heads, ring_attention, scatter_heads


@dataclass
class References:
    """What this rank has kept of all runs: after Ulysses' exchange its heads of its ring rank's tokens."""

    # of the images of a call, as specs.CachedReferences names them -> {attention: (K, B, N, T, H)}
    cached: dict[tuple, dict] = field(default_factory=dict)
    sizes: dict[tuple, list[int]] = field(default_factory=dict)            # the same -> T of every sequence rank

    @property
    def num_bytes(self):
        return sum(both.nbytes for cached in self.cached.values() for both in cached.values())

    def drop(self, names):
        """Forget what is kept under these names."""
        for rows in [rows for rows in self.cached if rows[0][0] in names]:
            del self.cached[rows], self.sizes[rows]

    def of(self, rows, key):
        """(keys and values of an attention (K, B, N, T, H), T of every sequence rank), of these images."""
        if rows in self.cached:
            return self.cached[rows][key], self.sizes[rows]
        places = {row: (cached, index) for cached in self.cached for index, row in enumerate(cached)}
        assert all(row in places for row in rows), f"other ranks keep the references of some of the images {rows}"
        pieces = [self.cached[places[row][0]][key][:, places[row][1]] for row in rows]
        return torch.stack(pieces, 1), self.sizes[places[rows[0]][0]]


@dataclass(frozen=True)
class ReferenceUse:
    """What a forward does with the keys and values of references: fills what is kept of them, or attends to that.
    rows: its images, as References knows them. stream: theirs, in a call that has them."""

    references: References
    rows: tuple
    fills: bool
    stream: str

    def __call__(self, key, k_BNTH, v_BNTH, attention, context, streams):
        """(keys, values, Attention): what queries attend to. k, v: of scatter_heads; streams: whose they are."""
        if not self.fills:
            (more_keys, more_values), sizes = self.references.of(self.rows, key)
            both = [own + cached for own, cached in zip(attention.sizes, sizes)]
            return (torch.cat([k_BNTH, more_keys], 2), torch.cat([v_BNTH, more_values], 2),
                    dataclasses.replace(attention, key_sizes=both))
        pieces = [torch.stack([k_BNTH[:, :, slot], v_BNTH[:, :, slot]]) for slot in self._slots(context, streams)]
        self.references.cached.setdefault(self.rows, {})[key] = torch.cat(pieces, 3)
        self.references.sizes[self.rows] = context.tokens.shards(self.stream)
        return k_BNTH, v_BNTH, attention

    def _slots(self, context, streams):
        """Where the references' tokens are among those of this ring rank, in the order of Tokens.pieces."""
        degree, start, slots = context.mesh.degrees["ulysses"], 0, []
        first = context.mesh.ranks["ring"] * degree * len(streams)
        for stream, _, size in context.tokens.gathered_order(streams)[first:first + degree * len(streams)]:
            if stream == self.stream:
                slots.append(slice(start, start + size))
            start += size
        return slots


def attention_with_references(q_BNTH, k_BNTH, v_BNTH, attention, context, layer):
    """As usp_attention, with what the forward's ReferenceUse does. Every rank of the axes calls it."""
    mesh, traffic = context.mesh, context.traffic
    (q_BNTH, k_BNTH, v_BNTH), scattered = scatter_heads(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic)
    k_BNTH, v_BNTH, attention = context.references(layer.key, k_BNTH, v_BNTH, attention, context, layer.streams)
    if mesh.degrees["ring"] > 1:
        return gather_heads(ring_attention(q_BNTH, k_BNTH, v_BNTH, attention, mesh, traffic), scattered, mesh, traffic)
    return gather_heads(attention.whole(q_BNTH, k_BNTH, v_BNTH, None), scattered, mesh, traffic)
