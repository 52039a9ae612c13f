"""In which form attention's tensors travel between devices that share tokens (Ulysses, Ring). Read on both sides."""

WHOLE, KEYS, ALL = "whole", "keys and values in fp8", "all in fp8"
EXCHANGES = WHOLE, KEYS, ALL


def describe_exchange(exchange, layout):
    """What a run says of it; "" where all travels as it is."""
    return f", {exchange}" if exchange != WHOLE and layout.ulysses_degree * layout.ring_degree > 1 else ""
