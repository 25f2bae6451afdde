// Stage 2, host build: one source rank's share of every quota, the ids of the instances, and what
// comes to those of one rank.
//
// Source: UltraEP, Algorithm 1 (SolveReroute); the rest beyond own assignments is split as in
// tests/reference/reroute.py instead of by rounded proportions.

#include <algorithm>

#include "megatron_ext/api.h"

namespace megatron_ext {

void split_quota(int64_t num_ranks,
                 int64_t num_experts,
                 const int64_t* load,
                 const int64_t* quota,
                 int64_t source_rank,
                 int64_t* split) {
    const int64_t mains = num_experts / num_ranks;
    for (int64_t e = 0; e < num_experts; ++e) {
        const int64_t* expert_quota = quota + e * num_ranks;
        int64_t* share = split + e * num_ranks;
        const int64_t home = e / mains;
        const auto demand = [&](int64_t r) { return load[r * num_experts + e]; };
        // What rank r's instance takes of r's own assignments.
        const auto local = [&](int64_t r) { return std::min(demand(r), expert_quota[r]); };

        std::fill_n(share, num_ranks, int64_t{0});
        share[source_rank] = local(source_rank);

        // The source's piece of the line of residual demands ...
        int64_t begin = 0;
        for (int64_t r = 0; r < source_rank; ++r) begin += demand(r) - local(r);
        const int64_t end = begin + demand(source_rank) - local(source_rank);
        if (begin == end) continue;

        // ... against the instances' pieces of the equally long line of residual quotas.
        int64_t position = 0;
        const auto overlap = [&](int64_t t) {
            const int64_t next = position + expert_quota[t] - local(t);
            share[t] += std::max<int64_t>(std::min(end, next) - std::max(begin, position), 0);
            position = next;
        };
        overlap(home);
        for (int64_t t = 0; t < num_ranks && position < end; ++t) {
            if (t != home) overlap(t);
        }
    }
}

void number_instances(int64_t num_ranks,
                      int64_t num_experts,
                      int64_t num_slots,
                      const int32_t* slots,
                      int64_t* physical_index) {
    const int64_t mains = num_experts / num_ranks;
    const int64_t places = mains + num_slots;
    std::fill_n(physical_index, num_experts * num_ranks, int64_t{-1});
    for (int64_t e = 0; e < num_experts; ++e) {
        const int64_t home = e / mains;
        physical_index[e * num_ranks + home] = home * places + e % mains;
    }
    for (int64_t i = 0; i < num_ranks * num_slots; ++i) {
        const int64_t t = i / num_slots;
        if (slots[i] < 0 || slots[i] >= num_experts) continue;
        physical_index[slots[i] * num_ranks + t] = t * places + mains + i % num_slots;
    }
}

void count_arriving(int64_t num_ranks,
                    int64_t num_experts,
                    int64_t num_slots,
                    const int64_t* load,
                    const int64_t* quota,
                    const int32_t* slots,
                    int64_t rank,
                    int64_t* arriving) {
    const int64_t mains = num_experts / num_ranks;
    const int64_t places = mains + num_slots;
    std::fill_n(arriving, num_ranks * places, int64_t{0});
    for (int64_t place = 0; place < places; ++place) {
        const int64_t e = place < mains ? rank * mains + place : slots[place - mains];
        if (e < 0 || e >= num_experts) continue;
        const int64_t* expert_quota = quota + e * num_ranks;
        const int64_t home = e / mains;
        const auto demand = [&](int64_t r) { return load[r * num_experts + e]; };
        const auto local = [&](int64_t r) { return std::min(demand(r), expert_quota[r]); };

        // The same lines as in split_quota(), seen from one instance.
        int64_t begin = 0;
        for (int64_t t = 0; t < num_ranks; ++t) {
            if (rank != home && (t == home || t < rank)) begin += expert_quota[t] - local(t);
        }
        const int64_t end = begin + expert_quota[rank] - local(rank);
        int64_t position = 0;
        for (int64_t r = 0; r < num_ranks; ++r) {
            const int64_t next = position + demand(r) - local(r);
            const int64_t shared = std::min(end, next) - std::max(begin, position);
            arriving[r * places + place] =
                std::max<int64_t>(shared, 0) + (r == rank ? local(rank) : 0);
            position = next;
        }
    }
}

void sum_arriving(int64_t num_ranks, int64_t places, const int64_t* arriving, int64_t* arrivals) {
    std::fill_n(arrivals, num_ranks + places, int64_t{0});
    // Wraps: slots that name an expert twice count what comes to it twice.
    const auto add = [&](int64_t to, int64_t count) {
        arrivals[to] = static_cast<int64_t>(static_cast<uint64_t>(arrivals[to]) +
                                            static_cast<uint64_t>(count));
    };
    for (int64_t r = 0; r < num_ranks; ++r) {
        for (int64_t place = 0; place < places; ++place) {
            add(r, arriving[r * places + place]);
            add(num_ranks + place, arriving[r * places + place]);
        }
    }
}

}  // namespace megatron_ext
