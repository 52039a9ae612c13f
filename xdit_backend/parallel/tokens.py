"""Which tokens this rank works on. The one object that cuts, attention and join share; built anew for each prediction."""

from dataclasses import dataclass

import torch

from ..partition import shard_sizes, shard_start


@dataclass(frozen=True)
class Tokens:
    """The image and text tokens of one prediction, and this rank's shard of each.

    Every stream is cut into one contiguous shard a sequence rank; shards differ by one token at most. Text is a
    stream only in models whose text takes part in self-attention.
    """

    counts: dict[str, int]                 # stream -> number of tokens in all
    num_shards: int = 1
    shard: int = 0

    def sizes(self, streams):
        """How many tokens of these streams each sequence rank holds."""
        per_stream = [shard_sizes(self.counts[stream], self.num_shards) for stream in streams]
        return [sum(sizes) for sizes in zip(*per_stream)]

    def pieces(self, streams):
        """[(stream, first token, number of tokens)], in the order in which tokens gathered from all ranks stand."""
        return [(stream, shard_start(self.counts[stream], self.num_shards, shard),
                 shard_sizes(self.counts[stream], self.num_shards)[shard])
                for shard in range(self.num_shards) for stream in streams]

    def take(self, tensor, dim, streams):
        """Cut this rank's tokens out of a tensor that holds all tokens of the streams, one after the other, at `dim`."""
        if self.num_shards == 1:
            return tensor
        pieces, offset = [], 0
        for stream in streams:
            count = self.counts[stream]
            start = shard_start(count, self.num_shards, self.shard)
            pieces.append(tensor.narrow(dim, offset + start, shard_sizes(count, self.num_shards)[self.shard]))
            offset += count
        assert offset == tensor.shape[dim], f"{streams} have {offset} tokens, the tensor has {tensor.shape[dim]}"
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
