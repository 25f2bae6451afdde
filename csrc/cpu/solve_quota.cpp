// Stage 2, host build: the quota planner. Its algorithm is in planner/. This file has its memory,
// the loops over domains, thresholds and methods, and, for the fastest plan, the loop over
// tolerances.

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "host_load.h"
#include "megatron_ext/api.h"
#include "megatron_ext/planner/attempt.h"
#include "megatron_ext/planner/search.h"

namespace megatron_ext {
namespace {

// Plans one load, with one tolerance after the other.
template <class Amount>
class QuotaPlanner {
  public:
    QuotaPlanner(const QuotaProblem& problem, const HostLoad& load)
        : problem_(problem),
          load_(load),
          ranks_(load_.ranks()),
          mains_(load_.mains()),
          slots_(load_.slots()),
          hottest_first_(ranks_ * mains_),
          place_(ranks_ * mains_),
          bounds_(load_.num_domains(), kUnknown),
          replicas_(load_.no_replicas()),
          tries_(load) {}

    // What the busiest rank has at least in every plan.
    int64_t bound() {
        int64_t bound = 0;
        for (int d = 0; d < load_.num_domains(); ++d) bound = larger(bound, bound_of(d));
        return bound;
    }

    // Plan for `tolerance_ppm`.
    void plan(int64_t tolerance_ppm) {
        problem_.tolerance_ppm = tolerance_ppm;
        target_ = target_load(load_.total(), problem_.num_ranks, tolerance_ppm);
        int64_t start = target_;
        for (int d = 0; d < load_.num_domains(); ++d) start = bound_above(start, d);
        std::vector<int64_t> reached(load_.num_domains());
        for (int d = 0; d < load_.num_domains(); ++d) {
            const bool found = search(domain(d), start, &reached[d]);
            take(d, found);
        }
        const int64_t worst = *std::max_element(reached.begin(), reached.end());
        for (int d = 0; d < load_.num_domains(); ++d) {
            if (reached[d] == worst) continue;
            const Domain<Amount> own = domain(d);
            const bool found = own.before() > worst;
            WorkLeft left{work_budget(ranks_, mains_)};
            if (!found || reach(own, worst, left)) take(d, found);
        }
    }

    // Of the last plan; none before the first.
    const Replicas& replicas() const { return replicas_; }

  private:
    Domain<Amount> domain(int d) const { return tries_.domain(d, problem_.tolerance_ppm == 0); }

    // The bound of domain d, or `least` if that is more.
    int64_t bound_above(int64_t least, int d) {
        const Domain<Amount> own = domain(d);
        if (slots_ == 0) return larger(least, own.before());
        if (bounds_[d] == kUnknown) {
            if (is_bound_within(own, least)) return least;
            bounds_[d] = bound_of(d);
        }
        return larger(least, bounds_[d]);
    }

    int64_t bound_of(int d) {
        const Domain<Amount> own = domain(d);
        const int experts = own.experts();
        HostLoad::sort_falling(own.expert_load, hottest_first_.data(), experts);
        for (int i = 0; i < experts; ++i) place_[hottest_first_[i]] = i;
        using Bound = DomainBound<HostWarp<int64_t>, Amount>;
        int64_t bound = Bound(warp_, own, hottest_first_.data(), nullptr).by_receivers();
        // As DomainBound::by_senders, for 1, 2, 3 ... senders in one pass: with each sender there
        // are more experts, and fewer slots for them. So the last expert that the slots take never
        // comes later in the order than the one before.
        counts_.assign(experts, false);
        int end = experts;  // Experts from here on are not taken.
        int64_t count = 0;  // of those that are
        int64_t taken = 0;  // their assignments
        int64_t load = 0;   // of the k busiest ranks together
        for (int k = 1; k <= ranks_; ++k) {
            const int r = own.busiest_first[k - 1];
            load += own.home_load[r];
            if (load / k + (load % k != 0) <= bound) break;  // Nor do more ranks have more each.
            for (int e = r * mains_; e < (r + 1) * mains_; ++e) {
                counts_[place_[e]] = true;
                if (place_[e] >= end) continue;
                ++count;
                taken += own.expert_load[e];
            }
            while (count > static_cast<int64_t>(slots_) * (ranks_ - k)) {
                if (!counts_[--end]) continue;
                --count;
                taken -= own.expert_load[hottest_first_[end]];
            }
            const int64_t left = load - taken;
            bound = larger(bound, left / k + (left % k != 0));
        }
        return bound;
    }

    // Whether no bound of the domain is above `threshold`, as far as that can be seen without
    // sorting experts: from the hottest main of each rank.
    bool is_bound_within(const Domain<Amount>& domain, int64_t threshold) {
        hottest_load_.assign(1, 0);  // of the k busiest ranks together
        int64_t brought = 0;
        int64_t left = 0;  // above the threshold, and without room
        for (int k = 0; k < ranks_; ++k) {
            const int r = domain.busiest_first[k];
            left += larger(domain.home_load[r] - threshold, 0);
            const int64_t load = domain.expert_load[r * mains_ + domain.hottest[r]];
            brought = larger(brought, load);
            hottest_load_.push_back(hottest_load_.back() + load);
        }
        // Sums end where nothing is left: with a loose threshold all of them would leave int64.
        for (int r = 0; r < ranks_ && left > 0; ++r) {
            left -= std::min(larger(threshold - domain.home_load[r], 0), brought);
        }
        if (left > 0) return false;
        int64_t excess = 0;
        for (int64_t k = 1; k <= ranks_; ++k) {
            excess += domain.home_load[domain.busiest_first[k - 1]] - threshold;
            if (excess <= 0) return true;
            const int64_t free = slots_ * (ranks_ - k);
            if (free < k * mains_ && excess > hottest_load_[std::min(k, free)]) return false;
        }
        return true;
    }

    // Keeps the plan; false if there is none better than no balancing.
    bool search(const Domain<Amount>& domain, int64_t start, int64_t* reached) {
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
            if (is_reached) tries_.keep();
            found = found || is_reached;
            published.narrow(is_reached);
        }
        ThresholdSearch search(start, published.reached(), problem_.tolerance_ppm);
        while (!search.done() && left.rounds > 0) {
            const bool is_reached = search.try_round(
                left,
                [&](int probe, Method method) {
                    return run(domain,
                               search.threshold(probe),
                               method,
                               left.rounds,
                               restarts_of_probe(method));
                },
                [&](int, Method) { tries_.keep(); });
            found = found || is_reached;
        }
        *reached = search.reached();
        return found;
    }

    // Keeps a plan for just this threshold; false if none was found.
    bool reach(const Domain<Amount>& domain, int64_t threshold, WorkLeft& left) {
        return choose_at_start(
            domain.even,
            left,
            [&](Method method) {
                const int32_t most = std::min(left.rounds, work_at_start(method, ranks_, mains_));
                return run(domain, threshold, method, most, restarts_at_start(method));
            },
            [&](Method) { tries_.keep(); });
    }

    Verdict run(const Domain<Amount>& domain,
                int64_t threshold,
                Method method,
                int32_t work_limit,
                int restarts = 0) {
        Attempt<HostPlannerWarp<Amount>> attempt({&domain, &tries_.now()}, work_limit);
        return attempt.run(static_cast<Amount>(threshold), method, restarts);
    }

    // Take a domain's plan over: what was kept, or, if none was found, no replicas.
    void take(int d, bool found) { load_.take(d, found ? &tries_.kept() : nullptr, replicas_); }

    static constexpr int64_t kUnknown = -1;

    QuotaProblem problem_;
    const HostLoad& load_;
    const int ranks_;  // of a domain
    const int mains_;
    const int slots_;
    const HostWarp<int64_t> warp_{};
    std::vector<int32_t> hottest_first_;  // [D * M], of the domain that is looked at
    std::vector<int32_t> place_;          // [D * M] of an expert in hottest_first_
    std::vector<char> counts_;            // [D * M] whether the expert there is a sender's
    std::vector<int64_t> hottest_load_;
    std::vector<int64_t> bounds_;  // of the domains, or kUnknown
    Replicas replicas_;
    HostTries<Amount> tries_;
    int64_t target_ = 0;
};

// The modelled time of plans of one load, as `LayerCosts` of megatron_ext/balance/costs.py has it.
class LayerClock {
  public:
    LayerClock(const QuotaProblem& problem,
               const LayerCosts& costs,
               const int64_t* load,
               const HostLoad& sums)
        : problem_(problem),
          costs_(costs),
          load_(load),
          mains_(problem.num_experts / problem.num_ranks),
          expert_load_(sums.expert_load()),
          kept_(problem.num_experts),
          ranks_(problem.num_ranks) {
        for (int64_t r = 0; r < problem.num_ranks; ++r) {
            const int64_t* row = load + r * problem.num_experts;
            ranks_[r].own = std::accumulate(row, row + problem.num_experts, int64_t{0});
        }
        find_locals();
    }

    struct Measured {
        int64_t time;
        int64_t sends;    // of the busiest sender
        int64_t busiest;  // rank's assignments
    };

    Measured measure(const Replicas& replicas) {
        std::copy(expert_load_.begin(), expert_load_.end(), kept_.begin());
        for (Rank& rank : ranks_) rank.sends = rank.computed = rank.local = 0;
        for (int64_t t = 0; t < problem_.num_ranks; ++t) {
            for (int64_t i = t * problem_.num_slots; i < (t + 1) * problem_.num_slots; ++i) {
                const int64_t expert = replicas.expert[i];
                if (expert < 0) break;
                kept_[expert] -= replicas.amount[i];
                compute(t, expert, replicas.amount[i]);
                ++ranks_[expert / mains_].sends;
            }
        }
        for (int64_t e = 0; e < problem_.num_experts; ++e) compute(e / mains_, e, kept_[e]);
        int64_t sends = 0, tokens = 0, busiest = 0;
        for (const Rank& rank : ranks_) {
            sends = larger(sends, rank.sends);
            tokens = larger(tokens, larger(rank.own, rank.computed) - rank.local);
            busiest = larger(busiest, rank.computed);
        }
        return {picoseconds(sends, tokens, busiest), sends, busiest};
    }

    // What no plan with so many sends, and so much for the busiest rank, is below.
    int64_t least_time(int64_t sends, int64_t busiest) const {
        return picoseconds(sends, larger(least_sent_, busiest - most_local_), busiest);
    }

  private:
    struct Rank {
        int64_t own;  // assignments of its tokens
        int64_t sends;
        int64_t computed;
        int64_t local;  // assignments of its tokens that it computes
    };

    void compute(int64_t rank, int64_t expert, int64_t amount) {
        ranks_[rank].computed += amount;
        ranks_[rank].local += std::min(load_[rank * problem_.num_experts + expert], amount);
    }

    // A rank computes of its own tokens at most what is for its mains, and for the experts that
    // would serve most of its tokens from its slots.
    void find_locals() {
        const int64_t slots = std::min(problem_.num_slots, problem_.num_experts);
        std::vector<int64_t> most(slots);  // falling
        for (int64_t r = 0; r < problem_.num_ranks; ++r) {
            const int64_t* row = load_ + r * problem_.num_experts;
            int64_t local = 0;
            std::fill(most.begin(), most.end(), int64_t{0});
            for (int64_t e = 0; e < problem_.num_experts; ++e) {
                if (e / mains_ == r) {
                    local += row[e];
                } else if (slots > 0 && row[e] > most.back()) {
                    most.pop_back();
                    most.insert(
                        std::upper_bound(most.begin(), most.end(), row[e], std::greater<>()),
                        row[e]);
                }
            }
            local = std::accumulate(most.begin(), most.end(), local);
            least_sent_ = larger(least_sent_, ranks_[r].own - local);
            most_local_ = larger(most_local_, local);
        }
    }

    static int64_t cut(__int128 time) {
        return time < INT64_MAX ? static_cast<int64_t>(time) : INT64_MAX;
    }

    // Each product is cut, too: three of them together may leave 128 bits.
    int64_t picoseconds(int64_t sends, int64_t tokens, int64_t busiest) const {
        const auto time = [](int64_t count, int64_t each) -> __int128 {
            return cut(__int128{count} * each);
        };
        return cut(time(sends, costs_.expert) + time(tokens, costs_.token) +
                   time(busiest, costs_.assignment));
    }

    const QuotaProblem problem_;
    const LayerCosts costs_;
    const int64_t* load_;
    const int64_t mains_;
    const std::vector<int64_t>& expert_load_;
    std::vector<int64_t> kept_;  // by the mains
    std::vector<Rank> ranks_;
    int64_t least_sent_ = 0;
    int64_t most_local_ = 0;
};

template <class Amount>
void plan_fastest(const QuotaProblem& problem,
                  const Tolerances& tolerances,
                  const LayerCosts& costs,
                  const int64_t* load,
                  const HostLoad& sums,
                  int64_t* quota,
                  int32_t* slots) {
    QuotaPlanner<Amount> planner(problem, sums);
    LayerClock clock(problem, costs, load, sums);
    Replicas best = planner.replicas();
    int64_t best_time = clock.measure(best).time;
    const auto try_one = [&](int64_t ppm) {
        planner.plan(ppm);
        const LayerClock::Measured tried = clock.measure(planner.replicas());
        if (tried.time < best_time) {
            best = planner.replicas();
            best_time = tried.time;
        }
        return tried;
    };
    const int64_t tightest = tolerances.count - 1;
    const auto target_of = [&](int64_t i) {
        return target_load(sums.total(), problem.num_ranks, tolerances.ppm[i]);
    };
    int64_t most_sends = 1;
    const auto is_worth_it = [&](int64_t i) {
        return clock.least_time((most_sends + 1) / 2, target_of(i)) < best_time;
    };
    if (is_worth_it(tightest)) {
        try_one(tolerances.ppm[tightest]);
        for (int64_t i = 0; i < tightest; ++i) {
            if (!is_worth_it(i)) continue;
            const LayerClock::Measured tried = try_one(tolerances.ppm[i]);
            if (tried.busiest > target_of(i)) break;
            most_sends = larger(most_sends, tried.sends);
        }
    }
    sums.write(best, quota, slots);
}

}  // namespace

void solve_quota(const QuotaProblem& problem, const int64_t* load, int64_t* quota, int32_t* slots) {
    solve_ladder(problem, {{problem.tolerance_ppm}, 1}, load, quota, slots);
}

void solve_ladder(const QuotaProblem& problem,
                  const Tolerances& tolerances,
                  const int64_t* load,
                  int64_t* quota,
                  int32_t* slots) {
    const HostLoad sums(problem, load);
    sums.in_amounts(problem.min_quota, [&](auto amount) {
        QuotaPlanner<decltype(amount)> planner(problem, sums);
        for (int64_t i = 0; i < tolerances.count; ++i) {
            planner.plan(tolerances.ppm[i]);
            sums.write(planner.replicas(),
                       quota + i * problem.num_experts * problem.num_ranks,
                       slots + i * problem.num_ranks * problem.num_slots);
        }
    });
}

void solve_fastest(const QuotaProblem& problem,
                   const Tolerances& tolerances,
                   const LayerCosts& costs,
                   const int64_t* load,
                   int64_t* quota,
                   int32_t* slots) {
    const HostLoad sums(problem, load);
    sums.in_amounts(problem.min_quota, [&](auto amount) {
        plan_fastest<decltype(amount)>(problem, tolerances, costs, load, sums, quota, slots);
    });
}

int64_t lower_bound(const QuotaProblem& problem, const int64_t* load) {
    const HostLoad sums(problem, load);
    int64_t bound = 0;
    sums.in_amounts(problem.min_quota, [&](auto amount) {
        bound = QuotaPlanner<decltype(amount)>(problem, sums).bound();
    });
    return bound;
}

}  // namespace megatron_ext
