// Masters and moments in bf16, and moments in 8 bits, a block at a time. moments.py is the reference.
#pragma once

#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 256;  // elements that share a scale in 8 bits; 1 KiB of fp32
constexpr int64_t STRIP = 128;  // elements of one loop

// Call work(at, count) for each strip of a block. The loops over a strip are short, and mostly of constant length. So a
// CPU executes the end of one and the start of the next together, such as divisions and integer operations.
template <class Work>
inline void for_strips(int64_t count, const Work& work) {
    int64_t at = 0;
    for (; at + STRIP <= count; at += STRIP) work(at, STRIP);
    if (at < count) work(at, count - at);
}

// The start of a sequence of random numbers; moments.py has the same fields.
struct Bits {
    uint64_t first;  // index of the first element in its unit
    uint32_t keys[2];
    uint64_t shift;  // to the number's 16 bits
};

// Draw 32 random bits for each of `count` elements from `at` on.
inline void draw(const Bits& of, int64_t at, int64_t count, uint32_t* __restrict to) {
    while (count) {  // each pass ends where the upper 32 bits of the element's index change
        const uint64_t element = of.first + at;
        const uint32_t low = uint32_t(element), key = of.keys[0];
        const uint32_t second = of.keys[1] + uint32_t(element >> 32) * 0x9e3779b9u;
        const int here = int(std::min(count, (int64_t(1) << 32) - low));
        for (int i = 0; i < here; i++) {  // 32 bits, as the elements of vectors
            uint32_t x = low + uint32_t(i) + key;
            x = (x ^ x >> 16) * 0x7feb352du + second;
            x = (x ^ x >> 15) * 0x846ca68bu;
            to[i] = x ^ x >> 16;
        }
        at += here, count -= here, to += here;
    }
}

// Add 16 of the `random` bits, from bit `shift` on, below bf16's last place, and truncate.
inline void encode_bf16(const float* __restrict values, const uint32_t* __restrict random, int shift,
                        uint16_t* __restrict out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = cut_bf16(bits(values[i]), random[i] >> shift & 0xffff);
}

// The cube of the greatest root of an 8-bit code. First moments are signed.
template <bool SIGNED>
constexpr float CUBE = SIGNED ? 127 * 127 * 127 : 256 * 256 * 256;

template <bool SIGNED>
inline void decode_8bit(const uint8_t* __restrict codes, float greatest, float* __restrict to, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float root = SIGNED ? float(int8_t(codes[i])) : float(codes[i] + (codes[i] != 0));
        to[i] = root * root * root * (1 / CUBE<SIGNED>) * greatest;
    }
}

// Return the cube root of x, which is in [0, 2^24], to 1e-4. As an integer a float is about its logarithm, so y is
// 1 / root to 6 %. The polynomial in x y^3 is about its power of -2/3.
inline float about_root(float x) {
    const float y = number(uint32_t(int32_t(1.4186e9f - float(int32_t(bits(x))) * (1.0f / 3))));
    const float root = x * (y * y), third = root * y;
    return root * fused(third, fused(third, 1.305543f, -3.036995f), 2.754709f);
}

// Return one of the two whole roots next to that of `cube`: the upper one if it is past `chance` of the way. `near` is
// a whole number less than 1 from the root. moments.py has the same roundings.
inline int32_t whole_root(float cube, float near, float chance) {
    const float square = near * near, past = fused(-square, near, cube);
    const bool below = past < 0;
    const float way = 3 * square + 1 + (below ? -3 * near : 3 * near);
    return int32_t(near) - below + ((below ? past + way : past) > chance * way);
}

// Encode a block, and write its greatest magnitude to `scale`. The upper halves of `random` round second moments.
template <bool SIGNED>
inline void encode_8bit(const float* __restrict values, const uint32_t* __restrict random, uint8_t* __restrict codes,
                        float* __restrict scale, int64_t count) {
    alignas(64) float cube[BLOCK], near[BLOCK];
    uint32_t greatest = 0;  // as integers the bits of magnitudes have the order of the numbers, with NaN above all
    for (int64_t i = 0; i < count; i++) greatest = std::max(greatest, bits(values[i]) & MAGNITUDE);
    *scale = number(greatest);
    if (greatest == 0 || greatest >= INFINITE) {
        std::fill_n(codes, count, 0);
        return;
    }
    // A power of two first moves the greatest magnitude to [1, 4), because its inverse may be infinite.
    const float power = number((254 - std::min(std::max(greatest >> 23, 1u), 253u)) << 23);
    const float factor = CUBE<SIGNED> / (*scale * power);
    // Short loops, or the compiler would run out of registers.
    for (int64_t i = 0; i < count; i++) cube[i] = std::fabs(values[i]) * power * factor;
    for (int64_t i = 0; i < count; i++) near[i] = std::nearbyint(about_root(cube[i]));
    alignas(64) int32_t code[BLOCK];
    for (int64_t i = 0; i < count; i++)
        if (SIGNED) {
            const int32_t root = whole_root(cube[i], near[i], 0.5f);
            code[i] = values[i] < 0 ? -root : root;
        } else {
            const int32_t root = whole_root(cube[i], near[i], float(int32_t(random[i] >> 16)) * 0x1p-16f + 0x1p-17f);
            code[i] = values[i] > 0 ? std::max(root, 2) - 1 : 0;  // only zero is zero
        }
    for (int64_t i = 0; i < count; i++) codes[i] = uint8_t(code[i]);
}

}  // namespace
