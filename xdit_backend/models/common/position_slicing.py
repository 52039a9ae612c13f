"""Positions of a patch: modules of diffusers that derive positions from a latent's shape, asked for some rows of it.

A family's plan names one of these for each such module. Everything else in a forward treats a patch as a smaller
latent. The hooks call them with the module, its own forward, the rows (hooks/context.ImageRows), the tokens of the
forward (distributed/tokens.Tokens) and the call's arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .plan import TokenArgument


def whole_latents(rows, args, kwargs):
    """The call's arguments for the whole latent: latents become tensors of its shape, without content."""
    def whole(value):
        if not torch.is_tensor(value) or value.ndim < 4:
            return value
        shape = list(value.shape)
        shape[rows.patch.dim] = rows.whole_rows
        return value.new_empty(1).expand(shape)
    return [whole(value) for value in args], {name: whole(value) for name, value in kwargs.items()}


def whole_shapes(rows, args, kwargs):
    """The call's arguments for the whole latent, where the first says shapes:
    [[(frames, token rows, token columns), ...]]."""
    def whole(shape):
        return tuple(rows.whole_token_rows if axis == rows.axis else length for axis, length in enumerate(shape))
    return [[[whole(own), *others] for own, *others in args[0]], *args[1:]], kwargs


@dataclass(frozen=True)
class Cut:
    """What the module's own forward gives for the whole latent, cut to the patch's tokens.

    outputs: where the tokens are in what it returns; for a tuple, one for each (or one for all), None for what it makes
    of the patch itself. whole: the call's arguments for the whole latent.
    """

    outputs: TokenArgument | tuple[TokenArgument | None, ...]
    whole: Callable = whole_latents

    def __call__(self, module, forward, rows, tokens, args, kwargs):
        whole_args, whole_kwargs = self.whole(rows, args, kwargs)
        whole = forward(*whole_args, **whole_kwargs)
        if not isinstance(whole, tuple):
            return _cut(whole, self.outputs, rows, tokens)
        if isinstance(self.outputs, TokenArgument):
            return tuple(_cut(output, self.outputs, rows, tokens) for output in whole)
        own = forward(*args, **kwargs) if None in self.outputs else whole
        return tuple(mine if argument is None else _cut(output, argument, rows, tokens)
                     for mine, output, argument in zip(own, whole, self.outputs))


def _cut(tensor, argument, rows, tokens):
    """All tokens of other streams, and the patch's of the image."""
    lengths = [rows.num_tokens if stream == "image" else tokens.held(stream) for stream in argument.streams]
    pieces = [piece.narrow(argument.dim, rows.first_token, tokens.counts["image"]) if stream == "image" else piece
              for stream, piece in zip(argument.streams, tensor.split(lengths, argument.dim))]
    pieces = [piece for piece in pieces if piece.shape[argument.dim]]          # of the image there are always some
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, argument.dim)


def embedded(module, forward, rows, tokens, args, kwargs):
    """diffusers' PatchEmbed for the rows of a patch: the patch embedded alone, plus its rows of the whole's positions.

    args: the latent (B, C, rows of the patch, W). Returns (B, tokens of the patch, hidden).
    """
    latent, size = args[0], module.patch_size
    whole = torch.empty(1, 1, rows.whole_rows, latent.shape[3] // size * size, device="meta")

    embed, module.proj.forward = module.proj.forward, lambda blank: torch.zeros(1, 1, 1, 1, device=latent.device)
    # the positions alone, added to one zero, in the precision they have
    try:
        positions = forward(whole)
    finally:
        module.proj.forward = embed
    table, module.pos_embed = module.pos_embed, None
    try:
        embedded = forward(latent)
    finally:
        module.pos_embed = table
    return (embedded + positions[:, rows.first_token:rows.first_token + tokens.counts["image"]]).to(embedded.dtype)
