"""Token shards: the tokens that each sequence rank works on in a forward."""

from dataclasses import dataclass, field

import torch

from ..partition import shard_sizes


@dataclass(frozen=True)
class Tokens:
    """The tokens of one forward, by stream, and this rank's shard of each.

    Every stream is cut into one contiguous shard per sequence rank, in proportion to the ranks' speeds; on identical
    ranks shards differ by at most one token, or the image's by at most one row of `row` tokens. "image" is the latent's
    stream, of which each rank has tokens; the others take part in its self-attention. left_out: tokens of the model's
    forward that the blocks do not get, since an earlier patch carried them.
    """

    counts: dict[str, int]                 # stream -> number of tokens
    num_shards: int = 1
    shard: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    row: int = 1
    speeds: tuple[int, ...] = ()           # relative, of the sequence ranks; (): identical

    def held(self, stream):
        """Number of tokens of a stream in tensors outside the blocks."""
        return self.counts[stream] + self.left_out.get(stream, 0)

    def shards(self, stream):
        """Number of tokens of a stream on each sequence rank."""
        row = self.row if stream == "image" else 1
        sizes = shard_sizes(self.counts[stream] // row, self.num_shards, self.speeds, least=int(stream == "image"))
        return [size * row for size in sizes]

    def sizes(self, streams):
        """Number of tokens of these streams on each sequence rank."""
        per_stream = [self.shards(stream) for stream in streams]
        return [sum(sizes) for sizes in zip(*per_stream)]

    def own(self, streams):
        """Number of tokens of these streams on this rank."""
        return self.sizes(streams)[self.shard]

    def image_slice(self, streams):
        """Slice of the latent's tokens, and of reference images', among this rank's tokens of these streams."""
        text = streams.index("text")
        assert text in (0, len(streams) - 1), "text is the first or the last"
        return slice(self.own(("text",)), None) if text == 0 else slice(0, self.own(streams[:text]))

    def gathered_order(self, streams):
        """[(stream, first token, number of tokens)], in the order of tokens gathered from all ranks."""
        sizes = {stream: self.shards(stream) for stream in streams}
        return [(stream, sum(sizes[stream][:shard]), sizes[stream][shard]) for shard in range(self.num_shards)
                for stream in streams]

    def take(self, tensor, dim, streams):
        """Take this rank's tokens of a tensor with all tokens of the streams, one stream after the other, along
        `dim`."""
        lengths = [self.held(stream) for stream in streams]
        assert sum(lengths) == tensor.shape[dim], f"{streams} are {lengths} tokens, the tensor has {tensor.shape[dim]}"
        if self.num_shards == 1 and not any(self.left_out.get(stream) for stream in streams):
            return tensor
        shards = []
        for stream, tokens in zip(streams, tensor.split(lengths, dim)):
            sizes = self.shards(stream)
            shards.append(tokens.narrow(dim, sum(sizes[:self.shard]), sizes[self.shard]))
        shards = [tokens for tokens in shards if tokens.shape[dim]] or shards[:1]
        return shards[0] if len(shards) == 1 else torch.cat(shards, dim)
