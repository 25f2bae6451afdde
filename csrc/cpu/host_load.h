// Shared by the planners of the host build: the sums and orders of a load, its NVLink domains, and
// how replicas become quotas.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "megatron_ext/api.h"
#include "megatron_ext/planner/search.h"

namespace megatron_ext {

// Replicas of a plan. What they do not take stays with the mains.
struct Replicas {
    std::vector<int32_t> expert;  // [R, S] logical expert or -1, filled from slot 0
    std::vector<int64_t> amount;  // [R, S] assignments, where there is an expert
};

class HostLoad {
  public:
    HostLoad(const QuotaProblem& problem, const int64_t* load)
        : num_ranks_(problem.num_ranks),
          min_quota_(problem.min_quota),
          ranks_(static_cast<int>(problem.nvlink_domain)),
          mains_(static_cast<int>(problem.num_experts / problem.num_ranks)),
          slots_(static_cast<int>(problem.num_slots)),
          expert_load_(problem.num_experts, 0),
          home_load_(problem.num_ranks, 0),
          busiest_first_(problem.num_ranks) {
        const int64_t experts = problem.num_experts;
        for (int64_t r = 0; r < num_ranks_; ++r) {
            const int64_t* row = load + r * experts;
            for (int64_t e = 0; e < experts; ++e) expert_load_[e] += row[e];
        }
        for (int64_t e = 0; e < experts; ++e) home_load_[e / mains_] += expert_load_[e];
        for (int d = 0; d < num_domains(); ++d) {
            sort_falling(home_load_.data() + d * ranks_, &busiest_first_[d * ranks_], ranks_);
        }
    }

    int ranks() const { return ranks_; }  // of a domain
    int mains() const { return mains_; }  // of a rank
    int slots() const { return slots_; }
    int num_domains() const { return static_cast<int>(num_ranks_) / ranks_; }
    const std::vector<int64_t>& expert_load() const { return expert_load_; }

    int64_t total() const {
        return std::accumulate(home_load_.begin(), home_load_.end(), int64_t{0});
    }

    Domain domain(int d, bool even) const {
        const int first = d * ranks_;
        return {ranks_,
                mains_,
                slots_,
                min_quota_,
                even,
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

    Replicas no_replicas() const {
        return {std::vector<int32_t>(num_ranks_ * slots_, -1),
                std::vector<int64_t>(num_ranks_ * slots_)};
    }

    int64_t try_bytes() const { return TryMemory::bytes(ranks_, ranks_ * mains_, slots_); }

    TryMemory try_in(char* memory) const {
        TryMemory placed{};
        placed.lay_out(memory, ranks_, ranks_ * mains_, slots_);
        return placed;
    }

    // Take a domain's plan over: that of a try, or, if there is none, no replicas.
    void take(int d, const TryMemory* plan, Replicas& replicas) const {
        const int64_t first = static_cast<int64_t>(d) * ranks_ * slots_;
        std::fill_n(replicas.expert.begin() + first, ranks_ * slots_, int32_t{-1});
        if (plan == nullptr) return;
        for (int r = 0; r < ranks_; ++r) {
            for (int i = r * slots_; i < r * slots_ + plan->held[r]; ++i) {
                replicas.expert[first + i] = d * ranks_ * mains_ + plan->expert[i];
                replicas.amount[first + i] = plan->amount[i];
            }
        }
    }

    // As solve_quota() in api.h has it.
    void write(const Replicas& replicas, int64_t* quota, int32_t* slots) const {
        const auto experts = static_cast<int64_t>(expert_load_.size());
        for (int64_t e = 0; e < experts; ++e) {
            int64_t* row = quota + e * num_ranks_;
            std::fill_n(row, num_ranks_, int64_t{0});
            row[e / mains_] = expert_load_[e];
        }
        std::copy(replicas.expert.begin(), replicas.expert.end(), slots);
        for (int64_t i = 0; i < num_ranks_ * slots_; ++i) {
            const int64_t expert = replicas.expert[i];
            if (expert < 0) continue;
            quota[expert * num_ranks_ + expert / mains_] -= replicas.amount[i];
            quota[expert * num_ranks_ + i / slots_] = replicas.amount[i];
        }
    }

  private:
    const int64_t num_ranks_;  // of all domains
    const int64_t min_quota_;
    const int ranks_;
    const int mains_;
    const int slots_;
    std::vector<int64_t> expert_load_;    // [E] all sources together
    std::vector<int64_t> home_load_;      // [R] of a rank's mains
    std::vector<int32_t> busiest_first_;  // [R], counted within the domain
};

}  // namespace megatron_ext
