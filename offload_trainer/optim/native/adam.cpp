// The CPU update kernel: one step of AdamW over pages in host memory, in one pass. Moments are in fp32, bf16 or 8 bits,
// masters in fp32 or bf16. Muon, below it, updates one matrix.
//
//     grad (16 bit) -> x scale -> exp_avg, exp_avg_sq, master (in place, as stored) -> out (16 bit)
//
// native_kernel.py builds this with -O3 -march=native -ffp-contract=off. The loops are simple, so that the compiler can
// vectorise them. FMA is used only where `fused` says so, since it changes the last bit. A block of elements stays in
// the L1 cache from one loop to the next, so every byte crosses the memory bus once.

#include "crc32.h"
#include "formats.h"
#include "gradients.h"
#include "numbers.h"
#include "threads.h"

namespace {

constexpr int64_t PIECE = 64 * BLOCK;  // elements that a thread claims at a time

// Copy with non-temporal stores: nothing reads `to` soon, and its old bytes need not be loaded before the write.
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

void write_rounded(const float* __restrict from, Type type, int64_t at, int64_t count, void* out) {
    alignas(64) uint16_t rounded[BLOCK];
    if (type == NONE) return;
    if (type == F32) return stream(static_cast<float*>(out) + at, from, count * 4);
    narrow(from, type, 0, count, rounded);
    stream(static_cast<uint16_t*>(out) + at, rounded, count * 2);
}

// -- one block -------------------------------------------------------------------------------------------------------

// The constants of one step, rounded to fp32 as torch rounds them. rules.py has the same fields.
struct AdamStep {
    float scale;            // factor on the gradient
    float keep;             // 1 - lr x decay
    float lerp;             // 1 - beta1 if that is below 1/2, else -beta1
    int32_t from_gradient;  // 1: `lerp` starts from the gradient (1 - beta1 is at least 1/2); 0: from exp_avg
    float beta2;
    float rest2;            // 1 - beta2
    float root_correction;  // sqrt(1 - beta2 ^ step)
    float eps;
    float minus_step_size;  // -lr / (1 - beta1 ^ step)
};

// Both values are computed before one is selected: a branch around either would prevent vectorisation.
inline float root_over(float v, const Divisor& correction) {
    const float root = std::sqrt(v), over = quotient(root, correction);
    return root == std::numeric_limits<float>::infinity() ? root : over;
}

// The same operations in the same order as the vectorised loop of torch's FusedAdamKernel.cpp.
void adam(const AdamStep& s, const Divisor& correction, float* __restrict master, float* __restrict exp_avg,
          float* __restrict exp_avg_sq, const float* __restrict grad, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float g = grad[i], before = exp_avg[i];
        const float m = fused(s.lerp, g - before, s.from_gradient ? g : before);
        const float v = fused(s.rest2 * g, g, exp_avg_sq[i] * s.beta2);
        const float denominator = root_over(v, correction) + s.eps;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        master[i] = master[i] * s.keep + s.minus_step_size * m / denominator;
    }
}

}  // namespace

extern "C" {

// native_kernel.py has the same fields. Masters are F32 or BF16, moments F32, BF16 or CODES.
struct Page {
    void *master, *exp_avg, *exp_avg_sq;
    float *exp_avg_scales, *exp_avg_sq_scales;
    const void* grad;
    void* out;
    Bits noise, exp_avg_noise;  // the first of masters and, in the upper halves, second moments
    Type masters, moments, grad_type, out_type;
    int64_t shadow;  // bytes from the state to memory that receives its old bytes; 0: there is none
};

struct Part {
    int64_t start, end;  // elements of the page; multiples of BLOCK, except for the page's end
    AdamStep step;
};

}

namespace {

// Update `count` elements from `block` on, at most BLOCK. Everything is inlined: the constant length of strips is then
// known to each loop.
template <Type MASTERS, Type MOMENTS>
[[gnu::flatten]] void update(const Page& page, const AdamStep& step, const Divisor& correction, int64_t block,
                             int64_t count) {
    alignas(64) float first[BLOCK], second[BLOCK];
    alignas(64) uint32_t random[BLOCK];
    uint8_t* const codes = static_cast<uint8_t*>(page.exp_avg) + block;
    uint8_t* const codes_sq = static_cast<uint8_t*>(page.exp_avg_sq) + block;
    float *const scale = page.exp_avg_scales + block / BLOCK, *const scale_sq = page.exp_avg_sq_scales + block / BLOCK;
    for_strips(count, [&](int64_t from, int64_t n) {
        alignas(64) float grad[STRIP], wide[STRIP];
        alignas(64) uint32_t more[STRIP];
        const int64_t at = block + from;
        float *exp_avg = first + from, *exp_avg_sq = second + from;
        uint32_t* const words = random + from;
        if (MASTERS == BF16 || MOMENTS != F32) draw(page.noise, at, n, words);
        float* const master = MASTERS == F32 ? static_cast<float*>(page.master) + at : wide;
        if (MASTERS == BF16) widen(page.master, BF16, at, n, 1.0f, wide);
        widen(page.grad, page.grad_type, at, n, step.scale, grad);
        if (MOMENTS == F32) {
            exp_avg = static_cast<float*>(page.exp_avg) + at, exp_avg_sq = static_cast<float*>(page.exp_avg_sq) + at;
            adam(step, correction, master, exp_avg, exp_avg_sq, grad, n);
        } else if (MOMENTS == BF16) {
            widen(page.exp_avg, BF16, at, n, 1.0f, exp_avg);
            widen(page.exp_avg_sq, BF16, at, n, 1.0f, exp_avg_sq);
            adam(step, correction, master, exp_avg, exp_avg_sq, grad, n);
            draw(page.exp_avg_noise, at, n, more);
            encode_bf16(exp_avg, more, 0, static_cast<uint16_t*>(page.exp_avg) + at, n);
            encode_bf16(exp_avg_sq, words, 16, static_cast<uint16_t*>(page.exp_avg_sq) + at, n);
        } else {
            decode_8bit<true>(codes + from, *scale, exp_avg, n);
            decode_8bit<false>(codes_sq + from, *scale_sq, exp_avg_sq, n);
            adam(step, correction, master, exp_avg, exp_avg_sq, grad, n);
        }
        if (MASTERS == BF16) {
            uint16_t* const stored = static_cast<uint16_t*>(page.master) + at;
            encode_bf16(wide, words, 0, stored, n);
            if (page.out_type != BF16) widen(stored, BF16, 0, n, 1.0f, wide);
        }
        if (MASTERS == BF16 && page.out_type == BF16)
            stream(static_cast<uint16_t*>(page.out) + at, static_cast<uint16_t*>(page.master) + at, n * 2);
        else
            write_rounded(master, page.out_type, at, n, page.out);
    });
    if (MOMENTS == CODES) {
        encode_8bit<true>(first, random, codes, scale, count);
        encode_8bit<false>(second, random, codes_sq, scale_sq, count);
    }
}

// -- a page ----------------------------------------------------------------------------------------------------------

// Copy the state of `count` elements from `at` on to the shadow memory.
template <Type MASTERS, Type MOMENTS>
void keep_old(const Page& page, int64_t at, int64_t count) {
    constexpr int64_t moment = MOMENTS == F32 ? 4 : MOMENTS == BF16 ? 2 : 1;
    const auto keep = [&](void* field, int64_t bytes, int64_t from, int64_t numbers) {
        char* const old = static_cast<char*>(field) + from * bytes;
        stream(old + page.shadow, old, numbers * bytes);
    };
    keep(page.master, MASTERS == F32 ? 4 : 2, at, count);
    for (void* field : {page.exp_avg, page.exp_avg_sq}) keep(field, moment, at, count);
    if (MOMENTS == CODES)
        for (float* scales : {page.exp_avg_scales, page.exp_avg_sq_scales}) keep(scales, 4, at / BLOCK, 1);
}

inline int64_t pieces_of(const Part& part) { return (part.end - part.start + PIECE - 1) / PIECE; }

template <Type MASTERS, Type MOMENTS>
void update_piece(const Page& page, const Part* part, int64_t piece) {
    for (; piece >= pieces_of(*part); part++) piece -= pieces_of(*part);
    const Divisor correction(part->step.root_correction);
    const int64_t start = part->start + piece * PIECE, end = std::min(start + PIECE, part->end);
    for (int64_t at = start; at < end; at += BLOCK) {
        const int64_t count = std::min(BLOCK, end - at);
        if (page.shadow) keep_old<MASTERS, MOMENTS>(page, at, count);
        update<MASTERS, MOMENTS>(page, part->step, correction, at, count);
    }
}

template <Type MASTERS>
auto update_of(Type moments) {
    return moments == F32    ? update_piece<MASTERS, F32>
           : moments == BF16 ? update_piece<MASTERS, BF16>
                             : update_piece<MASTERS, CODES>;
}

// -- Muon --------------------------------------------------------------------------------------------------------------
// `TorchMuon` in muon.py is the reference; the products between the two functions are torch's.

// a + weight x (b - a) with torch's roundings, from the end that is nearer.
struct Lerp {
    float factor;       // weight if that is below 1/2, else weight - 1
    int32_t from_end;   // 1: from b

    float operator()(float a, float b) const { return fused(factor, b - a, from_end ? b : a); }
};

// Call `compute(at, count)` for all blocks of `elements`, on up to `threads` threads.
template <class Compute>
void for_blocks(int64_t elements, int32_t threads, const Compute& compute) {
    share((elements + PIECE - 1) / PIECE, threads, [&](int64_t piece) {
        const int64_t end = std::min((piece + 1) * PIECE, elements);
        for (int64_t at = piece * PIECE; at < end; at += BLOCK) compute(at, std::min(BLOCK, end - at));
    });
}

}  // namespace

extern "C" {

// Update the elements of `count` parts of a page, on up to `threads` threads.
void update_page(const Page* page, const Part* parts, int64_t count, int32_t threads) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < count; i++) pieces += pieces_of(parts[i]);
    const auto update = page->masters == F32 ? update_of<F32>(page->moments) : update_of<BF16>(page->moments);
    share(pieces, threads, [=](int64_t piece) { update(*page, parts, piece); });
}

// Copy `size` bytes past the caches, on up to `threads` threads.
void copy(void* to, const void* from, int64_t size, int32_t threads) {
    constexpr int64_t strip = 1 << 18;
    share((size + strip - 1) / strip, threads, [=](int64_t number) {
        const int64_t at = number * strip;
        stream(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, std::min(strip, size - at));
    });
}

// Add a gradient times `scale` to the momentum `exp_avg`, and write the direction to `out` (bf16).
void muon_direction(const void* grad, Type grad_type, float* exp_avg, uint16_t* out, int64_t elements, float scale,
                    float average, int32_t average_from_end, float nesterov, int32_t nesterov_from_end,
                    int32_t threads) {
    const Lerp to_average{average, average_from_end}, to_direction{nesterov, nesterov_from_end};
    for_blocks(elements, threads, [=](int64_t at, int64_t count) {
        alignas(64) float wide[BLOCK];
        widen(grad, grad_type, at, count, scale, wide);
        for (int64_t i = 0; i < count; i++) {
            const float momentum = to_average(exp_avg[at + i], wide[i]);
            exp_avg[at + i] = momentum;
            out[at + i] = to_bf16(to_direction(wide[i], momentum));
        }
    });
}

// Decay the masters by the factor `keep`, add minus_lr x `orthogonal` (bf16), and round them to `out`, if any.
void muon_step(float* master, const uint16_t* orthogonal, void* out, Type out_type, int64_t elements, float keep,
               float minus_lr, int32_t threads) {
    for_blocks(elements, threads, [=](int64_t at, int64_t count) {
        float* const here = master + at;
        for (int64_t i = 0; i < count; i++)
            here[i] = fused(minus_lr, from_bf16(orthogonal[at + i]), here[i] * keep);
        write_rounded(here, out_type, at, count, out);
    });
}

// Return the checksum of `size` bytes (CRC-32 of zlib), or -1 if this CPU has no carry-less multiplication.
int64_t page_sum(const uint8_t* data, int64_t size) {
#ifdef __PCLMUL__
    return crc_of(data, size);
#else
    return -1;
#endif
}

}
