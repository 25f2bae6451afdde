// Stage 2 on the device: the quota planner.
//
// 1. Plans every load of a batch with every tolerance, every NVLink domain for itself: the same
//    tries and search as on the host (planner/), so the same bits.
// 2. One block: one domain of one load, with one tolerance. One warp: one try at a time. With more
//    domains than one the kernel is launched again. The other domains need not get below the load
//    that the worst domain reached, and this load is known only when all blocks are done.
// 3. A kernel, because the plan is needed on the device without a host sync.
// 4. Warps share only their verdicts; thread 0 chooses between two barriers of the block. The tries
//    that a round may ask for run side by side: all methods at the threshold asked for, then the
//    next steps of UltraEP's binary search, then eight thresholds by two methods.
// 5. Deterministic: integers; which warp ran a try does not matter, and neither does a try that the
//    host would have skipped, because work is accounted for in the host's order.
// 6. The slowest try decides the time: dependent reductions over the ranks, which are one
//    instruction where the load fits 32 bits. Tries lie in shared memory if they fit (at 64 ranks,
//    256 experts and 2 slots they take 150 KB), else in global memory.

#include <algorithm>

#include "megatron_ext/cuda_api.h"
#include "megatron_ext/planner/attempt.h"
#include "megatron_ext/planner/search.h"

namespace megatron_ext {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * DeviceWarp::kLanes;
static_assert(2 * ThresholdSearch::kProbes == kWarps, "a round is two tries for each probe");
static_assert(kMethods <= kWarps, "all methods at once");
constexpr int kSteps = 4;  // of a binary search in one round: 15 tries

// What a block sums up of all domains before it plans, and what it reached; in global memory.
struct Sums {
    int64_t* reached;        // [1] the threshold of its plan
    int64_t* expert_load;    // [E]
    int64_t* home_load;      // [R]
    int32_t* busiest_first;  // [R], counted within the domain
    int32_t* hottest_first;  // [E], counted within the domain

    __host__ __device__ int64_t lay_out(char* memory, const QuotaProblem& problem) {
        const int64_t ranks = problem.num_ranks;
        const int64_t experts = problem.num_experts;
        reached = reinterpret_cast<int64_t*>(memory);
        expert_load = reached + 1;
        home_load = expert_load + experts;
        busiest_first = reinterpret_cast<int32_t*>(home_load + ranks);
        hottest_first = busiest_first + ranks;
        return (8 * (1 + experts + ranks) + 4 * (ranks + experts) + 15) / 16 * 16;
    }
};

__host__ __device__ int64_t sums_bytes(const QuotaProblem& problem) {
    return Sums{}.lay_out(nullptr, problem);
}

__host__ __device__ int mains_of(const QuotaProblem& problem) {
    return static_cast<int>(problem.num_experts / problem.num_ranks);
}

__device__ Domain domain_of(const QuotaProblem& problem, const Sums& sums, int d, bool even) {
    const auto ranks = static_cast<int>(problem.nvlink_domain);
    return {ranks,
            mains_of(problem),
            static_cast<int>(problem.num_slots),
            problem.min_quota,
            even,
            sums.expert_load + static_cast<int64_t>(d) * ranks * mains_of(problem),
            sums.home_load + d * ranks,
            sums.busiest_first + d * ranks};
}

// Order indices by falling value. Neighboring lanes compare an index with a part of the others
// each.
__device__ __noinline__ void sort_falling(const int64_t* value, int32_t* order, int count) {
    int parts = DeviceWarp::kLanes;
    while (parts > 1 && parts * count > kThreads) parts /= 2;
    const int thread = static_cast<int>(threadIdx.x);
    MEGATRON_EXT_ROLLED
    for (int first = 0; first < count; first += kThreads / parts) {
        const int i = first + thread / parts;
        const int64_t own = i < count ? value[i] : 0;
        int place = 0;
#pragma unroll 8  // reads in flight at once
        for (int j = thread % parts; j < count; j += parts) {
            place += comes_first(value[j], j, own, i);
        }
        MEGATRON_EXT_ROLLED
        for (int distance = 1; distance < parts; distance *= 2) {
            place += __shfl_xor_sync(DeviceWarp::kAll, place, distance);
        }
        if (i < count && thread % parts == 0) order[place] = i;
    }
}

extern __shared__ float4 dynamic_memory[];

// The dynamic shared memory from `offset` on, for domains of up to kRanks ranks. Addresses are
// computed, not kept: as all functions see where they come from, they are those of shared memory,
// at distances that are known, and it takes no read to get one.
template <int kRanks>
struct SharedMemory {
    int offset;

    __host__ __device__ static int capacity(int) { return kRanks; }
    __device__ char* bytes() const { return reinterpret_cast<char*>(dynamic_memory) + offset; }
    __device__ SharedMemory of_try(int64_t where, int) const {
        return {offset + static_cast<int>(where)};
    }
    __device__ TryMemory arrays(const Domain& domain) const {
        TryMemory memory;
        memory.lay_out(bytes(), kRanks, domain.experts(), domain.slots);
        return memory;
    }
};

// Global memory, whose addresses would take too many registers: they are kept in shared memory.
struct GlobalMemory {
    char* start;
    const TryMemory* placed;  // [kWarps + 1], in shared memory

    __host__ __device__ static int capacity(int ranks) { return ranks; }
    __device__ char* bytes() const { return start; }
    __device__ GlobalMemory of_try(int64_t, int idx) const { return {start, placed + idx}; }
    __device__ const TryMemory& arrays(const Domain&) const { return *placed; }
};

template <class Memory>
__host__ __device__ int64_t try_bytes(int ranks, int mains, int slots) {
    return TryMemory::bytes(Memory::capacity(ranks), ranks * mains, slots);
}

__host__ __device__ int64_t loads_bytes(int ranks, int mains) {
    return (8 * ranks * (mains + 1) + 15) / 16 * 16;
}

// The domain's own loads, and the tries with the best plan.
template <class Memory>
__host__ __device__ int64_t tries_bytes(const QuotaProblem& problem) {
    const auto ranks = static_cast<int>(problem.nvlink_domain);
    const int mains = mains_of(problem);
    return loads_bytes(ranks, mains) +
           (kWarps + 1) * try_bytes<Memory>(ranks, mains, static_cast<int>(problem.num_slots));
}

// Of a block in global memory; kSharedRanks as at the kernel.
template <int kSharedRanks>
__host__ __device__ int64_t block_bytes(const QuotaProblem& problem) {
    return sums_bytes(problem) + (kSharedRanks > 0 ? 0 : tries_bytes<GlobalMemory>(problem));
}

template <class TheMemory>
struct PlannerWarp : DeviceWarp {
    using Memory = TheMemory;
};

// What the warps of a block share while they plan.
struct Shared {
    int64_t tolerance_ppm;
    Domain domain;
    Verdict verdicts[kWarps];
    int state_of[kWarps];  // which memory a warp works on
    int best;              // which memory holds the best plan
    int chosen;            // the warp whose plan it was, or -1
};

// Warp::Memory: where the tries lie.
template <class Warp>
class BlockPlanner {
  public:
    __device__ BlockPlanner(Shared& shared,
                            const QuotaProblem& problem,
                            Warp warp,
                            const Domain& domain,
                            typename Warp::Memory memory)
        : shared_(shared), problem_(problem), warp_(warp), domain_(domain), memory_(memory) {
        auto* const expert_load = reinterpret_cast<int64_t*>(memory.bytes());
        auto* const home_load = expert_load + domain.experts();
        MEGATRON_EXT_ROLLED
        for (int e = thread(); e < domain.experts(); e += kThreads) {
            expert_load[e] = domain.expert_load[e];
        }
        MEGATRON_EXT_ROLLED
        for (int r = thread(); r < domain.ranks; r += kThreads) {
            home_load[r] = domain.home_load[r];
        }
        if (thread() < kWarps) shared.state_of[thread()] = thread();
        if (thread() == 0) {
            shared.best = kWarps;
            shared.domain = {domain.ranks,
                             domain.mains,
                             domain.slots,
                             problem.min_quota,
                             domain.even,
                             expert_load,
                             home_load,
                             domain.busiest_first};
        }
        __syncthreads();
    }

    // Returns whether there is a plan better than no balancing.
    __device__ __noinline__ bool search(int64_t target, int64_t start, int64_t* reached) {
        *reached = domain_.before();
        if (*reached <= start || domain_.slots == 0) return false;
        WorkLeft left{work_budget(domain_.ranks, domain_.mains)};
        if (reach(start, left)) {
            *reached = start;
            return true;
        }
        bool found = false;
        PublishedSearch published(target, *reached);
        MEGATRON_EXT_ROLLED
        while (!published.done()) {
            run_next_steps(published, start);
            // As the verdicts tell, step by step.
            int node = 0;
            int chosen = -1;
            MEGATRON_EXT_ROLLED
            for (int step = 0; step < kSteps && !published.done(); ++step) {
                const bool is_reached = shared_.verdicts[node].reached;
                if (is_reached) chosen = node;
                published.narrow(is_reached);
                node = 2 * node + (is_reached ? 1 : 2);
            }
            keep(chosen);
            found = found || chosen >= 0;
        }
        ThresholdSearch search(start, published.reached(), shared_.tolerance_ppm);
        MEGATRON_EXT_ROLLED
        while (!search.done() && left.rounds > 0) {
            const int probe = warp_idx() / 2;
            const Method method = method_of_probe(warp_idx());
            if (!search.nothing_to_do(probe)) {
                run(search.threshold(probe), method, left.rounds, restarts_of_probe(method));
            }
            __syncthreads();
            int chosen = -1;
            found |= search.try_round(
                left,
                [&](int p, Method m) { return shared_.verdicts[warp_of_probe(p, m)]; },
                [&](int p, Method m) { chosen = warp_of_probe(p, m); });
            keep(chosen);
        }
        *reached = search.reached();
        return found;
    }

    // Whether a plan for just this threshold was found. What mostly decides comes first by itself,
    // where it is quicker than the others: the exact fill; and what mostly is not needed last:
    // refilling.
    __device__ __noinline__ bool reach(int64_t threshold, WorkLeft& left) {
        const auto method = static_cast<Method>(warp_idx());
        const auto run_here = [&] {
            run(threshold,
                method,
                work_at_start(method, domain_.ranks, domain_.mains),
                restarts_at_start(method));
        };
        WorkLeft then = left;  // what the host would have left
        bool decided = false;
        if (domain_.even) {
            if (method == Method::kFill) run_here();
            __syncthreads();
            decided = then.pays_for(verdict_of(Method::kFill));
        }
        if (!decided) {
            const bool is_method = warp_idx() < kMethods;
            if (is_method && method != Method::kFill && method != Method::kRefill) run_here();
            __syncthreads();
            if (!then.pays_for(verdict_of(Method::kBestFit))) {
                if (method == Method::kRefill) run_here();
                __syncthreads();
            }
        }
        int chosen = -1;
        const bool reached = choose_at_start(
            domain_.even,
            left,
            [&](Method method) { return verdict_of(method); },
            [&](Method method) { chosen = static_cast<int>(method); });
        keep(chosen);
        return reached;
    }

    __device__ TryMemory best() const { return memory_of(shared_.best).arrays(domain_); }

  private:
    // Behind the domain's own loads.
    __device__ typename Warp::Memory memory_of(int state) const {
        return memory_.of_try(loads_bytes(domain_.ranks, domain_.mains) +
                                  state * try_bytes<typename Warp::Memory>(
                                              domain_.ranks, domain_.mains, domain_.slots),
                              state);
    }

    __device__ static int thread() { return static_cast<int>(threadIdx.x); }
    __device__ static int warp_idx() { return thread() / DeviceWarp::kLanes; }

    __device__ Verdict verdict_of(Method method) const {
        return shared_.verdicts[static_cast<int>(method)];
    }

    __device__ static Method method_of_probe(int warp) {
        return warp % 2 == 0 ? Method::kRefill : Method::kBestFit;
    }

    __device__ static int warp_of_probe(int probe, Method method) {
        return 2 * probe + (method == Method::kRefill ? 0 : 1);
    }

    // The tries of the next steps of UltraEP's search, for all verdicts before a step: step 0 is
    // warp 0's, and the one after that of warp w is 2w + 1's if it is reached, else 2w + 2's.
    __device__ void run_next_steps(PublishedSearch published, int64_t start) {
        if (warp_idx() < (1 << kSteps) - 1) {
            // Behind the leading one, the bits of w + 1 are the way from step 0 to the warp's.
            const int way = warp_idx() + 1;
            MEGATRON_EXT_ROLLED
            for (int bit = 30 - __clz(way); bit >= 0 && !published.done(); --bit) {
                published.narrow((way >> bit & 1) == 0);
            }
            const int64_t threshold = published.threshold();
            if (published.done() || threshold < start) {
                if (thread() % DeviceWarp::kLanes == 0) shared_.verdicts[warp_idx()] = Verdict{};
            } else {
                run(threshold, Method::kRoomiest, INT32_MAX, 0);
            }
        }
        __syncthreads();
    }

    // By a warp; one place in the code for all tries.
    __device__ __noinline__ void run(int64_t threshold,
                                     Method method,
                                     int32_t work_limit,
                                     int restarts) {
        Attempt<Warp> attempt(
            shared_.domain, memory_of(shared_.state_of[warp_idx()]), warp_, work_limit);
        const Verdict verdict = attempt.run(threshold, method, restarts);
        if (thread() % DeviceWarp::kLanes == 0) shared_.verdicts[warp_idx()] = verdict;
    }

    // The plan of this warp, if it is one, is the best so far. By the whole block; after it the
    // verdicts may be overwritten.
    __device__ __noinline__ void keep(int warp) {
        __syncthreads();
        if (thread() == 0 && warp >= 0) {
            const int kept = shared_.best;
            shared_.best = shared_.state_of[warp];
            shared_.state_of[warp] = kept;
        }
        __syncthreads();
    }

    Shared& shared_;
    const QuotaProblem& problem_;
    const Warp warp_;
    const Domain& domain_;
    const typename Warp::Memory memory_;
};

// Plan the domain, or plan it once more for `worst` alone, and write its plan.
template <class Memory>
__device__ void plan_domain(Shared& shared,
                            const QuotaProblem& problem,
                            DeviceWarp warp,
                            const Domain& domain,
                            const Sums& sums,
                            Memory tries,
                            int64_t target,
                            int64_t start,
                            int64_t worst,
                            int64_t* quota,
                            int32_t* slots) {
    const int thread = static_cast<int>(threadIdx.x);
    BlockPlanner<PlannerWarp<Memory>> planner(shared, problem, {warp}, domain, tries);
    bool found = false;
    if (worst == 0) {
        int64_t reached;
        found = planner.search(target, start, &reached);
        // Of the first launch only: blocks of the second read it, at any time.
        if (thread == 0) *sums.reached = reached;
    } else if (domain.before() > worst) {
        WorkLeft left{work_budget(domain.ranks, domain.mains)};
        found = planner.reach(worst, left);
        if (!found) return;
    }

    const int ranks = static_cast<int>(problem.num_ranks);
    const int first_rank = static_cast<int>(blockIdx.x) * domain.ranks;
    const int first_expert = first_rank * domain.mains;
    constexpr int kLanes = DeviceWarp::kLanes;
    MEGATRON_EXT_ROLLED
    for (int e = thread / kLanes; e < domain.experts(); e += kWarps) {
        const int home = first_rank + e / domain.mains;
        int64_t* row = quota + static_cast<int64_t>(first_expert + e) * ranks;
        MEGATRON_EXT_ROLLED
        for (int t = thread % kLanes; t < ranks; t += kLanes) {
            row[t] = t == home ? domain.expert_load[e] : 0;
        }
    }
    MEGATRON_EXT_ROLLED
    for (int i = thread; i < domain.ranks * domain.slots; i += kThreads) {
        slots[first_rank * domain.slots + i] = -1;
    }
    __syncthreads();
    if (!found) return;
    const TryMemory best = planner.best();
    MEGATRON_EXT_ROLLED
    for (int r = thread; r < domain.ranks; r += kThreads) {
        MEGATRON_EXT_ROLLED
        for (int k = 0; k < best.held[r]; ++k) {
            const int replica = r * domain.slots + k;
            const int expert = first_expert + best.expert[replica];
            const int64_t amount = best.amount[replica];
            int64_t* row = quota + static_cast<int64_t>(expert) * ranks;
            // Replicas of one main are on several ranks. Subtracts: unsigned arithmetic wraps.
            atomicAdd(reinterpret_cast<unsigned long long*>(row + first_rank + best.giver[replica]),
                      static_cast<unsigned long long>(-amount));
            row[first_rank + r] = amount;
            slots[first_rank * domain.slots + replica] = expert;
        }
    }
}

// kSharedRanks: for how many ranks there is shared memory; 0 if the tries lie in global memory.
template <int kSharedRanks>
__global__ __launch_bounds__(kThreads, 1) void solve_quota_kernel(QuotaProblem problem,
                                                                  Tolerances tolerances,
                                                                  int64_t first_plan,
                                                                  bool again,
                                                                  const int64_t* loads,
                                                                  int64_t load_stride,
                                                                  char* workspace,
                                                                  int64_t* quotas,
                                                                  int32_t* slots) {
    __shared__ Shared shared;
    __shared__ Domain domain;
    __shared__ int64_t bounds[kWarps];

    const int thread = static_cast<int>(threadIdx.x);
    const int warp_idx = thread / DeviceWarp::kLanes;
    const int64_t plan_idx = first_plan + blockIdx.y;
    const int64_t tolerance_ppm = tolerances.ppm[plan_idx % tolerances.count];
    if (thread == 0) shared.tolerance_ppm = tolerance_ppm;
    const int64_t ranks = problem.num_ranks;
    const int64_t experts = problem.num_experts;
    const int num_domains = static_cast<int>(gridDim.x);
    const int own = static_cast<int>(blockIdx.x);
    const int64_t* load = loads + plan_idx / tolerances.count * ranks * load_stride;
    const auto memory_of = [&](int d) {
        return workspace + (static_cast<int64_t>(blockIdx.y) * num_domains + d) *
                               block_bytes<kSharedRanks>(problem);
    };
    char* memory = memory_of(own);
    Sums sums;
    char* tries = memory + sums.lay_out(memory, problem);

    // Sums of all domains: where the search starts depends on the worst of them.
    MEGATRON_EXT_ROLLED
    for (int64_t e = thread; e < experts; e += kThreads) {
        int64_t sum = 0;
#pragma unroll 16  // reads in flight at once
        for (int64_t r = 0; r < ranks; ++r) sum += load[r * load_stride + e];
        sums.expert_load[e] = sum;
    }
    __syncthreads();
    const int mains = mains_of(problem);
    MEGATRON_EXT_ROLLED
    for (int64_t r = thread; r < ranks; r += kThreads) {
        int64_t sum = 0;
        MEGATRON_EXT_ROLLED
        for (int m = 0; m < mains; ++m) sum += sums.expert_load[r * mains + m];
        sums.home_load[r] = sum;
    }
    const auto domain_ranks = static_cast<int>(problem.nvlink_domain);
    const int domain_experts = domain_ranks * mains;
    MEGATRON_EXT_ROLLED
    for (int d = 0; d < num_domains; ++d) {
        sort_falling(sums.expert_load + static_cast<int64_t>(d) * domain_experts,
                     sums.hottest_first + d * domain_experts,
                     domain_experts);
    }
    __syncthreads();
    MEGATRON_EXT_ROLLED
    for (int d = 0; d < num_domains; ++d) {
        const int first = d * domain_ranks;
        sort_falling(sums.home_load + first, sums.busiest_first + first, domain_ranks);
    }
    if (thread == 0) domain = domain_of(problem, sums, own, shared.tolerance_ppm == 0);
    __syncthreads();

    const DeviceWarp wide{false};
    const int64_t total =
        wide.sum(static_cast<int>(ranks), [&](int r) -> int64_t { return sums.home_load[r]; });
    int64_t worst = 0;
    if (again) {
        MEGATRON_EXT_ROLLED
        for (int d = 0; d < num_domains; ++d) {
            worst = larger(worst, *reinterpret_cast<const int64_t*>(memory_of(d)));
        }
        if (*sums.reached == worst) return;
    }
    const int64_t target = target_load(total, ranks, shared.tolerance_ppm);
    int64_t start = target;
    if (!again) {
        int64_t bound = target;
        MEGATRON_EXT_ROLLED
        for (int d = 0; d < num_domains; ++d) {
            const Domain each = domain_of(problem, sums, d, shared.tolerance_ppm == 0);
            const DomainBound<DeviceWarp> of_domain(
                wide, each, sums.hottest_first + d * domain_experts);
            if (d % kWarps == warp_idx) bound = larger(bound, of_domain.by_receivers());
            MEGATRON_EXT_ROLLED
            for (int k = 1 + warp_idx; k <= domain_ranks; k += kWarps) {
                bound = of_domain.by_senders(k, bound);
            }
        }
        if (thread % DeviceWarp::kLanes == 0) bounds[warp_idx] = bound;
        __syncthreads();
        MEGATRON_EXT_ROLLED
        for (int w = 0; w < kWarps; ++w) start = larger(start, bounds[w]);
    }

    int64_t* quota = quotas + plan_idx * experts * ranks;
    int32_t* held = slots + plan_idx * ranks * problem.num_slots;
    // What is compared is at most the total and one more.
    const DeviceWarp warp{total < INT32_MAX};
    const auto plan = [&](auto memory) {
        plan_domain(shared, problem, warp, domain, sums, memory, target, start, worst, quota, held);
    };
    if constexpr (kSharedRanks > 0) {
        plan(SharedMemory<kSharedRanks>{0});
    } else {
        auto* const placed = reinterpret_cast<TryMemory*>(dynamic_memory);
        if (thread <= kWarps) {
            const int64_t bytes = try_bytes<GlobalMemory>(domain.ranks, domain.mains, domain.slots);
            placed[thread].lay_out(tries + loads_bytes(domain.ranks, domain.mains) + thread * bytes,
                                   domain.ranks,
                                   domain.experts(),
                                   domain.slots);
        }
        __syncthreads();
        plan(GlobalMemory{tries, placed});
    }
}

int64_t num_domains(const QuotaProblem& problem) {
    return problem.num_ranks / problem.nvlink_domain;
}

// A few blocks for every multiprocessor. More plans go in parts, in the same workspace.
int64_t plans_at_once(const QuotaProblem& problem) {
    constexpr int64_t kBlocks = 512;
    return std::max<int64_t>(kBlocks / num_domains(problem), 1);
}

// What a problem is solved by.
struct Kernel {
    decltype(&solve_quota_kernel<0>) function;
    int64_t shared_bytes;  // dynamic shared memory of a block
    int64_t block_bytes;   // its global memory
};

// The shared memory that a block can have besides what the kernel declares: 220 of 227 KB on Hopper
// and on data-center Blackwell, 92 of 99 KB on others. 0 where the GPU does not say.
int64_t most_shared() {
    constexpr int64_t kDeclared = 7 << 10;
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
            cudaSuccess) {
        return 0;
    }
    return bytes - kDeclared;
}

template <int kRanks>
bool fits_shared(const QuotaProblem& problem) {
    return problem.nvlink_domain <= kRanks &&
           tries_bytes<SharedMemory<kRanks>>(problem) <= most_shared();
}

template <int kRanks>
Kernel in_shared_memory(const QuotaProblem& problem) {
    return {solve_quota_kernel<kRanks>,
            tries_bytes<SharedMemory<kRanks>>(problem),
            block_bytes<kRanks>(problem)};
}

Kernel kernel_for(const QuotaProblem& problem) {
    if (fits_shared<64>(problem)) return in_shared_memory<64>(problem);
    if (fits_shared<96>(problem)) return in_shared_memory<96>(problem);
    return {solve_quota_kernel<0>, (kWarps + 1) * sizeof(TryMemory), block_bytes<0>(problem)};
}

}  // namespace

int64_t solve_ladder_cuda_bytes(const QuotaProblem& problem,
                                const Tolerances& tolerances,
                                int64_t batch) {
    return std::min(batch * tolerances.count, plans_at_once(problem)) * num_domains(problem) *
           kernel_for(problem).block_bytes;
}

cudaError_t solve_ladder_cuda(const QuotaProblem& problem,
                              const Tolerances& tolerances,
                              const int64_t* load,
                              int64_t load_stride,
                              int64_t batch,
                              void* workspace,
                              int64_t* quota,
                              int32_t* slots,
                              cudaStream_t stream) {
    const int64_t plans = batch * tolerances.count;
    const Kernel chosen = kernel_for(problem);
    const auto kernel = chosen.function;
    const cudaError_t allowed = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(chosen.shared_bytes));
    if (allowed != cudaSuccess) return allowed;
    MEGATRON_EXT_ROLLED
    for (int64_t first = 0; first < plans; first += plans_at_once(problem)) {
        const int64_t now = std::min(plans - first, plans_at_once(problem));
        const dim3 grid(static_cast<unsigned>(num_domains(problem)), static_cast<unsigned>(now));
        MEGATRON_EXT_ROLLED
        for (int launch = 0; launch < (num_domains(problem) > 1 ? 2 : 1); ++launch) {
            kernel<<<grid, kThreads, static_cast<size_t>(chosen.shared_bytes), stream>>>(
                problem,
                tolerances,
                first,
                launch > 0,
                load,
                load_stride,
                static_cast<char*>(workspace),
                quota,
                slots);
            const cudaError_t launched = cudaGetLastError();
            if (launched != cudaSuccess) return launched;
        }
    }
    return cudaSuccess;
}

}  // namespace megatron_ext
