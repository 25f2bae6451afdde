// Stage 2 on the device: shares of every quota by source rank, and the ids of the instances.
//
// 1. One row [E, R] of the split for each source rank asked for, and of the plan's ids if asked for.
// 2. One warp: one expert of one source. One lane: one instance at a time.
// 3. A kernel, because the quotas are on the device.
// 4. Lanes combine their numbers by prefix sums.
// 5. Deterministic: integers.
// 6. Reads 2 * E * R quotas and loads, writes E * R shares: 0.4 MB for one source at EP64 and 256
//    experts, so the latency of a few rounds of reads and shuffles decides the time.

#include "lines.cuh"
#include "megatron_ext/cuda_api.h"

namespace megatron_ext {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * DeviceWarp::kLanes;

__device__ int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

// Physical id of expert e's instance on rank t, or -1.
__device__ int64_t id_of(const PlacedInstances& placed, int64_t e, int64_t t, int64_t mains) {
    const int64_t first = t * (mains + placed.num_slots);
    if (e / mains == t) return first + e % mains;
    for (int64_t s = 0; s < placed.num_slots; ++s) {
        if (placed.slots[t * placed.num_slots + s] == e) return first + mains + s;
    }
    return -1;
}

__global__ void split_quota_kernel(int64_t ranks,
                                   int64_t experts,
                                   const int64_t* load,
                                   const int64_t* quota,
                                   int64_t first_source,
                                   int64_t* split,
                                   PlacedInstances placed) {
    const DeviceWarp warp;
    const int64_t e = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / DeviceWarp::kLanes;
    if (e >= experts) return;  // whole warps
    const int64_t source = first_source + blockIdx.y;
    const int64_t home = e / (experts / ranks);
    const int64_t* expert_quota = quota + e * ranks;
    int64_t* share = split + (static_cast<int64_t>(blockIdx.y) * experts + e) * ranks;
    const auto demand = [&](int64_t r) { return load[r * experts + e]; };
    // What rank r's instance takes of r's own assignments.
    const auto local = [&](int64_t r) { return smaller(demand(r), expert_quota[r]); };

    // The source's piece of the line of residual demands ...
    const int64_t begin =
        warp.sum(static_cast<int>(source), [&](int r) { return demand(r) - local(r); });
    const int64_t end = begin + demand(source) - local(source);
    // ... against the instances' pieces of the equally long line of residual quotas.
    int64_t position = 0;
    for (int64_t first = 0; first < ranks; first += DeviceWarp::kLanes) {
        const int64_t i = first + warp.lane();
        const int64_t t = rank_at(i, home);
        const int64_t length = i < ranks ? expert_quota[t] - local(t) : 0;
        const int64_t next = position + sum_up_to_lane(length);
        if (i < ranks) {
            const int64_t shared = greater(smaller(end, next) - greater(begin, next - length), 0);
            share[t] = shared + (t == source ? local(t) : 0);
            if (placed.physical_index != nullptr) {
                placed.physical_index[e * ranks + t] = id_of(placed, e, t, experts / ranks);
            }
        }
        position = of_last_lane(next);
    }
}

}  // namespace

cudaError_t split_quota_cuda(int64_t num_ranks,
                             int64_t num_experts,
                             const int64_t* load,
                             const int64_t* quota,
                             int64_t first_source,
                             int64_t num_sources,
                             int64_t* split,
                             const PlacedInstances& placed,
                             cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>((num_experts + kWarps - 1) / kWarps),
                    static_cast<unsigned>(num_sources));
    split_quota_kernel<<<grid, kThreads, 0, stream>>>(
        num_ranks, num_experts, load, quota, first_source, split, placed);
    return cudaGetLastError();
}

}  // namespace megatron_ext
