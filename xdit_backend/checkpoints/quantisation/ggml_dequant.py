"""Dequantisation of GGUF blocks on their device, at use in every linear layer of every forward.

The layouts are those of ggml's ggml-common.h. Nothing is copied from the host, which would wait for the device;
integers stay in one byte each until they are multiplied.

# n blocks
"""

import struct

import torch

LEVELS = struct.unpack("<2q", struct.pack("16b", -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89,
                                          113))


def numbers(blocks, type_, dtype):
    """Values of blocks: (n, bytes of a block) uint8 -> (n, elements of a block) of `dtype`, computed in float32 and
    rounded once."""
    integers, scale, offset = BLOCKS[type_](blocks)
    result = torch.empty(integers.shape, dtype=dtype, device=blocks.device)
    if offset is None:
        torch.mul(integers, scale, out=result)
    else:
        torch.addcmul(offset, integers, scale, out=result)
    return result.flatten(1)


# Each function returns (integers, scales, offsets to add to the products or None), which broadcast to (n, groups,
# elements).

def _q4_0(blocks):
    scale, quants = blocks.split([2, 16], 1)
    return _signed(_fields(quants, 4), 8), _half(scale), None


def _q4_1(blocks):
    scale, offset, quants = blocks.split([2, 2, 16], 1)
    return _fields(quants, 4), _half(scale), _half(offset)


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
    integers = _fields(quants.unflatten(1, (2, 32)), 2).view(-1, 16, 16)
    offsets = _half(offset) * -(scales >> 4).view(torch.int8)[:, :, None]
    return integers, _half(scale) * (scales & 15)[:, :, None], offsets


def _q3_k(blocks):
    third, quants, low, high, scale = blocks.split([32, 64, 8, 4, 2], 1)
    integers = _fields(quants.unflatten(1, (2, 32)), 2).view(-1, 8, 32).add_(_fields(third, 1), alpha=4)
    scales = _signed(_fields(low, 4).flatten(1).add_(_fields(high, 2).flatten(1), alpha=16), 32)
    return _signed(integers, 4).view(-1, 16, 16), _half(scale) * scales[:, :, None], None


def _q4_k(blocks):
    scale_pair, scales, quants = blocks.split([4, 12, 128], 1)
    return _fields(quants.unflatten(1, (4, 32)), 4).view(-1, 8, 32), *_of_eight(scale_pair, scales)


def _q5_k(blocks):
    scale_pair, scales, fifth, quants = blocks.split([4, 12, 32, 128], 1)
    integers = _fields(quants.unflatten(1, (4, 32)), 4).view(-1, 8, 32).add_(_fields(fifth, 1), alpha=16)
    return integers, *_of_eight(scale_pair, scales)


def _q6_k(blocks):
    low, high, scales, scale = blocks.split([128, 64, 16, 2], 1)
    integers = _fields(low.unflatten(1, (2, 64)),
                   4).view(-1, 8, 32).add_(_fields(high.unflatten(1, (2, 32)), 2).view(-1, 8, 32), alpha=16)
    return _signed(integers, 32).view(-1, 16, 16), _half(scale) * scales.view(torch.int8)[:, :, None], None


def _iq4_nl(blocks):
    scale, quants = blocks.split([2, 16], 1)
    return _levels(quants), _half(scale), None


def _iq4_xs(blocks):
    scale, high, low, quants = blocks.split([2, 2, 4, 128], 1)
    scales = _fields(low, 4).transpose(1, 2).flatten(1).add_(_fields(high, 2).transpose(1, 2).flatten(1), alpha=16)
    return _levels(quants.unflatten(1, (8, 16))), (_half(scale) * _signed(scales, 32)[:, :, None])[
        ..., None], None


BLOCKS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
          "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs}


def _fields(quants, bits):
    """Split bytes (..., size) into fields of this many bits, lowest first: (..., fields, size)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=quants.device)
    return (quants.unsqueeze(-2) >> shifts[:, None]).bitwise_and_(2 ** bits - 1)


def _signed(integers, zero):
    """Bytes as signed numbers with this zero point, in place."""
    return integers.view(torch.int8).sub_(zero)


def _half(number):
    """The float16 in two bytes of each block, as float32: (n, 1, 1)."""
    return number.view(torch.float16).float()[:, :, None]


def _with_fifth(quants, fifth):
    """32 numbers whose fifth bits are stored in four consecutive bytes."""
    return _fields(quants, 4).flatten(1).add_(_fields(fifth, 1).transpose(1, 2).flatten(1), alpha=16)[:, None]


def _of_eight(scale_pair, scales):
    """Scales and offsets of eight groups, six bits each: the low bits of the first four and of the last four, then the
    high bits of both."""
    factor, least = scale_pair.view(torch.float16).float()[:, :, None, None].unbind(1)
    *firsts, lows = scales.unflatten(1, (3, 4)).unbind(1)
    of_lasts = [low | (first >> 2).bitwise_and_(48) for low, first in zip(_fields(lows, 4).unbind(1), firsts)]
    factors, offsets = (torch.cat([first & 63, last], 1)[:, :, None] for first, last in zip(firsts, of_lasts))
    return factor * factors, least * -offsets.view(torch.int8)


def _levels(indices):
    """The levels of IQ4 at two indices per byte: (..., size) -> (..., 2, size), low bits first. The table is built from
    two numbers passed as kernel arguments; both levels of a byte are looked up at once, since an index takes four
    bytes."""
    table = torch.cat([torch.full((1,), eight, dtype=torch.int64, device=indices.device)
                       for eight in LEVELS]).view(torch.int8)
    pairs = torch.stack([table.repeat(len(table)), table.repeat_interleave(len(table))], 1).view(torch.int16)[:, 0]
    both = pairs.index_select(0, indices.flatten().int()).view(torch.int8)
    return both.view(*indices.shape, 2).transpose(-1, -2)
