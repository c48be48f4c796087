// Split masters: 2 bytes in addition to the bf16 weight, a block at a time. split_masters.py is the reference.
#pragma once

#include "formats.h"

namespace {

constexpr uint16_t MIDDLE = 0x8000;

// Return whether a master is at the midpoint and was rounded down, to the even weight that is its upper half.
inline bool is_tie(uint32_t word) {
    return uint32_t((word & 0x1ffff) == MIDDLE) & uint32_t((word & MAGNITUDE) < INFINITE);
}

// Store the positions of a block's ties in its lower halves; return their number.
inline uint16_t list_ties(const float* master, uint16_t* remainder, int64_t count) {
    bool tie[BLOCK];
    int64_t ties = 0;
    for (int64_t i = 0; i < count; i++) ties += tie[i] = is_tie(bits(master[i]));
    int64_t to = ties, next = 0;
    for (int64_t i = 0; i < ties; i++) {
        if (tie[i]) continue;
        while (!tie[to]) to++;
        remainder[to++] = remainder[i];
    }
    for (int64_t i = 0; i < count; i++)
        if (tie[i]) remainder[next++] = uint16_t(i);
    return uint16_t(ties);
}

// Reverse `list_ties`. Data damaged on a drive gives wrong numbers, but no access outside the block.
inline void put_back(uint16_t* remainder, int64_t ties, bool* tie, int64_t count) {
    std::fill(tie, tie + count, false);
    for (int64_t i = 0; i < std::min(ties, count); i++) tie[std::min(int64_t(remainder[i]), count - 1)] = true;
    const int64_t first = std::count(tie, tie + count, true);
    int64_t from = first;
    for (int64_t i = 0; i < first; i++) {
        if (tie[i]) continue;
        while (!tie[from]) from++;
        remainder[i] = remainder[from++];
    }
    for (int64_t i = 0; i < count; i++)
        if (tie[i]) remainder[i] = MIDDLE;
}

inline void join_halves(const uint16_t* __restrict weight, const uint16_t* __restrict remainder,
                        float* __restrict master, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t upper = uint32_t(weight[i]) << 16, lower = remainder[i];
        const uint32_t way = uint32_t(int32_t(int16_t(remainder[i])));
        master[i] = number((upper & MAGNITUDE) > INFINITE ? upper | lower : upper + way);
    }
}

inline void join(const uint16_t* weight, const uint16_t* remainder, uint16_t ties, float* master, int64_t count) {
    if (ties == 0) return join_halves(weight, remainder, master, count);
    uint16_t restored[BLOCK];
    bool tie[BLOCK];
    std::memcpy(restored, remainder, count * sizeof *restored);
    put_back(restored, ties, tie, count);
    join_halves(weight, restored, master, count);
    for (int64_t i = 0; i < count; i++)
        if (tie[i]) master[i] = number((uint32_t(weight[i]) << 16) + MIDDLE);
}

inline void split(const float* __restrict master, uint16_t* __restrict weight, uint16_t* __restrict remainder,
                  uint16_t* __restrict ties, int64_t count) {
    uint32_t any = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t word = bits(master[i]);
        weight[i] = to_bf16(master[i]);
        remainder[i] = uint16_t(word);
        any |= is_tie(word);
    }
    *ties = any ? list_ties(master, remainder, count) : 0;
}

}  // namespace
