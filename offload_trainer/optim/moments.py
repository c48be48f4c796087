"""Encode and decode masters and moments in bf16, and moments in bitsandbytes' blockwise 8-bit format.

A stored number that changes by less than half a unit in the last place never moves if it is rounded to nearest;
stochastic rounding is correct on average. The 8-bit format is a table of 256 values in [-1, 1] or [0, 1], finer near
zero, times the largest magnitude of each 256 elements (Dettmers et al., https://arxiv.org/abs/2110.02861). 8-bit first
moments decay fast enough to be rounded to nearest, and without random bits, as in a conversion, all numbers are.
The functions here are the reference; the kernels compute the same bits faster.
"""

import ctypes
import functools
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offload_trainer.plan.tiered.layout import BLOCK_8BIT
from offload_trainer.plan.tiered.state_formats import is_signed, scales_of

_PIECE = 2**16  # elements that are processed at a time, so that they stay in the cache
_INFINITY = 0x7F800000  # the bits of fp32 infinity; the magnitude of a NaN is larger


class Bits(ctypes.Structure):
    """The start of a sequence of random bits: element `first` of a unit, and two keys. adam.cpp has the same struct."""

    _fields_ = (("first", ctypes.c_uint64), ("keys", ctypes.c_uint32 * 2))


@dataclass(frozen=True)
class Noise:
    """The random bits of one step: a function of seed, step, field, unit and element, independent of page cuts."""

    seed: int
    step: int

    def bits(self, field: str, unit: int, first: int) -> Bits:
        """Return the random bits of a unit's `field`, starting at element `first`."""
        drawn = hashlib.blake2b(f"rounding {self.seed} {self.step} {field} {unit}".encode(), digest_size=8).digest()
        return Bits.from_buffer_copy(first.to_bytes(8, sys.byteorder) + drawn)


def random_bits(bits: Bits, n: int) -> torch.Tensor:
    """Return int32[n] of random numbers below 2^16: a hash of each element's index and the keys.

    The hash is lowbias32, two 32-bit multiplications (C. Wellons, Prospecting for Hash Functions, 2018). The second key
    is added between them; otherwise two fields would have the same bits at different offsets.
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
    return (number + 2**31) % 2**32 - 2**31


def encode_bf16(values: torch.Tensor, out: torch.Tensor, *, noise: Bits) -> None:
    """Round `values` (fp32[n]) stochastically to `out` (bf16[n]); infinity and NaN stay as they are."""
    for start in range(0, values.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        words = values[piece].view(torch.int32)
        rounded = (words + random_bits(Bits(noise.first + start, noise.keys), words.numel())) >> 16
        nan = (words & 0x7FFFFFFF) > _INFINITY
        out[piece].view(torch.int16).copy_(torch.where(nan, (words >> 16) | 0x40, rounded))


@dataclass(frozen=True)
class StoredField:
    """A master or moment: `values` (n entries) and, in 8 bits, `scales` (fp32[ceil(n / 256)]), views of its fields."""

    signed: bool  # an average of squares is not
    values: torch.Tensor
    scales: torch.Tensor | None

    def read(self) -> torch.Tensor:
        """Return the values as fp32[n]; fp32 values are not copied."""
        if self.scales is None:
            return self.values.float()
        wide = dynamic_map(self.signed)[self.values.long()]
        return wide.mul_(self.scales.repeat_interleave(BLOCK_8BIT)[: wide.numel()])

    def write(self, values: torch.Tensor, *, noise: Bits | None = None) -> None:
        """Store `values` (fp32[n]), rounded stochastically by the bits of `noise` if the format is stochastic."""
        if self.scales is not None:
            self._write_codes(values, noise=None if self.signed else noise)
        elif self.values.dtype is torch.bfloat16 and noise is not None:
            encode_bf16(values, self.values, noise=noise)
        else:
            self.values.copy_(values)

    def _write_codes(self, values: torch.Tensor, *, noise: Bits | None) -> None:
        """Store `values` in 8 bits. Only zero becomes zero. A block that holds an infinity or a NaN decodes to NaN.

        Without `noise` the nearest code is used. With it, for unsigned values, one of the two nearest is chosen with a
        probability proportional to the distance from the other.
        """
        n, absmax = values.numel(), self.scales
        assert absmax is not None
        blocks = torch.nn.functional.pad(values, (0, -n % BLOCK_8BIT)).view(-1, BLOCK_8BIT)
        torch.amax(blocks.abs(), dim=1, out=absmax)
        usable = (absmax.isfinite() & (absmax > 0))[:, None]
        scaled = torch.where(usable, blocks / absmax[:, None], 0.0).view(-1)[:n]
        if noise is None:
            self.values.copy_(torch.bucketize(scaled, _bounds(self.signed)))
            return
        lower = torch.bucketize(scaled, dynamic_map(False)[1:], right=True)
        end, way = cells()[lower].T
        threshold = (random_bits(noise, n) * 2 + 1) * 2.0**-17  # the midpoints of 2^16 equal parts of [0, 1]
        upper = scaled - end > threshold * way
        self.values.copy_(torch.where((lower == 0) & (scaled > 0), 1, lower + upper))

    def start_at_zero(self) -> None:
        """Set a field whose bytes are all zero to the value zero; in 8 bits code 0 is the lowest number instead."""
        if self.scales is not None:
            self.values.fill_(int((dynamic_map(self.signed) == 0).nonzero()))


def stored_field(kind: str, fields: Mapping[str, torch.Tensor], here: slice | None = None) -> StoredField:
    """Return the master or a moment of a page's elements `here`, which start at a multiple of 256, or of all."""
    values, scales = fields[kind], fields.get(scales_of(kind))
    if here is not None:
        values = values[here]
        scales = None if scales is None else scales[here.start // BLOCK_8BIT : -(-here.stop // BLOCK_8BIT)]
    return StoredField(is_signed(kind), values, scales)


@functools.cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """Return the values of the 256 codes, ascending (fp32): zero, one, and midpoints of equal parts of seven decades.

    The decade up to 1 has 64 parts (128 if unsigned), each smaller decade half as many. A signed table has every value
    except one with both signs. The arithmetic is in fp32 and gives bitsandbytes' tables to the last bit.
    """
    values = [0.0, 1.0]
    for halvings in range(7):
        edges = torch.linspace(0.1, 1.0, (64 if signed else 128) // 2**halvings + 1)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10**-halvings).tolist()
        values += middles
        if signed:
            values += [-middle for middle in middles]
    return torch.tensor(sorted(values))


@functools.cache
def _bounds(signed: bool) -> torch.Tensor:
    """Return the 255 midpoints between neighbouring codes; a value above a midpoint gets the higher code.

    The first midpoint of the unsigned table is 0, so that only zero is encoded as zero. The update divides by the root
    of the second moment: if that is rounded to zero while the first moment is not, the update is thousands of times the
    learning rate; if it is rounded up, the update is small.
    """
    values = dynamic_map(signed)
    bounds = (values[1:] + values[:-1]) / 2
    if not signed:
        bounds[0] = 0.0
    return bounds


@functools.cache
def cells() -> torch.Tensor:
    """Return fp32[256, 2]: the value of each unsigned code, and its distance to the next one (0 for the last)."""
    values = dynamic_map(False)
    return torch.stack([values, torch.diff(values, append=values[-1:])], dim=1).contiguous()


@functools.cache
def nearest_table() -> torch.Tensor:
    """Return adam.cpp's lookup tables from a number in [-1, 1] to the nearest code: int32[2, 0x3F81], one per sign.

    Codes of negative numbers are counted down from 255, so that they also grow with the magnitude. A number exactly at
    a midpoint gets the lower code for either sign, which is the higher one when counted down.
    """
    bounds = _bounds(True)
    return torch.stack([_search_table(bounds, above=False), _search_table(-bounds.flip(0), above=True)])


@functools.cache
def lower_table() -> torch.Tensor:
    """Return adam.cpp's lookup table from an unsigned number to the largest code not above it: int32[0x3F81]."""
    return _search_table(dynamic_map(False)[1:], above=True)


def _search_table(bounds: torch.Tensor, *, above: bool) -> torch.Tensor:
    """Return a table, indexed by the upper 16 bits of a number in [0, 1], that counts the `bounds` below the number.

    `bounds` is fp32[255], ascending; with `above` a number equal to a bound counts as above it. Numbers with equal
    upper halves have at most one bound between them. So each entry (int32) holds the count for the smallest such number
    in its upper half, and in its lower half the complement of the bound's lower half. Adding the number's lower half
    carries into the count exactly if the number is past the bound.
    """
    top = torch.arange(0x3F81, dtype=torch.int32) << 16
    least, greatest = top.view(torch.float32), (top | 0xFFFF).view(torch.float32)
    first, last = (torch.bucketize(numbers, bounds, right=above) for numbers in (least, greatest))
    assert int((last - first).max()) <= 1
    past = (bounds[first.clamp(max=254)].view(torch.int32) & 0xFFFF) + (0 if above else 1)
    return ((first << 16) + torch.where(last > first, 0x10000 - past, 0)).int()
