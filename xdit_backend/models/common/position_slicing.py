"""Positions of a patch: rules that call a model's position modules, which derive positions from the shape of the
latent, for some of its rows.

A family's plan names one of these rules for each such module. The rest of a forward treats a patch as a smaller latent.
The hooks call a rule with the module, its own forward, the rows (hooks.forward_context.ImageRows), the tokens of the
forward (distributed.token_shards.Tokens) and the call's arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .plan import TokenArgument


def full_latents(rows, args, kwargs):
    """The call's arguments for the full latent: tensors of latents are replaced by tensors of its shape without
    content."""
    def full(value):
        if not torch.is_tensor(value) or value.ndim < 4:
            return value
        shape = list(value.shape)
        shape[rows.patch.dim] = rows.whole_rows
        return value.new_empty(1).expand(shape)
    return [full(value) for value in args], {name: full(value) for name, value in kwargs.items()}


def full_shapes(rows, args, kwargs):
    """The call's arguments for the full latent, if the first has shapes: [[(frames, token rows, token columns),
    ...]]."""
    def full(shape):
        return tuple(rows.whole_token_rows if axis == rows.axis else length for axis, length in enumerate(shape))
    return [[[full(own), *others] for own, *others in args[0]], *args[1:]], kwargs


@dataclass(frozen=True)
class Cut:
    """Run the module's own forward for the full latent and keep the patch's tokens of its output.

    outputs: the token dim and streams of what the module returns; for a tuple, one for each element (or one for all),
    and None for elements that are computed from the patch itself. full_arguments: the call's arguments for the full
    latent.
    """

    outputs: TokenArgument | tuple[TokenArgument | None, ...]
    full_arguments: Callable = full_latents

    def __call__(self, module, forward, rows, tokens, args, kwargs):
        full_args, full_kwargs = self.full_arguments(rows, args, kwargs)
        full = forward(*full_args, **full_kwargs)
        if not isinstance(full, tuple):
            return _cut(full, self.outputs, rows, tokens)
        if isinstance(self.outputs, TokenArgument):
            return tuple(_cut(output, self.outputs, rows, tokens) for output in full)
        own = forward(*args, **kwargs) if None in self.outputs else full
        return tuple(mine if argument is None else _cut(output, argument, rows, tokens)
                     for mine, output, argument in zip(own, full, self.outputs))


def _cut(tensor, argument, rows, tokens):
    """Keep all tokens of other streams, and the patch's tokens of the image."""
    lengths = [rows.num_tokens if stream == "image" else tokens.held(stream) for stream in argument.streams]
    cut = [part.narrow(argument.dim, rows.first_token, tokens.counts["image"]) if stream == "image" else part
           for stream, part in zip(argument.streams, tensor.split(lengths, argument.dim))]
    cut = [part for part in cut if part.shape[argument.dim]]                   # the image's is never empty
    return cut[0] if len(cut) == 1 else torch.cat(cut, argument.dim)


def embedded(module, forward, rows, tokens, args, kwargs):
    """diffusers' PatchEmbed for the rows of a patch: the patch's own embedding plus its rows of the full latent's
    positions.

    args: the latent (B, C, rows of the patch, W). Returns (B, tokens of the patch, hidden).
    """
    latent, size = args[0], module.patch_size
    full = torch.empty(1, 1, rows.whole_rows, latent.shape[3] // size * size, device="meta")

    embed, module.proj.forward = module.proj.forward, lambda blank: torch.zeros(1, 1, 1, 1, device=latent.device)
    # the positions alone, added to a zero, at their own precision
    try:
        positions = forward(full)
    finally:
        module.proj.forward = embed
    table, module.pos_embed = module.pos_embed, None
    try:
        embedded = forward(latent)
    finally:
        module.pos_embed = table
    return (embedded + positions[:, rows.first_token:rows.first_token + tokens.counts["image"]]).to(embedded.dtype)
