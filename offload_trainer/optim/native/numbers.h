// Conversions between fp32 and the 16-bit formats, and a division that does not use the CPU's divider.
#pragma once

#ifdef __AVX512BF16__  // these CPUs do not slow down with 512-bit vectors, which compilers avoid by default
#pragma GCC target("prefer-vector-width=512")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

// torch does not fuse on a CPU without FMA; there this has other bits, and is not used.
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline uint32_t bits(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
}

inline float number(uint32_t word) {
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

constexpr uint32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;

inline float from_bf16(uint16_t word) { return number(uint32_t(word) << 16); }

// Add `below` to the bits below bf16's last place, and truncate. A NaN could become infinity, so it is made quiet.
inline uint16_t cut_bf16(uint32_t word, uint32_t below) {
    return uint16_t((std::isnan(number(word)) ? word | 0x400000 : word + below) >> 16);
}

// Round to nearest even.
inline uint16_t to_bf16(float value) { return cut_bf16(bits(value), 0x7fff + (bits(value) >> 16 & 1)); }

// Exponent and mantissa shifted into place are the value / 2^112; the product is exact, for subnormals too.
inline float from_f16(uint16_t word) {
    const uint32_t magnitude = uint32_t(word & 0x7fff) << 13;
    const uint32_t finite = bits(number(magnitude) * 0x1p112f);
    return number((magnitude >= 0x0f800000 ? magnitude | INFINITE : finite) | uint32_t(word & 0x8000) << 16);
}

// Round to nearest even, and to infinity beyond 65504. Subnormal results are multiples of 2^-24, which is the last
// place of numbers in [0.5, 1), so adding 0.5 rounds correctly.
inline uint16_t to_f16(float value) {
    const uint32_t magnitude = bits(value) & MAGNITUDE;
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t subnormal = bits(number(magnitude) + 0.5f) - bits(0.5f);
    uint32_t word = magnitude < 0x38800000 ? subnormal : std::min(normal - (112 << 10), uint32_t(0x7c00));
    word = magnitude > INFINITE ? 0x7e00 | (magnitude >> 13 & 0x3ff) : word;
    return uint16_t(word | (bits(value) >> 16 & 0x8000));
}

enum Type : int32_t { NONE, F32, F16, BF16, CODES };  // rules.py has the same numbers

// Write `count` elements of `from`, from element `at` on, to `to` in fp32, multiplied by `scale`.
inline void widen(const void* from, Type type, int64_t at, int64_t count, float scale, float* __restrict to) {
    const uint16_t* half = static_cast<const uint16_t*>(from) + at;
    const float* whole = static_cast<const float*>(from) + at;
    if (type == BF16)
        for (int64_t i = 0; i < count; i++) to[i] = from_bf16(half[i]) * scale;
    else if (type == F16)
        for (int64_t i = 0; i < count; i++) to[i] = from_f16(half[i]) * scale;
    else
        for (int64_t i = 0; i < count; i++) to[i] = whole[i] * scale;
}

// Write `count` numbers to `to`, from element `at` on, rounded to its type.
inline void narrow(const float* __restrict from, Type type, int64_t at, int64_t count, void* to) {
    uint16_t* const half = static_cast<uint16_t*>(to) + at;
    if (type == F32)
        std::memcpy(static_cast<float*>(to) + at, from, count * 4);
    else if (type == BF16)
        for (int64_t i = 0; i < count; i++) half[i] = to_bf16(from[i]);
    else
        for (int64_t i = 0; i < count; i++) half[i] = to_f16(from[i]);
}

// A divisor of many numbers. `inverse` + `rest` is 1 / value to twice the precision of fp32.
struct Divisor {
    float value, inverse, rest;
    explicit Divisor(float v) : value(v), inverse(1 / v), rest(float(1 / double(v) - double(inverse))) {}
};

// Return a / d, correctly rounded if d is in [2^-60, 1] and a is 0 or its magnitude is in [2^-100, 2^60]. The CPU's
// divider is the bottleneck here, and this leaves it to divisions by varying divisors. The first two products are
// within one last place of a / d. The remainder of that is exact in an FMA, and one correction with the rounded inverse
// is then correctly rounded (Markstein's theorem; Muller et al., Handbook of Floating-Point Arithmetic, section 4.7).
inline float quotient(float a, const Divisor& d) {
    const float close = fused(a, d.inverse, a * d.rest);
    return fused(fused(-close, d.value, a), d.inverse, close);
}

}  // namespace
