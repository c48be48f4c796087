"""Adam's moments in two bytes or one: bf16, and bitsandbytes' blockwise 8-bit format, both rounded stochastically.

    fp32 values ──encode──> small ──decode──> fp32 values

A running average that moves by less than half of the last place would stand still if it were rounded to nearest;
rounded up as often as its distance says, it is right on average. The 8-bit format is a table of 256 values in [-1, 1]
or [0, 1], finer near zero, times the greatest magnitude of each 256 elements (Dettmers et al., 8-bit Optimizers via
Block-wise Quantization, https://arxiv.org/abs/2110.02861). Its first moments forget so fast that the nearest will do.

The functions here define what is computed; adam.cpp computes the same bits faster.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from dataclasses import dataclass

import torch

from offload_trainer.plan.layout import BLOCK_8BIT

_PIECE = 2**16  # elements whose random bits are mixed at a time, in the cache
_INFINITY = 0x7F800000  # the bits of fp32's infinity; a NaN's magnitude is above it


class Bits(ctypes.Structure):
    """Where the random bits of a stretch begin: those of element `first` of a unit and after. adam.cpp has the same."""

    _fields_ = (("first", ctypes.c_uint64), ("keys", ctypes.c_uint32 * 2))


@dataclass(frozen=True)
class Noise:
    """The random bits of one step: a function of seed, step, field, unit and element, however the unit is cut."""

    seed: int
    step: int

    def bits(self, field: str, unit: int, first: int) -> Bits:
        """For the elements of a unit's `field` from `first` on."""
        drawn = hashlib.blake2b(f"rounding {self.seed} {self.step} {field} {unit}".encode(), digest_size=8).digest()
        return Bits.from_buffer_copy(first.to_bytes(8, sys.byteorder) + drawn)


def random_bits(bits: Bits, n: int) -> torch.Tensor:
    """int32[n] below 2^16, one for each element: its number and the keys, mixed.

    The mixing is a 32-bit integer hash of two multiplications (constants: C. Wellons, Prospecting for Hash Functions,
    2018, lowbias32). The second key enters between them, or two fields would have the same bits, shifted.
    """
    upper, lower = divmod(bits.first, 2**32)
    head = 2**32 - lower
    if n > head:
        after = Bits(bits.first + head, bits.keys)
        return torch.cat([random_bits(bits, head), random_bits(after, n - head)])
    x = torch.arange(n, dtype=torch.int32).add_(_wrapped(lower + bits.keys[0]))  # integers wrap around
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(0x7FEB352D).add_(_wrapped(bits.keys[1] + upper * 0x9E3779B9))
    x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(_wrapped(0x846CA68B))
    return x.bitwise_xor_(x >> 16).bitwise_and_(0xFFFF)


def _wrapped(number: int) -> int:
    """Its lowest 32 bits, as a number with a sign."""
    return (number + 2**31) % 2**32 - 2**31


def encode_bf16(values: torch.Tensor, out: torch.Tensor, *, noise: Bits) -> None:
    """Round `values` (fp32[n]) to `out` (bf16[n]), up in magnitude with the probability of what is cut off.

    The bits of `noise` are added below bf16's last place. Infinity and NaN stay.
    """
    for start in range(0, values.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        words = values[piece].view(torch.int32)
        rounded = (words + random_bits(Bits(noise.first + start, noise.keys), words.numel())) >> 16
        nan = (words & 0x7FFFFFFF) > _INFINITY
        out[piece].view(torch.int16).copy_(torch.where(nan, (words >> 16) | 0x40, rounded))


def decode_bf16(values: torch.Tensor, out: torch.Tensor) -> None:
    """`values` (bf16[n]) as fp32[n] in `out`."""
    out.copy_(values)


def encode_8bit(
    values: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor, *, signed: bool, noise: Bits | None = None
) -> None:
    """Encode `values` (fp32[n]) as `codes` (uint8[n]) and `absmax` (fp32[ceil(n / 256)]).

    `signed` says which table. The nearest code is taken; with `noise`, for values without a sign, one of the two that
    are around, the upper with the probability of the way to it. Only zero becomes zero. Where a block holds an infinity
    or a NaN, all of it decodes to NaN.
    """
    n = values.numel()
    blocks = torch.nn.functional.pad(values, (0, -n % BLOCK_8BIT)).view(-1, BLOCK_8BIT)
    torch.amax(blocks.abs(), dim=1, out=absmax)
    usable = (absmax.isfinite() & (absmax > 0))[:, None]
    scaled = torch.where(usable, blocks / absmax[:, None], 0.0).view(-1)[:n]
    if noise is None:
        codes.copy_(torch.bucketize(scaled, _bounds(signed)))
        return
    assert not signed
    lower = torch.bucketize(scaled, dynamic_map(False)[1:], right=True)
    end, way = cells()[lower].T
    threshold = (random_bits(noise, n) * 2 + 1) * 2.0**-17  # the middles of 2^16 parts of [0, 1]
    upper = scaled - end > threshold * way
    codes.copy_(torch.where((lower == 0) & (scaled > 0), 1, lower + upper))


def decode_8bit(codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, *, signed: bool) -> None:
    """The values (`out`, fp32[n]) that `codes` (uint8[n]) and `absmax` (fp32[ceil(n / 256)]) stand for."""
    values = dynamic_map(signed)[codes.long()]
    torch.mul(values, absmax.repeat_interleave(BLOCK_8BIT)[: codes.numel()], out=out)


# -- tables of the 8-bit format --------------------------------------------------------------------------------------


@functools.cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """What the 256 codes stand for, ascending (fp32): zero, one, and the middles of equal parts of seven decades.

    The decade up to 1 has 64 parts (128 unsigned), each smaller one half as many; with a sign, all but one are there
    twice. The arithmetic is in fp32, as bitsandbytes', whose tables these are to the last bit.
    """
    values = [0.0, 1.0]
    for halvings in range(7):
        edges = torch.linspace(0.1, 1.0, (64 if signed else 128) // 2**halvings + 1)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10**-halvings).tolist()
        values += middles
        if signed:
            values += [-middle for middle in middles]
    return torch.tensor(sorted(values))


def zero_code(*, signed: bool) -> int:
    """The code of zero."""
    return int((dynamic_map(signed) == 0).nonzero())


@functools.cache
def _bounds(signed: bool) -> torch.Tensor:
    """The 255 middles between neighbouring codes: above one, the higher code is taken.

    Without a sign the first is 0, so that only zero is zero. The second moment's root is divided by: rounded to zero
    beside a first moment that is not, it makes an update of thousands of times the rate; rounded up, a small one.
    """
    values = dynamic_map(signed)
    bounds = (values[1:] + values[:-1]) / 2
    if not signed:
        bounds[0] = 0.0
    return bounds


@functools.cache
def cells() -> torch.Tensor:
    """fp32[256, 2]: what each code without a sign stands for, and the way from there to the next; from one it is 0."""
    values = dynamic_map(False)
    return torch.stack([values, torch.diff(values, append=values[-1:])], dim=1).contiguous()


@functools.cache
def nearest_table(signed: bool) -> torch.Tensor:
    """adam.cpp's way from a number in [-1, 1] to the nearest code: int32[2, 0x3F81], `_search_table` of each sign.

    Negative numbers have their codes counted from 255 down, so that these too grow with the magnitude. A positive
    number at a bound has the lower code, and a negative one as well, which counted down is the higher.
    """
    bounds = _bounds(signed)
    return torch.stack([_search_table(bounds, above=False), _search_table(-bounds.flip(0), above=True)])


@functools.cache
def lower_table() -> torch.Tensor:
    """The same for the greatest code that is no more than a number without a sign: int32[0x3F81]."""
    return _search_table(dynamic_map(False)[1:], above=True)


def _search_table(bounds: torch.Tensor, *, above: bool) -> torch.Tensor:
    """How many of `bounds` (fp32[255], ascending) a number in [0, 1] is past, by the top half of its bits.

    At a bound itself it is past it where `above` says so. Numbers whose top halves agree are so close that one bound at
    most lies between them. So an entry (int32) holds the count for the least of them in its upper half, and in its
    lower half what is wanting to the next: the number's own lower half is added, and where it is past it carries.
    """
    top = torch.arange(0x3F81, dtype=torch.int32) << 16
    least, greatest = top.view(torch.float32), (top | 0xFFFF).view(torch.float32)
    first, last = (torch.bucketize(numbers, bounds, right=above) for numbers in (least, greatest))
    assert int((last - first).max()) <= 1
    past = (bounds[first.clamp(max=254)].view(torch.int32) & 0xFFFF) + (0 if above else 1)
    return ((first << 16) + torch.where(last > first, 0x10000 - past, 0)).int()
