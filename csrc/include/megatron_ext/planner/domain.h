// The parts of planning one NVLink domain: the domain, the state of a try, and the moves that
// change the state. The other files of this folder choose moves; attempt.h runs a try.
//
// Legend: D ranks of the domain, M mains per rank, S slots per rank. Ranks and experts are counted
// from the domain's first; the main of expert e lives on rank e / M. Where nothing else is said,
// ties go to the lowest index.
#pragma once

#include <cstdint>

#include "megatron_ext/warp.h"

namespace megatron_ext {

// A domain but for its arrays. Amount: int32 if nothing that a try compares leaves 32 bits
// (is_narrow), else int64.
template <class Amount>
struct DomainSizes {
    int ranks;          // D
    int mains;          // M
    int slots;          // S
    uint32_t per_slot;  // see per_slot_of
    Amount min_quota;
    bool even;  // whether no rank may be idler than the others by more than one assignment

    MEGATRON_EXT_HOST_DEVICE int experts() const { return ranks * mains; }

    // The rank of one of the D * S slots, without a division.
    MEGATRON_EXT_HOST_DEVICE int rank_of(int slot) const {
        return static_cast<int>(uint64_t{static_cast<uint32_t>(slot)} * per_slot >> 31);
    }
    // 2^31 / S and a little: exact as long as D * S * S is below 2^31.
    MEGATRON_EXT_HOST_DEVICE static uint32_t per_slot_of(int slots) {
        return slots > 0 ? (uint32_t{1} << 31) / static_cast<uint32_t>(slots) + 1 : 0;
    }
};

template <class Amount>
struct Domain : DomainSizes<Amount> {
    const Amount* expert_load;     // [D * M] assignments of all sources
    const Amount* home_load;       // [D] assignments of a rank's mains
    const int32_t* busiest_first;  // [D] ranks
    const int32_t* hottest;        // [D] main of a rank with most load, of the rank's 0 to M - 1

    MEGATRON_EXT_HOST_DEVICE Amount before() const { return home_load[busiest_first[0]]; }
};

// Whether tries of a domain may count in 32 bits. Nobody has more than the busiest rank, no key is
// more than twice that, and no sum over the ranks is more than they would have if all had as much.
MEGATRON_EXT_HOST_DEVICE inline bool is_narrow(int64_t before, int ranks, int64_t min_quota) {
    constexpr int64_t kMost = (int64_t{1} << (32 - kIndexBits)) - 1;  // All ones are no word.
    static_assert(kIndexBits > kRankBits, "no key of a rank is more than twice that");
    return before < kMost && min_quota < kMost && before * ranks <= INT32_MAX;
}

// Work is counted in rounds of a warp: one operation on 32 indices. So many rounds a pass over all
// ranks takes.
MEGATRON_EXT_HOST_DEVICE inline int32_t rounds_of(int count) { return (count + 31) >> 5; }

// Arrays of a try, in memory of the caller.
template <class Amount>
struct TryMemory {
    int64_t* words;     // [D] for what lanes put side by side; see also hosts.h
    Amount* room;       // [D] assignments a rank may still take; below 0 it has to shed some
    Amount* host_room;  // [D] the same of hosts; see hosts.h
    Amount* width;      // [D] what a chain carries to a rank
    Amount* wider;      // [D] the same after one more step
    Amount* kept;       // [D * M] assignments that stay with the main
    Amount* amount;     // [D * S] assignments of a replica
    int32_t* held;      // [D] slots in use, from slot 0
    int32_t* sends;     // [D] replicas of a rank's mains
    int32_t* hottest;   // [D] expert of a rank that keeps most
    int32_t* order;     // [D] ranks, in the order of shedding
    int32_t* host;      // [D] of SortedHosts
    int32_t* step;      // [D] last step of the chain to a rank
    int32_t* expert;    // [D * S] expert of a replica
    int32_t* giver;     // [D * S] home of that expert
    int32_t* given;     // [D * S] replicas of one rank's mains

    // Lay the arrays out behind `memory`, which has `bytes` for them; for `ranks` ranks or fewer.
    MEGATRON_EXT_HOST_DEVICE static int bytes(int ranks, int experts, int slots) {
        TryMemory memory{};
        return memory.lay_out(nullptr, ranks, experts, slots);
    }

    MEGATRON_EXT_HOST_DEVICE int lay_out(char* memory, int ranks, int experts, int slots) {
        int offset = 0;
        const int d = ranks;
        // Those of one number first: where that is known to the compiler, so is their place.
        put(words, memory, offset, d);
        put(room, memory, offset, d);
        put(host_room, memory, offset, d);
        put(width, memory, offset, d);
        put(wider, memory, offset, d);
        put(held, memory, offset, d);
        put(sends, memory, offset, d);
        put(hottest, memory, offset, d);
        put(order, memory, offset, d);
        put(host, memory, offset, d);
        put(step, memory, offset, d);
        offset = (offset + 15) / 16 * 16;
        put(amount, memory, offset, d * slots);
        put(kept, memory, offset, experts);
        put(expert, memory, offset, d * slots);
        put(giver, memory, offset, d * slots);
        put(given, memory, offset, d * slots);
        return (offset + 15) / 16 * 16;
    }

  private:
    template <class T>
    MEGATRON_EXT_HOST_DEVICE static void put(T*& array, char* memory, int& offset, int n) {
        if (memory != nullptr) array = reinterpret_cast<T*>(memory + offset);
        offset += n * static_cast<int>(sizeof(T));
    }
};

}  // namespace megatron_ext
