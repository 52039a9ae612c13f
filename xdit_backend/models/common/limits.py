"""How many blocks a model may have: each is built before the tensors of a file are compared with the model's."""

MAX_BLOCKS = 256                           # of one list; the longest published one has 60 (Qwen-Image)


def count_blocks(prefix, shapes):
    """Number of blocks named `prefix`0., `prefix`1., ... Raises ValueError for more than any model has."""
    num_blocks = len({name[len(prefix):].partition(".")[0] for name in shapes if name.startswith(prefix)})
    if num_blocks > MAX_BLOCKS:
        raise ValueError(f"{num_blocks:,} blocks named {prefix}, and at most {MAX_BLOCKS} are read")
    return num_blocks
