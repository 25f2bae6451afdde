// Shared by the planners of the host build: the sums and orders of a load, its NVLink domains, and
// how replicas become quotas.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
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
          busiest_first_(problem.num_ranks),
          hottest_(problem.num_ranks) {
        const int64_t experts = problem.num_experts;
        for (int64_t r = 0; r < num_ranks_; ++r) {
            const int64_t* row = load + r * experts;
            for (int64_t e = 0; e < experts; ++e) expert_load_[e] += row[e];
        }
        for (int64_t r = 0; r < num_ranks_; ++r) {
            const int64_t* const own = &expert_load_[r * mains_];
            home_load_[r] = std::accumulate(own, own + mains_, int64_t{0});
            hottest_[r] = static_cast<int32_t>(std::max_element(own, own + mains_) - own);
        }
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

    // Runs `solve(amount)`, where `amount` is of the type in which tries of this load may count.
    //   min_quota  the most that any try has
    template <class Solve>
    void in_amounts(int64_t min_quota, Solve solve) const {
        const int64_t busiest = *std::max_element(home_load_.begin(), home_load_.end());
        if (is_narrow(busiest, ranks_, min_quota)) {
            solve(int32_t{0});
        } else {
            solve(int64_t{0});
        }
    }

    // To `order`: all indices by falling values, which are not negative; of equals the lower one
    // first.
    template <class Amount>
    static void sort_falling(const Amount* value, int32_t* order, int count) {
        std::iota(order, order + count, 0);
        if (count < kMany) {
            std::sort(order, order + count, [&](int a, int b) {
                return comes_first(value[a], a, value[b], b);
            });
            return;
        }
        // By one byte after the other, from the lowest on. Equals stay in order.
        std::vector<int32_t> other(count);
        const Amount most = *std::max_element(value, value + count);
        for (int shift = 0; shift < std::numeric_limits<Amount>::digits && most >> shift > 0;
             shift += 8) {
            const auto byte = [&](int i) { return 255 - (value[i] >> shift & 255); };
            std::array<int32_t, 256> first{};
            for (int i = 0; i < count; ++i) ++first[byte(i)];
            std::exclusive_scan(first.begin(), first.end(), first.begin(), 0);
            for (int i = 0; i < count; ++i) other[first[byte(order[i])]++] = order[i];
            std::copy(other.begin(), other.end(), order);
        }
    }

    Replicas no_replicas() const {
        return {std::vector<int32_t>(num_ranks_ * slots_, -1),
                std::vector<int64_t>(num_ranks_ * slots_)};
    }

    // Take a domain's plan over: that of a try, or, if there is none, no replicas.
    template <class Amount>
    void take(int d, const TryMemory<Amount>* plan, Replicas& replicas) const {
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
    template <class Amount>
    friend class HostTries;

    // From so many on, sorting by bytes takes less time than by comparing.
    static constexpr int kMany = 128;

    const int64_t num_ranks_;  // of all domains
    const int64_t min_quota_;
    const int ranks_;
    const int mains_;
    const int slots_;
    std::vector<int64_t> expert_load_;    // [E] all sources together
    std::vector<int64_t> home_load_;      // [R] of a rank's mains
    std::vector<int32_t> busiest_first_;  // [R], counted within the domain
    std::vector<int32_t> hottest_;        // [R], counted within a rank's mains
};

// Memory of tries, one after the other, and the loads that they read, as they count.
template <class Amount>
class HostTries {
  public:
    // load: of its ranks and experts; has to live as long.
    explicit HostTries(const HostLoad& load)
        : load_(load),
          expert_load_(load.expert_load_.begin(), load.expert_load_.end()),
          home_load_(load.home_load_.begin(), load.home_load_.end()) {
        const int experts = load.ranks_ * load.mains_;
        const int64_t bytes = TryMemory<Amount>::bytes(load.ranks_, experts, load.slots_);
        memory_.resize(2 * bytes);
        now_.lay_out(memory_.data(), load.ranks_, experts, load.slots_);
        kept_.lay_out(memory_.data() + bytes, load.ranks_, experts, load.slots_);
    }
    HostTries(const HostTries&) = delete;
    HostTries& operator=(const HostTries&) = delete;

    Domain<Amount> domain(int d, bool even) const {
        const int first = d * load_.ranks_;
        return {load_.ranks_,
                load_.mains_,
                load_.slots_,
                Domain<Amount>::per_slot_of(load_.slots_),
                static_cast<Amount>(load_.min_quota_),
                even,
                expert_load_.data() + first * load_.mains_,
                home_load_.data() + first,
                load_.busiest_first_.data() + first,
                load_.hottest_.data() + first};
    }

    // The next try's memory, with the plan of the last one, and what `keep` put aside.
    const TryMemory<Amount>& now() const { return now_; }
    const TryMemory<Amount>& kept() const { return kept_; }
    void keep() { std::swap(now_, kept_); }

  private:
    const HostLoad& load_;
    std::vector<Amount> expert_load_;
    std::vector<Amount> home_load_;
    std::vector<char> memory_;
    TryMemory<Amount> now_{};
    TryMemory<Amount> kept_{};
};

}  // namespace megatron_ext
