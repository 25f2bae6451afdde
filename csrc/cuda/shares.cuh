// Shares of an expert's quotas with a warp: a source rank's, one lane for each instance, or an
// instance's, one lane for each source rank.
#pragma once

#include "lines.cuh"
#include "megatron_ext/cuda_api.h"

namespace megatron_ext {

// What the ranks have of one expert, and what its instances take.
class ExpertShares {
  public:
    __device__ ExpertShares(const SharedQuotas& quotas, int64_t e)
        : quotas_(quotas),
          e_(e),
          home_(e / (quotas.num_experts / quotas.num_ranks)),
          quota_(quotas.quota + e * quotas.num_ranks) {}

    __device__ int64_t home() const { return home_; }
    // What rank r's instance takes of r's own assignments.
    __device__ int64_t local(int64_t r) const { return demand(r) < quota_[r] ? demand(r) : quota_[r]; }
    // Pieces of two equally long lines: what rank r has besides, and what its instance takes besides.
    __device__ int64_t residual_demand(int64_t r) const { return demand(r) - local(r); }
    __device__ int64_t residual_quota(int64_t t) const { return quota_[t] - local(t); }

  private:
    __device__ int64_t demand(int64_t r) const { return quotas_.load[r * quotas_.load_stride + e_]; }

    const SharedQuotas& quotas_;
    const int64_t e_;
    const int64_t home_;
    const int64_t* const quota_;
};

// Call take(r, share) for the ranks of a line of pieces, rank_at(i) the i-th, by a lane each: how
// much of its piece, `length_of(r)`, lies between `begin` and `end`. Lanes without a rank have r = -1
// and nothing.
template <class RankAt, class LengthOf, class Take>
__device__ void overlap_line(
    int64_t ranks, int64_t begin, int64_t end, RankAt rank_at, LengthOf length_of, Take take) {
    const DeviceWarp warp;
    int64_t position = 0;
    for (int64_t first = 0; first < ranks; first += DeviceWarp::kLanes) {
        const int64_t i = first + warp.lane();
        const int64_t r = i < ranks ? rank_at(i) : -1;
        const int64_t length = r >= 0 ? length_of(r) : 0;
        const int64_t next = position + sum_up_to_lane(length);
        const int64_t last = end < next ? end : next;
        const int64_t start = begin > next - length ? begin : next - length;
        take(r, last > start ? last - start : 0);
        position = of_last_lane(next);
    }
}

// Call take(t, share) in instance order: the source's share of the instance on rank t, by a lane
// each; lanes without an instance have t = -1 and nothing. Called by all lanes, for the same expert.
template <class Take>
__device__ void share_expert(const SharedQuotas& quotas, int64_t e, int64_t source, Take take) {
    const DeviceLanes<int64_t> warp;
    const ExpertShares of(quotas, e);
    const int64_t begin =
        warp.sum(static_cast<int>(source), [&](int r) { return of.residual_demand(r); });
    overlap_line(
        quotas.num_ranks,
        begin,
        begin + of.residual_demand(source),
        [&](int64_t i) { return rank_at(i, of.home()); },
        [&](int64_t t) { return of.residual_quota(t); },
        [&](int64_t t, int64_t shared) {
            take(t, shared + (t == source ? of.local(source) : 0));
        });
}

// Call take(r, share) for every source rank r: its share of the instance on rank `target`; lanes as
// above.
template <class Take>
__device__ void share_instance(const SharedQuotas& quotas, int64_t e, int64_t target, Take take) {
    const DeviceLanes<int64_t> warp;
    const ExpertShares of(quotas, e);
    // The home rank's instance is the first.
    const int64_t before =
        warp.sum(static_cast<int>(target), [&](int t) { return of.residual_quota(t); });
    const int64_t begin = target == of.home()  ? 0
                          : target < of.home() ? before + of.residual_quota(of.home())
                                               : before;
    overlap_line(
        quotas.num_ranks,
        begin,
        begin + of.residual_quota(target),
        [](int64_t i) { return i; },
        [&](int64_t r) { return of.residual_demand(r); },
        [&](int64_t r, int64_t shared) {
            take(r, shared + (r == target ? of.local(target) : 0));
        });
}

}  // namespace megatron_ext
