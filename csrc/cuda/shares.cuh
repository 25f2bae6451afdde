// A source rank's shares of an expert's quotas with a warp, one lane for each instance.
#pragma once

#include "lines.cuh"
#include "megatron_ext/cuda_api.h"

namespace megatron_ext {

// Call take(t, share) in instance order: the share of the instance on rank t, by a lane each; lanes
// without an instance have t = -1 and nothing. Called by all lanes, for the same expert.
template <class Take>
__device__ void share_expert(const SharedQuotas& quotas, int64_t e, int64_t source, Take take) {
    const DeviceWarp warp;
    const auto smaller = [](int64_t a, int64_t b) { return a < b ? a : b; };
    const auto greater = [](int64_t a, int64_t b) { return a > b ? a : b; };
    const int64_t ranks = quotas.num_ranks;
    const int64_t home = e / (quotas.num_experts / ranks);
    const int64_t* quota = quotas.quota + e * ranks;
    const auto demand = [&](int64_t r) { return quotas.load[r * quotas.load_stride + e]; };
    // What rank r's instance takes of r's own assignments.
    const auto local = [&](int64_t r) { return smaller(demand(r), quota[r]); };

    // The source's piece of the line of residual demands ...
    const int64_t begin =
        warp.sum(static_cast<int>(source), [&](int r) { return demand(r) - local(r); });
    const int64_t end = begin + demand(source) - local(source);
    // ... against the instances' pieces of the equally long line of residual quotas.
    int64_t position = 0;
    for (int64_t first = 0; first < ranks; first += DeviceWarp::kLanes) {
        const int64_t i = first + warp.lane();
        const int64_t t = i < ranks ? rank_at(i, home) : -1;
        const int64_t length = t >= 0 ? quota[t] - local(t) : 0;
        const int64_t next = position + sum_up_to_lane(length);
        const int64_t shared = greater(smaller(end, next) - greater(begin, next - length), 0);
        take(t, t < 0 ? 0 : shared + (t == source ? local(t) : 0));
        position = of_last_lane(next);
    }
}

}  // namespace megatron_ext
