// Lays an expert's instances on a line with a warp, one lane for each instance.
#pragma once

#include <cstdint>

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

}  // namespace megatron_ext
