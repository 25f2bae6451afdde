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
//    that a round may ask for run side by side: all methods at the threshold asked for; beside
//    them, by the warps without one, UltraEP's binary search, as far as it comes; then what is left
//    of that, then eight thresholds by two methods.
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
#include "ptx.cuh"

namespace megatron_ext {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * DeviceWarp::kLanes;
static_assert(2 * ThresholdSearch::kProbes == kWarps, "a round is two tries for each probe");
constexpr int kSteps = 4;        // of a binary search in one round: 15 tries
constexpr int kStepsBeside = 3;  // of those beside the methods: 7 tries
constexpr int kWarpsBeside = kWarps - kMethods;
constexpr int kThreadsBeside = kWarpsBeside * DeviceWarp::kLanes;
static_assert(kThreads % kThreadsBeside == 0, "a thread's number among them is the rest");
static_assert(1 << kStepsBeside <= kWarpsBeside, "the tries of so many steps have a warp each");

// What a block sums up of all domains before it plans. Where there is one domain, it lies in shared
// memory: to read from global memory what the block has just written there took half of the bounds'
// time.
struct Sums {
    int64_t* expert_load;    // [E]
    int64_t* home_load;      // [R]
    int32_t* busiest_first;  // [R], counted within the domain
    int32_t* hottest_first;  // [E], counted within the domain
    int32_t* busier;         // [E], see DomainBound
    int32_t* place;          // [R] of a rank in busiest_first
    int32_t* hottest;        // [R] see Domain
    int32_t* hottest_load;   // [R] of these mains, if that fits
    int32_t* hottest_sum;    // [R] of these, in the order busiest_first, with those before it
    int32_t* excess_sum;     // [R] the same of what ranks have above a threshold

    __host__ __device__ static constexpr int64_t bytes(int64_t ranks, int64_t experts) {
        return (8 * (experts + ranks) + 4 * (6 * ranks + 2 * experts) + 15) / 16 * 16;
    }

    __device__ void lay_out(char* memory, int64_t ranks, int64_t experts) {
        expert_load = reinterpret_cast<int64_t*>(memory);
        home_load = expert_load + experts;
        busiest_first = reinterpret_cast<int32_t*>(home_load + ranks);
        hottest_first = busiest_first + ranks;
        busier = hottest_first + experts;
        place = busier + experts;
        hottest = place + ranks;
        hottest_load = hottest + ranks;
        hottest_sum = hottest_load + ranks;
        excess_sum = hottest_sum + ranks;
    }
};

__host__ __device__ int64_t sums_bytes(const QuotaProblem& problem) {
    return Sums::bytes(problem.num_ranks, problem.num_experts);
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
            sums.busiest_first + d * ranks,
            sums.hottest + d * ranks};
}

extern __shared__ float4 dynamic_memory[];

// Call `found(index, sum)` for each index. Neighboring lanes sum a part each. By the first kBy
// threads of the block.
//   sum_part(i, part, parts)  what a part has for an index
template <int kBy, class SumPart, class Found>
__device__ void for_each_sum(int count, SumPart sum_part, Found found) {
    static_assert((kBy & (kBy - 1)) == 0, "a power of two");
    // 2^shift parts, at most as many as lanes, so that all indices have a thread each, if they can.
    const int spare = __clz(count - 1) - __builtin_clz(kBy - 1);
    const int shift = spare < 0 ? 0 : spare < 5 ? spare : 5;
    const int parts = 1 << shift;
    const int part = static_cast<int>(threadIdx.x) & (parts - 1);
    MEGATRON_EXT_ROLLED
    for (int first = 0; first < count; first += kBy >> shift) {
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
constexpr int kEachWords = 4 * DeviceWarp::kLanes;  // There are as many words for each part.

__host__ __device__ constexpr int padded(int count) {
    return (count + kEachWords - 1) / kEachWords * kEachWords;
}

// What is behind the last value comes before none.
__device__ uint32_t word_of(int64_t value, int i, int count) {
    return i < count ? static_cast<uint32_t>(value) << kIndexBits | (kMostWords - 1 - i) : 0;
}

// The place of each index by falling value: found(index, place). By the first kBy threads.
//   words  [padded(count)]
template <int kBy, class Found>
__device__ void order_words(const uint32_t* words, int count, Found found) {
    const auto count_before = [&](int i, int part, int parts) {
        const uint32_t own = words[i];
        int before = 0;
#pragma unroll 4
        for (int j = part; j < padded(count) / 4; j += parts) {
            const FourWords four = reinterpret_cast<const FourWords*>(words)[j];
#pragma unroll
            for (int k = 0; k < 4; ++k) before += four.each[k] > own;
        }
        return before;
    };
    for_each_sum<kBy>(count, count_before, found);
}

// The same of any values.
template <int kBy, class Found>
__device__ void order_values(const int64_t* value, int count, Found found) {
    const auto count_before = [&](int i, int part, int parts) {
        const int64_t own = value[i];
        int before = 0;
#pragma unroll 8  // reads in flight at once
        for (int j = part; j < count; j += parts) before += comes_first(value[j], j, own, i);
        return before;
    };
    for_each_sum<kBy>(count, count_before, found);
}

// The loads of a domain; its ranks in order, and their hottest mains, if there is a place for them.
// By so many threads of the block, of which this is the `thread`th.
template <class Amount>
__device__ void copy_loads(const Domain<int64_t>& domain,
                           Amount* expert_load,
                           Amount* home_load,
                           int32_t* busiest_first,
                           int32_t* hottest,
                           int thread,
                           int threads) {
    MEGATRON_EXT_ROLLED
    for (int e = thread; e < domain.experts(); e += threads) {
        expert_load[e] = static_cast<Amount>(domain.expert_load[e]);
    }
    MEGATRON_EXT_ROLLED
    for (int r = thread; r < domain.ranks; r += threads) {
        home_load[r] = static_cast<Amount>(domain.home_load[r]);
        if (busiest_first != nullptr) busiest_first[r] = domain.busiest_first[r];
        if (hottest != nullptr) hottest[r] = domain.hottest[r];
    }
}

template <class Amount>
__device__ DomainSizes<Amount> sizes_of(const Domain<int64_t>& domain) {
    return {domain.ranks,
            domain.mains,
            domain.slots,
            domain.per_slot,
            static_cast<Amount>(domain.min_quota),
            domain.even};
}

// A warp sets a flag, at any time, that others see later. All lanes see the same.
__device__ void set_flag(unsigned& flag) { atomicExch(&flag, 1u); }
__device__ bool is_set(unsigned& flag) {
    const bool set = DeviceWarp::lane() == 0 && atomicAdd(&flag, 0u) != 0;
    return __ballot_sync(DeviceWarp::kAll, set) != 0;
}

// What warps tell each other while they try.
struct Flags {
    unsigned is_stopped;   // nobody needs the tries that may stop
    unsigned num_methods;  // that have been tried
};

// What the tries of a block came to.
struct Results {
    Verdict of_warp[kWarps];
    PublishedSearch beside;  // what was searched beside the methods
    bool found_beside;       // a plan, which is kept
    bool goes_on_beside;
};

// Whose plan a block keeps: not a warp's.
constexpr int kBest = kWarps;

// A block's loads and tries in shared memory, for so many ranks, experts and slots or fewer. Where
// they are is known to the compiler, but for the warp: it takes no read to find out.
template <int kMostRanks, int kMostExperts, int kMostSlots>
struct SharedMemory {
    using Amount = int32_t;
    static constexpr int kRanks = kMostRanks;
    static constexpr int kSlots = kMostSlots;
    // Mains of a rank: a lane each, but where ranks are few.
    static constexpr int kMains =
        kMostRanks > DeviceWarp::kLanes ? DeviceWarp::kLanes : kMostExperts;
    static_assert((2 * kMostSlots + 1) * kMostRanks <= 1 << kIndexBits, "ids of offers in a chain");
    static_assert(kMostExperts <= 1 << kIndexBits, "mains of a rank");
    static_assert(kMostExperts % 4 == 0, "what is copied by four");
    static_assert(kMostRanks <= 1 << kRankBits, "keys of ranks");

    __host__ __device__ static int try_bytes() {
        return TryMemory<Amount>::bytes(kMostRanks, kMostExperts, kMostSlots);
    }
    __host__ __device__ static int bytes() {
        return kTries + kWarps * try_bytes() + bytes_of_last() + kMostWords * 4;
    }
    __host__ static bool fits(const QuotaProblem& problem, int64_t most_bytes) {
        const int64_t ranks = problem.nvlink_domain;
        return ranks <= kMostRanks && ranks * mains_of(problem) <= kMostExperts &&
               mains_of(problem) <= kMains && problem.num_slots <= kMostSlots &&
               bytes() <= most_bytes;
    }

    // By so many threads of the block, of which this is the `thread`th; it waits before it tries.
    __device__ void copy(const Domain<int64_t>& domain, int thread, int threads) const {
        if (thread == 0) placed() = {sizes_of<Amount>(domain), Flags{}};
        copy_loads(domain, loads(), loads() + kMostExperts, order(), hottest(), thread, threads);
    }

    __device__ Domain<Amount> domain() const {
        return {placed().sizes, loads(), loads() + kMostExperts, order(), hottest()};
    }
    __device__ TryMemory<Amount> of(int warp) const {
        TryMemory<Amount> placed;
        placed.lay_out(memory(warp), kMostRanks, kMostExperts, kMostSlots);
        return placed;
    }
    __device__ TryMemory<Amount> arrays() const { return of(DeviceWarp::warp()); }

    __device__ Flags& flags() const { return placed().flags; }
    __device__ bool is_stopped() const { return is_set(flags().is_stopped); }

    // For a block's sums, until the first plan is kept: that lies there, too.
    __device__ static char* place_of_sums() { return memory(kBest); }
    // For what is put in order: [kMostWords].
    __device__ static uint32_t* words() {
        return reinterpret_cast<uint32_t*>(memory(kBest) + bytes_of_last());
    }

  private:
    struct Placed {
        DomainSizes<Amount> sizes;
        Flags flags;
    };
    static constexpr int kLoads = 32;  // behind what is placed first
    static constexpr int kOrder = kLoads + sizeof(Amount) * (kMostExperts + kMostRanks);
    static constexpr int kHottest = kOrder + sizeof(int32_t) * kMostRanks;
    static constexpr int kTries = kHottest + sizeof(int32_t) * kMostRanks;
    static_assert(sizeof(Placed) <= kLoads && kTries % 16 == 0, "where arrays may begin");

    __host__ __device__ static int bytes_of_last() {
        constexpr auto kSums = static_cast<int>(Sums::bytes(kMostRanks, kMostExperts));
        return kSums > try_bytes() ? kSums : try_bytes();
    }

    __device__ static Placed& placed() { return *reinterpret_cast<Placed*>(dynamic_memory); }
    __device__ static char* memory() { return reinterpret_cast<char*>(dynamic_memory); }
    __device__ static char* memory(int warp) { return memory() + kTries + warp * try_bytes(); }
    __device__ static Amount* loads() { return reinterpret_cast<Amount*>(memory() + kLoads); }
    __device__ static int32_t* order() { return reinterpret_cast<int32_t*>(memory() + kOrder); }
    __device__ static int32_t* hottest() { return reinterpret_cast<int32_t*>(memory() + kHottest); }
};

// The same in global memory, for all that does not fit. Addresses would take too many registers:
// they are kept in shared memory.
struct GlobalMemory {
    using Amount = int64_t;
    static constexpr int kRanks = 0;
    char* start;

    // By the whole block, which waits before it tries.
    __device__ void copy(const Domain<int64_t>& domain) const {
        auto* const expert_load = reinterpret_cast<Amount*>(start);
        auto* const home_load = expert_load + domain.experts();
        const auto thread = static_cast<int>(threadIdx.x);
        copy_loads(domain, expert_load, home_load, nullptr, nullptr, thread, kThreads);
        const int64_t loads = sizeof(Amount) * (domain.experts() + domain.ranks);
        const int64_t each = TryMemory<Amount>::bytes(domain.ranks, domain.experts(), domain.slots);
        if (thread <= kWarps) {
            placed().tries[thread].lay_out(start + (loads + 15) / 16 * 16 + thread * each,
                                           domain.ranks,
                                           domain.experts(),
                                           domain.slots);
        }
        if (thread == 0) {
            placed().flags = {};
            placed().domain = {sizes_of<Amount>(domain),
                               expert_load,
                               home_load,
                               domain.busiest_first,
                               domain.hottest};
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

    __device__ Flags& flags() const { return placed().flags; }
    __device__ bool is_stopped() const { return is_set(flags().is_stopped); }

    struct Placed {
        Flags flags;
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

// Warp::Memory: where the tries lie. results: in shared memory.
template <class Warp>
class BlockPlanner {
    using Amount = typename Warp::Amount;

  public:
    static constexpr int64_t kNoSearch = -1;

    __device__ BlockPlanner(Results& results, int64_t tolerance_ppm, typename Warp::Memory memory)
        : results_(results), tolerance_ppm_(tolerance_ppm), memory_(memory) {}

    // Returns whether there is a plan better than no balancing.
    __device__ __noinline__ bool search(int64_t target, int64_t start, int64_t* reached) {
        const auto& domain = memory_.domain();
        *reached = domain.before();
        if (*reached <= start || domain.slots == 0) return false;
        WorkLeft left{work_budget(domain.ranks, domain.mains)};
        if (reach(start, left, target)) {
            *reached = start;
            return true;
        }
        PublishedSearch published = results_.beside;
        bool found = results_.found_beside;
        MEGATRON_EXT_ROLLED
        while (!published.done()) {
            run_next_steps(published, start, kSteps);
            __syncthreads();
            const int chosen = follow(published, kSteps);
            keep(chosen);
            found = found || chosen >= 0;
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
                [&](int p, Method m) { return results_.of_warp[warp_of_probe(p, m)]; },
                [&](int p, Method m) { chosen = warp_of_probe(p, m); });
            keep(chosen);
        }
        *reached = search.reached();
        return found;
    }

    // Whether a plan for just this threshold was found. The exact fill comes first by itself, as it
    // mostly decides, and is quicker than the others. Refilling stops when best fit has made it
    // there. To be called once.
    //   target  of UltraEP's search, which goes on meanwhile; or kNoSearch
    __device__ __noinline__ bool reach(int64_t threshold, WorkLeft& left, int64_t target) {
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
            decided = then.pays_for(results_.of_warp[static_cast<int>(Method::kFill)]);
        }
        if (!decided) {
            if (warp_idx() >= kMethods) {
                if (target != kNoSearch) search_beside(target, threshold);
            } else if (method != Method::kFill) {
                const Verdict verdict = run_here();
                Flags& flags = memory_.flags();
                if (method == Method::kBestFit && then.pays_for(verdict)) {
                    set_flag(flags.is_stopped);
                }
                if (DeviceWarp::lane() == 0) atomicAdd(&flags.num_methods, 1u);
            }
            __syncthreads();
        }
        Verdict verdicts[kMethods];
#pragma unroll  // all reads come first
        for (int m = 0; m < kMethods; ++m) verdicts[m] = results_.of_warp[m];
        int chosen = -1;
        const bool reached = choose_at_start(
            domain.even,
            left,
            [&](Method method) { return verdicts[static_cast<int>(method)]; },
            [&](Method method) { chosen = static_cast<int>(method); });
        keep(chosen);
        return reached;
    }

  private:
    __device__ static int thread() { return static_cast<int>(threadIdx.x); }
    __device__ static int warp_idx() { return DeviceWarp::warp(); }

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
            if (DeviceWarp::lane() == 0) results_.of_warp[warp_idx()] = Verdict{};
        } else {
            run(threshold, Method::kRoomiest, INT32_MAX, 0);
        }
    }

    // Go these steps as the verdicts tell. Returns the warp whose plan is the best so far, or -1.
    __device__ int follow(PublishedSearch& published, int steps) const {
        int node = 0;
        int chosen = -1;
        MEGATRON_EXT_ROLLED
        for (int step = 0; step < steps && !published.done(); ++step) {
            const bool is_reached = results_.of_warp[warp_of_node(node)].reached;
            if (is_reached) chosen = warp_of_node(node);
            published.narrow(is_reached);
            node = 2 * node + (is_reached ? 1 : 2);
        }
        return chosen;
    }

    // UltraEP's search, as far as it comes while methods are tried. By the warps without one.
    __device__ void search_beside(int64_t target, int64_t start) {
        PublishedSearch published(target, memory_.domain().before());
        bool found = false;
        bool goes_on = true;
        MEGATRON_EXT_ROLLED
        while (goes_on) {
            run_next_steps(published, start, kStepsBeside);
            sync_some<kThreadsBeside>();
            const int chosen = follow(published, kStepsBeside);
            if (chosen >= 0) copy_plan(chosen, thread() % kThreadsBeside, kThreadsBeside);
            found = found || chosen >= 0;
            if (thread() == kThreads - 1) {
                Flags& flags = memory_.flags();
                const bool is_needed = atomicAdd(&flags.is_stopped, 0u) == 0 &&
                                       atomicAdd(&flags.num_methods, 0u) < kMethods - 1;
                results_.beside = published;
                results_.found_beside = found;
                results_.goes_on_beside = is_needed && !published.done();
            }
            sync_some<kThreadsBeside>();
            goes_on = results_.goes_on_beside;
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
        if (DeviceWarp::lane() == 0) results_.of_warp[warp_idx()] = verdict;
        return verdict;
    }

    // The plan of this warp, if it is one, is the best so far. By the whole block; after it the
    // verdicts may be overwritten.
    __device__ __noinline__ void keep(int warp) {
        __syncthreads();
        if (warp < 0) return;
        copy_plan(warp, thread(), kThreads);
        __syncthreads();
    }

    // By `threads` threads, of which this is the `first`th.
    __device__ void copy_plan(int warp, int first, int threads) const {
        const auto& plan = memory_.of(warp);
        const auto& best = memory_.of(kBest);
        const auto& domain = memory_.domain();
        MEGATRON_EXT_ROLLED
        for (int i = first; i < domain.ranks * domain.slots; i += threads) {
            best.expert[i] = plan.expert[i];
            best.amount[i] = plan.amount[i];
        }
        MEGATRON_EXT_ROLLED
        for (int r = first; r < domain.ranks; r += threads) best.held[r] = plan.held[r];
    }

    Results& results_;
    const int64_t tolerance_ppm_;
    const typename Warp::Memory memory_;
};

// What a block plans, and where to.
struct Job {
    Domain<int64_t> domain;
    int64_t tolerance_ppm;
    int ranks;         // of all domains
    int first_rank;    // of the domain
    int64_t* reached;  // the domain's busiest load
    int64_t* quota;    // [E, R]
    int32_t* slots;    // [R, S]
};

// Write zeros where a domain's plan goes, and that no slot is in use. By so many threads of the
// block, of which this is the `thread`th.
__device__ void write_zeros(const Job& job, int thread, int threads) {
    const auto& domain = job.domain;
    int64_t* const rows =
        job.quota + static_cast<int64_t>(job.first_rank) * domain.mains * job.ranks;
    const int64_t places = static_cast<int64_t>(domain.experts()) * job.ranks;
#pragma unroll 8
    for (int64_t i = thread; i < places; i += threads) rows[i] = 0;
    MEGATRON_EXT_ROLLED
    for (int i = thread; i < domain.ranks * domain.slots; i += threads) {
        job.slots[job.first_rank * domain.slots + i] = -1;
    }
}

// Behind the zeros, write the plan of no balancing.
__device__ void write_mains(const Job& job, int thread, int threads) {
    const auto& domain = job.domain;
    MEGATRON_EXT_ROLLED
    for (int e = thread; e < domain.experts(); e += threads) {
        const int home = job.first_rank + e / domain.mains;
        const int64_t expert = static_cast<int64_t>(job.first_rank) * domain.mains + e;
        job.quota[expert * job.ranks + home] = domain.expert_load[e];
    }
}

// Write the replicas of the domain's best plan into that of no balancing. By the whole block.
template <class Memory>
__device__ void write_replicas(Memory tries, const Job& job) {
    const auto& domain = tries.domain();
    const auto& best = tries.of(kBest);
    const int first_expert = job.first_rank * domain.mains;
    MEGATRON_EXT_ROLLED
    for (int i = static_cast<int>(threadIdx.x); i < domain.ranks * domain.slots; i += kThreads) {
        const int r = domain.rank_of(i);
        if (i - r * domain.slots >= best.held[r]) continue;
        const int expert = first_expert + best.expert[i];
        const int64_t amount{best.amount[i]};
        int64_t* const row = job.quota + static_cast<int64_t>(expert) * job.ranks;
        // Replicas of one main are on several ranks. Subtracts: unsigned arithmetic wraps.
        atomicAdd(reinterpret_cast<unsigned long long*>(row + expert / domain.mains),
                  static_cast<unsigned long long>(-amount));
        row[job.first_rank + r] = amount;
        job.slots[job.first_rank * domain.slots + i] = expert;
    }
}

// Plan the domain, or plan it once more for `worst` alone, and write its plan. What is written is
// the plan of no balancing, or that of the first time. A function: else its callees would leave the
// kernel no registers.
template <class Memory>
__device__ __noinline__ void plan_domain(
    const Job& job, Memory tries, int64_t target, int64_t start, int64_t worst) {
    __shared__ Results results;
    const auto thread = static_cast<int>(threadIdx.x);
    BlockPlanner<PlannerWarp<Memory>> planner(results, job.tolerance_ppm, tries);
    if (worst == 0) {
        if (thread >= kThreads - kThreadsBeside) {  // The methods begin meanwhile.
            write_zeros(job, thread % kThreadsBeside, kThreadsBeside);
            sync_some<kThreadsBeside>();
            write_mains(job, thread % kThreadsBeside, kThreadsBeside);
        }
        int64_t reached;
        const bool found = planner.search(target, start, &reached);
        // Of the first launch only: blocks of the second read it, at any time.
        if (thread == 0) *job.reached = reached;
        if (!found) return;
    } else {
        const auto& domain = job.domain;
        const bool is_above = domain.before() > worst;
        WorkLeft left{work_budget(domain.ranks, domain.mains)};
        if (is_above && !planner.reach(worst, left, planner.kNoSearch)) return;
        write_zeros(job, thread, kThreads);
        __syncthreads();
        write_mains(job, thread, kThreads);
        if (!is_above) return;
        __syncthreads();
    }
    write_replicas(tries, job);
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
        ranks,
        problem.num_experts);
    sums.expert_load[e] = sum;
}

// The ranks' sums, from the experts' sums. Of all domains: where the search starts depends on the
// worst of them. By the whole block.
//   words     [padded(R)] out, of the ranks' loads; or null
//   in_words  becomes false if a load does not fit a word
__device__ void sum_ranks(const QuotaProblem& problem,
                          const Sums& sums,
                          uint32_t* words,
                          bool& in_words) {
    const int mains = mains_of(problem);
    const auto ranks = static_cast<int>(problem.num_ranks);
    MEGATRON_EXT_ROLLED
    for (int r = static_cast<int>(threadIdx.x); r < padded(ranks); r += kThreads) {
        int64_t sum = 0;
        int64_t most = -1;
        int hottest = 0;
        if (r < ranks) {
#pragma unroll 4  // reads in flight at once
            for (int m = 0; m < mains; ++m) {
                const int64_t load = sums.expert_load[r * mains + m];
                sum += load;
                hottest = load > most ? m : hottest;
                most = larger(most, load);
            }
            sums.home_load[r] = sum;
            sums.hottest[r] = hottest;
            sums.hottest_load[r] = static_cast<int32_t>(most);
            if (!fits_words(sum)) in_words = false;
        }
        if (words != nullptr) words[r] = word_of(sum, r, ranks);
    }
}

// Order the ranks of each domain. By the first kBy threads of the block.
template <int kBy>
__device__ void order_ranks(const QuotaProblem& problem, const Sums& sums, const uint32_t* words) {
    const auto ranks = static_cast<int>(problem.nvlink_domain);
    const auto found_of = [&](int first) {
        return [&sums, first](int r, int place) {
            sums.busiest_first[first + place] = r;
            sums.place[first + r] = place;
        };
    };
    if (words != nullptr) {
        order_words<kBy>(words, ranks, found_of(0));
        return;
    }
    const auto all_ranks = static_cast<int>(problem.num_ranks);
    MEGATRON_EXT_ROLLED
    for (int first = 0; first < all_ranks; first += ranks) {
        order_values<kBy>(sums.home_load + first, ranks, found_of(first));
    }
}

// Order the experts of each domain. By the whole block.
//   words  [padded(D * M)], or null where loads do not fit words
__device__ __noinline__ void order_experts(const QuotaProblem& problem,
                                           const Sums& sums,
                                           int num_domains,
                                           uint32_t* words) {
    const int mains = mains_of(problem);
    const auto ranks = static_cast<int>(problem.nvlink_domain);
    const int experts = ranks * mains;
    MEGATRON_EXT_ROLLED
    for (int d = 0; d < num_domains; ++d) {
        const int first = d * experts;
        const int64_t* const load = sums.expert_load + first;
        const auto found = [&](int e, int place) {
            sums.hottest_first[first + place] = e;
            sums.busier[first + place] = sums.place[d * ranks + e / mains];
        };
        if (words != nullptr) {
            MEGATRON_EXT_ROLLED
            for (int e = static_cast<int>(threadIdx.x); e < padded(experts); e += kThreads) {
                words[e] = word_of(e < experts ? load[e] : 0, e, experts);
            }
            __syncthreads();
            order_words<kThreads>(words, experts, found);
        } else {
            order_values<kThreads>(load, experts, found);
        }
        __syncthreads();  // The words may be overwritten.
    }
}

// The sum of the lanes' numbers up to this one's.
__device__ int32_t sum_to_lane(int32_t own) {
    const int lane = DeviceWarp::lane();
#pragma unroll
    for (int distance = 1; distance < DeviceWarp::kLanes; distance *= 2) {
        const int32_t before = __shfl_sync(DeviceWarp::kAll, own, lane - distance);
        if (lane >= distance) own += before;
    }
    return own;
}

// Whether no bound of a domain is above `threshold`, as far as that can be seen without ordering
// experts: from the hottest main of each rank, as is_bound_within of the host does. By a warp;
// false where sums may leave 32 bits.
//   total  of all domains
__device__ bool is_bound_within(
    const QuotaProblem& problem, const Sums& sums, int d, int64_t total, int64_t threshold) {
    constexpr int kLanes = DeviceWarp::kLanes;
    const auto ranks = static_cast<int>(problem.nvlink_domain);
    if (problem.num_slots == 0 || larger(total, threshold * ranks) > INT32_MAX) return false;
    const auto slots = static_cast<int>(problem.num_slots);
    const int mains = mains_of(problem);
    const int lane = DeviceWarp::lane();
    const int32_t* const busiest_first = sums.busiest_first + d * ranks;
    const int32_t* const hottest_load = sums.hottest_load + d * ranks;
    int32_t* const hottest_sum = sums.hottest_sum + d * ranks;
    int32_t* const excess_sum = sums.excess_sum + d * ranks;
    // Both sums of the ranks up to one, side by side.
    int32_t hottest_before = 0;
    int32_t excess_before = 0;
    int32_t most = 0;
#pragma unroll 2  // sums in flight at once
    for (int i = lane; i - lane < ranks; i += kLanes) {
        const bool is_rank = i < ranks;
        const int r = is_rank ? busiest_first[i] : 0;
        const int32_t hot = is_rank ? hottest_load[r] : 0;
        const auto own =
            is_rank ? static_cast<int32_t>(sums.home_load[d * ranks + r] - threshold) : 0;
        const int32_t hottest_here = hottest_before + sum_to_lane(hot);
        const int32_t excess_here = excess_before + sum_to_lane(own);
        if (is_rank) {
            hottest_sum[i] = hottest_here;
            excess_sum[i] = excess_here;
        }
        hottest_before = __shfl_sync(DeviceWarp::kAll, hottest_here, kLanes - 1);
        excess_before = __shfl_sync(DeviceWarp::kAll, excess_here, kLanes - 1);
        most = hot > most ? hot : most;
    }
    const int32_t brought = __reduce_max_sync(DeviceWarp::kAll, most);
    __syncwarp();
    int32_t left = 0;  // above the threshold, and without room
    bool is_within = true;
#pragma unroll 2
    for (int i = lane; i - lane < ranks; i += kLanes) {
        const bool is_rank = i < ranks;
        const int32_t excess = is_rank ? excess_sum[i] : 0;
        const int32_t own = is_rank && i > 0 ? excess - excess_sum[i - 1] : excess;
        const int senders = i + 1;
        const int free = slots * (ranks - senders);
        const int taking = free < senders ? free : senders;
        const int32_t taken = is_rank && taking > 0 ? hottest_sum[taking - 1] : 0;
        if (is_rank && free < senders * mains && excess > taken) is_within = false;
        left += own > -brought ? own : -brought;
    }
    if (__reduce_add_sync(DeviceWarp::kAll, left) > 0) is_within = false;
    return __ballot_sync(DeviceWarp::kAll, !is_within) == 0;
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
    __shared__ Job job;
    __shared__ int64_t total, target;
    __shared__ int64_t bounds[kWarps];
    __shared__ bool in_words, is_within, in_32_bits;
    // For functions that are called: what has no address stays in registers.
    __shared__ QuotaProblem given_problem;
    __shared__ Sums given_sums;

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
    char* memory = memory_of(own) + kReachedBytes;
    char* tries = memory + sums_bytes(problem);
    constexpr bool kInShared = !std::is_same<Memory, GlobalMemory>::value;
    uint32_t* words = nullptr;
    if constexpr (kInShared) {
        if (num_domains == 1) memory = Memory::place_of_sums();
        words = Memory::words();
    }
    Sums sums;
    sums.lay_out(memory, ranks, experts);
    if (thread == 0) {
        in_words = kInShared;
        is_within = true;
        given_problem = problem;
    }

    if (num_domains > 1) {  // sum_columns_kernel has left them with the first block
        Sums first;
        first.lay_out(memory_of(0) + kReachedBytes, ranks, experts);
        sums.expert_load = first.expert_load;
    } else {
        for_each_sum<kThreads>(
            static_cast<int>(experts),
            [&](int e, int part, int parts) -> long long {
                return sum_column(load, load_stride, e, part, ranks, parts);
            },
            [&](int e, int64_t sum) { sums.expert_load[e] = sum; });
    }
    __syncthreads();

    // The last warp sums and divides, the first half of the block puts ranks in order.
    constexpr int kOrdering = kThreads / 2;
    constexpr int kSummingWarp = kWarps - 1;
    if (warp_idx == kSummingWarp) {
        const int64_t sum = DeviceLanes<int64_t>{}.sum(DeviceWarp::kLanes, [&](int lane) {
            int64_t own = 0;
#pragma unroll 8  // reads in flight at once
            for (int64_t e = lane; e < experts; e += DeviceWarp::kLanes) own += sums.expert_load[e];
            return own;
        });
        if (DeviceWarp::lane() == 0) total = sum;
    }
    uint32_t* const words_of_ranks = num_domains == 1 ? words : nullptr;
    if (!again) sum_ranks(problem, sums, words_of_ranks, in_words);
    if (thread == 0) {
        job = {domain_of(problem, sums, own, tolerance_ppm == 0),
               tolerance_ppm,
               static_cast<int>(ranks),
               own * static_cast<int>(problem.nvlink_domain),
               reinterpret_cast<int64_t*>(memory_of(own)),
               quotas + plan_idx * experts * ranks,
               slots + plan_idx * ranks * problem.num_slots};
        given_sums = sums;
    }
    __syncthreads();

    if (warp_idx == kSummingWarp) {
        const int64_t load = target_load(total, ranks, tolerance_ppm);
        if (DeviceWarp::lane() == 0) target = load;
    } else if (!again && thread < kOrdering) {
        order_ranks<kOrdering>(problem, sums, in_words ? words_of_ranks : nullptr);
    }
    __syncthreads();

    // The first warp looks at bounds meanwhile.
    constexpr int kLooking = DeviceWarp::kLanes;
    if constexpr (kInShared) {
        if (thread >= kLooking) Memory{}.copy(job.domain, thread - kLooking, kThreads - kLooking);
        // Found out now: as soon as the first warps try, plans may be kept where the sums lie.
        if (thread == kThreads - 1) {
            in_32_bits = is_narrow(job.domain.before(), job.domain.ranks, problem.min_quota);
        }
    }
    int64_t start = target;
    int64_t worst = 0;
    if (again) {
        MEGATRON_EXT_ROLLED
        for (int d = 0; d < num_domains; ++d) {
            worst = larger(worst, *reinterpret_cast<const int64_t*>(memory_of(d)));
        }
        if (*job.reached == worst) return;
    } else {
        MEGATRON_EXT_ROLLED
        for (int d = warp_idx; d < num_domains; d += kWarps) {
            const bool is_own_within = is_bound_within(problem, given_sums, d, total, target);
            if (!is_own_within && DeviceWarp::lane() == 0) is_within = false;
        }
    }
    __syncthreads();
    if (!is_within) {
        order_experts(given_problem, given_sums, num_domains, in_words ? words : nullptr);
        const auto bound = [&](auto warp) {
            return bound_of_warp(
                warp, given_problem, given_sums, num_domains, target, tolerance_ppm == 0);
        };
        // Of a domain's ranks, none of which has more than the total, sums stay in 32 bits then.
        const int64_t of_warp = total <= INT32_MAX / problem.nvlink_domain
                                    ? bound(DeviceLanes<int32_t>{})
                                    : bound(DeviceLanes<int64_t>{});
        if (DeviceWarp::lane() == 0) bounds[warp_idx] = of_warp;
        __syncthreads();
        const DeviceLanes<int64_t> wide;
        start = larger(start, wide.best(kWarps, [&](int w) -> int64_t { return bounds[w]; }).key);
    }

    if constexpr (kInShared) {
        if (in_32_bits) {
            plan_domain(job, Memory{}, target, start, worst);
            return;
        }
    }
    const GlobalMemory in_global{tries};
    in_global.copy(job.domain);
    __syncthreads();
    plan_domain(job, in_global, target, start, worst);
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
