"""Positions of a patch: modules of diffusers that derive positions from a latent's shape, asked for some rows of it.

A family's plan names one of these for each such module. Everything else in a forward treats a patch as a smaller latent.
"""

import torch


def embedded_patch(module, forward, latent, patch):
    """diffusers' PatchEmbed for the rows of a patch: the patch embedded alone, plus its rows of the whole's positions.

    latent: (B, C, rows of the patch, W). Returns (B, tokens of the patch, hidden).
    """
    size = module.patch_size
    whole = -(-patch.whole // size)
    rows, columns = latent.shape[2] // size, latent.shape[3] // size
    hidden = module.proj.out_channels

    module.proj.forward = lambda blank: torch.zeros(1, hidden, whole, columns, device=latent.device)
    try:                                                       # the positions alone, in the precision they have
        positions = forward(torch.empty(1, 1, whole * size, columns * size, device="meta"))
    finally:
        del module.proj.forward
    table, module.pos_embed = module.pos_embed, None
    try:
        embedded = forward(latent)
    finally:
        module.pos_embed = table
    start = patch.start // size * columns
    return (embedded + positions[:, start:start + rows * columns]).to(embedded.dtype)


def rotary_patch(module, forward, hidden_states, patch):
    """Wan's rotary tables for the frames or rows of a patch: those of the whole latent, cut.

    hidden_states: the patch, of which only the shape is used. Returns tables (1, tokens of the patch, 1, head size).
    """
    size = module.patch_size[patch.dim - 2]
    shape = list(hidden_states.shape)
    rows = shape[patch.dim] // size
    whole = -(-patch.whole // size)
    shape[patch.dim] = whole * size
    tables = forward(hidden_states.new_empty(1).expand(shape))
    tokens = tables[0].shape[1] // whole                       # of one row or frame
    start = patch.start // size * tokens
    return tuple(table[:, start:start + rows * tokens] for table in tables)
