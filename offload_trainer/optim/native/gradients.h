// Add gradients to sums in host memory and measure the sums, in one pass.
//
//     gradient ──widen──> + sum ──round──> sum       in fp32, stored in the sums' format
//                            └──squares──> one result a piece of `width` elements
//
// torch's norm of a contiguous fp32 tensor keeps one running sum in each lane of a vector, adds the lanes in order, and
// then the elements that fill no vector. How many lanes there are, and where a square and its addition are fused,
// depends on how torch was built and on the CPU; kernels.py finds the order with torch's bits. Ordered norms (norms.py)
// halve: element i + half is added to element i until one is left.
#pragma once

#include <memory>
#include <new>

#include "formats.h"
#include "threads.h"

namespace {

constexpr int64_t STRETCH = 1 << 14;  // elements that a thread claims at a time if nothing is measured
constexpr int64_t ROW = 1024;  // elements that are added at a time; halving adds the squares of whole rows
constexpr int64_t MOST_SUBS = 16;  // parts of a piece that threads take one by one

struct Addition {
    void* sums;
    const void* values;  // null: the sums are only measured
    int64_t count;
    int64_t width;  // elements of a piece
    float* results;  // null: nothing is measured
    Type sums_type, values_type;
    int32_t first;  // 1: the gradient replaces the sum
    int32_t lanes;  // 0: halving
    int32_t group;  // of the elements that fill no vector, whole groups of so many are not fused; 0: all are fused
};

// Update the sums of `count` elements from `at` on, at most ROW, and return them in fp32 as they are stored.
void add_block(const Addition& call, int64_t at, int64_t count, float* __restrict to) {
    if (!call.values) return widen(call.sums, call.sums_type, at, count, 1.0f, to);
    widen(call.values, call.values_type, at, count, 1.0f, to);
    if (!call.first) {
        alignas(64) float before[ROW];
        widen(call.sums, call.sums_type, at, count, 1.0f, before);
        for (int64_t i = 0; i < count; i++) to[i] = before[i] + to[i];
    } else if (call.values_type == call.sums_type) {  // as they are: rounding would not change them
        const int64_t size = call.sums_type == F32 ? 4 : 2;
        std::memcpy(static_cast<char*>(call.sums) + at * size, static_cast<const char*>(call.values) + at * size,
                    count * size);
        return;
    }
    narrow(to, call.sums_type, at, count, call.sums);
    if (call.results && call.sums_type != F32)
        widen(call.sums, call.sums_type, at, count, 1.0f, to);
}

// -- torch's order ---------------------------------------------------------------------------------------------------

inline float add_square(float sum, float value, bool fused) {
    return fused ? __builtin_fmaf(value, value, sum) : sum + value * value;
}

template <int N>
struct Vector {
    typedef float type __attribute__((vector_size(N * sizeof(float))));
};

// Add the squares of `count` values, a multiple of N, to N sums. A vector keeps the sums in a register.
template <int N>
void add_squares(const float* values, int64_t count, float* sums, bool fused) {
    if (fused) {
        for (int64_t v = 0; v < count; v += N)
            for (int lane = 0; lane < N; lane++) sums[lane] = add_square(sums[lane], values[v + lane], true);
        return;
    }
    typename Vector<N>::type total, value;
    std::memcpy(&total, sums, sizeof total);
    for (int64_t v = 0; v < count; v += N) {
        std::memcpy(&value, values + v, sizeof value);
        total += value * value;
    }
    std::memcpy(sums, &total, sizeof total);
}

template <int N>
void measure_lanes(const Addition& call, int64_t piece) {
    const bool fused = call.group == 0;
    const int64_t start = piece * call.width, count = std::min(call.width, call.count - start), left = count % N;
    alignas(64) float values[ROW], sums[N] = {};
    const float* tail = values;
    for (int64_t at = 0; at < count; at += ROW) {
        const int64_t here = std::min(ROW, count - at), whole = here / N * N;
        add_block(call, start + at, here, values);
        add_squares<N>(values, whole, sums, fused);
        tail = values + whole;
    }
    float sum = sums[0];
    for (int lane = 1; lane < N; lane++) sum += sums[lane];
    const int64_t unfused = fused ? 0 : left / call.group * call.group;
    for (int64_t i = 0; i < left; i++) sum = add_square(sum, tail[i], i >= unfused);
    call.results[piece] = std::sqrt(sum);
}

// -- halving ---------------------------------------------------------------------------------------------------------

// A piece as rows of `row` elements. Rows beyond the last element are zero and left out.
struct Rows {
    int64_t start, count, row, rows;

    // Write the sums of squares of rows j, j + step, j + 2 step, ... to `out`.
    void sum(const Addition& call, int64_t j, int64_t step, float* __restrict out) const {
        if (step == rows) {
            const int64_t here = std::max(int64_t(0), std::min(row, count - j * row));
            if (here) add_block(call, start + j * row, here, out);
            for (int64_t i = 0; i < here; i++) out[i] *= out[i];
            for (int64_t i = here; i < row; i++) out[i] = 0;
            return;
        }
        sum(call, j, 2 * step, out);
        if ((j + step) * row >= count) return;
        alignas(64) float other[ROW];
        sum(call, j + step, 2 * step, other);
        for (int64_t i = 0; i < row; i++) out[i] += other[i];
    }
};

inline Rows rows_of(const Addition& call, int64_t piece) {
    const int64_t start = piece * call.width, row = std::min(ROW, call.width);
    return {start, std::min(call.width, call.count - start), row, call.width / row};
}

inline float halved(float* __restrict sums, int64_t count) {
    while (count > 1) {
        count /= 2;
        for (int64_t i = 0; i < count; i++) sums[i] += sums[i + count];
    }
    return sums[0];
}

// -- a call ----------------------------------------------------------------------------------------------------------

// Do one task of a call. `subs` parts of a halved piece are tasks of their own, and `parts` gets the sums of each.
void add_task(const Addition& addition, int64_t subs, float* parts, int64_t task) {
    alignas(64) float sums[ROW];
    if (!addition.results) {
        const int64_t start = task * STRETCH, end = std::min(start + STRETCH, addition.count);
        for (int64_t at = start; at < end; at += ROW) add_block(addition, at, std::min(ROW, end - at), sums);
    } else if (const int32_t lanes = addition.lanes) {
        (lanes == 16 ? measure_lanes<16> : lanes == 8 ? measure_lanes<8> : measure_lanes<4>)(addition, task);
    } else {
        const Rows rows = rows_of(addition, task / subs);
        rows.sum(addition, task % subs, subs, parts ? parts + task * ROW : sums);
        if (!parts) addition.results[task] = halved(sums, rows.row);
    }
}

}  // namespace

extern "C" {

// Add, measure, or both, on up to `threads` threads. Return 0, or -1 if there is no memory.
int32_t add_gradient(const Addition* addition, int32_t threads) {
    const int64_t pieces = (addition->count + addition->width - 1) / addition->width;
    int64_t tasks = addition->results ? pieces : (addition->count + STRETCH - 1) / STRETCH, subs = 1;
    std::unique_ptr<float[]> parts;
    if (addition->results && !addition->lanes && threads > 1 && pieces < 4 * threads) {
        subs = std::min(MOST_SUBS, rows_of(*addition, 0).rows);
        tasks = pieces * subs;
        parts.reset(new (std::nothrow) float[tasks * ROW]);
        if (!parts) return -1;
    }
    share(tasks, threads, [&](int64_t task) { add_task(*addition, subs, parts.get(), task); });
    for (int64_t piece = 0; parts && piece < pieces; piece++)  // with several parts, rows have ROW elements
        addition->results[piece] = halved(parts.get() + piece * subs * ROW, subs * rows_of(*addition, piece).row);
    return 0;
}

}
