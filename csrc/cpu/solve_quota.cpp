// Stage 2, host build: the quota planner. What it does is in planner/; here is the memory, and the
// loop over domains, thresholds and methods.

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "megatron_ext/api.h"
#include "megatron_ext/planner/attempt.h"
#include "megatron_ext/planner/search.h"

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
          busiest_first_(problem.num_ranks),
          hottest_first_(problem.num_experts) {
        for (int64_t r = 0; r < problem.num_ranks; ++r) {
            const int64_t* row = load + r * problem.num_experts;
            for (int64_t e = 0; e < problem.num_experts; ++e) expert_load_[e] += row[e];
        }
        for (int64_t e = 0; e < problem.num_experts; ++e) home_load_[e / mains_] += expert_load_[e];
        for (int d = 0; d < num_domains(); ++d) {
            sort_falling(home_load_.data() + d * ranks_, &busiest_first_[d * ranks_], ranks_);
        }
        const int64_t bytes = TryMemory<int64_t>::bytes(ranks_, mains_, slots_);
        memory_.resize(2 * bytes);
        best_.place(memory_.data(), ranks_, mains_, slots_);
        try_.place(memory_.data() + bytes, ranks_, mains_, slots_);
    }

    // What the busiest rank has at least in every plan.
    int64_t bound() {
        int64_t bound = 0;
        for (int d = 0; d < num_domains(); ++d) bound = larger(bound, bound_of(d));
        return bound;
    }

    void solve(int64_t* quota, int32_t* slots) {
        const int64_t ranks = problem_.num_ranks;
        std::fill_n(quota, problem_.num_experts * ranks, int64_t{0});
        const int64_t total = std::accumulate(home_load_.begin(), home_load_.end(), int64_t{0});
        target_ = target_load(total, ranks, problem_.tolerance_ppm);
        int64_t start = target_;
        for (int d = 0; d < num_domains(); ++d) start = bound_above(start, d);
        std::vector<int64_t> reached(num_domains());
        for (int d = 0; d < num_domains(); ++d) {
            const bool found = search(domain(d), start, &reached[d]);
            write(d, found, quota, slots);
        }
        const int64_t worst = *std::max_element(reached.begin(), reached.end());
        for (int d = 0; d < num_domains(); ++d) {
            if (reached[d] == worst) continue;
            const Domain<int64_t> own = domain(d);
            const bool found = own.before() > worst;
            WorkLeft left{work_budget(ranks_, mains_)};
            if (!found || reach(own, worst, left)) write(d, found, quota, slots);
        }
    }

  private:
    int num_domains() const { return static_cast<int>(problem_.num_ranks) / ranks_; }

    Domain<int64_t> domain(int d) const {
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

    static void sort_falling(const int64_t* value, int32_t* order, int count) {
        std::iota(order, order + count, 0);
        std::sort(order, order + count, [&](int a, int b) {
            return comes_first(value[a], a, value[b], b);
        });
    }

    const int32_t* hottest_first(int d) {
        const int experts = ranks_ * mains_;
        int32_t* order = hottest_first_.data() + d * experts;
        sort_falling(expert_load_.data() + d * experts, order, experts);
        return order;
    }

    // The bound of domain d, or `least` if that is more.
    int64_t bound_above(int64_t least, int d) {
        const Domain<int64_t> own = domain(d);
        if (slots_ == 0) return larger(least, own.before());
        if (is_bound_within(own, least)) return least;
        return larger(least, bound_of(d));
    }

    int64_t bound_of(int d) {
        const Domain<int64_t> own = domain(d);
        const DomainBound<HostWarp, int64_t> bounds(warp_, own, hottest_first(d));
        int64_t bound = bounds.by_receivers();
        for (int k = 1; k <= ranks_; ++k) bound = larger(bound, bounds.by_senders(k));
        return bound;
    }

    // Whether no bound of the domain is above `threshold`, as far as that can be seen without
    // sorting experts: from the hottest main of each rank.
    bool is_bound_within(const Domain<int64_t>& domain, int64_t threshold) {
        const auto hottest = [&](int r) {
            const int64_t* load = domain.expert_load + r * mains_;
            return *std::max_element(load, load + mains_);
        };
        hottest_load_.assign(1, 0);  // of the k busiest ranks together
        int64_t brought = 0;
        int64_t total = 0;
        for (int k = 0; k < ranks_; ++k) {
            const int r = domain.busiest_first[k];
            total += domain.home_load[r];
            const int64_t load = hottest(r);
            brought = larger(brought, load);
            hottest_load_.push_back(hottest_load_.back() + load);
        }
        __int128 computed = 0;  // of 128 bits, as the sums need not fit 64, like the excess below
        for (int r = 0; r < ranks_; ++r) {
            const __int128 most = static_cast<__int128>(domain.home_load[r]) + brought;
            computed += std::min<__int128>(threshold, most);
        }
        if (computed < total) return false;
        __int128 excess = 0;
        for (int64_t k = 1; k <= ranks_; ++k) {
            excess += domain.home_load[domain.busiest_first[k - 1]] - threshold;
            const int64_t free = slots_ * (ranks_ - k);
            if (free < k * mains_ && excess > hottest_load_[std::min(k, free)]) return false;
        }
        return true;
    }

    // Leaves the plan in best_; false if there is none better than no balancing.
    bool search(const Domain<int64_t>& domain, int64_t start, int64_t* reached) {
        *reached = domain.before();
        if (*reached <= start || slots_ == 0) return false;
        WorkLeft left{work_budget(ranks_, mains_)};
        if (reach(domain, start, left)) {
            *reached = start;
            return true;
        }
        bool found = false;
        PublishedSearch published(target_, *reached);
        while (!published.done()) {
            const int64_t threshold = published.threshold();
            const bool is_reached =
                threshold >= start && run(domain, threshold, Method::kRoomiest, INT32_MAX).reached;
            if (is_reached) keep();
            found = found || is_reached;
            published.narrow(is_reached);
        }
        ThresholdSearch search(start, published.reached(), problem_.tolerance_ppm);
        while (!search.done() && left.rounds > 0) {
            const bool is_reached = search.try_round(
                left,
                [&](int probe, Method method) {
                    return run(domain, search.threshold(probe), method, left.rounds);
                },
                [&](int, Method) { keep(); });
            found = found || is_reached;
        }
        *reached = search.reached();
        return found;
    }

    // Leaves a plan for just this threshold in best_; false if none was found.
    bool reach(const Domain<int64_t>& domain, int64_t threshold, WorkLeft& left) {
        return choose_at_start(
            domain.even,
            left,
            [&](Method method) {
                const int32_t most = std::min(left.rounds, work_at_start(method, ranks_, mains_));
                return run(domain, threshold, method, most, restarts_at_start(method));
            },
            [&](Method) { keep(); });
    }

    Verdict run(const Domain<int64_t>& domain,
                int64_t threshold,
                Method method,
                int32_t work_limit,
                int restarts = 0) {
        Attempt<HostWarp, int64_t> attempt(domain, try_, warp_, work_limit);
        return attempt.run(threshold, method, restarts);
    }

    // The plan of the last try is the best so far.
    void keep() { std::swap(best_, try_); }

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
    std::vector<int32_t> hottest_first_;  // [E], counted within the domain
    std::vector<int64_t> hottest_load_;
    std::vector<char> memory_;
    TryMemory<int64_t> best_;
    TryMemory<int64_t> try_;
    int64_t target_ = 0;
};

}  // namespace

void solve_quota(const QuotaProblem& problem, const int64_t* load, int64_t* quota, int32_t* slots) {
    QuotaPlanner(problem, load).solve(quota, slots);
}

int64_t lower_bound(const QuotaProblem& problem, const int64_t* load) {
    return QuotaPlanner(problem, load).bound();
}

}  // namespace megatron_ext
