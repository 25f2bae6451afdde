// The seal of a plan on the device, and a look at the seals of the plan before.
//
// 1. Sums the mixed words of a load, its quota and its slots (seal.h) to one int64, and compares
//    the ranks' seals of the plan before, which came with the load.
// 2. One block. One thread: every kThreads-th word.
// 3. A kernel, because load, plan and seals are on the device and the host must not wait for them.
// 4. Threads add up in shared memory. A difference goes to memory of the host: the last word that
//    is written there is the first that the host looks at.
// 5. Deterministic: integer sums do not depend on their order.
// 6. Reads 16 * R * E + 4 * R * S bytes: 256 KiB for R = 64, E = 256, at a few bytes a cycle and
//    thread about 3 us, beside what else is on the GPU. Writes to the host only a difference.

#include "megatron_ext/cuda_api.h"
#include "ptx.cuh"

namespace megatron_ext {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads)
    seal_kernel(SealedPlan plan, Seals before, int64_t* seal) {
    __shared__ unsigned long long partial[kThreads];
    __shared__ int is_different;
    const int thread = threadIdx.x;
    if (thread == 0) is_different = 0;
    partial[thread] = plan.sum(thread, kThreads);
    // All sums are there, and the flag is clear.
    __syncthreads();
    for (int64_t r = thread; r < before.num_ranks; r += kThreads) {
        if (before.each[r * before.stride] != before.each[0]) is_different = 1;
    }
    for (int half = kThreads / 2; half > 0; half /= 2) {
        if (thread < half) partial[thread] += partial[thread + half];
        // The next, shorter half reads these sums.
        __syncthreads();
    }
    if (thread != 0) return;
    *seal = static_cast<int64_t>(partial[0]);
    volatile int64_t* const difference = before.difference;
    if (is_different == 0 || difference[0] != 0) return;
    difference[1] = before.layer;
    for (int64_t r = 0; r < before.num_ranks; ++r) {
        difference[2 + r] = before.each[r * before.stride];
    }
    // The host reads the rest once it has seen this.
    fence_system();
    difference[0] = 1;
}

}  // namespace

cudaError_t seal_plan_cuda(const SealedPlan& plan,
                           const Seals& before,
                           int64_t* seal,
                           cudaStream_t stream) {
    seal_kernel<<<1, kThreads, 0, stream>>>(plan, before, seal);
    return cudaGetLastError();
}

}  // namespace megatron_ext
