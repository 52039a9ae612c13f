"""The numbers in GGUF's blocks, on their device. Used where a quantised weight is computed with: in every linear of
every forward.

The layouts are those of ggml's ggml-common.h. Nothing is copied from the host, which would wait for the device; whole
numbers stay in a byte each until they are multiplied.

# n blocks
"""

import struct

import torch

LEVELS = struct.unpack("<2q", struct.pack("16b", -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89,
                                          113))


def numbers(blocks, type_, dtype):
    """The numbers of blocks (n, bytes of a block) uint8, as (n, numbers of a block) of `dtype`:
    computed in float32, rounded once."""
    whole, scale, offset = BLOCKS[type_](blocks)
    result = torch.empty(whole.shape, dtype=dtype, device=blocks.device)
    if offset is None:
        torch.mul(whole, scale, out=result)
    else:
        torch.addcmul(offset, whole, scale, out=result)
    return result.flatten(1)


# Of each type: (whole numbers, their factors, what is added to the products or None), which broadcast to (n, groups,
# numbers).

def _q4_0(blocks):
    scale, quants = blocks.split([2, 16], 1)
    return _signed(_parts(quants, 4), 8), _half(scale), None


def _q4_1(blocks):
    scale, offset, quants = blocks.split([2, 2, 16], 1)
    return _parts(quants, 4), _half(scale), _half(offset)


def _q5_0(blocks):
    scale, fifth, quants = blocks.split([2, 4, 16], 1)
    return _signed(_with_fifth(quants, fifth), 16), _half(scale), None


def _q5_1(blocks):
    scale, offset, fifth, quants = blocks.split([2, 2, 4, 16], 1)
    return _with_fifth(quants, fifth), _half(scale), _half(offset)


def _q8_0(blocks):
    scale, quants = blocks.split([2, 32], 1)
    return quants.view(torch.int8)[:, None], _half(scale), None


def _q2_k(blocks):
    scales, quants, scale, offset = blocks.split([16, 64, 2, 2], 1)
    whole = _parts(quants.unflatten(1, (2, 32)), 2).view(-1, 16, 16)
    return whole, _half(scale) * (scales & 15)[:, :, None], _half(offset) * -(scales >> 4).view(torch.int8)[:, :, None]


def _q3_k(blocks):
    third, quants, low, high, scale = blocks.split([32, 64, 8, 4, 2], 1)
    whole = _parts(quants.unflatten(1, (2, 32)), 2).view(-1, 8, 32).add_(_parts(third, 1), alpha=4)
    scales = _signed(_parts(low, 4).flatten(1).add_(_parts(high, 2).flatten(1), alpha=16), 32)
    return _signed(whole, 4).view(-1, 16, 16), _half(scale) * scales[:, :, None], None


def _q4_k(blocks):
    halves, scales, quants = blocks.split([4, 12, 128], 1)
    return _parts(quants.unflatten(1, (4, 32)), 4).view(-1, 8, 32), *_of_eight(halves, scales)


def _q5_k(blocks):
    halves, scales, fifth, quants = blocks.split([4, 12, 32, 128], 1)
    whole = _parts(quants.unflatten(1, (4, 32)), 4).view(-1, 8, 32).add_(_parts(fifth, 1), alpha=16)
    return whole, *_of_eight(halves, scales)


def _q6_k(blocks):
    low, high, scales, scale = blocks.split([128, 64, 16, 2], 1)
    whole = _parts(low.unflatten(1, (2, 64)),
                   4).view(-1, 8, 32).add_(_parts(high.unflatten(1, (2, 32)), 2).view(-1, 8, 32), alpha=16)
    return _signed(whole, 32).view(-1, 16, 16), _half(scale) * scales.view(torch.int8)[:, :, None], None


def _iq4_nl(blocks):
    scale, quants = blocks.split([2, 16], 1)
    return _levels(quants), _half(scale), None


def _iq4_xs(blocks):
    scale, high, low, quants = blocks.split([2, 2, 4, 128], 1)
    scales = _parts(low, 4).transpose(1, 2).flatten(1).add_(_parts(high, 2).transpose(1, 2).flatten(1), alpha=16)
    return _levels(quants.unflatten(1, (8, 16))), (_half(scale) * _signed(scales, 32)[:, :, None])[
        ..., None], None


BLOCKS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
          "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs}


def _parts(quants, bits):
    """Bytes (..., size) in parts of so many bits, the lowest first: (..., parts, size)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=quants.device)
    return (quants.unsqueeze(-2) >> shifts[:, None]).bitwise_and_(2 ** bits - 1)


def _signed(whole, zero):
    """Bytes as signed numbers, of which this one is zero. In their place."""
    return whole.view(torch.int8).sub_(zero)


def _half(number):
    """The float16 in two bytes of each block: (n, 1, 1), float32."""
    return number.view(torch.float16).float()[:, :, None]


def _with_fifth(quants, fifth):
    """32 numbers, whose fifth bits follow one another in four bytes."""
    return _parts(quants, 4).flatten(1).add_(_parts(fifth, 1).transpose(1, 2).flatten(1), alpha=16)[:, None]


def _of_eight(halves, scales):
    """Factors and offsets of eight groups, six bits each:
    the low ones of the first four and of the last four, then both's high ones."""
    factor, least = halves.view(torch.float16).float()[:, :, None, None].unbind(1)
    *firsts, lows = scales.unflatten(1, (3, 4)).unbind(1)
    of_lasts = [low | (first >> 2).bitwise_and_(48) for low, first in zip(_parts(lows, 4).unbind(1), firsts)]
    factors, offsets = (torch.cat([first & 63, last], 1)[:, :, None] for first, last in zip(firsts, of_lasts))
    return factor * factors, least * -offsets.view(torch.int8)


def _levels(places):
    """The levels of IQ4 at these places, two in each byte: (..., size) -> (..., 2, size), the low ones first. The table
    is made of two numbers that travel with the kernels; what is looked up are both levels of a byte at once, since
    places take four bytes."""
    table = torch.cat([torch.full((1,), eight, dtype=torch.int64, device=places.device)
                       for eight in LEVELS]).view(torch.int8)
    pairs = torch.stack([table.repeat(len(table)), table.repeat_interleave(len(table))], 1).view(torch.int16)[:, 0]
    both = pairs.index_select(0, places.flatten().int()).view(torch.int8)
    return both.view(*places.shape, 2).transpose(-1, -2)
