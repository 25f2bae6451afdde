// Stage 2 on the device: the quota planner.
//
// 1. Plans every load of a batch with every tolerance, every NVLink domain for itself: the same
//    tries and search as on the host (planner/), so the same bits.
// 2. One block: one domain of one load, with one tolerance. One warp: one try at a time. With more
//    domains than one, a kernel of many blocks sums the columns once for the blocks of a plan, and
//    the planner is launched again. The other domains need not get below the load that the worst
//    domain reached, and this load is known only when all blocks are done.
// 3. A kernel, because the plan is needed on the device without a host sync.
// 4. Warps share only their verdicts; all choose alike between two barriers of the block. The tries
//    that a round may ask for run side by side: all methods at the threshold asked for beside the
//    first steps of UltraEP's binary search, then its next steps, then eight thresholds by two
//    methods.
// 5. Deterministic: integers; which warp ran a try does not matter, and neither does a try that the
//    host would have skipped, because work is accounted for in the host's order.
// 6. The slowest try decides the time: dependent reductions over the ranks, which are one
//    instruction where tries count in 32 bits (is_narrow). Such tries lie in shared memory if they
//    fit, all others in global memory.

#include <algorithm>
#include <type_traits>

#include "megatron_ext/cuda_api.h"
#include "megatron_ext/planner/attempt.h"
#include "megatron_ext/planner/search.h"

namespace megatron_ext {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * DeviceWarp::kLanes;
static_assert(2 * ThresholdSearch::kProbes == kWarps, "a round is two tries for each probe");
constexpr int kSteps = 4;        // of a binary search in one round: 15 tries
constexpr int kStepsBeside = 3;  // of those beside the methods: 7 tries
static_assert(kMethods + (1 << kStepsBeside) <= kWarps, "methods and steps in one round");

// What a block sums up of all domains before it plans. Where there is one domain, it lies in shared
// memory, where tries will: to read from global memory what the block has just written there took
// half of the bounds' time.
struct Sums {
    int64_t* expert_load;    // [E]
    int64_t* home_load;      // [R]
    int32_t* busiest_first;  // [R], counted within the domain
    int32_t* hottest_first;  // [E], counted within the domain
    int32_t* busier;         // [E], see DomainBound
    int32_t* place;          // [R] of a rank in busiest_first
    int64_t* hottest;        // [R] loads of ranks' hottest mains, in the order busiest_first
    int64_t* hottest_sum;    // [R] of these, each with those before it
    int64_t* excess;         // [R] above a threshold, in the same order

    __host__ __device__ int64_t lay_out(char* memory, const QuotaProblem& problem) {
        const int64_t ranks = problem.num_ranks;
        const int64_t experts = problem.num_experts;
        expert_load = reinterpret_cast<int64_t*>(memory);
        home_load = expert_load + experts;
        hottest = home_load + ranks;
        hottest_sum = hottest + ranks;
        excess = hottest_sum + ranks;
        busiest_first = reinterpret_cast<int32_t*>(excess + ranks);
        hottest_first = busiest_first + ranks;
        busier = hottest_first + experts;
        place = busier + experts;
        return (8 * (experts + 4 * ranks) + 8 * (ranks + experts) + 15) / 16 * 16;
    }
};

__host__ __device__ int64_t sums_bytes(const QuotaProblem& problem) {
    return Sums{}.lay_out(nullptr, problem);
}

// A block's part of the workspace: what it reached, its sums, and tries in global memory.
constexpr int64_t kReachedBytes = 16;

__host__ __device__ int64_t num_domains(const QuotaProblem& problem) {
    return problem.num_ranks / problem.nvlink_domain;
}

__host__ __device__ int mains_of(const QuotaProblem& problem) {
    return static_cast<int>(problem.num_experts / problem.num_ranks);
}

__device__ Domain<int64_t> domain_of(const QuotaProblem& problem,
                                     const Sums& sums,
                                     int d,
                                     bool even) {
    const auto ranks = static_cast<int>(problem.nvlink_domain);
    return {ranks,
            mains_of(problem),
            static_cast<int>(problem.num_slots),
            Domain<int64_t>::per_slot_of(static_cast<int>(problem.num_slots)),
            problem.min_quota,
            even,
            sums.expert_load + static_cast<int64_t>(d) * ranks * mains_of(problem),
            sums.home_load + d * ranks,
            sums.busiest_first + d * ranks};
}

extern __shared__ float4 dynamic_memory[];

// Call `found(index, sum)` for each index. Neighboring lanes sum a part each. By the whole block.
//   sum_part(i, part, parts)  what a part has for an index
template <class SumPart, class Found>
__device__ void for_each_sum(int count, SumPart sum_part, Found found) {
    int shift = 5;  // 2^shift parts, at most as many as lanes
    while (shift > 0 && count << shift > kThreads) --shift;
    const int parts = 1 << shift;
    const int part = static_cast<int>(threadIdx.x) & (parts - 1);
    MEGATRON_EXT_ROLLED
    for (int first = 0; first < count; first += kThreads >> shift) {
        const int i = first + static_cast<int>(threadIdx.x >> shift);
        auto sum = i < count ? sum_part(i, part, parts) : 0;
        MEGATRON_EXT_ROLLED
        for (int distance = 1; distance < parts; distance *= 2) {
            sum += __shfl_xor_sync(DeviceWarp::kAll, sum, distance);
        }
        if (i < count && part == 0) found(i, sum);
    }
}

// Whether values and indices fit words in shared memory, values above inverted indices: of two
// words the higher one comes first.
__device__ bool fits_words(int64_t value) { return value < int64_t{1} << (32 - kIndexBits); }
constexpr int kMostWords = 1 << kIndexBits;

// Order indices by falling value. By the whole block, before it tries: words lie where tries will.
template <class Found>
__device__ void sort_falling(const int64_t* value, int count, bool in_words, Found found) {
    if (!in_words) {
        const auto count_before = [&](int i, int part, int parts) {
            const int64_t own = value[i];
            int before = 0;
#pragma unroll 8  // reads in flight at once
            for (int j = part; j < count; j += parts) before += comes_first(value[j], j, own, i);
            return before;
        };
        for_each_sum(count, count_before, found);
        return;
    }
    auto* const words = reinterpret_cast<uint32_t*>(dynamic_memory);
    constexpr int kEach = 4 * DeviceWarp::kLanes;  // so that each part is as long
    const int padded = (count + kEach - 1) / kEach * kEach;
    MEGATRON_EXT_ROLLED
    for (int i = static_cast<int>(threadIdx.x); i < padded; i += kThreads) {
        // What is behind the last comes before none.
        words[i] =
            i < count ? static_cast<uint32_t>(value[i]) << kIndexBits | (kMostWords - 1 - i) : 0;
    }
    __syncthreads();
    const auto count_before = [&](int i, int part, int parts) {
        const uint32_t own = words[i];
        int before = 0;
#pragma unroll 4
        for (int j = part; j < padded / 4; j += parts) {
            const FourWords four = reinterpret_cast<const FourWords*>(words)[j];
#pragma unroll
            for (int k = 0; k < 4; ++k) before += four.each[k] > own;
        }
        return before;
    };
    for_each_sum(count, count_before, found);
    __syncthreads();  // The words may be overwritten.
}

// The loads of a domain, and its ranks in order if there is a place for them. By the whole block.
template <class Amount>
__device__ void copy_loads(const Domain<int64_t>& domain,
                           Amount* expert_load,
                           Amount* home_load,
                           int32_t* busiest_first) {
    const auto thread = static_cast<int>(threadIdx.x);
    MEGATRON_EXT_ROLLED
    for (int e = thread; e < domain.experts(); e += kThreads) {
        expert_load[e] = static_cast<Amount>(domain.expert_load[e]);
    }
    MEGATRON_EXT_ROLLED
    for (int r = thread; r < domain.ranks; r += kThreads) {
        home_load[r] = static_cast<Amount>(domain.home_load[r]);
        if (busiest_first != nullptr) busiest_first[r] = domain.busiest_first[r];
    }
}

// A warp sets a flag, at any time, that others see later. All lanes see the same.
__device__ void set_flag(unsigned& flag) { atomicExch(&flag, 1u); }
__device__ bool is_set(unsigned& flag) {
    const bool set = DeviceWarp::lane() == 0 && atomicAdd(&flag, 0u) != 0;
    return __ballot_sync(DeviceWarp::kAll, set) != 0;
}

// Whose plan a block keeps: not a warp's.
constexpr int kBest = kWarps;

// A block's loads and tries in shared memory, for so many ranks, experts and slots or fewer. Where
// they are is known to the compiler, but for the warp: it takes no read to find out.
template <int kMostRanks, int kMostExperts, int kMostSlots>
struct SharedMemory {
    using Amount = int32_t;
    static constexpr int kRanks = kMostRanks;
    static constexpr int kSlots = kMostSlots;
    static_assert((2 * kMostSlots + 1) * kMostRanks <= 1 << kIndexBits, "ids of offers in a chain");
    static_assert(kMostExperts <= 1 << kIndexBits, "mains of a rank");
    static_assert(kMostRanks <= 1 << kRankBits, "keys of ranks");

    __host__ __device__ static int try_bytes() {
        return TryMemory<Amount>::bytes(kMostRanks, kMostExperts, kMostSlots);
    }
    __host__ static int bytes() { return kTries + (kWarps + 1) * try_bytes(); }
    __host__ static bool fits(const QuotaProblem& problem, int64_t most_bytes) {
        const int64_t ranks = problem.nvlink_domain;
        return ranks <= kMostRanks && ranks * mains_of(problem) <= kMostExperts &&
               problem.num_slots <= kMostSlots && bytes() <= most_bytes;
    }

    // By the whole block, which waits before it tries.
    __device__ void copy(const DomainSizes<Amount>& sizes, const Domain<int64_t>& domain) const {
        if (threadIdx.x == 0) placed() = {sizes, /*is_stopped=*/0};
        copy_loads(domain, loads(), loads() + kMostExperts, order());
        __syncthreads();  // The sums may be overwritten.
        // Of ranks and replicas that there are not, lanes read what they ignore: it has to be an
        // index.
        auto* const own = reinterpret_cast<float4*>(memory(DeviceWarp::warp()));
        MEGATRON_EXT_ROLLED
        for (int i = DeviceWarp::lane(); i < try_bytes() / 16; i += DeviceWarp::kLanes) {
            own[i] = float4{};
        }
    }

    __device__ Domain<Amount> domain() const {
        return {placed().sizes, loads(), loads() + kMostExperts, order()};
    }
    __device__ TryMemory<Amount> of(int warp) const {
        TryMemory<Amount> placed;
        placed.lay_out(memory(warp), kMostRanks, kMostExperts, kMostSlots);
        return placed;
    }
    __device__ TryMemory<Amount> arrays() const { return of(DeviceWarp::warp()); }

    __device__ void stop() const { set_flag(placed().is_stopped); }
    __device__ bool is_stopped() const { return is_set(placed().is_stopped); }

    // For a block's sums, until loads are copied. Behind the words that are sorted.
    __device__ static char* place_of_sums() {
        return memory() + kTries + kMostWords * sizeof(uint32_t);
    }

  private:
    struct Placed {
        DomainSizes<Amount> sizes;
        unsigned is_stopped;
    };
    static constexpr int kLoads = 32;  // behind what is placed first
    static constexpr int kOrder = kLoads + sizeof(Amount) * (kMostExperts + kMostRanks);
    static constexpr int kTries = kOrder + sizeof(int32_t) * kMostRanks;
    static_assert(sizeof(Placed) <= kLoads && kTries % 16 == 0, "where arrays may begin");

    __device__ static Placed& placed() { return *reinterpret_cast<Placed*>(dynamic_memory); }
    __device__ static char* memory() { return reinterpret_cast<char*>(dynamic_memory); }
    __device__ static char* memory(int warp) { return memory() + kTries + warp * try_bytes(); }
    __device__ static Amount* loads() { return reinterpret_cast<Amount*>(memory() + kLoads); }
    __device__ static int32_t* order() { return reinterpret_cast<int32_t*>(memory() + kOrder); }
};

// The same in global memory, for all that does not fit. Addresses would take too many registers:
// they are kept in shared memory.
struct GlobalMemory {
    using Amount = int64_t;
    static constexpr int kRanks = 0;
    char* start;

    __device__ void copy(const DomainSizes<Amount>& sizes, const Domain<int64_t>& domain) const {
        auto* const expert_load = reinterpret_cast<Amount*>(start);
        auto* const home_load = expert_load + domain.experts();
        copy_loads(domain, expert_load, home_load, nullptr);
        const auto thread = static_cast<int>(threadIdx.x);
        const int64_t loads = sizeof(Amount) * (domain.experts() + domain.ranks);
        const int64_t each = TryMemory<Amount>::bytes(domain.ranks, domain.experts(), domain.slots);
        if (thread <= kWarps) {
            placed().tries[thread].lay_out(start + (loads + 15) / 16 * 16 + thread * each,
                                           domain.ranks,
                                           domain.experts(),
                                           domain.slots);
        }
        if (thread == 0) {
            placed().is_stopped = 0;
            placed().domain = {sizes, expert_load, home_load, domain.busiest_first};
        }
        __syncthreads();
        const auto& own = arrays();
        MEGATRON_EXT_ROLLED
        for (int i = DeviceWarp::lane(); i < domain.ranks * domain.slots; i += DeviceWarp::kLanes) {
            own.expert[i] = own.giver[i] = 0;  // Lanes read them where there is no replica, too.
        }
    }

    __device__ const Domain<Amount>& domain() const { return placed().domain; }
    __device__ const TryMemory<Amount>& of(int warp) const { return placed().tries[warp]; }
    __device__ const TryMemory<Amount>& arrays() const { return of(DeviceWarp::warp()); }

    __device__ void stop() const { set_flag(placed().is_stopped); }
    __device__ bool is_stopped() const { return is_set(placed().is_stopped); }

    struct Placed {
        unsigned is_stopped;
        Domain<Amount> domain;
        TryMemory<Amount> tries[kWarps + 1];
    };

  private:
    __device__ static Placed& placed() { return *reinterpret_cast<Placed*>(dynamic_memory); }
};

// Of a block in global memory: what takes most.
__host__ __device__ int64_t block_bytes(const QuotaProblem& problem) {
    const int64_t ranks = problem.nvlink_domain;
    const int64_t experts = ranks * mains_of(problem);
    const int64_t each = TryMemory<int64_t>::bytes(
        static_cast<int>(ranks), static_cast<int>(experts), static_cast<int>(problem.num_slots));
    return kReachedBytes + sums_bytes(problem) + (8 * (ranks + experts) + 15) / 16 * 16 +
           (kWarps + 1) * each;
}

template <class TheMemory>
struct PlannerWarp : DeviceLanes<typename TheMemory::Amount> {
    using Memory = TheMemory;
    using Hosts = std::conditional_t<TheMemory::kRanks == 0,
                                     FlatHosts<typename TheMemory::Amount>,
                                     NoHosts<typename TheMemory::Amount>>;
    using Given = FlatGiven;
    using Paths = std::conditional_t<TheMemory::kRanks == 0,
                                     FlatPaths<typename TheMemory::Amount>,
                                     LanesPaths<typename TheMemory::Amount>>;
    template <class Warp>
    using AtHand =
        std::conditional_t<TheMemory::kRanks == 0, MemoryAtHand<Warp>, RegistersAtHand<Warp>>;
    template <class Warp>
    using HandOver =
        std::conditional_t<TheMemory::kRanks == 0, HandOverInTurn<Warp>, HandOverAtOnce<Warp>>;
};

// Warp::Memory: where the tries lie. verdicts: [kWarps], which the warps of a block share.
template <class Warp>
class BlockPlanner {
    using Amount = typename Warp::Amount;

  public:
    __device__ BlockPlanner(Verdict* verdicts,
                            const QuotaProblem& problem,
                            int64_t tolerance_ppm,
                            const Domain<int64_t>& domain,
                            typename Warp::Memory memory)
        : verdicts_(verdicts), tolerance_ppm_(tolerance_ppm), memory_(memory) {
        memory.copy({domain.ranks,
                     domain.mains,
                     domain.slots,
                     domain.per_slot,
                     static_cast<Amount>(problem.min_quota),
                     domain.even},
                    domain);
        __syncthreads();
    }

    // Returns whether there is a plan better than no balancing.
    __device__ __noinline__ bool search(int64_t target, int64_t start, int64_t* reached) {
        const auto& domain = memory_.domain();
        *reached = domain.before();
        if (*reached <= start || domain.slots == 0) return false;
        WorkLeft left{work_budget(domain.ranks, domain.mains)};
        PublishedSearch published(target, *reached);
        if (reach(start, left, &published)) {
            *reached = start;
            return true;
        }
        bool found = false;
        int steps = kStepsBeside;  // that have run
        MEGATRON_EXT_ROLLED
        while (!published.done()) {
            if (steps == 0) {
                steps = kSteps;
                run_next_steps(published, start, steps);
                __syncthreads();
            }
            // As the verdicts tell, step by step.
            int node = 0;
            int chosen = -1;
            MEGATRON_EXT_ROLLED
            for (int step = 0; step < steps && !published.done(); ++step) {
                const bool is_reached = verdicts_[warp_of_node(node)].reached;
                if (is_reached) chosen = warp_of_node(node);
                published.narrow(is_reached);
                node = 2 * node + (is_reached ? 1 : 2);
            }
            keep(chosen);
            found = found || chosen >= 0;
            steps = 0;
        }
        ThresholdSearch search(start, published.reached(), tolerance_ppm_);
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
                [&](int p, Method m) { return verdicts_[warp_of_probe(p, m)]; },
                [&](int p, Method m) { chosen = warp_of_probe(p, m); });
            keep(chosen);
        }
        *reached = search.reached();
        return found;
    }

    // Whether a plan for just this threshold was found. The exact fill comes first by itself, as it
    // mostly decides, and is quicker than the others. Refilling stops when best fit has made it
    // there. To be called once.
    //   beside  the first steps of this search run beside the methods; may be null
    __device__ __noinline__ bool reach(int64_t threshold,
                                       WorkLeft& left,
                                       const PublishedSearch* beside) {
        const auto method = static_cast<Method>(warp_idx());
        const auto& domain = memory_.domain();
        const auto run_here = [&] {
            return run(threshold,
                       method,
                       work_at_start(method, domain.ranks, domain.mains),
                       restarts_at_start(method));
        };
        WorkLeft then = left;  // what the host would have left
        bool decided = false;
        if (domain.even) {
            if (method == Method::kFill) run_here();
            __syncthreads();
            decided = then.pays_for(verdict_of(Method::kFill));
        }
        if (!decided) {
            if (warp_idx() >= kMethods) {
                if (beside != nullptr) run_next_steps(*beside, threshold, kStepsBeside);
            } else if (method != Method::kFill) {
                const Verdict verdict = run_here();
                if (method == Method::kBestFit && then.pays_for(verdict)) memory_.stop();
            }
            __syncthreads();
        }
        int chosen = -1;
        const bool reached = choose_at_start(
            domain.even,
            left,
            [&](Method method) { return verdict_of(method); },
            [&](Method method) { chosen = static_cast<int>(method); });
        keep(chosen);
        return reached;
    }

  private:
    __device__ static int thread() { return static_cast<int>(threadIdx.x); }
    __device__ static int warp_idx() { return DeviceWarp::warp(); }

    __device__ Verdict verdict_of(Method method) const {
        return verdicts_[static_cast<int>(method)];
    }

    __device__ static Method method_of_probe(int warp) {
        return warp % 2 == 0 ? Method::kRefill : Method::kBestFit;
    }

    __device__ static int warp_of_probe(int probe, Method method) {
        return 2 * probe + (method == Method::kRefill ? 0 : 1);
    }

    // The tries of the next steps of UltraEP's search, for all verdicts before a step: step 0 is
    // node 0, and the one after that of node n is node 2n + 1 if it is reached, else 2n + 2. The
    // last warps come first: beside the methods, the longest try shares its scheduler with the
    // method that seldom runs.
    __device__ static int warp_of_node(int node) { return kWarps - 1 - node; }

    __device__ void run_next_steps(PublishedSearch published, int64_t start, int steps) {
        // Behind the leading one, the bits of node + 1 are the way from step 0.
        const int way = kWarps - warp_idx();
        if (way >= 1 << steps) return;
        MEGATRON_EXT_ROLLED
        for (int bit = 30 - __clz(way); bit >= 0 && !published.done(); --bit) {
            published.narrow((way >> bit & 1) == 0);
        }
        const int64_t threshold = published.threshold();
        if (published.done() || threshold < start) {
            if (DeviceWarp::lane() == 0) verdicts_[warp_idx()] = Verdict{};
        } else {
            run(threshold, Method::kRoomiest, INT32_MAX, 0);
        }
    }

    // By a warp; one place in the code for all tries.
    __device__ __noinline__ Verdict run(int64_t threshold,
                                        Method method,
                                        int32_t work_limit,
                                        int restarts) {
        // What best fit may show not to be needed.
        const bool may_stop = method == Method::kRefill || warp_idx() >= kMethods;
        Attempt<Warp> attempt(memory_, work_limit, may_stop);
        const Verdict verdict = attempt.run(static_cast<Amount>(threshold), method, restarts);
        if (DeviceWarp::lane() == 0) verdicts_[warp_idx()] = verdict;
        return verdict;
    }

    // The plan of this warp, if it is one, is the best so far. By the whole block; after it the
    // verdicts may be overwritten.
    __device__ __noinline__ void keep(int warp) {
        __syncthreads();
        if (warp < 0) return;
        const auto& plan = memory_.of(warp);
        const auto& best = memory_.of(kBest);
        const auto& domain = memory_.domain();
        MEGATRON_EXT_ROLLED
        for (int i = thread(); i < domain.ranks * domain.slots; i += kThreads) {
            best.expert[i] = plan.expert[i];
            best.amount[i] = plan.amount[i];
        }
        MEGATRON_EXT_ROLLED
        for (int r = thread(); r < domain.ranks; r += kThreads) best.held[r] = plan.held[r];
        __syncthreads();
    }

    Verdict* const verdicts_;
    const int64_t tolerance_ppm_;
    const typename Warp::Memory memory_;
};

// Write the domain's best plan; if none was found, that of no balancing.
template <class Memory>
__device__ __noinline__ void write_plan(
    Memory tries, bool found, int ranks, int64_t* quota, int32_t* slots) {
    const int thread = static_cast<int>(threadIdx.x);
    const auto& domain = tries.domain();
    const int first_rank = static_cast<int>(blockIdx.x) * domain.ranks;
    const int first_expert = first_rank * domain.mains;
    int64_t* rows = quota + static_cast<int64_t>(first_expert) * ranks;
    const int64_t places = static_cast<int64_t>(domain.experts()) * ranks;
#pragma unroll 8
    for (int64_t i = thread; i < places; i += kThreads) rows[i] = 0;
    MEGATRON_EXT_ROLLED
    for (int i = thread; i < domain.ranks * domain.slots; i += kThreads) {
        slots[first_rank * domain.slots + i] = -1;
    }
    __syncthreads();
    MEGATRON_EXT_ROLLED
    for (int e = thread; e < domain.experts(); e += kThreads) {
        rows[static_cast<int64_t>(e) * ranks + first_rank + e / domain.mains] =
            domain.expert_load[e];
    }
    __syncthreads();
    if (!found) return;
    const auto& best = tries.of(kBest);
    MEGATRON_EXT_ROLLED
    for (int r = thread; r < domain.ranks; r += kThreads) {
        MEGATRON_EXT_ROLLED
        for (int k = 0; k < best.held[r]; ++k) {
            const int replica = r * domain.slots + k;
            const int expert = best.expert[replica];
            const int64_t amount{best.amount[replica]};
            int64_t* row = rows + static_cast<int64_t>(expert) * ranks + first_rank;
            // Replicas of one main are on several ranks. Subtracts: unsigned arithmetic wraps.
            atomicAdd(reinterpret_cast<unsigned long long*>(row + expert / domain.mains),
                      static_cast<unsigned long long>(-amount));
            row[r] = amount;
            slots[first_rank * domain.slots + replica] = first_expert + expert;
        }
    }
}

// Plan the domain, or plan it once more for `worst` alone, and write its plan.
template <class Memory>
__device__ void plan_domain(const QuotaProblem& problem,
                            int64_t tolerance_ppm,
                            const Domain<int64_t>& domain,
                            int64_t* reached_here,
                            Memory tries,
                            int64_t target,
                            int64_t start,
                            int64_t worst,
                            int64_t* quota,
                            int32_t* slots) {
    __shared__ Verdict verdicts[kWarps];
    const int thread = static_cast<int>(threadIdx.x);
    BlockPlanner<PlannerWarp<Memory>> planner(verdicts, problem, tolerance_ppm, domain, tries);
    bool found = false;
    if (worst == 0) {
        int64_t reached;
        found = planner.search(target, start, &reached);
        // Of the first launch only: blocks of the second read it, at any time.
        if (thread == 0) *reached_here = reached;
    } else if (domain.before() > worst) {
        WorkLeft left{work_budget(domain.ranks, domain.mains)};
        found = planner.reach(worst, left, nullptr);
        if (!found) return;
    }
    write_plan(tries, found, static_cast<int>(problem.num_ranks), quota, slots);
}

// The bounds of all domains that fall to a warp, or `least` if that is more.
template <class Warp>
__device__ __noinline__ int64_t bound_of_warp(Warp warp,
                                              const QuotaProblem& problem,
                                              const Sums& sums,
                                              int num_domains,
                                              int64_t least,
                                              bool even) {
    const int warp_idx = DeviceWarp::warp();
    int64_t bound = least;
    MEGATRON_EXT_ROLLED
    for (int d = 0; d < num_domains; ++d) {
        const Domain<int64_t> domain = domain_of(problem, sums, d, even);
        const DomainBound<Warp, int64_t> bounds(warp,
                                                domain,
                                                sums.hottest_first + d * domain.experts(),
                                                sums.busier + d * domain.experts());
        // The last warps have the least to do behind it.
        if (d % kWarps == kWarps - 1 - warp_idx) bound = larger(bound, bounds.by_receivers());
        MEGATRON_EXT_ROLLED
        for (int k = 1 + warp_idx; k <= domain.ranks; k += kWarps) {
            bound = bounds.by_senders(k, bound);
        }
    }
    return bound;
}

// The tokens of all ranks from `first` on, `step` apart, that chose an expert.
__device__ int64_t sum_column(const int64_t* load,
                              int64_t load_stride,
                              int64_t expert,
                              int64_t first,
                              int64_t ranks,
                              int64_t step) {
    int64_t sum = 0;
#pragma unroll 32  // reads in flight at once
    for (int64_t r = first; r < ranks; r += step) sum += load[r * load_stride + expert];
    return sum;
}

// A block: as many experts as a warp has lanes; its warps share the ranks.
constexpr int kSumWarps = 4;
constexpr int kSumThreads = kSumWarps * DeviceWarp::kLanes;
__global__ __launch_bounds__(kSumThreads) void sum_columns_kernel(QuotaProblem problem,
                                                                  int64_t num_tolerances,
                                                                  int64_t first_plan,
                                                                  const int64_t* loads,
                                                                  int64_t load_stride,
                                                                  char* workspace) {
    __shared__ int64_t parts[kSumWarps][DeviceWarp::kLanes];
    const int64_t plan_idx = first_plan + blockIdx.y;
    const int64_t ranks = problem.num_ranks;
    const int64_t* load = loads + plan_idx / num_tolerances * ranks * load_stride;
    const int warp = DeviceWarp::warp();
    const int lane = DeviceWarp::lane();
    const int64_t e = static_cast<int64_t>(blockIdx.x) * DeviceWarp::kLanes + lane;
    const bool is_expert = e < problem.num_experts;
    parts[warp][lane] = is_expert ? sum_column(load, load_stride, e, warp, ranks, kSumWarps) : 0;
    __syncthreads();
    if (warp != 0 || !is_expert) return;
    int64_t sum = 0;
    for (int w = 0; w < kSumWarps; ++w) sum += parts[w][lane];
    Sums sums;
    sums.lay_out(
        workspace + blockIdx.y * num_domains(problem) * block_bytes(problem) + kReachedBytes,
        problem);
    sums.expert_load[e] = sum;
}

// The ranks' sums and their order, from the experts' sums. Of all domains: where the search starts
// depends on the worst of them. By the whole block.
//   has_room  whether kMostWords fit into the shared memory
// Returns whether values are ordered in words.
__device__ __noinline__ bool sum_ranks(const QuotaProblem& problem,
                                       const Sums& sums,
                                       int num_domains,
                                       bool has_room) {
    __shared__ bool in_words;
    const int mains = mains_of(problem);
    const auto ranks = static_cast<int>(problem.nvlink_domain);
    if (threadIdx.x == 0) in_words = has_room && ranks * mains <= kMostWords;
    __syncthreads();
    MEGATRON_EXT_ROLLED
    for (int64_t r = threadIdx.x; r < problem.num_ranks; r += kThreads) {
        int64_t sum = 0;
        MEGATRON_EXT_ROLLED
        for (int m = 0; m < mains; ++m) sum += sums.expert_load[r * mains + m];
        sums.home_load[r] = sum;
        if (!fits_words(sum)) in_words = false;
    }
    __syncthreads();
    MEGATRON_EXT_ROLLED
    for (int d = 0; d < num_domains; ++d) {
        const int first = d * ranks;
        sort_falling(sums.home_load + first, ranks, in_words, [&](int r, int place) {
            sums.busiest_first[first + place] = r;
            sums.place[first + r] = place;
        });
    }
    __syncthreads();
    return in_words;
}

// The experts' order. By the whole block.
__device__ __noinline__ void order_experts(const QuotaProblem& problem,
                                           const Sums& sums,
                                           int num_domains,
                                           bool in_words) {
    const int mains = mains_of(problem);
    const auto ranks = static_cast<int>(problem.nvlink_domain);
    const int experts = ranks * mains;
    MEGATRON_EXT_ROLLED
    for (int d = 0; d < num_domains; ++d) {
        const int first = d * experts;
        sort_falling(sums.expert_load + first, experts, in_words, [&](int e, int place) {
            sums.hottest_first[first + place] = e;
            sums.busier[first + place] = sums.place[d * ranks + e / mains];
        });
    }
    __syncthreads();
}

// Whether no bound is above `threshold`, as far as that can be seen without ordering experts: from
// the hottest main of each rank, as is_bound_within of the host does. By the whole block; false
// where sums may leave int64.
__device__ __noinline__ bool are_bounds_within(const QuotaProblem& problem,
                                               const Sums& sums,
                                               int num_domains,
                                               int64_t total,
                                               int64_t threshold) {
    __shared__ bool is_within;
    if (problem.num_slots == 0 || total > int64_t{1} << 48) return false;
    const int mains = mains_of(problem);
    const auto ranks = static_cast<int>(problem.nvlink_domain);
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread == 0) is_within = true;
    // The sum of the first i + 1 values, in part; reads are in flight at once.
    const auto sum_to = [&](const int64_t* values) {
        return [values, ranks](int i, int part, int parts) -> long long {
            long long sum = 0;
#pragma unroll 4
            for (int j = part; j < ranks; j += parts) sum += j <= i ? values[j] : 0;
            return sum;
        };
    };
    MEGATRON_EXT_ROLLED
    for (int d = 0; d < num_domains; ++d) {
        const int first = d * ranks;
        int64_t* const hottest = sums.hottest + first;
        int64_t* const hottest_sum = sums.hottest_sum + first;
        int64_t* const excess = sums.excess + first;
        MEGATRON_EXT_ROLLED
        for (int i = thread; i < ranks; i += kThreads) {
            const int r = first + sums.busiest_first[first + i];
            int64_t most = 0;
#pragma unroll 4
            for (int m = 0; m < mains; ++m) most = larger(most, sums.expert_load[r * mains + m]);
            hottest[i] = most;
            excess[i] = sums.home_load[r] - threshold;
        }
        __syncthreads();
        for_each_sum(ranks, sum_to(hottest), [&](int i, int64_t sum) { hottest_sum[i] = sum; });
        __syncthreads();
        for_each_sum(ranks, sum_to(excess), [&](int i, int64_t sum) {
            const int64_t senders = i + 1;
            const int64_t free = problem.num_slots * (ranks - senders);
            const int64_t taking = free < senders ? free : senders;
            const int64_t taken = taking > 0 ? hottest_sum[taking - 1] : 0;
            if (free < senders * mains && sum > taken) is_within = false;
        });
        const DeviceLanes<int64_t> wide;
        const int64_t brought = wide.best(ranks, [&](int i) -> int64_t { return hottest[i]; }).key;
        const int64_t left = wide.sum(
            ranks, [&](int i) -> int64_t { return excess[i] > -brought ? excess[i] : -brought; });
        if (left > 0) is_within = false;
    }
    __syncthreads();
    return is_within;
}

// Memory: where tries lie that count in 32 bits. Others lie in global memory.
template <class Memory>
__global__ __launch_bounds__(kThreads, 1) void solve_quota_kernel(QuotaProblem problem,
                                                                  Tolerances tolerances,
                                                                  int64_t first_plan,
                                                                  bool again,
                                                                  const int64_t* loads,
                                                                  int64_t load_stride,
                                                                  char* workspace,
                                                                  int64_t* quotas,
                                                                  int32_t* slots) {
    __shared__ Domain<int64_t> domain;
    __shared__ int64_t bounds[kWarps];

    const int thread = static_cast<int>(threadIdx.x);
    const int warp_idx = DeviceWarp::warp();
    const int64_t plan_idx = first_plan + blockIdx.y;
    const int64_t tolerance_ppm = tolerances.ppm[plan_idx % tolerances.count];
    const int64_t ranks = problem.num_ranks;
    const int64_t experts = problem.num_experts;
    const int num_domains = static_cast<int>(gridDim.x);
    const int own = static_cast<int>(blockIdx.x);
    const int64_t* load = loads + plan_idx / tolerances.count * ranks * load_stride;
    const auto memory_of = [&](int d) {
        return workspace +
               (static_cast<int64_t>(blockIdx.y) * num_domains + d) * block_bytes(problem);
    };
    auto* const reached = reinterpret_cast<int64_t*>(memory_of(own));
    char* memory = memory_of(own) + kReachedBytes;
    char* tries = memory + sums_bytes(problem);
    constexpr bool kInShared = !std::is_same<Memory, GlobalMemory>::value;
    Sums sums;
    if constexpr (kInShared) {
        if (num_domains == 1) memory = Memory::place_of_sums();
    }
    sums.lay_out(memory, problem);

    if (num_domains > 1) {  // sum_columns_kernel has left them with the first block
        Sums first;
        first.lay_out(memory_of(0) + kReachedBytes, problem);
        sums.expert_load = first.expert_load;
    } else {
        for_each_sum(
            static_cast<int>(experts),
            [&](int e, int part, int parts) -> long long {
                return sum_column(load, load_stride, e, part, ranks, parts);
            },
            [&](int e, int64_t sum) { sums.expert_load[e] = sum; });
        __syncthreads();
    }
    bool in_words = false;
    if (!again) in_words = sum_ranks(problem, sums, num_domains, kInShared);
    if (thread == 0) domain = domain_of(problem, sums, own, tolerance_ppm == 0);
    __syncthreads();

    const DeviceLanes<int64_t> wide;
    const int64_t total =
        wide.sum(static_cast<int>(ranks), [&](int r) -> int64_t { return sums.home_load[r]; });
    int64_t worst = 0;
    if (again) {
        MEGATRON_EXT_ROLLED
        for (int d = 0; d < num_domains; ++d) {
            worst = larger(worst, *reinterpret_cast<const int64_t*>(memory_of(d)));
        }
        if (*reached == worst) return;
    }
    const int64_t target = target_load(total, ranks, tolerance_ppm);
    int64_t start = target;
    if (!again && !are_bounds_within(problem, sums, num_domains, total, target)) {
        order_experts(problem, sums, num_domains, in_words);
        const auto bound = [&](auto warp) {
            return bound_of_warp(warp, problem, sums, num_domains, target, tolerance_ppm == 0);
        };
        // Of a domain's ranks, none of which has more than the total, sums stay in 32 bits then.
        const int64_t of_warp = total <= INT32_MAX / problem.nvlink_domain
                                    ? bound(DeviceLanes<int32_t>{})
                                    : bound(DeviceLanes<int64_t>{});
        if (DeviceWarp::lane() == 0) bounds[warp_idx] = of_warp;
        __syncthreads();
        start = larger(start, wide.best(kWarps, [&](int w) -> int64_t { return bounds[w]; }).key);
    }

    int64_t* quota = quotas + plan_idx * experts * ranks;
    int32_t* held = slots + plan_idx * ranks * problem.num_slots;
    const auto plan = [&](auto memory) {
        plan_domain(
            problem, tolerance_ppm, domain, reached, memory, target, start, worst, quota, held);
    };
    if constexpr (kInShared) {
        if (is_narrow(domain.before(), problem.min_quota)) {
            plan(Memory{});
            return;
        }
    }
    plan(GlobalMemory{tries});
}

// A few blocks for every multiprocessor. More plans go in parts, in the same workspace.
int64_t plans_at_once(const QuotaProblem& problem) {
    constexpr int64_t kBlocks = 512;
    return std::max<int64_t>(kBlocks / num_domains(problem), 1);
}

// What a problem is solved by.
struct Kernel {
    decltype(&solve_quota_kernel<GlobalMemory>) function;
    int shared_bytes;  // dynamic shared memory of a block
};

// The shared memory that a block can have besides what the kernel declares: 226 of 227 KB on Hopper
// and on data-center Blackwell, 98 of 99 KB on others. 0 where the GPU does not say.
int64_t most_shared() {
    constexpr int64_t kDeclared = 1 << 10;
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
            cudaSuccess) {
        return 0;
    }
    return bytes - kDeclared;
}

// The first memory that the problem fits in.
template <class Memory, class... Larger>
Kernel kernel_among(const QuotaProblem& problem) {
    constexpr int kPlacedBytes = sizeof(GlobalMemory::Placed);
    if constexpr (sizeof...(Larger) == 0) {
        return {solve_quota_kernel<Memory>, kPlacedBytes};
    } else {
        if (!Memory::fits(problem, most_shared())) return kernel_among<Larger...>(problem);
        return {solve_quota_kernel<Memory>, std::max(Memory::bytes(), kPlacedBytes)};
    }
}

Kernel kernel_for(const QuotaProblem& problem) {
    return kernel_among<SharedMemory<32, 1024, 8>,
                        SharedMemory<64, 512, 2>,
                        SharedMemory<96, 576, 4>,
                        GlobalMemory>(problem);
}

}  // namespace

int64_t solve_ladder_cuda_bytes(const QuotaProblem& problem,
                                const Tolerances& tolerances,
                                int64_t batch) {
    return std::min(batch * tolerances.count, plans_at_once(problem)) * num_domains(problem) *
           block_bytes(problem);
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
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chosen.shared_bytes);
    if (allowed != cudaSuccess) return allowed;
    MEGATRON_EXT_ROLLED
    for (int64_t first = 0; first < plans; first += plans_at_once(problem)) {
        const int64_t now = std::min(plans - first, plans_at_once(problem));
        const auto domains = static_cast<unsigned>(num_domains(problem));
        const dim3 grid(domains, static_cast<unsigned>(now));
        if (domains > 1) {
            constexpr int64_t kColumns = DeviceWarp::kLanes;
            const dim3 columns(
                static_cast<unsigned>((problem.num_experts + kColumns - 1) / kColumns), grid.y);
            sum_columns_kernel<<<columns, kSumThreads, 0, stream>>>(
                problem, tolerances.count, first, load, load_stride, static_cast<char*>(workspace));
        }
        MEGATRON_EXT_ROLLED
        for (int launch = 0; launch < (domains > 1 ? 2 : 1); ++launch) {
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
