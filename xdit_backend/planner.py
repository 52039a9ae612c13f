"""The automatic choice: which parallel method a run uses on the devices there are. Pure arithmetic.

Called by the bridge before each prediction; the workers follow the layout that a command names.
"""

from .config import validate_layout
from .protocol.errors import ConfigError
from .protocol.messages import Layout


def choose_layout(config, num_devices, num_branches, num_heads, family):
    """Return the Layout for one prediction.

    Manual mode: the person's degrees. Auto mode: CFG parallel when there are two branches and an even number of
    devices, then Ulysses as far as the heads allow, then Ring. CFG parallel comes first because it sends only the
    prediction; Ulysses sends less than Ring (xDiT, arXiv 2411.01738, table 1).
    Raises ConfigError when the layout cannot work for this model.
    """
    if config.mode == "manual":
        layout = config.layout
        validate_layout(layout, num_heads, family)
        return layout
    cfg_degree = 2 if num_branches == 2 and num_devices % 2 == 0 else 1
    rest = num_devices // cfg_degree
    ulysses_degree = max(d for d in range(1, rest + 1) if rest % d == 0 and num_heads % d == 0)
    return Layout(cfg_degree=cfg_degree, ring_degree=rest // ulysses_degree, ulysses_degree=ulysses_degree)


def describe_layout(layout):
    """A layout in a person's words, e.g. "CFG 2 x Ulysses 2"."""
    names = {"cfg_degree": "CFG", "data_degree": "data", "ring_degree": "Ring", "ulysses_degree": "Ulysses"}
    parts = [f"{text} {getattr(layout, name)}" for name, text in names.items() if getattr(layout, name) > 1]
    return " x ".join(parts) or "one device"


def shard_sizes(num_tokens, num_shards):
    """Sizes of contiguous shards that differ by one at most, the larger ones first."""
    quotient, remainder = divmod(num_tokens, num_shards)
    return [quotient + (index < remainder) for index in range(num_shards)]


def shard_start(num_tokens, num_shards, index):
    """Index of the first token of a shard."""
    quotient, remainder = divmod(num_tokens, num_shards)
    return quotient * index + min(remainder, index)


def check_shards(num_tokens, num_shards):
    """Refuse more sequence shards than tokens."""
    if num_tokens < num_shards:
        raise ConfigError(f"The latent has {num_tokens} tokens, too few for ulysses_degree x ring_degree = {num_shards}. "
                          f"Use a larger latent or lower degrees.")
