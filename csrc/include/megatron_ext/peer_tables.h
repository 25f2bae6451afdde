// The kernels' tables (peer_exchange.h) from lists of integers, as transports write them: one row
// of words for the device, and where its parts begin.
//
// Made on the host, because the transfers are there. A kernel that made them from the plan on the
// device would save the walk over the transfers and, above all, the planner's copy of the plan to
// the host, which waits for the device; and a captured graph would follow the plans of its replays,
// where now it repeats the transfers of its capture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "megatron_ext/peer_exchange.h"

namespace megatron_ext {

using Words = std::vector<int64_t>;

// What pushes and pulls have in common. `used`: rank and slot of each used slot of this rank, as
// `wait_peers_cuda` takes them.
struct PeerTable {
    Words words;
    int64_t rows_at = 0;    // copies or sums
    int64_t places_at = 0;  // destinations or replicas
    int64_t used_at = 0;
    int64_t num_rows = 0;
    int64_t num_places = 0;
    int64_t num_used = 0;
};

namespace peer_tables {

// `lists`: row after row, `head` words and the number of places, then rank and slot of each place.
// A row on the device is the head, the first place and the number of places.
inline PeerTable make(Words addresses, const Words& lists, size_t head, const Words& used) {
    PeerTable table{std::move(addresses)};
    Words places;
    table.rows_at = static_cast<int64_t>(table.words.size());
    for (size_t i = 0; i < lists.size();) {
        const auto row = lists.begin() + static_cast<ptrdiff_t>(i);
        const auto first = row + static_cast<ptrdiff_t>(head) + 1;
        const int64_t count = lists.at(i + head);
        table.words.insert(table.words.end(), row, first - 1);
        table.words.push_back(static_cast<int64_t>(places.size()) / 2);
        table.words.push_back(count);
        places.insert(places.end(), first, first + 2 * count);
        ++table.num_rows;
        i += head + 1 + 2 * static_cast<size_t>(count);
    }
    table.places_at = static_cast<int64_t>(table.words.size());
    table.num_places = static_cast<int64_t>(places.size()) / 2;
    table.words.insert(table.words.end(), places.begin(), places.end());
    table.used_at = static_cast<int64_t>(table.words.size());
    table.num_used = static_cast<int64_t>(used.size()) / 2;
    table.words.insert(table.words.end(), used.begin(), used.end());
    return table;
}

template <class Row>
const Row* rows(const int64_t* words, int64_t at) {
    return reinterpret_cast<const Row*>(words + at);
}

}  // namespace peer_tables

// A push.
//   mains   addresses of the mains' segments, main after main, in the order of the copies from
//   mains copies  for each copy: rank and slot where it comes from if it is relayed, else -1 -1;
//   then the
//           number of destinations, then rank and slot of each; copies from mains first
//   filled  rank that fills and slot, for each used slot of this rank
inline PeerTable push_table(Words mains, const Words& copies, const Words& filled) {
    static_assert(sizeof(PeerCopy) == 4 * sizeof(int64_t));
    return peer_tables::make(std::move(mains), copies, 2, filled);
}

// A pull.
//   sums      addresses of the sums, main after main, segment by segment
//   replicas  for each main: the number of replicas, then rank and slot of each
//   computed  rank of the main and slot, for each used slot of this rank
inline PeerTable pull_table(Words sums, const Words& replicas, const Words& computed) {
    static_assert(sizeof(PeerSum) == 2 * sizeof(int64_t));
    return peer_tables::make(std::move(sums), replicas, 0, computed);
}

// What the kernels get; `words` are those of the table, on the device.
inline PeerPush peer_push(const PeerTable& table,
                          const int64_t* words,
                          const PeerSegments& segments) {
    return {segments,
            peer_tables::rows<PeerCopy>(words, table.rows_at),
            peer_tables::rows<const char*>(words, 0),
            peer_tables::rows<PeerPlace>(words, table.places_at),
            table.num_rows};
}

// `is_bfloat16` is left to the caller.
inline PeerPull peer_pull(const PeerTable& table,
                          const int64_t* words,
                          const PeerSegments& segments) {
    return {segments,
            {},
            peer_tables::rows<PeerSum>(words, table.rows_at),
            peer_tables::rows<float*>(words, 0),
            peer_tables::rows<PeerPlace>(words, table.places_at),
            table.num_rows};
}

inline const PeerPlace* used_places(const PeerTable& table, const int64_t* words) {
    return peer_tables::rows<PeerPlace>(words, table.used_at);
}

}  // namespace megatron_ext
