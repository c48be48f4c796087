"""Encode and decode masters and moments in bf16, and moments in 8 bits with a scale for each block of 256 elements.

A stored number that changes by less than half a unit in the last place never moves if it is rounded to nearest;
stochastic rounding is correct on average. An 8-bit code is a cube root. A first moment is (c / 127)^3 of its block's
greatest magnitude, with c from -127 to 127. A second moment is ((c + 1) / 256)^3 of it, with c from 1 to 255, or zero.
So codes are dense near the greatest magnitude and reach down to 5e-7 of it, and bytes of zeros are zeros. (Scales of
blocks: Dettmers et al., https://arxiv.org/abs/2110.02861.) 8-bit first moments decay fast enough to be rounded to
nearest, and without random bits, as in a conversion, all numbers are.
The functions here are the reference; the kernels compute the same bits faster.
"""

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offload_trainer.plan.tiered.layout import BLOCK_8BIT
from offload_trainer.plan.tiered.state_formats import is_signed, scales_of

_PIECE = 2**16  # elements that are processed at a time, so that they stay in the cache
_INFINITY = 0x7F800000  # the bits of fp32 infinity; the magnitude of a NaN is larger


class Bits(ctypes.Structure):
    """The start of a sequence of random numbers of 16 bits: element `first` of a unit, two keys, and a place.

    `shift` is the numbers' place in 32 bits: 0 or 16. formats.h has the same struct.
    """

    _fields_ = (("first", ctypes.c_uint64), ("keys", ctypes.c_uint32 * 2), ("shift", ctypes.c_uint64))


@dataclass(frozen=True)
class Noise:
    """The random bits of one step: a function of seed, step, field, unit and element, independent of page cuts."""

    seed: int
    step: int

    def bits(self, field: str, unit: int, first: int) -> Bits:
        """Return the random bits of a unit's `field`, starting at element `first`.

        Masters take the lower half of 32 bits, and second moments the upper half of the same.
        """
        drawn_for, shift = ("master", 16) if field == "exp_avg_sq" else (field, 0)
        words = f"rounding {self.seed} {self.step} {drawn_for} {unit}".encode()
        keys = (ctypes.c_uint32 * 2).from_buffer_copy(hashlib.blake2b(words, digest_size=8).digest())
        return Bits(first, keys, shift)


def random_bits(bits: Bits, n: int) -> torch.Tensor:
    """Return int32[n] of random numbers below 2^16: a hash of each element's index and the keys.

    The hash is lowbias32, two 32-bit multiplications (C. Wellons, Prospecting for Hash Functions, 2018). The second key
    is added between them; otherwise two fields would have the same bits at different offsets.
    """
    upper, lower = divmod(bits.first, 2**32)
    head = 2**32 - lower
    if n > head:
        after = Bits(bits.first + head, bits.keys, bits.shift)
        return torch.cat([random_bits(bits, head), random_bits(after, n - head)])
    x = torch.arange(n, dtype=torch.int32).add_(_wrapped(lower + bits.keys[0]))  # integers wrap around
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(0x7FEB352D).add_(_wrapped(bits.keys[1] + upper * 0x9E3779B9))
    x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(_wrapped(0x846CA68B))
    return x.bitwise_xor_((x >> 16) & 0xFFFF).bitwise_right_shift_(bits.shift).bitwise_and_(0xFFFF)


def _wrapped(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def encode_bf16(values: torch.Tensor, out: torch.Tensor, *, noise: Bits) -> None:
    """Round `values` (fp32[n]) stochastically to `out` (bf16[n]); infinity and NaN stay as they are."""
    for start in range(0, values.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        words = values[piece].view(torch.int32)
        here = Bits(noise.first + start, noise.keys, noise.shift)
        rounded = (words + random_bits(here, words.numel())) >> 16
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
        root = self.values.view(torch.int8).float() if self.signed else self.values.float() + (self.values > 0)
        share = (root * root * root).mul_(1 / _cube(self.signed))
        return share.mul_(self.scales.repeat_interleave(BLOCK_8BIT)[: share.numel()])

    def write(self, values: torch.Tensor, *, noise: Bits | None = None) -> None:
        """Store `values` (fp32[n]), rounded stochastically by the bits of `noise` if the format is stochastic."""
        if self.scales is not None:
            self._write_codes(values, noise=None if self.signed else noise)
        elif self.values.dtype is torch.bfloat16 and noise is not None:
            encode_bf16(values, self.values, noise=noise)
        else:
            self.values.copy_(values)

    def _write_codes(self, values: torch.Tensor, *, noise: Bits | None) -> None:
        """Store `values` in 8 bits. A block that holds an infinity or a NaN decodes to NaN.

        Without `noise` the nearest code is used. With it, one of the two nearest is chosen with a probability
        proportional to the distance from the other. Only zero is stored as a second moment of zero. The update divides
        by the root of the second moment: if that is rounded to zero while the first moment is not, the update is
        thousands of times the learning rate; if it is rounded up, the update is small.
        """
        n, greatest = values.numel(), self.scales
        assert greatest is not None
        blocks = torch.nn.functional.pad(values, (0, -n % BLOCK_8BIT)).view(-1, BLOCK_8BIT)
        torch.amax(blocks.abs(), dim=1, out=greatest)
        usable = greatest.isfinite() & (greatest > 0)
        blocks = torch.where(usable[:, None], blocks, 0.0)
        # A power of two first moves the greatest magnitude to [1, 4), because its inverse may be infinite.
        power = (254 - (greatest.view(torch.int32) >> 23).clamp(1, 253) << 23).view(torch.float32)
        factor = torch.tensor(_cube(self.signed)) / torch.where(usable, greatest * power, 1.0)
        cubes = (blocks.abs() * power[:, None] * factor[:, None]).view(-1)[:n]
        chance = 0.5 if noise is None else (random_bits(noise, n) * 2 + 1) * 2.0**-17  # middles of 2^16 parts of [0, 1]
        codes, values = _whole_root(cubes, chance), blocks.view(-1)[:n]
        if self.signed:
            self.values.view(torch.int8).copy_(torch.where(values < 0, -codes, codes))
        else:
            self.values.copy_(torch.where(values > 0, codes.clamp(min=2) - 1, 0))


def stored_field(kind: str, fields: Mapping[str, torch.Tensor], here: slice | None = None) -> StoredField:
    """Return the master or a moment of a page's elements `here`, which start at a multiple of 256, or of all."""
    values, scales = fields[kind], fields.get(scales_of(kind))
    if here is not None:
        values = values[here]
        scales = None if scales is None else scales[here.start // BLOCK_8BIT : -(-here.stop // BLOCK_8BIT)]
    return StoredField(is_signed(kind), values, scales)


def _cube(signed: bool) -> float:
    """Return the cube of the largest root. It and the cubes below are exact in fp32."""
    return 127.0**3 if signed else 256.0**3


def _whole_root(cubes: torch.Tensor, chance: torch.Tensor | float) -> torch.Tensor:
    """Return one of the two whole roots next to that of each cube: the upper one if it is past `chance` of the way.

    Any `near` that is less than 1 from the root gives the same result.
    """
    near = cubes.double().pow(1 / 3).round().float()
    past = cubes - near**3
    below = past < 0
    way = 3 * near**2 + 1 + torch.where(below, -3 * near, 3 * near)
    return near - below.float() + (torch.where(below, past + way, past) > chance * way)
