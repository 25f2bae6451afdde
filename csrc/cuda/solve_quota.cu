// Stage 2 on the device: the quota planner.
//
// 1. Plans every load of a batch, every NVLink domain for itself: the same tries and search as on
//    the host (domain_attempt.h, quota_search.h), so the same bits.
// 2. One block: one domain of one load. One warp: one try (threshold, method) at a time. With more
//    domains than one the kernel is launched again, because what the worst domain reached, which
//    the others need not get below, is known only when all blocks are done.
// 3. A kernel, because the plan is needed on the device without a host sync.
// 4. Warps share only their verdicts; thread 0 chooses between two barriers of the block.
// 5. Deterministic: integers; which warp ran a try does not matter.
// 6. The time is that of the slowest try, mostly dependent reductions over the ranks. States are in
//    global memory, small enough for the L1 cache at 64 ranks and 256 experts (12 KB each).

#include <algorithm>

#include "megatron_ext/cuda_api.h"
#include "megatron_ext/domain_attempt.h"
#include "megatron_ext/quota_search.h"

namespace megatron_ext {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * DeviceWarp::kLanes;
constexpr int kAttempts = ThresholdSearch::kProbes * kMethods;
static_assert(kAttempts % kWarps == 0 && kWarps % kMethods == 0, "a pass is whole probes");

// What a block sums up of all domains before it plans, and what it reached.
struct Sums {
    int64_t* reached;        // [1] the threshold of its plan
    int64_t* expert_load;    // [E]
    int64_t* home_load;      // [R]
    int32_t* busiest_first;  // [R], counted within the domain
};

__host__ __device__ int64_t sums_bytes(const QuotaProblem& problem) {
    const int64_t bytes = 8 * (1 + problem.num_experts + problem.num_ranks) + 4 * problem.num_ranks;
    return (bytes + 15) / 16 * 16;
}

__host__ __device__ int64_t state_bytes(const QuotaProblem& problem) {
    return AttemptState::bytes(static_cast<int>(problem.nvlink_domain),
                               static_cast<int>(problem.num_experts / problem.num_ranks),
                               static_cast<int>(problem.num_slots));
}

__host__ __device__ int64_t block_bytes(const QuotaProblem& problem) {
    return sums_bytes(problem) + (kAttempts + 1) * state_bytes(problem);
}

__device__ Domain domain_of(const QuotaProblem& problem, const Sums& sums, int d) {
    const int ranks = static_cast<int>(problem.nvlink_domain);
    const int mains = static_cast<int>(problem.num_experts / problem.num_ranks);
    return {ranks,
            mains,
            static_cast<int>(problem.num_slots),
            problem.min_quota,
            problem.tolerance_ppm == 0,
            sums.expert_load + static_cast<int64_t>(d) * ranks * mains,
            sums.home_load + d * ranks,
            sums.busiest_first + d * ranks};
}

__global__ __launch_bounds__(kThreads, 1) void solve_quota_kernel(QuotaProblem problem,
                                                                  bool again,
                                                                  const int64_t* loads,
                                                                  char* workspace,
                                                                  int64_t* quotas,
                                                                  int32_t* slots) {
    __shared__ Verdict verdicts[kAttempts];
    __shared__ int state_of[kAttempts];  // which state in memory a try works on
    __shared__ int best_state;
    __shared__ int lowest;
    __shared__ int64_t start;
    __shared__ Domain domain;
    __shared__ AttemptState state_of_warp[kWarps];

    const DeviceWarp warp;
    const int thread = static_cast<int>(threadIdx.x);
    const int warp_idx = thread / DeviceWarp::kLanes;
    const int64_t ranks = problem.num_ranks;
    const int64_t experts = problem.num_experts;
    const int num_domains = static_cast<int>(gridDim.x);
    const int own = static_cast<int>(blockIdx.x);
    const int64_t* load = loads + blockIdx.y * ranks * experts;
    int64_t* quota = quotas + blockIdx.y * experts * ranks;
    int32_t* held_experts = slots + blockIdx.y * ranks * problem.num_slots;
    const auto memory_of = [&](int d) {
        return workspace +
               (static_cast<int64_t>(blockIdx.y) * num_domains + d) * block_bytes(problem);
    };
    char* memory = memory_of(own);

    Sums sums;
    sums.reached = reinterpret_cast<int64_t*>(memory);
    sums.expert_load = sums.reached + 1;
    sums.home_load = sums.expert_load + experts;
    sums.busiest_first = reinterpret_cast<int32_t*>(sums.home_load + ranks);
    char* states = memory + sums_bytes(problem);

    // Sums of all domains: where the search starts depends on the worst of them.
    for (int64_t e = thread; e < experts; e += kThreads) {
        int64_t sum = 0;
#pragma unroll 16  // reads in flight at once
        for (int64_t r = 0; r < ranks; ++r) sum += load[r * experts + e];
        sums.expert_load[e] = sum;
    }
    if (thread < kAttempts) state_of[thread] = thread;
    if (thread == 0) {
        best_state = kAttempts;
        domain = domain_of(problem, sums, own);
    }
    __syncthreads();
    const int64_t mains = experts / ranks;
    for (int64_t r = thread; r < ranks; r += kThreads) {
        int64_t sum = 0;
        for (int64_t m = 0; m < mains; ++m) sum += sums.expert_load[r * mains + m];
        sums.home_load[r] = sum;
    }
    __syncthreads();
    for (int d = warp_idx; d < num_domains; d += kWarps) {
        const int first = d * domain.ranks;
        sort_ranks(warp, domain.ranks, sums.home_load + first, sums.busiest_first + first);
    }
    __syncthreads();
    if (warp_idx == 0) {
        const int64_t threshold =
            start_threshold(warp, num_domains, problem.tolerance_ppm, [&](int d) {
                return domain_of(problem, sums, d);
            });
        if (thread == 0) start = threshold;
    }
    __syncthreads();
    const int64_t before = domain.home_load[domain.busiest_first[0]];
    int64_t worst = 0;
    if (again) {
        for (int d = 0; d < num_domains; ++d) {
            worst = larger(worst, *reinterpret_cast<const int64_t*>(memory_of(d)));
        }
        if (*sums.reached == worst) return;
    }

    const auto state_at = [&](int index) {
        AttemptState state;
        state.place(
            states + index * state_bytes(problem), domain.ranks, domain.mains, domain.slots);
        return state;
    };
    bool found = false;
    // Again: only for `worst`.
    ThresholdSearch search = again                   ? ThresholdSearch(worst, worst + 1)
                             : problem.num_slots > 0 ? ThresholdSearch(start, before)
                                                     : ThresholdSearch(before, before);
    while (!search.done()) {
        if (thread == 0) lowest = -1;
        __syncthreads();
        for (int pass = 0; pass < kAttempts / kWarps && lowest < 0; ++pass) {
            const int attempt = pass * kWarps + warp_idx;
            const int probe = attempt / kMethods;
            Verdict verdict;
            if (!search.nothing_to_do(probe)) {
                if (warp.lane() == 0) state_of_warp[warp_idx] = state_at(state_of[attempt]);
                __syncwarp();
                DomainAttempt<DeviceWarp> run(domain, state_of_warp[warp_idx], warp);
                verdict = run.run(search.threshold(probe), static_cast<Method>(attempt % kMethods));
            }
            if (warp.lane() == 0) verdicts[attempt] = verdict;
            __syncthreads();
            if (thread == 0) {
                for (int p = pass * kWarps / kMethods;
                     p < (pass + 1) * kWarps / kMethods && lowest < 0;
                     ++p) {
                    const int chosen = choose_plan(verdicts + p * kMethods, domain.even);
                    if (chosen < 0) continue;
                    lowest = p;
                    const int kept = best_state;
                    best_state = state_of[p * kMethods + chosen];
                    state_of[p * kMethods + chosen] = kept;
                }
            }
            __syncthreads();
        }
        found = found || lowest >= 0;
        search.narrow(lowest);
        __syncthreads();  // `lowest` is read before it is reset.
    }
    if (again && !found && before > worst) return;
    // Of the first launch only: blocks of the second read it, at any time.
    if (!again && thread == 0) *sums.reached = search.reached();

    const int64_t first_rank = static_cast<int64_t>(own) * domain.ranks;
    const int64_t first_expert = first_rank * mains;
    for (int64_t i = thread; i < domain.experts() * ranks; i += kThreads) {
        const int64_t e = first_expert + i / ranks;
        quota[e * ranks + i % ranks] = i % ranks == e / mains ? sums.expert_load[e] : 0;
    }
    for (int64_t i = thread; i < domain.ranks * problem.num_slots; i += kThreads) {
        held_experts[first_rank * problem.num_slots + i] = -1;
    }
    __syncthreads();
    if (!found || (again && before <= worst)) return;

    const AttemptState best = state_at(best_state);
    for (int r = thread; r < domain.ranks; r += kThreads) {
        for (int k = 0; k < best.held[r]; ++k) {
            const int64_t expert = first_expert + best.expert[r * domain.slots + k];
            const int64_t amount = best.amount[r * domain.slots + k];
            int64_t* row = quota + expert * ranks;
            // Replicas of one main are on several ranks. Subtracts: unsigned arithmetic wraps.
            atomicAdd(reinterpret_cast<unsigned long long*>(row + expert / mains),
                      static_cast<unsigned long long>(-amount));
            row[first_rank + r] = amount;
            held_experts[(first_rank + r) * problem.num_slots + k] = static_cast<int32_t>(expert);
        }
    }
}

int64_t num_domains(const QuotaProblem& problem) {
    return problem.num_ranks / problem.nvlink_domain;
}

// A few blocks for every multiprocessor. Larger batches go in parts, in the same workspace.
int64_t loads_at_once(const QuotaProblem& problem) {
    constexpr int64_t kBlocks = 512;
    return std::max<int64_t>(kBlocks / num_domains(problem), 1);
}

}  // namespace

int64_t solve_quota_cuda_bytes(const QuotaProblem& problem, int64_t batch) {
    return std::min(batch, loads_at_once(problem)) * num_domains(problem) * block_bytes(problem);
}

cudaError_t solve_quota_cuda(const QuotaProblem& problem,
                             const int64_t* load,
                             int64_t batch,
                             void* workspace,
                             int64_t* quota,
                             int32_t* slots,
                             cudaStream_t stream) {
    const int64_t pairs = problem.num_ranks * problem.num_experts;
    for (int64_t first = 0; first < batch; first += loads_at_once(problem)) {
        const int64_t loads = std::min(batch - first, loads_at_once(problem));
        const dim3 grid(static_cast<unsigned>(num_domains(problem)), static_cast<unsigned>(loads));
        for (int launch = 0; launch < (num_domains(problem) > 1 ? 2 : 1); ++launch) {
            solve_quota_kernel<<<grid, kThreads, 0, stream>>>(
                problem,
                launch > 0,
                load + first * pairs,
                static_cast<char*>(workspace),
                quota + first * pairs,
                slots + first * problem.num_ranks * problem.num_slots);
            const cudaError_t launched = cudaGetLastError();
            if (launched != cudaSuccess) return launched;
        }
    }
    return cudaSuccess;
}

}  // namespace megatron_ext
