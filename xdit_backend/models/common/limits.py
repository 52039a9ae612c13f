"""Limit on the number of blocks, which are all built before the tensors of a file are compared with the model's."""

MAX_BLOCKS = 256                           # per block list; the longest published one has 60 (Qwen-Image)


def count_blocks(prefix, shapes):
    """Count the blocks named `prefix`0., `prefix`1., ... Raises ValueError for more than MAX_BLOCKS."""
    num_blocks = len({name[len(prefix):].partition(".")[0] for name in shapes if name.startswith(prefix)})
    if num_blocks > MAX_BLOCKS:
        raise ValueError(f"{num_blocks:,} blocks named {prefix}, and at most {MAX_BLOCKS} are supported")
    return num_blocks
