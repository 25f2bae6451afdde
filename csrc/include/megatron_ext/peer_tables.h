// Makes the pull kernel's tables (peer_exchange.h) from lists of integers, as transports write
// them: one row of words for the device, and where its parts begin.
//
// The tables are made on the host, which must know anyway which mains have replicas: it allocates
// their sums. A push's tables are compiled on the device (compile_copies.cuh).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "megatron_ext/peer_exchange.h"

namespace megatron_ext {

using Words = std::vector<int64_t>;

// `used`: rank of the main and slot, for each used slot of this rank, as `wait_peers_cuda` takes
// them.
struct PullTable {
    Words words;
    int64_t sums_at = 0;
    int64_t replicas_at = 0;
    int64_t used_at = 0;
    int64_t num_sums = 0;
    int64_t num_used = 0;
};

//   totals    addresses of the sums, main after main, segment by segment
//   replicas  for each main: the number of replicas, then rank and slot of each
//   computed  rank of the main and slot, for each used slot of this rank
inline PullTable pull_table(Words totals, const Words& replicas, const Words& computed) {
    static_assert(sizeof(PeerSum) == 2 * sizeof(int64_t));
    static_assert(sizeof(PeerPlace) == 2 * sizeof(int64_t));
    PullTable table{std::move(totals)};
    Words& words = table.words;
    Words places;
    table.sums_at = static_cast<int64_t>(words.size());
    for (size_t i = 0; i < replicas.size(); ++table.num_sums) {
        const int64_t count = replicas[i++];
        words.push_back(static_cast<int64_t>(places.size()) / 2);
        words.push_back(count);
        for (int64_t word = 0; word < 2 * count; ++word) places.push_back(replicas.at(i++));
    }
    table.replicas_at = static_cast<int64_t>(words.size());
    words.insert(words.end(), places.begin(), places.end());
    table.used_at = static_cast<int64_t>(words.size());
    table.num_used = static_cast<int64_t>(computed.size()) / 2;
    words.insert(words.end(), computed.begin(), computed.end());
    return table;
}

// What the kernel gets; `words` are those of the table, on the device. `is_bfloat16` is left to the
// caller.
inline PeerPull peer_pull(const PullTable& table,
                          const int64_t* words,
                          const PeerSegments& segments) {
    return {segments,
            {},
            reinterpret_cast<const PeerSum*>(words + table.sums_at),
            reinterpret_cast<float* const*>(words),
            reinterpret_cast<const PeerPlace*>(words + table.replicas_at),
            table.num_sums};
}

inline const PeerPlace* used_places(const PullTable& table, const int64_t* words) {
    return reinterpret_cast<const PeerPlace*>(words + table.used_at);
}

}  // namespace megatron_ext
