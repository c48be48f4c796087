// AdamW over host memory in one pass, and the small formats of its moments.
//
//     grad (16 bit) -> x scale -> exp_avg, exp_avg_sq, master (fp32, in place) -> out (16 bit)
//
// kernels.py builds this with -O3 -march=native -ffp-contract=off. The loops are plain, for the compiler to vectorise;
// a product is fused with a sum only where `fused` says so, since that decides the last bit. A block of elements stays
// in the L1 cache from one loop to the next, so every byte crosses the memory bus once. Each function is called by all
// threads at a time with one `next`, from which they claim pieces until none is left.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

enum Type : int32_t { NONE, F32, F16, BF16 };  // kernels.py has the same numbers

constexpr int64_t BLOCK = 256;          // elements: 1 KiB of each fp32 tensor; those that share a scale in 8 bits
constexpr int64_t PIECE = 256 * BLOCK;  // what a thread claims at a time; kernels.py has the same number

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool FUSES = true;
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
constexpr bool FUSES = false;
inline float fused(float a, float b, float c) { return a * b + c; }  // as torch does there
#endif

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

// To nearest even. A NaN would round to infinity; it is cut and made quiet instead.
inline uint16_t to_bf16(float value) {
    const uint32_t word = bits(value);
    const uint32_t rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
    return uint16_t((word & MAGNITUDE) > INFINITE ? word >> 16 | 0x40 : rounded);
}

// Exponent and mantissa moved into place are the value / 2^112; the product is exact, for subnormals too.
inline float from_f16(uint16_t word) {
    const uint32_t magnitude = uint32_t(word & 0x7fff) << 13;
    const uint32_t finite = bits(number(magnitude) * 0x1p112f);
    return number((magnitude >= 0x0f800000 ? magnitude | INFINITE : finite) | uint32_t(word & 0x8000) << 16);
}

// To nearest even; beyond 65504 to infinity. Subnormal results are multiples of 2^-24, which is the last place of
// numbers in [0.5, 1): adding 0.5 rounds there.
inline uint16_t to_f16(float value) {
    const uint32_t magnitude = bits(value) & MAGNITUDE;
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t subnormal = bits(number(magnitude) + 0.5f) - bits(0.5f);
    uint32_t word = magnitude < 0x38800000 ? subnormal : std::min(normal - (112 << 10), uint32_t(0x7c00));
    word = magnitude > INFINITE ? 0x7e00 | (magnitude >> 13 & 0x3ff) : word;
    return uint16_t(word | (bits(value) >> 16 & 0x8000));
}

// Stores that go past the caches: nothing reads `to` soon, and its old bytes need not be read to be overwritten.
void stream(void* to, const void* from, int64_t size) {
#ifdef __SSE2__
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        const int64_t whole = size / 16;
        for (int64_t i = 0; i < whole; i++)
            _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_loadu_si128(static_cast<const __m128i*>(from) + i));
        to = static_cast<char*>(to) + whole * 16;
        from = static_cast<const char*>(from) + whole * 16;
        size -= whole * 16;
    }
#endif
    std::memcpy(to, from, size);
}

// Streamed stores become visible to other threads in no order unless fenced.
inline void finish_stream() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

void read_gradient(const void* grad, Type type, int64_t at, int64_t count, float scale, float* __restrict to) {
    const uint16_t* half = static_cast<const uint16_t*>(grad) + at;
    const float* whole = static_cast<const float*>(grad) + at;
    if (type == BF16)
        for (int64_t i = 0; i < count; i++) to[i] = from_bf16(half[i]) * scale;
    else if (type == F16)
        for (int64_t i = 0; i < count; i++) to[i] = from_f16(half[i]) * scale;
    else
        for (int64_t i = 0; i < count; i++) to[i] = whole[i] * scale;
}

void write_rounded(const float* __restrict from, Type type, int64_t at, int64_t count, void* out) {
    alignas(64) uint16_t rounded[BLOCK];
    if (type == F32) return stream(static_cast<float*>(out) + at, from, count * 4);
    if (type == BF16)
        for (int64_t i = 0; i < count; i++) rounded[i] = to_bf16(from[i]);
    else
        for (int64_t i = 0; i < count; i++) rounded[i] = to_f16(from[i]);
    stream(static_cast<uint16_t*>(out) + at, rounded, count * 2);
}

// A number that much is divided by. `inverse` + `rest` is 1 / value to twice the precision of fp32.
struct Divisor {
    float value, inverse, rest;
    explicit Divisor(float v) : value(v), inverse(1 / v), rest(float(1 / double(v) - double(inverse))) {}
};

// a / d, correctly rounded, for a = 0 or infinity or sqrt of an fp32 number and d in (1e-6, 1]: the CPU's divider is
// the bottleneck here, and this leaves it to the other division. The first two products are within one last place
// of a / d; the remainder of that is exact in an FMA, and one correction with the rounded inverse is then correctly
// rounded (Markstein's theorem; Muller et al., Handbook of Floating-Point Arithmetic, section 4.7).
inline float quotient(float a, const Divisor& d) {
    if (!FUSES) return a / d.value;
    const float close = fused(a, d.inverse, a * d.rest);
    const float exact = fused(fused(-close, d.value, a), d.inverse, close);
    return a == std::numeric_limits<float>::infinity() ? a : exact;
}

}  // namespace

extern "C" {

// The constants of one step, rounded to fp32 as torch rounds them. kernels.py has the same fields.
struct Step {
    float scale;            // of the gradient
    float keep;             // 1 - lr x decay
    float lerp;             // 1 - beta1 where that is below 1/2, else -beta1
    int32_t from_gradient;  // whether `lerp` starts from the gradient (1 - beta1 not below 1/2) or from exp_avg
    float beta2;
    float rest2;            // 1 - beta2
    float root_correction;  // sqrt(1 - beta2 ^ step)
    float eps;
    float minus_step_size;  // -lr / (1 - beta1 ^ step)
};

}

namespace {

// Operation by operation what the vectorised loop of torch's FusedAdamKernel.cpp does.
void adam(const Step& s, const Divisor& correction, float* __restrict master, float* __restrict exp_avg,
          float* __restrict exp_avg_sq, const float* __restrict grad, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float g = grad[i];
        const float m = fused(s.lerp, g - exp_avg[i], s.from_gradient ? g : exp_avg[i]);
        const float v = fused(s.rest2 * g, g, exp_avg_sq[i] * s.beta2);
        const float denominator = quotient(std::sqrt(v), correction) + s.eps;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        master[i] = master[i] * s.keep + s.minus_step_size * m / denominator;
    }
}

inline bool claim(int64_t* next, int64_t n, int64_t* start, int64_t* stop) {
    *start = __atomic_fetch_add(next, PIECE, __ATOMIC_RELAXED);
    *stop = std::min(*start + PIECE, n);
    return *start < n;
}

}  // namespace

extern "C" {

void adam_update(const Step* step, float* master, float* exp_avg, float* exp_avg_sq, const void* grad, Type grad_type,
                 void* out, Type out_type, int64_t n, int64_t* next) {
    alignas(64) float scaled[BLOCK];
    const Divisor correction(step->root_correction);
    for (int64_t start, stop; claim(next, n, &start, &stop);)
        for (int64_t at = start; at < stop; at += BLOCK) {
            const int64_t count = std::min(BLOCK, stop - at);
            read_gradient(grad, grad_type, at, count, step->scale, scaled);
            adam(*step, correction, master + at, exp_avg + at, exp_avg_sq + at, scaled, count);
            if (out_type != NONE) write_rounded(master + at, out_type, at, count, out);
        }
    finish_stream();
}

// moments.py defines what the following compute.

struct Bits {
    uint64_t first;  // element of the unit
    uint32_t keys[2];
};

}

namespace {

// 16 random bits for each of `count` elements from `at` on.
void draw(const Bits& of, int64_t at, int64_t count, uint32_t* __restrict to) {
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

// The greatest magnitude of a block, in bits: as integers they are in the order of the numbers, NaN above all.
uint32_t greatest_magnitude(const float* values, int64_t count) {
    uint32_t greatest = 0;
    for (int64_t i = 0; i < count; i++) greatest = std::max(greatest, bits(values[i]) & MAGNITUDE);
    return greatest;
}

}  // namespace

extern "C" {

void encode_bf16(const float* __restrict values, const Bits* bits_of, uint16_t* __restrict out, int64_t n,
                 int64_t* next) {
    alignas(64) uint32_t chance[BLOCK];
    for (int64_t start, stop; claim(next, n, &start, &stop);)
        for (int64_t at = start; at < stop; at += BLOCK) {
            const int64_t count = std::min(BLOCK, stop - at);
            draw(*bits_of, at, count, chance);
            for (int64_t i = 0; i < count; i++) {
                const uint32_t word = bits(values[at + i]);
                const uint32_t rounded = (word + chance[i]) >> 16;
                out[at + i] = uint16_t((word & MAGNITUDE) > INFINITE ? word >> 16 | 0x40 : rounded);
            }
        }
}

void decode_bf16(const uint16_t* __restrict values, float* __restrict out, int64_t n, int64_t* next) {
    for (int64_t start, stop; claim(next, n, &start, &stop);)
        for (int64_t i = start; i < stop; i++) out[i] = from_bf16(values[i]);
}

void encode_8bit(const float* __restrict values, const uint32_t* __restrict table, uint8_t* __restrict codes,
                 float* __restrict absmax, int64_t n, int64_t* next) {
    alignas(64) uint32_t entry[BLOCK], rest[BLOCK], flip[BLOCK];
    for (int64_t start, stop; claim(next, n, &start, &stop);)
        for (int64_t at = start; at < stop; at += BLOCK) {
            const int64_t end = std::min(at + BLOCK, stop);
            const uint32_t greatest = greatest_magnitude(values + at, end - at);
            const float scale = number(greatest);
            absmax[at / BLOCK] = scale;
            if (greatest == 0 || greatest >= INFINITE) {
                std::memset(codes + at, int(table[0] >> 16), end - at);  // the code of zero
                continue;
            }
            for (int64_t i = 0; i < end - at; i++) {
                const uint32_t word = bits(values[at + i] / scale);
                entry[i] = (word >> 31) * 0x3f81 + (word >> 16 & 0x7fff);  // a quotient's top half is at most 0x3f80
                rest[i] = word & 0xffff;
                flip[i] = uint32_t(int32_t(word) >> 31);
            }
#pragma GCC unroll 8
            for (int64_t i = 0; i < end - at; i++) entry[i] = table[entry[i]];
            for (int64_t i = 0; i < end - at; i++) codes[at + i] = uint8_t((entry[i] + rest[i]) >> 16 ^ flip[i]);
        }
}

struct Cell {  // between two codes
    float end, way;
};

void encode_8bit_by_chance(const float* __restrict values, const uint32_t* __restrict lower,
                           const Cell* __restrict cells, const Bits* bits_of, uint8_t* __restrict codes,
                           float* __restrict absmax, int64_t n, int64_t* next) {
    alignas(64) uint32_t chance[BLOCK], code[BLOCK];
    alignas(64) float scaled[BLOCK];
    alignas(64) Cell cell[BLOCK];
    for (int64_t start, stop; claim(next, n, &start, &stop);)
        for (int64_t at = start; at < stop; at += BLOCK) {
            const int64_t count = std::min(BLOCK, stop - at);
            const uint32_t greatest = greatest_magnitude(values + at, count);
            const float scale = number(greatest);
            absmax[at / BLOCK] = scale;
            if (greatest == 0 || greatest >= INFINITE) {
                std::memset(codes + at, 0, count);
                continue;
            }
            draw(*bits_of, at, count, chance);
            for (int64_t i = 0; i < count; i++) {
                scaled[i] = values[at + i] / scale;
                code[i] = bits(scaled[i]) >> 16;
            }
#pragma GCC unroll 8
            for (int64_t i = 0; i < count; i++) code[i] = lower[code[i]];
            for (int64_t i = 0; i < count; i++) code[i] = (code[i] + (bits(scaled[i]) & 0xffff)) >> 16;
#pragma GCC unroll 8
            for (int64_t i = 0; i < count; i++) std::memcpy(cell + i, cells + code[i], sizeof *cell);
            for (int64_t i = 0; i < count; i++) {
                const float threshold = float(int32_t(chance[i] * 2 + 1)) * 0x1p-17f;
                const uint32_t chosen = code[i] + (scaled[i] - cell[i].end > threshold * cell[i].way);
                codes[at + i] = uint8_t(chosen | (chosen == 0 && scaled[i] > 0));
            }
        }
}

void decode_8bit(const uint8_t* __restrict codes, const float* __restrict absmax, const float* __restrict map,
                 float* __restrict out, int64_t n, int64_t* next) {
    for (int64_t start, stop; claim(next, n, &start, &stop);)
        for (int64_t at = start; at < stop; at += BLOCK) {
            const float scale = absmax[at / BLOCK];
            const int64_t end = std::min(at + BLOCK, stop);
            for (int64_t i = at; i < end; i++) out[i] = map[codes[i]] * scale;
        }
}

}
