// Stage 1 on the device: which tokens chose an expert, and how many they are.
//
// 1. From the bool routing map [N, E]: the marks that assign.cu goes by, and int64 counts [E].
// 2. Two kernels. mark: a thread for one expert and 32 tokens makes a mask of the tokens that chose
//    the expert. count: a warp for one expert sums the masks before each tile.
// 3. Kernels, because the planner needs the counts on the device without a host sync and in int64,
//    and j, the rank of a token among those of its expert, is a prefix sum over tokens.
// 4. count goes by what mark wrote; nothing has to be cleared.
// 5. Deterministic: integers.
// 6. Reads N * E bytes once, and a quarter of that again: 2.5 MiB for N = 8192, E = 256, 1 us at
//    4 TB/s, so launches and latency dominate.

#include "lines.cuh"
#include "megatron_ext/cuda_api.h"
#include "megatron_ext/warp.h"

namespace megatron_ext {
namespace {

constexpr int kLanes = DeviceWarp::kLanes;
constexpr int kThreads = 256;

__global__ void mark_kernel(int64_t num_tokens,
                            int64_t num_experts,
                            const bool* routing_map,
                            TokenMarks marks) {
    const int64_t e = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
    if (e >= num_experts) return;
    const int64_t tile = blockIdx.x;
    const int64_t first = tile * TokenMarks::kTile;
    const int64_t left = num_tokens - first;
    uint32_t mask = 0;
#pragma unroll  // all reads in flight at once
    for (int bit = 0; bit < TokenMarks::kTile; ++bit) {
        const bool chosen = bit < left && routing_map[(first + bit) * num_experts + e];
        mask |= static_cast<uint32_t>(chosen) << bit;
    }
    marks.mask[tile * num_experts + e] = mask;
}

__global__ void count_kernel(
    int64_t tiles, int64_t num_experts, TokenMarks marks, const int64_t* tail, int64_t* counts) {
    const int64_t e = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    if (e == 0 && lane == 0 && tail != nullptr) counts[num_experts] = *tail;
    if (e >= num_experts) return;  // whole warps
    int total = 0;
    for (int64_t first = 0; first < tiles; first += kLanes) {
        const int64_t tile = first + lane;
        const int own = tile < tiles ? __popc(marks.mask[tile * num_experts + e]) : 0;
        const int sum = total + sum_up_to_lane(own);
        if (tile < tiles) marks.before[tile * num_experts + e] = sum - own;
        total = of_last_lane(sum);
    }
    if (lane == 0) counts[e] = total;
}

}  // namespace

cudaError_t count_load_cuda(const bool* routing_map,
                            int64_t num_tokens,
                            int64_t num_experts,
                            const int64_t* tail,
                            const TokenMarks& marks,
                            int64_t* counts,
                            cudaStream_t stream) {
    if (num_experts == 0) return cudaSuccess;
    const int64_t tiles = TokenMarks::num_tiles(num_tokens);
    if (tiles > 0) {
        const dim3 grid(static_cast<unsigned>(tiles),
                        static_cast<unsigned>((num_experts + kThreads - 1) / kThreads));
        mark_kernel<<<grid, kThreads, 0, stream>>>(num_tokens, num_experts, routing_map, marks);
    }
    constexpr int64_t kWarps = kThreads / kLanes;
    count_kernel<<<static_cast<unsigned>((num_experts + kWarps - 1) / kWarps),
                   kThreads,
                   0,
                   stream>>>(tiles, num_experts, marks, tail, counts);
    return cudaGetLastError();
}

}  // namespace megatron_ext
