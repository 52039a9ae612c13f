"""Transfer of commands' tensors between machines: each segment has a copy on the other machine, which is filled before
the command, and results are sent back.

Segments start as zeros on every machine, and each element is written by the ranks of one machine only, or with equal
values by several. Received chunks are therefore merged with a bitwise OR, and chunks of zeros are not sent.
"""

import dataclasses

import torch

from ..protocol.errors import XDiTError
from ..protocol.shared_memory import Segment, map_segment
from .connections import CHUNK_BYTES, Piece


@dataclasses.dataclass
class PendingCommand:
    """A command that some ranks of a machine have not answered."""

    unanswered: set
    segments: dict                 # path on the host -> local Segment, of all its tensors
    results: list                  # paths of the segments that the workers write


def pending_command(command, ranks, here=lambda segment: segment):
    """The PendingCommand of a command for these ranks. here(segment): local segment for one of the host's."""
    every = list(segments_of(command))
    return PendingCommand(set(ranks), {segment.path: here(segment) for segment, _ in every},
                sorted({segment.path for segment, is_result in every if is_result}))


def segments_of(value, is_result=False):
    """Yield (Segment, whether the workers write it) for each in a message."""
    if isinstance(value, Segment):
        yield value, is_result
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from segments_of(getattr(value, field.name), is_result or "is_result" in field.metadata)
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from segments_of(each, is_result)


def replaced(value, function):
    """A message with every Segment replaced by function(segment)."""
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
    """Send the contents of a segment. path: on the host."""
    content = _bytes(segment)
    for start in range(0, len(content), CHUNK_BYTES):
        chunk = content[start:start + CHUNK_BYTES]
        if chunk.any():
            link.send(Piece(path, start, len(chunk)), content=chunk.numpy().tobytes())


def receive(link, chunk, segment):
    """Read the bytes of a Piece, which follow it, into a segment. Raises XDiTError if they lie outside of it."""
    content = torch.frombuffer(bytearray(link.read(chunk.num_bytes)), dtype=torch.uint8)
    target = _bytes(segment)
    if chunk.start + chunk.num_bytes > len(target):
        raise XDiTError(f"{chunk.num_bytes} bytes from {chunk.start} on are outside of a tensor of {len(target)} bytes")
    target[chunk.start:chunk.start + chunk.num_bytes] |= content


def _bytes(segment):
    return map_segment(segment).reshape(-1).view(torch.uint8)
