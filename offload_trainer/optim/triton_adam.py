"""One step of AdamW over pages of optimizer state in GPU memory, and the addition of gradients, as Triton functions.

Results equal those of native/adam.cpp bit for bit, except for the bits of NaNs. A row is a block of 256 elements, which
share a scale in 8 bits; a program updates ROWS of them. Numbers in bf16 are passed as int16, because integer arithmetic
rounds them in the same way on every card. FMA is written where a CPU with FMA fuses, and `enable_fp_fusion=False` keeps
the compiler from forming others. Only cuda_adam.py imports this module: torch's wheels for CPUs have no Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The table that cuda_adam.py's `_Table` describes, in words of 32 bits.
_APART, _ELEMENTS, _BEGIN, _KEYS, _HEADER = map(tl.constexpr, (2, 3, 4, 5, 9))
_WORDS = tl.constexpr(11)  # words of a part: start, end, and the constants of its step
_INFINITE = tl.constexpr(0x7F800000)  # the bits of fp32 infinity; the magnitude of a NaN is larger


@triton.jit
def adamw(
    table,  # int32: the numbers of this launch
    master,  # fp32 or int16 (bf16); a page's state is `apart` words from the next page's
    first_moments,  # fp32, int16 (bf16) or uint8
    second_moments,
    first_scales,  # fp32, a scale for each row, or None
    second_scales,
    grad,  # fp32, fp16 or int16 (bf16); without gaps between pages
    out,  # like `grad`, or None
    WHOLE: tl.constexpr,  # all parts end at the end of a row
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.load(table + _BEGIN) + (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * COLUMNS  # its first element
    lanes = tl.arange(0, COLUMNS)[None, :]
    ends = tl.load(table + _HEADER + 1 + tl.arange(0, PARTS) * _WORDS)
    part = table + _HEADER + tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1) * _WORDS
    used = tl.load(part) <= row
    mask = used[:, None] & (lanes < COLUMNS)
    if not WHOLE:
        mask = mask & (row[:, None] + lanes < tl.load(part + 1)[:, None])
    part = part[:, None] + 2
    elements, apart = tl.load(table + _ELEMENTS), tl.load(table + _APART)
    page = (row // elements).to(tl.int64) * apart  # offset of the page's state in words
    within = row % elements

    flat = _offsets(row.to(tl.int64), lanes)
    wide = _offsets(page * (32 // master.dtype.element_ty.primitive_bitwidth) + within, lanes)
    narrow = _offsets(page * (32 // first_moments.dtype.element_ty.primitive_bitwidth) + within, lanes)
    g = _widened(tl.load(grad + flat, mask=mask, other=0)) * _constant(part, 0)
    w = _widened(tl.load(master + wide, mask=mask, other=0))
    stored_m = tl.load(first_moments + narrow, mask=mask, other=0)
    stored_v = tl.load(second_moments + narrow, mask=mask, other=0)
    if first_scales is None:
        m, v = _widened(stored_m), _widened(stored_v)
    else:
        scale = page + within // COLUMNS
        m = _share(stored_m.to(tl.int8, bitcast=True).to(tl.float32), 127)
        v = _share(stored_v.to(tl.float32) + (stored_v != 0).to(tl.float32), 256)
        m *= tl.load(first_scales + scale, mask=used, other=0)[:, None]
        v *= tl.load(second_scales + scale, mask=used, other=0)[:, None]

    # The same operations in the same order as adam.cpp's `adam`.
    start = tl.where(tl.load(part + 3) != 0, g, m)
    m = tl.fma(_constant(part, 2), g - m, start)
    v = tl.fma(_constant(part, 5) * g, g, v * _constant(part, 4))
    denominator = tl.div_rn(tl.sqrt_rn(v), _constant(part, 6)) + _constant(part, 7)
    w = w * _constant(part, 1) + tl.div_rn(_constant(part, 8) * m, denominator)

    element = tl.load(table.to(tl.pointer_type(tl.int64))) + flat
    random = _random_bits(table + _KEYS, element)  # lower halves are for masters, upper halves for second moments
    if master.dtype.element_ty == tl.float32:
        tl.store(master + wide, w, mask=mask)
    else:
        stored_w = _cut_bf16(w, random & 0xFFFF)
        tl.store(master + wide, stored_w, mask=mask)
        w = _widened(stored_w)
    if out is not None:
        tl.store(out + flat, _rounded(w, out.dtype.element_ty), mask=mask)
    if first_scales is None and first_moments.dtype.element_ty == tl.float32:
        tl.store(first_moments + narrow, m, mask=mask)
        tl.store(second_moments + narrow, v, mask=mask)
    else:
        upper = random >> 16 & 0xFFFF
        if first_scales is None:
            m, v = _cut_bf16(m, _random_bits(table + _KEYS + 2, element) & 0xFFFF), _cut_bf16(v, upper)
        else:
            cubes_m, greatest_m = _cubes(tl.where(mask, m, 0.0), 127)
            cubes_v, greatest_v = _cubes(tl.where(mask, v, 0.0), 256)
            tl.store(first_scales + scale, greatest_m, mask=used)
            tl.store(second_scales + scale, greatest_v, mask=used)
            root = _whole_root(cubes_m, 0.5)
            m = tl.where(m < 0, -root, root).to(tl.int8).to(tl.uint8, bitcast=True)
            # Only zero is a second moment of zero.
            root = tl.maximum(_whole_root(cubes_v, (upper * 2 + 1).to(tl.float32) * 0.00000762939453125), 2)  # 2^-17
            v = tl.where((v > 0) & (greatest_v < float("inf"))[:, None], root - 1, 0).to(tl.uint8)
        tl.store(first_moments + narrow, m, mask=mask)
        tl.store(second_moments + narrow, v, mask=mask)


@triton.jit(do_not_specialize=["count", "width"])
def add_gradient(
    sums,  # fp32
    values,  # fp32, fp16 or int16 (bf16), added to the sums; or None
    out,  # fp32
    count,  # elements of `sums`
    width,  # elements of `out` for each ROWS * width elements of `sums`
    SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add the sums, or their squares, that are `width` apart, in the order of norms.py's `_sum_by_halves`."""
    result = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    first = result // width * (width * ROWS) + result % width
    total = _added(sums, values, first, width, count, SQUARES, ROWS)
    tl.store(out + result, total, mask=result < tl.cdiv(count, width * ROWS) * width)


@triton.jit
def _added(sums, values, first, apart, count, SQUARES: tl.constexpr, ROWS: tl.constexpr):
    """Return the sum of ROWS elements from `first` on. Halving adds the two halves first that are farthest apart."""
    if ROWS > 1:
        even = _added(sums, values, first, 2 * apart, count, SQUARES, ROWS // 2)
        return even + _added(sums, values, first + apart, 2 * apart, count, SQUARES, ROWS // 2)
    else:  # needed, since Triton would compile what follows the `if` as well
        mask = first < count
        element = tl.load(sums + first, mask=mask, other=0)
        if values is not None:
            element += _widened(tl.load(values + first, mask=mask, other=0))
            tl.store(sums + first, element, mask=mask)
        return element * element if SQUARES else element


@triton.jit
def _offsets(rows, lanes):
    """Return the offsets of the elements of rows. The compiler learns that it may move 16 bytes of fp32 at once."""
    return tl.max_contiguous(tl.multiple_of(rows[:, None] + lanes, (1, 4)), (1, 4))


@triton.jit
def _constant(part, NUMBER: tl.constexpr):
    """Return a number of rules.py's `AdamStep`."""
    return _number(tl.load(part + NUMBER))


@triton.jit
def _bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _number(words):
    return words.to(tl.float32, bitcast=True)


@triton.jit
def _widened(values):
    """Return bf16 (as int16), fp16 or fp32 in fp32."""
    return _number(values.to(tl.int32) << 16) if values.dtype == tl.int16 else values.to(tl.float32)


@triton.jit
def _rounded(values, DTYPE: tl.constexpr):
    """Round fp32 to the nearest number in `DTYPE`, which is int16 for bf16."""
    return _cut_bf16(values, 0x7FFF + (_bits(values) >> 16 & 1)) if tl.int16 == DTYPE else values.to(DTYPE)


@triton.jit
def _cut_bf16(values, below):
    """Add `below` to the bits below bf16's last place, and truncate; a carry rounds up."""
    words = _bits(values)
    nan = (words & 0x7FFFFFFF) > _INFINITE
    return tl.where(nan, words >> 16 | 0x40, words + below >> 16).to(tl.int16)


@triton.jit
def _random_bits(keys, element):
    """Return 32 random bits for each element of a unit (moments.py, random_bits)."""
    first, second = tl.load(keys).to(tl.uint32, bitcast=True), tl.load(keys + 1).to(tl.uint32, bitcast=True)
    x = element.to(tl.uint32) + first
    x = (x ^ x >> 16) * 0x7FEB352D + second + (element >> 32).to(tl.uint32) * 0x9E3779B9
    x = (x ^ x >> 15) * 0x846CA68B
    return (x ^ x >> 16).to(tl.int32, bitcast=True)


@triton.jit
def _share(root, ROOT: tl.constexpr):
    """Return the share of its block's greatest magnitude that an 8-bit code with this root stands for (moments.py)."""
    return root * root * root * (1.0 / (ROOT * ROOT * ROOT))


@triton.jit
def _cubes(values, ROOT: tl.constexpr):
    """Return the shares of magnitudes in the greatest one of their row, times ROOT^3, and that.

    They are 0 if the greatest magnitude is 0, infinite or NaN.
    """
    # As integers the bits of magnitudes have the order of the numbers, with NaN above all.
    greatest = tl.max(_bits(values) & 0x7FFFFFFF, axis=1)
    usable = (greatest != 0) & (greatest < _INFINITE)
    power = _number(254 - tl.minimum(tl.maximum(greatest >> 23, 1), 253) << 23)
    factor = tl.div_rn(ROOT * ROOT * ROOT * 1.0, tl.where(usable, _number(greatest) * power, 1.0))
    cubes = tl.abs(values) * power[:, None] * factor[:, None]
    return tl.where(usable[:, None], cubes, 0.0), _number(greatest)


@triton.jit
def _about_root(cubes):
    """Return the cube roots as formats.h does. Triton's own logarithm takes subnormal numbers for zero."""
    y = _number((1.4186e9 - _bits(cubes).to(tl.float32) * 0.33333334).to(tl.int32))
    root = cubes * (y * y)
    third = root * y
    return root * (2.754709 + third * (1.305543 * third - 3.036995))


@triton.jit
def _whole_root(cubes, chance):
    """Return one of the two whole roots next to that of each cube (moments.py, _whole_root)."""
    near = (_about_root(cubes) + 0.5).to(tl.int32).to(tl.float32)
    past = cubes - near * near * near
    below = past < 0
    way = 3 * near * near + 1 + tl.where(below, -3 * near, 3 * near)
    past = tl.where(below, past + way, past)
    return near.to(tl.int32) - below.to(tl.int32) + (past > chance * way).to(tl.int32)
