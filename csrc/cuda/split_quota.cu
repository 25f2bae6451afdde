// Stage 2 on the device, for those who look at splits: shares of every quota by source rank.
//
// 1. One row [E, R] of the split for each source rank asked for.
// 2. One warp: one expert of one source. One lane: one instance at a time (shares.cuh).
// 3. A kernel, because the quotas are on the device.
// 4. Lanes combine their numbers by prefix sums.
// 5. Deterministic: integers.
// 6. Reads 2 * E * R quotas and loads, writes E * R shares: 0.4 MB for one source at EP64 and 256
//    experts, so the latency of a few rounds of reads and shuffles decides the time.

#include "megatron_ext/cuda_api.h"
#include "shares.cuh"

namespace megatron_ext {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * DeviceWarp::kLanes;

__global__ void split_quota_kernel(SharedQuotas quotas, int64_t first_source, int64_t* split) {
    const int64_t e = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / DeviceWarp::kLanes;
    if (e >= quotas.num_experts) return;  // whole warps
    const int64_t row = static_cast<int64_t>(blockIdx.y) * quotas.num_experts + e;
    share_expert(quotas, e, first_source + blockIdx.y, [&](int64_t t, int64_t share) {
        if (t >= 0) split[row * quotas.num_ranks + t] = share;
    });
}

}  // namespace

cudaError_t split_quota_cuda(const SharedQuotas& quotas,
                             int64_t first_source,
                             int64_t num_sources,
                             int64_t* split,
                             cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>((quotas.num_experts + kWarps - 1) / kWarps),
                    static_cast<unsigned>(num_sources));
    split_quota_kernel<<<grid, kThreads, 0, stream>>>(quotas, first_source, split);
    return cudaGetLastError();
}

}  // namespace megatron_ext
