// Stage 2, host build: the published planner, to compare with.
//
// Source: UltraEP, Algorithm 1 (SolveReplication); differences are listed at reference.solve_paper.

#include <algorithm>
#include <numeric>
#include <vector>

#include "megatron_ext/api.h"
#include "megatron_ext/planner/search.h"

namespace megatron_ext {
namespace {

struct Transfer {
    int64_t expert;
    int64_t target_rank;
    int64_t amount;
};

class PaperSearch {
  public:
    PaperSearch(const QuotaProblem& problem, const int64_t* load)
        : problem_(problem),
          mains_(problem.num_experts / problem.num_ranks),
          expert_load_(problem.num_experts, 0),
          rank_load_(problem.num_ranks, 0),
          slack_(problem.num_ranks),
          num_held_(problem.num_ranks) {
        for (int64_t r = 0; r < problem.num_ranks; ++r) {
            for (int64_t e = 0; e < problem.num_experts; ++e) {
                expert_load_[e] += load[r * problem.num_experts + e];
            }
        }
        for (int64_t e = 0; e < problem.num_experts; ++e) rank_load_[e / mains_] += expert_load_[e];

        // Both orders are the same for every threshold, so they are made once; ties by index.
        busiest_first_ = sorted_descending(0, problem.num_ranks, rank_load_);
        hottest_first_.reserve(problem.num_experts);
        for (int64_t r = 0; r < problem.num_ranks; ++r) {
            const auto own = sorted_descending(r * mains_, (r + 1) * mains_, expert_load_);
            hottest_first_.insert(hottest_first_.end(), own.begin(), own.end());
        }
    }

    void run() {
        const int64_t total = std::accumulate(rank_load_.begin(), rank_load_.end(), int64_t{0});
        int64_t low = target_load(total, problem_.num_ranks, problem_.tolerance_ppm);
        int64_t high = rank_load_[busiest_first_[0]];
        int64_t threshold = low;
        while (low < high) {
            if (drain(threshold)) {
                best_.swap(transfers_);
                high = threshold;
            } else {
                low = threshold + 1;
            }
            threshold = low + (high - low) / 2;
        }
    }

    void write(int64_t* quota, int32_t* slots) {
        const int64_t ranks = problem_.num_ranks;
        std::fill_n(quota, problem_.num_experts * ranks, int64_t{0});
        std::fill_n(slots, ranks * problem_.num_slots, int32_t{-1});
        for (int64_t e = 0; e < problem_.num_experts; ++e) {
            quota[e * ranks + e / mains_] = expert_load_[e];
        }
        std::fill(num_held_.begin(), num_held_.end(), 0);
        for (const Transfer& transfer : best_) {
            int64_t* row = quota + transfer.expert * ranks;
            row[transfer.expert / mains_] -= transfer.amount;
            row[transfer.target_rank] = transfer.amount;
            const int64_t slot = num_held_[transfer.target_rank]++;
            slots[transfer.target_rank * problem_.num_slots + slot] =
                static_cast<int32_t>(transfer.expert);
        }
    }

  private:
    static std::vector<int64_t> sorted_descending(int64_t first,
                                                  int64_t last,
                                                  const std::vector<int64_t>& value) {
        std::vector<int64_t> order(last - first);
        std::iota(order.begin(), order.end(), first);
        std::stable_sort(
            order.begin(), order.end(), [&](int64_t a, int64_t b) { return value[a] > value[b]; });
        return order;
    }

    // Try to bring every rank down to `threshold`; fills transfers_. Stops at the first rank that
    // cannot be drained: the others no longer matter.
    bool drain(int64_t threshold) {
        transfers_.clear();
        std::fill(num_held_.begin(), num_held_.end(), 0);
        for (int64_t r = 0; r < problem_.num_ranks; ++r) {
            slack_[r] = std::max<int64_t>(threshold - rank_load_[r], 0);
        }
        for (const int64_t home : busiest_first_) {
            int64_t excess = rank_load_[home] - threshold;
            if (excess <= 0) break;
            for (int64_t i = home * mains_; i < (home + 1) * mains_ && excess > 0; ++i) {
                excess = shed(hottest_first_[i], home, excess);
            }
            if (excess > 0) return false;
        }
        return true;
    }

    // Move as much of `expert` as fits off its home rank; returns the excess that stays.
    int64_t shed(int64_t expert, int64_t home, int64_t excess) {
        int64_t movable = expert_load_[expert];
        while (excess > 0 && movable > 0) {
            const int64_t target = roomiest_host(home);
            if (target < 0) break;
            const int64_t amount = std::min({excess, slack_[target], movable});
            if (amount < problem_.min_quota) break;
            transfers_.push_back({expert, target, amount});
            ++num_held_[target];
            slack_[target] -= amount;
            movable -= amount;
            excess -= amount;
        }
        return excess;
    }

    // The rank with the most slack that may take a replica from `home`, the lowest of equals; or
    // -1. It cannot hold the expert already: a transfer uses up the excess, the expert or the
    // host's slack, so what goes on with the same expert goes to another host.
    int64_t roomiest_host(int64_t home) const {
        const int64_t first = home / problem_.nvlink_domain * problem_.nvlink_domain;
        int64_t best = -1;
        int64_t best_slack = 0;
        for (int64_t t = first; t < first + problem_.nvlink_domain; ++t) {
            if (slack_[t] <= best_slack || num_held_[t] == problem_.num_slots) continue;
            best = t;
            best_slack = slack_[t];
        }
        return best;
    }

    const QuotaProblem problem_;
    const int64_t mains_;
    std::vector<int64_t> expert_load_;    // [E] all sources together
    std::vector<int64_t> rank_load_;      // [R] of the mains, before balancing
    std::vector<int64_t> busiest_first_;  // [R] ranks
    std::vector<int64_t> hottest_first_;  // [R, M] experts, per home rank
    // State of one probe.
    std::vector<int64_t> slack_;     // [R]
    std::vector<int64_t> num_held_;  // [R] slots in use
    std::vector<Transfer> transfers_;
    std::vector<Transfer> best_;  // of the last probe that succeeded
};

}  // namespace

void solve_paper(const QuotaProblem& problem, const int64_t* load, int64_t* quota, int32_t* slots) {
    PaperSearch search(problem, load);
    search.run();
    search.write(quota, slots);
}

}  // namespace megatron_ext
