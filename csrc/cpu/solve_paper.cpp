// Stage 2, host build: the published planner, to compare with.
//
// Source: UltraEP, Algorithm 1 (SolveReplication); planner/published.h has a try, and
// tests/reference/paper.py lists the differences.

#include <cstdint>
#include <utility>
#include <vector>

#include "host_load.h"
#include "megatron_ext/api.h"
#include "megatron_ext/planner/published.h"
#include "megatron_ext/planner/search.h"

namespace megatron_ext {
namespace {

template <class Amount>
class PaperPlanner {
  public:
    PaperPlanner(const QuotaProblem& problem, const HostLoad& load)
        : load_(load), replicas_(load.no_replicas()), tried_(load.no_replicas()), tries_(load) {
        int64_t busiest = 0;
        for (int d = 0; d < load_.num_domains(); ++d) busiest = larger(busiest, domain(d).before());
        PublishedSearch search(target_load(load_.total(), problem.num_ranks, problem.tolerance_ppm),
                               busiest);
        while (!search.done()) {
            const bool reached = bring_all_to(search.threshold());
            if (reached) std::swap(replicas_, tried_);
            search.narrow(reached);
        }
    }

    void write(int64_t* quota, int32_t* slots) const { load_.write(replicas_, quota, slots); }

  private:
    Domain<Amount> domain(int d) const { return tries_.domain(d, /*even=*/false); }

    // Fills tried_. A domain that fails ends it: the others no longer matter.
    bool bring_all_to(Amount threshold) {
        for (int d = 0; d < load_.num_domains(); ++d) {
            const Domain<Amount> own = domain(d);
            Moves<HostPlannerWarp<Amount>> moves({&own, &tries_.now()}, INT32_MAX);
            moves.reset(threshold);
            if (!shed_to_roomiest(moves)) return false;
            load_.take(d, &tries_.now(), tried_);
        }
        return true;
    }

    const HostLoad& load_;
    Replicas replicas_;  // of the lowest threshold that was reached
    Replicas tried_;
    HostTries<Amount> tries_;
};

}  // namespace

void solve_paper(const QuotaProblem& problem, const int64_t* load, int64_t* quota, int32_t* slots) {
    const HostLoad sums(problem, load);
    sums.in_amounts(problem.min_quota, [&](auto amount) {
        PaperPlanner<decltype(amount)>(problem, sums).write(quota, slots);
    });
}

}  // namespace megatron_ext
