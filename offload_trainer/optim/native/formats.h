// Adam's moments in two bytes or one, a block at a time; moments.py defines what these compute.
#pragma once

#include "numbers.h"

#ifdef __AVX512FP16__
#include <immintrin.h>
#endif

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
    const uint32_t* nearest;     // of first moments: the way to the nearest code; those of numbers below 0 count down
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

#ifdef __AVX512FP16__  // CPUs that gather faster than they look up one by one: others are slow, or were made so for safety

inline __m512i wide(const uint16_t* index) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(index)));
}
inline __m512i wide(const uint8_t* index) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(index)));
}
inline __m512i wide(const uint32_t* index) { return _mm512_loadu_si512(index); }

// The same by whole vectors. How many elements that was.
template <class Index, class Entry>
inline int64_t gather(const Entry* __restrict table, const Index* __restrict index, Entry* __restrict to, int64_t count) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m512i places = wide(index + i);
        if (sizeof(Entry) == 4) {
            _mm512_storeu_si512(to + i, _mm512_i32gather_epi32(places, table, 4));
        } else {
            _mm512_storeu_si512(to + i, _mm512_i32gather_epi64(_mm512_castsi512_si256(places), table, 8));
            _mm512_storeu_si512(to + i + 8, _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(places, 1), table, 8));
        }
    }
    return i;
}

#else

template <class Index, class Entry>
inline int64_t gather(const Entry*, const Index*, Entry*, int64_t) {
    return 0;
}

#endif

// to[i] = table[index[i]], one by one where gathering does not pay: compilers that put vectors together from single loads
// take twice as long.
template <class Index, class Entry>
inline void look_up(const Entry* __restrict table, const Index* __restrict index, Entry* __restrict to, int64_t count) {
#pragma GCC unroll 8
    for (int64_t i = gather(table, index, to, count); i < count; i++) {
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

// Values, none greater than `scale`, as parts of it, and the top halves of these. Correctly rounded where it matters:
// below 2^-40 all are alike, as long as those that are not 0 stay so.
inline void divide(const float* __restrict values, float scale, float* __restrict to, uint16_t* __restrict top,
                   int64_t count) {
    const Divisor divisor(scale);
    if (scale >= 0x1p-60f && scale <= 1.0f)
        for (int64_t i = 0; i < count; i++) {
            to[i] = quotient(values[i], divisor);
            top[i] = uint16_t(bits(to[i]) >> 16);
        }
    else
        for (int64_t i = 0; i < count; i++) {
            to[i] = values[i] / scale;
            top[i] = uint16_t(bits(to[i]) >> 16);
        }
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
    divide(values, *absmax, scaled, top, count);
    look_up(table, top, entry, count);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t word = bits(scaled[i]);
        codes[i] = uint8_t((entry[i] + (word & 0xffff)) >> 16 ^ uint32_t(int32_t(word) >> 31));
    }
}

inline void encode_8bit_stochastically(const float* __restrict values, const Tables& tables,
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
    divide(values, *absmax, scaled, top, count);
    look_up(tables.lower, top, code, count);
    for (int64_t i = 0; i < count; i++) code[i] = (code[i] + (bits(scaled[i]) & 0xffff)) >> 16;
    look_up(tables.cells, code, cell, count);
    for (int64_t i = 0; i < count; i++) {
        const float threshold = float(int32_t(chance[i] * 2 + 1));  // x 2^-17: the middles of 2^16 parts of [0, 1]
        codes[i] = uint8_t(code[i] + (scaled[i] - cell[i].end > threshold * cell[i].way));
    }
}

}  // namespace
