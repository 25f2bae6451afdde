// Seals a plan with a block: sums the mixed words of a load, its quota and its slots (seal.h), and
// compares the ranks' seals of the plan before, which came with the load.
//
// Threads take every kThreads-th word and add up in shared memory; a sum of integers does not
// depend on its order. A difference goes to memory of the host: the last word that is written there
// is the first that the host looks at. What is read, 256 KiB for R = 64 and E = 256, takes about
// 3 us, beside what the other blocks do.
#pragma once

#include "megatron_ext/cuda_api.h"
#include "ptx.cuh"

namespace megatron_ext {

// In shared memory.
template <int kThreads>
struct SealParts {
    unsigned long long partial[kThreads];
    int is_different;
};

// Called by all `kThreads` threads of a block.
template <int kThreads>
__device__ void seal_plan_in_block(const Sealing& sealing, SealParts<kThreads>& parts) {
    auto& partial = parts.partial;
    int& is_different = parts.is_different;
    const SealedPlan& plan = sealing.plan;
    const Seals& before = sealing.before;
    const int thread = static_cast<int>(threadIdx.x);
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
    *sealing.seal = static_cast<int64_t>(partial[0]);
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

}  // namespace megatron_ext
