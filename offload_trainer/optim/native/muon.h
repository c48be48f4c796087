// Muon's arithmetic on the elements of one matrix in host memory. `TorchMuon` in muon.py is the reference; the products
// between the two functions are torch's.
#pragma once

#include <atomic>

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

// matrix_kernel.py has the same fields.
struct MuonDirection {
    const void* grad;
    float* exp_avg;
    uint16_t* out;  // bf16
    int64_t count;
    float scale;  // factor on the gradient
    Lerp average, nesterov;
    Type grad_type;
};

struct MuonStep {
    float* master;
    const uint16_t* orthogonal;  // bf16
    void* out;
    int64_t count;
    float keep;      // 1 - lr x decay
    float minus_lr;  // of this shape
    Type out_type;
};

inline int64_t count_of(const MuonDirection& call) { return call.count; }
inline int64_t count_of(const MuonStep& call) { return call.count; }

inline void compute(const MuonDirection& call, int64_t at, int64_t count) {
    alignas(64) float grad[BLOCK];
    widen(call.grad, call.grad_type, at, count, call.scale, grad);
    for (int64_t i = 0; i < count; i++) {
        const float average = call.average(call.exp_avg[at + i], grad[i]);
        call.exp_avg[at + i] = average;
        call.out[at + i] = to_bf16(call.nesterov(grad[i], average));
    }
}

inline void compute(const MuonStep& call, int64_t at, int64_t count) {
    float* const master = call.master + at;
    for (int64_t i = 0; i < count; i++)
        master[i] = fused(call.minus_lr, from_bf16(call.orthogonal[at + i]), master[i] * call.keep);
    write_rounded(master, call.out_type, at, count, call.out);
}

template <class Of>
struct MuonCall {
    const Of& of;
    std::atomic<int64_t> next{0};
};

template <class Of>
void compute_pieces(void* shared) {
    MuonCall<Of>& call = *static_cast<MuonCall<Of>*>(shared);
    const int64_t all = count_of(call.of);
    for (int64_t piece; (piece = call.next.fetch_add(1, std::memory_order_relaxed)) * PIECE < all;) {
        const int64_t end = std::min((piece + 1) * PIECE, all);
        for (int64_t at = piece * PIECE; at < end; at += BLOCK) compute(call.of, at, std::min(BLOCK, end - at));
    }
    finish_stream();
}

template <class Of>
void compute_all(const Of& of, int32_t threads) {
    MuonCall<Of> call{of};
    const int64_t pieces = (count_of(of) + PIECE - 1) / PIECE;
    the_crew().run(compute_pieces<Of>, &call, int(std::min(int64_t(threads), pieces)) - 1);
}

}  // namespace

extern "C" {

void muon_direction(const MuonDirection* of, int32_t threads) { compute_all(*of, threads); }
void muon_step(const MuonStep* of, int32_t threads) { compute_all(*of, threads); }

}
