// Masters and moments in bf16, and moments in 8 bits, a block at a time. moments.py is the reference.
#pragma once

#include "numbers.h"

#ifdef __AVX512FP16__
#include <immintrin.h>
#endif

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

// A code of second moments: its value, and 2^-16 of the distance to the next code. The distance from zero is 0, since
// only zero is encoded as zero.
struct Cell {
    float end, way;
};

// The tables of the 8-bit format; native_kernel.py has the same fields.
struct Tables {
    const float* unsigned_values;  // of the 256 codes of second moments
    const float* signed_values;    // of first moments
    const uint32_t* nearest;       // first moments: lookup table of the nearest code; negative numbers count down
    const uint32_t* lower;         // second moments: lookup table of the largest code that is not above the number
    const Cell* cells;
};

// The start of a sequence of random bits; moments.py has the same fields.
struct Bits {
    uint64_t first;  // index of the first element in its unit
    uint32_t keys[2];
};

// Draw 16 random bits for each of `count` elements from `at` on.
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
            to[i] = (x ^ x >> 16) & 0xffff;
        }
        at += here, count -= here, to += here;
    }
}

#ifdef __AVX512FP16__
inline __m512i sixteen(const uint8_t* at) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
inline __m512i sixteen(const uint16_t* at) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)); }
#endif

// Compute to[i] = table[index[i]]. CPUs with AVX512-FP16 load sixteen entries faster together. Elsewhere the asm
// statement keeps the compiler from assembling vectors from single loads, which takes twice as long.
template <class Index, class Entry>
inline void look_up(const Entry* __restrict table, const Index* __restrict index, Entry* __restrict to, int64_t count) {
    int64_t i = 0;
#ifdef __AVX512FP16__
    if constexpr (sizeof(Entry) == 4)
        for (; i + 16 <= count; i += 16)
            _mm512_storeu_si512(to + i, _mm512_i32gather_epi32(sixteen(index + i), table, 4));
#endif
#pragma GCC unroll 8
    for (; i < count; i++) {
        size_t place = index[i];
        asm("" : "+r"(place));
        std::memcpy(to + i, table + place, sizeof *to);
    }
}

inline void encode_bf16(const float* __restrict values, const uint32_t* __restrict chance, uint16_t* __restrict out,
                        int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = cut_bf16(bits(values[i]), chance[i]);
}

// Divide a block by its greatest magnitude, which is written to `scale`; write the quotients and their upper 16 bits.
// Return whether that is possible: it is neither zero, infinite nor NaN. As integers the bits of magnitudes have the
// order of the numbers, with NaN above all. Quotients above 2^-40 are correctly rounded; smaller ones all give the same
// code, so it only matters that they do not become 0.
inline bool divide(const float* __restrict values, float* __restrict scale, float* __restrict to,
                   uint16_t* __restrict top, int64_t count) {
    uint32_t greatest = 0;
    for (int64_t i = 0; i < count; i++) greatest = std::max(greatest, bits(values[i]) & MAGNITUDE);
    *scale = number(greatest);
    if (greatest == 0 || greatest >= INFINITE) return false;
    const Divisor divisor(number(greatest));
    if (divisor.value >= 0x1p-60f && divisor.value <= 1.0f)
        for (int64_t i = 0; i < count; i++) {
            to[i] = quotient(values[i], divisor);
            top[i] = uint16_t(bits(to[i]) >> 16);
        }
    else
        for (int64_t i = 0; i < count; i++) {
            to[i] = values[i] / divisor.value;
            top[i] = uint16_t(bits(to[i]) >> 16);
        }
    return true;
}

// Lookup tables are indexed by the upper 16 bits of a number. An entry's upper half is the code of the smallest number
// with those bits. Its lower half is such that adding the number's lower half carries into the code exactly if the number
// is past the next code's threshold (moments.py, `_search_table`).

inline void encode_8bit(const float* __restrict values, const uint32_t* __restrict table, uint8_t* __restrict codes,
                        float* __restrict absmax, int64_t count) {
    alignas(64) float scaled[BLOCK];
    alignas(64) uint16_t top[BLOCK];
    alignas(64) uint32_t entry[BLOCK];
    if (!divide(values, absmax, scaled, top, count)) {
        std::memset(codes, int(table[0] >> 16), count);  // the code of zero
        return;
    }
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
    if (!divide(values, absmax, scaled, top, count)) {
        std::memset(codes, 0, count);
        return;
    }
    look_up(tables.lower, top, code, count);
    for (int64_t i = 0; i < count; i++) code[i] = (code[i] + (bits(scaled[i]) & 0xffff)) >> 16;
    look_up(tables.cells, code, cell, count);
    for (int64_t i = 0; i < count; i++) {
        const float threshold = float(int32_t(chance[i])) + 0.5f;  // x 2^-16: midpoints of 2^16 parts of [0, 1]
        codes[i] = uint8_t(code[i] + (scaled[i] - cell[i].end > threshold * cell[i].way));
    }
}

}  // namespace
