// Adam's moments in two bytes or one, a block at a time; moments.py defines what these compute.
#pragma once

#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 256;  // elements: those that share a scale in 8 bits, and 1 KiB of fp32

// From a code of second moments to the next: its value, and 2^-17 of the way. From zero the way is 0, since only zero
// stays zero.
struct Cell {
    float end, way;
};

// The tables of the 8-bit format; native_adam.py has the same fields.
struct Tables {
    const float* values[2];      // what the codes stand for: of second moments, of first ones
    const uint32_t* nearest;     // of first moments: the way to the nearest code
    const uint32_t* lower;       // of second moments: the way to the greatest code that is no more
    const Cell* cells;
};

// Where the random bits of a stretch begin; moments.py has the same fields.
struct Bits {
    uint64_t first;  // element of the unit
    uint32_t keys[2];
};

// 16 random bits for each of `count` elements from `at` on.
inline void draw(const Bits& of, int64_t at, int64_t count, uint32_t* __restrict to) {
    while (count) {  // up to where the upper half of the element's number changes
        const uint64_t element = of.first + at;
        const uint32_t low = uint32_t(element), key = of.keys[0];
        const uint32_t second = of.keys[1] + uint32_t(element >> 32) * 0x9e3779b9u;
        const int64_t here = std::min(count, (int64_t(1) << 32) - low);
        for (int64_t i = 0; i < here; i++) {
            uint32_t x = low + uint32_t(i) + key;
            x = (x ^ x >> 16) * 0x7feb352du + second;
            x = (x ^ x >> 15) * 0x846ca68bu;
            to[i] = (x ^ x >> 16) & 0xffff;
        }
        at += here, count -= here, to += here;
    }
}

// to[i] = table[index[i]], one by one: compilers that put vectors together from single loads take twice as long.
template <class Index, class Entry>
inline void look_up(const Entry* __restrict table, const Index* __restrict index, Entry* __restrict to, int64_t count) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < count; i++) {
        size_t place = index[i];
        asm("" : "+r"(place));
        std::memcpy(to + i, table + place, sizeof *to);
    }
}

inline void encode_bf16(const float* __restrict values, const uint32_t* __restrict chance, uint16_t* __restrict out,
                        int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t word = bits(values[i]);
        const uint32_t rounded = (word + chance[i]) >> 16;
        out[i] = uint16_t((word & MAGNITUDE) > INFINITE ? word >> 16 | 0x40 : rounded);
    }
}

inline void decode_bf16(const uint16_t* __restrict values, float* __restrict out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = from_bf16(values[i]);
}

// What the codes stand for, still to be multiplied by their scale.
inline void decode_8bit(const uint8_t* __restrict codes, const float* __restrict table, float* __restrict out,
                        int64_t count) {
    look_up(table, codes, out, count);
}

// The greatest magnitude, in bits: as integers they are in the order of the numbers, NaN above all.
inline uint32_t greatest_magnitude(const float* values, int64_t count) {
    uint32_t greatest = 0;
    for (int64_t i = 0; i < count; i++) greatest = std::max(greatest, bits(values[i]) & MAGNITUDE);
    return greatest;
}

// Values, none greater than `scale`, as parts of it, correctly rounded where it matters: below 2^-40 all are alike, as
// long as those that are not 0 stay so.
inline void divide(const float* __restrict values, float scale, float* __restrict to, int64_t count) {
    const Divisor divisor(scale);
    if (scale >= 0x1p-60f && scale <= 1.0f)
        for (int64_t i = 0; i < count; i++) to[i] = quotient(values[i], divisor);
    else
        for (int64_t i = 0; i < count; i++) to[i] = values[i] / scale;
}

// How tables that go by the top halves of numbers are read: the entry has the code for the least number with that half
// in its own upper half, and in its lower half what is wanting to the next code: the sum carries where it is passed.

inline void encode_8bit(const float* __restrict values, const uint32_t* __restrict table, uint8_t* __restrict codes,
                        float* __restrict absmax, int64_t count) {
    alignas(64) float scaled[BLOCK];
    alignas(64) uint16_t top[BLOCK];
    alignas(64) uint32_t entry[BLOCK];
    const uint32_t greatest = greatest_magnitude(values, count);
    *absmax = number(greatest);
    if (greatest == 0 || greatest >= INFINITE) {
        std::memset(codes, int(table[0] >> 16), count);  // the code of zero
        return;
    }
    divide(values, *absmax, scaled, count);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t word = bits(scaled[i]);
        top[i] = uint16_t((word >> 31) * 0x3f81 + (word >> 16 & 0x7fff));  // a quotient's top half is at most 0x3f80
    }
    look_up(table, top, entry, count);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t word = bits(scaled[i]);
        codes[i] = uint8_t((entry[i] + (word & 0xffff)) >> 16 ^ uint32_t(int32_t(word) >> 31));
    }
}

inline void encode_8bit_by_chance(const float* __restrict values, const Tables& tables,
                                  const uint32_t* __restrict chance, uint8_t* __restrict codes,
                                  float* __restrict absmax, int64_t count) {
    alignas(64) float scaled[BLOCK];
    alignas(64) uint16_t top[BLOCK];
    alignas(64) uint32_t code[BLOCK];
    alignas(64) Cell cell[BLOCK];
    const uint32_t greatest = greatest_magnitude(values, count);
    *absmax = number(greatest);
    if (greatest == 0 || greatest >= INFINITE) {
        std::memset(codes, 0, count);
        return;
    }
    divide(values, *absmax, scaled, count);
    for (int64_t i = 0; i < count; i++) top[i] = uint16_t(bits(scaled[i]) >> 16);
    look_up(tables.lower, top, code, count);
    for (int64_t i = 0; i < count; i++) code[i] = (code[i] + (bits(scaled[i]) & 0xffff)) >> 16;
    look_up(tables.cells, code, cell, count);
    for (int64_t i = 0; i < count; i++) {
        const float threshold = float(int32_t(chance[i] * 2 + 1));  // x 2^-17: the middles of 2^16 parts of [0, 1]
        codes[i] = uint8_t(code[i] + (scaled[i] - cell[i].end > threshold * cell[i].way));
    }
}

}  // namespace
