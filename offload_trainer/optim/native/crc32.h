// The CRC-32 of zlib by carry-less multiplication (PCLMULQDQ). CPUs without it use zlib.
//
// A CRC is the remainder of the message, as a polynomial over GF(2), modulo P = x^32 + x^26 + ... + 1. So 16 bytes may
// be replaced by a congruent multiple of them, added 64 bytes later. Four accumulators fold the message into its last
// 64 bytes this way (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction",
// Intel, 2009), or four of 64 bytes each into its last 256. A table computes the CRC of those and of the rest.
#pragma once

#include <cstdint>

#if defined(__PCLMUL__) && defined(__SSE2__)
#include <immintrin.h>

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

#if defined(__VPCLMULQDQ__) && defined(__AVX512F__)
using Lanes = __m512i;
inline Lanes load(const void* at) { return _mm512_loadu_si512(at); }
inline void store(void* at, Lanes value) { _mm512_storeu_si512(at, value); }
// x^(2048 + 32) and x^(2048 - 32) modulo P, bits reversed: the factors for the low and the high 8 bytes.
inline Lanes further() { return _mm512_broadcast_i32x4(_mm_set_epi64x(0x1322d1430, 0x11542778a)); }
inline Lanes folded(Lanes value, Lanes by, Lanes next) {
    const Lanes low = _mm512_clmulepi64_epi128(value, by, 0x00), high = _mm512_clmulepi64_epi128(value, by, 0x11);
    return _mm512_xor_si512(_mm512_xor_si512(low, high), next);
}
#else
using Lanes = __m128i;
inline Lanes load(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
inline void store(void* at, Lanes value) { _mm_storeu_si128(static_cast<__m128i*>(at), value); }
inline Lanes further() { return _mm_set_epi64x(0x1c6e41596, 0x154442bd4); }  // with 512 in place of 2048
inline Lanes folded(Lanes value, Lanes by, Lanes next) {
    const Lanes low = _mm_clmulepi64_si128(value, by, 0x00), high = _mm_clmulepi64_si128(value, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}
#endif

inline uint32_t crc_of(const uint8_t* data, int64_t size) {
    constexpr int64_t lane = sizeof(Lanes), step = 4 * lane;
    if (size < step) return crc_of_few(0, data, size);
    const Lanes by = further();
    Lanes sums[4];
    for (int i = 0; i < 4; i++) sums[i] = load(data + lane * i);
    for (data += step, size -= step; size >= step; data += step, size -= step)
        for (int i = 0; i < 4; i++) sums[i] = folded(sums[i], by, load(data + lane * i));
    uint8_t last[step];
    for (int i = 0; i < 4; i++) store(last + lane * i, sums[i]);
    return crc_of_few(crc_of_few(0, last, step), data, size);
}

}  // namespace
#endif
