"""HyperTile (github.com/tfernd/HyperTile) as ComfyUI's node has it: queries of a self-attention are cut into tiles of
the image, keys and values into as many runs of tokens. Called by unet.py, on whole images.

# B images, N heads, T tokens, H head size; a tile: rows and columns of tiles, rows and columns of one
"""


def attend_in_tiles(tile, query_BNTH, key_BNTH, value_BNTH, attend):
    """What attend(query, key, value) gives for each tile by itself, (B, N, T, H). tile: of specs.Branch.tiles."""
    rows, columns, height, width = tile
    batch, heads, _, size = query_BNTH.shape
    grid = query_BNTH.view(batch, heads, rows, height, columns, width, size)
    tiled = grid.permute(0, 2, 4, 1, 3, 5, 6).reshape(batch * rows * columns, heads, height * width, size)
    runs = [each.unflatten(2, (rows * columns, -1)).transpose(1, 2).flatten(0, 1) for each in (key_BNTH, value_BNTH)]
    out = attend(tiled, *runs).reshape(batch, rows, columns, heads, height, width, size)
    return out.permute(0, 3, 1, 4, 2, 5, 6).reshape(query_BNTH.shape)
