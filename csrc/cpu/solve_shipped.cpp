// Stage 2, host build: the planner that UltraEP's authors ship, to compare with.
//
// Source: UltraEP, release 1.0.0; planner/published.h has a try, and tests/reference/paper.py says
// what differs.

#include <cstdint>
#include <vector>

#include "host_load.h"
#include "megatron_ext/api.h"
#include "megatron_ext/planner/published.h"
#include "megatron_ext/planner/search.h"

namespace megatron_ext {
namespace {

int64_t divided_up(int64_t number, int64_t by) { return number / by + (number % by != 0); }

template <class Amount>
class ShippedPlanner {
  public:
    ShippedPlanner(const QuotaProblem& problem, int64_t search_min_quota, const HostLoad& load)
        : tolerance_ppm_(problem.tolerance_ppm),
          search_min_quota_(search_min_quota),
          load_(load),
          replicas_(load.no_replicas()),
          tries_(load) {
        for (int d = 0; d < load_.num_domains(); ++d) plan(d);
    }

    void write(int64_t* quota, int32_t* slots) const { load_.write(replicas_, quota, slots); }

  private:
    void plan(int d) {
        const Domain<Amount> own = tries_.domain(d, /*even=*/false);
        const int64_t high = own.before();
        int64_t total = 0;
        for (int r = 0; r < own.ranks; ++r) total += own.home_load[r];
        const int64_t mean = divided_up(total, own.ranks);

        // 128 bits, because the product leaves int64 first.
        const __int128 above = (static_cast<__int128>(mean) * tolerance_ppm_ + 999'999) / 1'000'000;
        int64_t threshold = above < high - mean ? mean + static_cast<int64_t>(above) : high;
        const int64_t step = divided_up(high, 100);
        for (int test = 0; test < 3; ++test) {
            if (reaches<true>(d, own, threshold)) return;
            threshold = high - threshold > step ? threshold + step : high;
        }
        Domain<Amount> later = own;
        later.min_quota = static_cast<Amount>(search_min_quota_);
        if (!reaches<false>(d, later, mean)) search(d, later, mean + 1, high);
    }

    // From `low` on; without replicas nothing is above `high`.
    void search(int d, const Domain<Amount>& own, int64_t low, int64_t high) {
        constexpr int kProbes = 4;
        while (low < high) {
            const int64_t range = high - low;
            int64_t first = low;  // not ruled out
            int64_t reached = high;
            for (int i = 0; i < kProbes && reached == high; ++i) {
                // range * (i + 1) / 5, in int64. A short range is tried one by one.
                const int64_t probe = range <= kProbes
                                          ? low + i
                                          : low + range / (kProbes + 1) * (i + 1) +
                                                range % (kProbes + 1) * (i + 1) / (kProbes + 1);
                if (probe >= high) break;
                if (reaches<false>(d, own, probe)) {
                    reached = probe;
                } else {
                    first = probe + 1;
                }
            }
            low = first;
            high = reached;
        }
    }

    // Whether a try brings every rank down to the threshold; then its plan is the domain's.
    template <bool kByNeed>
    bool reaches(int d, const Domain<Amount>& own, int64_t threshold) {
        Moves<HostPlannerWarp<Amount>> moves({&own, &tries_.now()}, INT32_MAX);
        moves.reset(static_cast<Amount>(threshold));
        if (!shed_to_roomiest</*kStays=*/1, kByNeed>(moves)) return false;
        load_.take(d, &tries_.now(), replicas_);
        return true;
    }

    const int64_t tolerance_ppm_;
    const int64_t search_min_quota_;
    const HostLoad& load_;
    Replicas replicas_;
    HostTries<Amount> tries_;
};

}  // namespace

void solve_shipped(const QuotaProblem& problem,
                   int64_t search_min_quota,
                   const int64_t* load,
                   int64_t* quota,
                   int32_t* slots) {
    const HostLoad sums(problem, load);
    sums.in_amounts(larger(problem.min_quota, search_min_quota), [&](auto amount) {
        ShippedPlanner<decltype(amount)>(problem, search_min_quota, sums).write(quota, slots);
    });
}

}  // namespace megatron_ext
