// The CRC-32 of zlib by carry-less multiplication (PCLMULQDQ). CPUs without it use zlib.
//
// A CRC is the remainder of the message, as a polynomial over GF(2), modulo P = x^32 + x^26 + ... + 1. So 16 bytes may
// be replaced by a congruent multiple of them, added 64 bytes later. Four accumulators fold the message into its last
// 64 bytes this way (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction",
// Intel, 2009). A table computes the CRC of those and of the rest.
#pragma once

#include <cstdint>

#if defined(__PCLMUL__) && defined(__SSE2__)
#include <emmintrin.h>
#include <wmmintrin.h>

namespace {

struct CrcTable {
    uint32_t entry[256];
    CrcTable() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = byte;
            for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
            entry[byte] = crc;
        }
    }
};

inline uint32_t crc_of_few(uint32_t crc, const uint8_t* data, int64_t size) {
    static const CrcTable table;
    for (int64_t i = 0; i < size; i++) crc = crc >> 8 ^ table.entry[(crc ^ data[i]) & 255];
    return crc;
}

inline __m128i folded(__m128i value, __m128i further, const uint8_t* data) {
    const __m128i low = _mm_clmulepi64_si128(value, further, 0x00), high = _mm_clmulepi64_si128(value, further, 0x11);
    const __m128i next = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

inline uint32_t crc_of(const uint8_t* data, int64_t size) {
    if (size < 128) return crc_of_few(0, data, size);
    // x^(512 + 32) and x^(512 - 32) modulo P, bits reversed: the factors for the low and the high 8 bytes.
    const __m128i further = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    __m128i sums[4];
    for (int i = 0; i < 4; i++) sums[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i);
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
        for (int i = 0; i < 4; i++) sums[i] = folded(sums[i], further, data + 16 * i);
    uint8_t last[64];
    for (int i = 0; i < 4; i++) _mm_storeu_si128(reinterpret_cast<__m128i*>(last) + i, sums[i]);
    return crc_of_few(crc_of_few(0, last, 64), data, size);
}

}  // namespace
#endif
