// Seals: 64-bit digests of what all ranks of an EP group must hold alike.
//
// A seal is the sum of its words, each mixed with its position. So the order of the additions does
// not matter, and host and device get the same seal. One wrong word always changes it: for a
// position, the mixing maps different words to different numbers. Several wrong words leave it as
// it is with a chance of 2^-64. Mixing takes most of the time, so a load and a quota share a word.
#pragma once

#include <cstdint>

#include "megatron_ext/host_device.h"

namespace megatron_ext {

// A word's part of a seal. The finalizer of SplitMix64; the constant is 2^64 over the golden
// section, so positions that follow each other get far apart.
MEGATRON_EXT_HOST_DEVICE inline uint64_t sealed_word(int64_t position, int64_t word) {
    uint64_t mixed =
        static_cast<uint64_t>(word) + static_cast<uint64_t>(position + 1) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
}

// Words `from`, `from` + `step`, ... of an array that begins at `position` of what is sealed.
template <class Word>
MEGATRON_EXT_HOST_DEVICE uint64_t
sealed_words(const Word* words, int64_t count, int64_t position, int64_t from, int64_t step) {
    uint64_t sum = 0;
    for (int64_t i = from; i < count; i += step) sum += sealed_word(position + i, words[i]);
    return sum;
}

// What is sealed of a load and its plan: the pairs of load [R, E] and quota [E, R], by their places
// in memory, then slots [R, S].
struct SealedPlan {
    const int64_t* load;
    int64_t load_stride;  // from a row of the load to the next
    int64_t num_experts;  // E
    const int64_t* quota;
    const int32_t* slots;
    int64_t num_pairs;     // R * E
    int64_t num_replicas;  // R * S

    // The sum of every `step`-th word, from the word `from` of each array on.
    MEGATRON_EXT_HOST_DEVICE uint64_t sum(int64_t from, int64_t step) const {
        return sealed_pairs(from, step) + sealed_words(slots, num_replicas, num_pairs, from, step);
    }

  private:
    // Both are counts, below 2^32: each has half of the word to itself.
    MEGATRON_EXT_HOST_DEVICE static int64_t pair(int64_t load, int64_t quota) {
        const auto word = static_cast<uint64_t>(quota);
        return load ^ static_cast<int64_t>(word << 32 | word >> 32);
    }

    // As `sealed_words`. The rows of the load need not follow each other; divides once, not for
    // each word.
    MEGATRON_EXT_HOST_DEVICE uint64_t sealed_pairs(int64_t from, int64_t step) const {
        const int64_t rows = step / num_experts;
        const int64_t columns = step % num_experts;
        int64_t r = from / num_experts;
        int64_t e = from % num_experts;
        uint64_t sum = 0;
        for (int64_t i = from; i < num_pairs; i += step) {
            sum += sealed_word(i, pair(load[r * load_stride + e], quota[i]));
            r += rows;
            e += columns;
            if (e >= num_experts) {
                e -= num_experts;
                ++r;
            }
        }
        return sum;
    }
};

// The seals of all ranks, and where the first that differ are kept.
struct Seals {
    const int64_t* each;  // of rank r at each[r * stride]
    int64_t stride;
    int64_t num_ranks;
    int64_t layer;        // of the plans that were sealed
    int64_t* difference;  // 1 if there is one, else 0; then the layer; then R seals
};

}  // namespace megatron_ext
