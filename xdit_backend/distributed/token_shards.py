"""Which tokens this rank works on. Cuts, attention and joins share one Tokens, made anew for each forward."""

from dataclasses import dataclass, field

import torch

from ..partition import shard_sizes


@dataclass(frozen=True)
class Tokens:
    """The tokens of one forward, by stream, and this rank's shard of each.

    Every stream is cut into one contiguous shard a sequence rank, by the ranks' speeds; where they are alike, shards
    differ by one token at most, or those of the image by one row of `row` tokens. "image" is the latent's stream, of
    which each rank has some; others take part in self-attention beside it. left_out: tokens that the model's forward
    holds as well, which the blocks do not get, since an earlier patch has brought them.
    """

    counts: dict[str, int]                 # stream -> number of tokens in all
    num_shards: int = 1
    shard: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    row: int = 1
    speeds: tuple[int, ...] = ()           # of the sequence ranks, relative; (): alike

    def held(self, stream):
        """Tokens of a stream in tensors outside the blocks."""
        return self.counts[stream] + self.left_out.get(stream, 0)

    def shards(self, stream):
        """How many tokens of a stream each sequence rank has."""
        row = self.row if stream == "image" else 1
        sizes = shard_sizes(self.counts[stream] // row, self.num_shards, self.speeds, least=int(stream == "image"))
        return [size * row for size in sizes]

    def sizes(self, streams):
        """How many tokens of these streams each sequence rank has."""
        per_stream = [self.shards(stream) for stream in streams]
        return [sum(sizes) for sizes in zip(*per_stream)]

    def own(self, streams):
        """How many tokens of these streams this rank has."""
        return self.sizes(streams)[self.shard]

    def image_slice(self, streams):
        """Where, among this rank's tokens of these streams, those of the latent and of pictures beside it are."""
        text = streams.index("text")
        assert text in (0, len(streams) - 1), "text is the first or the last"
        return slice(self.own(("text",)), None) if text == 0 else slice(0, self.own(streams[:text]))

    def pieces(self, streams):
        """[(stream, first token, number of tokens)], in the order in which tokens gathered from all ranks stand."""
        sizes = {stream: self.shards(stream) for stream in streams}
        return [(stream, sum(sizes[stream][:shard]), sizes[stream][shard]) for shard in range(self.num_shards)
                for stream in streams]

    def take(self, tensor, dim, streams):
        """Cut this rank's tokens out of a tensor that holds all tokens of the streams, one after the other,
        at `dim`."""
        lengths = [self.held(stream) for stream in streams]
        assert sum(lengths) == tensor.shape[dim], f"{streams} are {lengths} tokens, the tensor has {tensor.shape[dim]}"
        if self.num_shards == 1 and not any(self.left_out.get(stream) for stream in streams):
            return tensor
        pieces = []
        for stream, piece in zip(streams, tensor.split(lengths, dim)):
            sizes = self.shards(stream)
            pieces.append(piece.narrow(dim, sum(sizes[:self.shard]), sizes[self.shard]))
        pieces = [piece for piece in pieces if piece.shape[dim]] or pieces[:1]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
