// Muon's arithmetic on the elements of one matrix in host memory. `TorchMuon` in muon.py is the reference; the products
// between the two functions are torch's.
#pragma once

#include "formats.h"
#include "numbers.h"
#include "threads.h"

namespace {

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

}
