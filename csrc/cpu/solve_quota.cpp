// Stage 2, host build: the quota planner. What it does is in domain_attempt.h and quota_search.h;
// here is the memory and the loop over domains, thresholds and methods.

#include <algorithm>
#include <utility>
#include <vector>

#include "megatron_ext/api.h"
#include "megatron_ext/domain_attempt.h"
#include "megatron_ext/quota_search.h"

namespace megatron_ext {
namespace {

class QuotaPlanner {
  public:
    QuotaPlanner(const QuotaProblem& problem, const int64_t* load)
        : problem_(problem),
          ranks_(static_cast<int>(problem.nvlink_domain)),
          mains_(static_cast<int>(problem.num_experts / problem.num_ranks)),
          slots_(static_cast<int>(problem.num_slots)),
          expert_load_(problem.num_experts, 0),
          home_load_(problem.num_ranks, 0),
          busiest_first_(problem.num_ranks) {
        for (int64_t r = 0; r < problem.num_ranks; ++r) {
            const int64_t* row = load + r * problem.num_experts;
            for (int64_t e = 0; e < problem.num_experts; ++e) expert_load_[e] += row[e];
        }
        for (int64_t e = 0; e < problem.num_experts; ++e) home_load_[e / mains_] += expert_load_[e];
        for (int d = 0; d < num_domains(); ++d) {
            sort_ranks(warp_, ranks_, &home_load_[d * ranks_], &busiest_first_[d * ranks_]);
        }
        const int64_t bytes = AttemptState::bytes(ranks_, mains_, slots_);
        memory_.resize((kMethods + 1) * bytes);
        best_.place(memory_.data(), ranks_, mains_, slots_);
        for (int m = 0; m < kMethods; ++m) {
            tries_[m].place(memory_.data() + (m + 1) * bytes, ranks_, mains_, slots_);
        }
    }

    // What the busiest rank has at least in every plan.
    int64_t bound() const {
        int64_t bound = 0;
        for (int d = 0; d < num_domains(); ++d)
            bound = larger(bound, domain_bound(warp_, domain(d)));
        return bound;
    }

    void solve(int64_t* quota, int32_t* slots) {
        const int64_t ranks = problem_.num_ranks;
        std::fill_n(quota, problem_.num_experts * ranks, int64_t{0});
        const int64_t start = start_threshold(
            warp_, num_domains(), problem_.tolerance_ppm, [&](int d) { return domain(d); });
        std::vector<int64_t> reached(num_domains());
        for (int d = 0; d < num_domains(); ++d) {
            const bool found = search(domain(d), start, &reached[d]);
            write(d, found, quota, slots);
        }
        const int64_t worst = *std::max_element(reached.begin(), reached.end());
        for (int d = 0; d < num_domains(); ++d) {
            if (reached[d] == worst) continue;
            const bool found = before(domain(d)) > worst;
            if (!found || reach(domain(d), worst)) write(d, found, quota, slots);
        }
    }

  private:
    int num_domains() const { return static_cast<int>(problem_.num_ranks) / ranks_; }

    Domain domain(int d) const {
        const int first = d * ranks_;
        return {ranks_,
                mains_,
                slots_,
                problem_.min_quota,
                problem_.tolerance_ppm == 0,
                expert_load_.data() + first * mains_,
                home_load_.data() + first,
                busiest_first_.data() + first};
    }

    // The busiest rank's load without balancing.
    static int64_t before(const Domain& domain) {
        return domain.home_load[domain.busiest_first[0]];
    }

    // Leaves the plan in best_; false if there is none better than no balancing.
    bool search(const Domain& domain, int64_t start, int64_t* reached) {
        bool found = false;
        ThresholdSearch search(slots_ > 0 ? start : before(domain), before(domain));
        while (!search.done()) {
            int lowest = -1;
            for (int probe = 0; probe < ThresholdSearch::kProbes && lowest < 0; ++probe) {
                if (!search.nothing_to_do(probe) && reach(domain, search.threshold(probe))) {
                    lowest = probe;
                }
            }
            found = found || lowest >= 0;
            search.narrow(lowest);
        }
        *reached = search.reached();
        return found;
    }

    bool reach(const Domain& domain, int64_t threshold) {
        Verdict verdicts[kMethods];
        for (int m = 0; m < kMethods; ++m) {
            DomainAttempt<HostWarp> attempt(domain, tries_[m], warp_);
            verdicts[m] = attempt.run(threshold, static_cast<Method>(m));
        }
        const int chosen = choose_plan(verdicts, domain.even);
        if (chosen < 0) return false;
        std::swap(best_, tries_[chosen]);
        return true;
    }

    // Write a domain's plan: best_, or, if none was found, no replicas.
    void write(int d, bool found, int64_t* quota, int32_t* slots) const {
        const int64_t first = static_cast<int64_t>(d) * ranks_;
        std::fill_n(slots + first * slots_, ranks_ * slots_, int32_t{-1});
        for (int64_t e = first * mains_; e < (first + ranks_) * mains_; ++e) {
            int64_t* row = quota + e * problem_.num_ranks;
            std::fill_n(row + first, ranks_, int64_t{0});
            row[e / mains_] = expert_load_[e];
        }
        if (!found) return;
        for (int r = 0; r < ranks_; ++r) {
            for (int k = 0; k < best_.held[r]; ++k) {
                const int64_t expert = first * mains_ + best_.expert[r * slots_ + k];
                const int64_t amount = best_.amount[r * slots_ + k];
                int64_t* row = quota + expert * problem_.num_ranks;
                row[expert / mains_] -= amount;
                row[first + r] = amount;
                slots[(first + r) * slots_ + k] = static_cast<int32_t>(expert);
            }
        }
    }

    const QuotaProblem problem_;
    const int ranks_;  // of a domain
    const int mains_;
    const int slots_;
    const HostWarp warp_{};
    std::vector<int64_t> expert_load_;
    std::vector<int64_t> home_load_;
    std::vector<int32_t> busiest_first_;  // [R], counted within the domain
    std::vector<char> memory_;
    AttemptState best_;
    AttemptState tries_[kMethods];
};

}  // namespace

void solve_quota(const QuotaProblem& problem, const int64_t* load, int64_t* quota, int32_t* slots) {
    QuotaPlanner(problem, load).solve(quota, slots);
}

int64_t lower_bound(const QuotaProblem& problem, const int64_t* load) {
    return QuotaPlanner(problem, load).bound();
}

}  // namespace megatron_ext
