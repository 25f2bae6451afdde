// Lays an expert's instances on a line with a warp, one lane for each instance.
#pragma once

#include <cstdint>

#include "megatron_ext/cuda_api.h"
#include "megatron_ext/interleave.h"
#include "megatron_ext/warp.h"

namespace megatron_ext {

// The values of this lane and all before it, added up; called by all lanes.
template <class T>
__device__ T sum_up_to_lane(T value) {
    const int lane = DeviceWarp().lane();
    for (int distance = 1; distance < DeviceWarp::kLanes; distance *= 2) {
        const T other = __shfl_up_sync(DeviceWarp::kAll, value, distance);
        if (lane >= distance) value += other;
    }
    return value;
}

// The last lane's value; called by all lanes.
template <class T>
__device__ T of_last_lane(T value) {
    return __shfl_sync(DeviceWarp::kAll, value, DeviceWarp::kLanes - 1);
}

// How many of the lanes before this one are in `lanes`.
__device__ inline int count_before_lane(unsigned lanes) {
    return __popc(lanes & ((1u << DeviceWarp().lane()) - 1));
}

// The rank at place i of instance order: home first, then the others ascending.
__device__ inline int64_t rank_at(int64_t i, int64_t home) {
    if (i == 0) return home;
    return i <= home ? i - 1 : i;
}

// Writes the line of expert e, with a warp; all is called by all lanes.
class LineOfExpert {
  public:
    __device__ LineOfExpert(const Lines& lines, int64_t e, int64_t num_ranks)
        : lines_(lines), e_(e), first_piece_(e * num_ranks) {}

    // A piece for each lane whose instance has a share, behind those before.
    __device__ void add(int64_t share, int64_t instance) {
        const int64_t end = count_ + sum_up_to_lane(share);
        const unsigned used = __ballot_sync(DeviceWarp::kAll, share != 0);
        if (share != 0) {
            const int64_t piece = first_piece_ + num_pieces_ + count_before_lane(used);
            lines_.end[piece] = end;
            lines_.instance[piece] = static_cast<int32_t>(instance);
        }
        count_ = of_last_lane(end);
        num_pieces_ += __popc(used);
    }

    __device__ void end() const {
        if (DeviceWarp().lane() != 0) return;
        lines_.count[e_] = count_;
        lines_.stride[e_] = count_ > 0 ? interleave_stride(count_) : 1;
        lines_.num_pieces[e_] = num_pieces_;
    }

  private:
    const Lines& lines_;
    const int64_t e_;
    const int64_t first_piece_;
    int64_t count_ = 0;
    int num_pieces_ = 0;
};

}  // namespace megatron_ext
