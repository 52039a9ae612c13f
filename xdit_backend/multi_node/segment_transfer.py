"""Tensors of commands on another machine: each segment has a copy there, which is filled before the command, and
results come back.

A segment begins as zeros on every machine, and each of its elements is written by the ranks of one, or alike by
several. So what one has is put to what another has by the bits that are set, piece by piece, and pieces of zeros need
not travel.
"""

import dataclasses

import torch

from ..protocol.errors import XDiTError
from ..protocol.shared_memory import Segment, map_segment
from .connections import PIECE_BYTES, Piece


@dataclasses.dataclass
class PendingCommand:
    """A command that some ranks of a machine have not answered."""

    unanswered: set
    segments: dict                 # path on the host -> the Segment here, of all its tensors
    results: list                  # paths of those that the workers write


def pending_command(command, ranks, here=lambda segment: segment):
    """The PendingCommand of a command for these ranks. here(segment): the local segment that stands for the host's."""
    every = list(segments_of(command))
    return PendingCommand(set(ranks), {segment.path: here(segment) for segment, _ in every},
                sorted({segment.path for segment, is_result in every if is_result}))


def segments_of(value, is_result=False):
    """(Segment, do the workers write it?) of each in a message."""
    if isinstance(value, Segment):
        yield value, is_result
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from segments_of(getattr(value, field.name), is_result or "is_result" in field.metadata)
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from segments_of(each, is_result)


def replaced(value, function):
    """A message with function(segment) in the place of every Segment."""
    if isinstance(value, Segment):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: replaced(each, function) for name, each in fields.items()}
        return (value if all(changed[name] is each for name, each in fields.items())
                else dataclasses.replace(value, **changed))
    if isinstance(value, (list, tuple)):
        made = [replaced(each, function) for each in value]
        return value if all(new is old for new, old in zip(made, value)) else type(value)(made)
    if isinstance(value, dict):
        made = {key: replaced(each, function) for key, each in value.items()}
        return value if all(made[key] is each for key, each in value.items()) else made
    return value


def send(link, path, segment):
    """Send what is in a segment, by the path that it has on the host's machine."""
    content = _bytes(segment)
    for start in range(0, len(content), PIECE_BYTES):
        part = content[start:start + PIECE_BYTES]
        if part.any():
            link.send(Piece(path, start, len(part)), content=part.numpy().tobytes())


def receive(link, piece, segment):
    """Put the bytes of a Piece, which follow it, into a segment. Raises XDiTError where they lie outside of it."""
    content = torch.frombuffer(bytearray(link.read(piece.num_bytes)), dtype=torch.uint8)
    there = _bytes(segment)
    if piece.start + piece.num_bytes > len(there):
        raise XDiTError(f"{piece.num_bytes} bytes from {piece.start} on are outside of a tensor of {len(there)} bytes")
    there[piece.start:piece.start + piece.num_bytes] |= content


def _bytes(segment):
    return map_segment(segment).reshape(-1).view(torch.uint8)
