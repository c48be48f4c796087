// Encoding and decoding of moments alone, so that tests can use numbers that no step produces. `moments` is BF16 or CODES;
// `noise` is null for 8-bit first moments.

#include "formats.h"

extern "C" {

void encode(Type moments, const float* values, int64_t n, const Tables* tables, const Bits* noise, void* out,
            float* scales) {
    alignas(64) uint32_t chance[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t count = std::min(BLOCK, n - at);
        uint8_t* codes = static_cast<uint8_t*>(out) + at;
        if (noise) draw(*noise, at, count, chance);
        if (moments == BF16)
            encode_bf16(values + at, chance, static_cast<uint16_t*>(out) + at, count);
        else if (noise)
            encode_8bit_stochastically(values + at, *tables, chance, codes, scales + at / BLOCK, count);
        else
            encode_8bit(values + at, tables->nearest, codes, scales + at / BLOCK, count);
    }
}

void decode(Type moments, const void* stored, const float* scales, int64_t n, const Tables* tables, int32_t which,
            float* out) {
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t count = std::min(BLOCK, n - at);
        if (moments == BF16) {
            decode_bf16(static_cast<const uint16_t*>(stored) + at, out + at, count);
        } else {
            decode_8bit(static_cast<const uint8_t*>(stored) + at, *tables, which, out + at, count);
            for (int64_t i = at; i < at + count; i++) out[i] *= scales[at / BLOCK];
        }
    }
}

}
