"""Seconds of a decode by rows, from what one device would compute. Pure arithmetic. Used by benches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decoder:
    """A decode of one picture: operations, bytes that its smaller steps move, layers that ask other ranks for something, and the bytes of
    the rows that they borrow, from one neighbour."""

    flops: float
    moved_bytes: float
    exchanges: int
    halo_bytes: float


def decode_seconds(decoder, machine, ranks):
    """Of the machine's first ranks, which have equal parts; all wait for the slowest. Rows at the edges are waited for."""
    slowest = max(_compute_s(decoder, device) for device in machine.devices[:ranks])
    if ranks == 1:
        return slowest / machine.alone
    neighbours, links = min(2, ranks - 1), machine.links
    waits = decoder.exchanges * links.latency("hop", ranks) + neighbours * decoder.halo_bytes / links.rate("hop", ranks)
    return slowest / ranks + waits


def _compute_s(decoder, device):
    return decoder.flops / (device.convolution_flops_s or device.matrix_flops_s) + decoder.moved_bytes / device.memory_bytes_s
