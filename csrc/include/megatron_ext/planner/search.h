// The search around the tries of stage 2: lower bounds that no plan of a domain can beat, which
// tries the search for the lowest threshold makes, and which of their plans it takes.
//
// The search of a domain:
//   1. tries the threshold asked for: the tolerance's, or the bound if that is more. Best fit, or
//      failing that refilling, decides whether it can be reached; if so, the other methods compete
//      for the plan that costs least (choose_at_start);
//   2. else makes UltraEP's own search, so that no plan is worse than UltraEP's (PublishedSearch);
//   3. and tries rising thresholds from the threshold asked for to what has been reached
//      (ThresholdSearch).
// A host runs one try after the other and skips tries that are not needed; a GPU runs all tries
// side by side that may be needed. Both get the same verdicts in the same order, and account for
// the work of tries in that order (WorkLeft). So they come to the same plan.
#pragma once

#include <cstdint>

#include "megatron_ext/api.h"
#include "megatron_ext/planner/attempt.h"

namespace megatron_ext {

MEGATRON_EXT_HOST_DEVICE inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// 64 bits are enough for the product of two numbers below this.
constexpr int64_t kFactor = int64_t{1} << 31;

// number * part / whole, rounded down, or `number` if that is less: so it stays in int64.
MEGATRON_EXT_ONCE_IN_CODE inline int64_t share_of(int64_t number, int64_t part, int64_t whole) {
    // A division of 128 bits takes hundreds of instructions.
    if (number < kFactor && part < kFactor) {
        const int64_t share = number * part / whole;
        return share < number ? share : number;
    }
    // 128 bits, because the product leaves int64 first.
    const __int128 share = static_cast<__int128>(number) * part / whole;
    return share < number ? static_cast<int64_t>(share) : number;
}

// A division of 32 bits takes a fourth of the instructions.
MEGATRON_EXT_HOST_DEVICE inline int64_t quotient(int64_t number, int64_t by) {
    if (static_cast<uint64_t>(number) <= UINT32_MAX && static_cast<uint64_t>(by) <= UINT32_MAX) {
        return static_cast<uint32_t>(number) / static_cast<uint32_t>(by);
    }
    return number / by;
}

MEGATRON_EXT_HOST_DEVICE inline int64_t mean_rounded_up(int64_t total, int64_t ranks) {
    const int64_t mean = quotient(total, ranks);
    return mean + (mean * ranks != total);
}

// Busiest rank's load that is within the tolerance where `ranks` ranks share `total`. Rounded down,
// so that reaching it means being within the tolerance; nothing is below the mean rounded up. Above
// the total nothing needs to move, so the cut keeps its meaning.
MEGATRON_EXT_HOST_DEVICE inline int64_t target_load(int64_t total,
                                                    int64_t ranks,
                                                    int64_t tolerance_ppm) {
    constexpr int64_t kMillion = 1'000'000;
    const int64_t part = kMillion + tolerance_ppm;
    const int64_t mean = mean_rounded_up(total, ranks);
    if (total < kFactor && part < kFactor) {  // Divided in two steps, it is the same number.
        const int64_t share = quotient(total * part / kMillion, ranks);
        return larger(share < total ? share : total, mean);
    }
    return larger(share_of(total, part, ranks * kMillion), mean);
}

// Whether (load a, index i) comes before (load b, index j) by falling load.
MEGATRON_EXT_HOST_DEVICE inline bool comes_first(int64_t a, int i, int64_t b, int j) {
    return a > b || (a == b && i < j);
}

// Bounds of the busiest rank's load of a domain, for all plans; docs/method.md has the proofs.
// Warp::Amount has to hold what a domain's ranks have together, Amount what an expert has.
template <class Warp, class Amount>
class DomainBound {
  public:
    // hottest_first: [D * M] experts by falling load. busier: [D * M] for these experts, in this
    // order, how many ranks come before their home in busiest_first.
    MEGATRON_EXT_HOST_DEVICE DomainBound(Warp warp,
                                         const Domain<Amount>& domain,
                                         const int32_t* hottest_first,
                                         const int32_t* busier)
        : warp_(warp), domain_(domain), hottest_first_(hottest_first), busier_(busier) {}

    // The mean, rounded up, and more where slots cannot bring cold ranks enough: a rank computes at
    // most its own load and what the domain's S hottest experts bring.
    MEGATRON_EXT_ONCE_IN_CODE int64_t by_receivers() const {
        const int ranks = domain_.ranks;
        const int64_t total =
            warp_.sum(ranks, [&](int r) -> int64_t { return domain_.home_load[r]; });
        const int most = domain_.slots < domain_.experts() ? domain_.slots : domain_.experts();
        int64_t brought = 0;
        MEGATRON_EXT_ROLLED
        for (int s = 0; s < most; ++s) brought += domain_.expert_load[hottest_first_[s]];
        // Whether what ranks above the threshold have too much finds room. Sums stay in int64 where
        // loads are cut; a bound may be too low, not too high.
        constexpr int64_t kMost = int64_t{1} << 51;
        const auto can_compute = [&](int64_t threshold) {
            const auto cut = [&](int64_t load) { return load < kMost ? load : kMost; };
            const int64_t excess = warp_.sum(ranks, [&](int r) -> int64_t {
                return larger(domain_.home_load[r] - threshold, 0);
            });
            const int64_t room = warp_.sum(ranks, [&](int r) -> int64_t {
                const int64_t room = larger(threshold - domain_.home_load[r], 0);
                return cut(room < brought ? room : brought);
            });
            return room >= cut(excess);
        };
        int64_t low = mean_rounded_up(total, ranks);
        int64_t high = domain_.before();
        if (low < high && can_compute(low)) return low;
        MEGATRON_EXT_ROLLED
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (can_compute(middle)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return low;
    }

    // What the `senders` busiest ranks keep at least, per rank and rounded up: the slots of the
    // others take no more than the so many hottest experts of theirs. Or `known`, if that is more.
    // By a warp; a host finds it of all numbers of senders in one pass.
    MEGATRON_EXT_ONCE_IN_CODE int64_t by_senders(int senders, int64_t known) const {
        const int64_t load = warp_.sum(
            senders, [&](int i) -> int64_t { return domain_.home_load[domain_.busiest_first[i]]; });
        const int64_t free = static_cast<int64_t>(domain_.slots) * (domain_.ranks - senders);
        // Rounded up, their mean is not above what is known; 128 bits, because it may leave int64.
        if (static_cast<__int128>(known) * senders >= load) return known;
        // What is known stands if they may get rid of all that is above it.
        const int64_t enough = load - known * senders;
        const int64_t taken = warp_.sum_first(
            domain_.experts(),
            free,
            enough,
            [&](int i) { return busier_[i] < senders; },
            [&](int i) -> int64_t { return domain_.expert_load[hottest_first_[i]]; });
        if (taken >= enough) return known;
        return (load - taken) / senders + ((load - taken) % senders != 0);
    }

  private:
    const Warp warp_;
    const Domain<Amount>& domain_;
    const int32_t* const hottest_first_;
    const int32_t* const busier_;
};

// Rounds of a warp that the tries of a domain may take all together, but for those of UltraEP's
// search, which end by themselves. What one try takes grows with the ranks, with what a pass over
// them takes, and with the experts; the rest is for starting over, which pays where ranks are few.
MEGATRON_EXT_HOST_DEVICE inline int32_t work_budget(int ranks, int mains) {
    return 12288 + 24 * ranks * mains + 2 * ranks * ranks;
}

// The same for each of the tries that compete with one that reached the threshold.
MEGATRON_EXT_HOST_DEVICE inline int32_t work_to_compete(int ranks) {
    return 512 + 24 * ranks * rounds_of(ranks);
}

// What is left of the budget as the tries come one after the other.
struct WorkLeft {
    int32_t rounds;

    // Take a try's work off; whether it reached its threshold with what was left at its turn.
    MEGATRON_EXT_HOST_DEVICE bool pays_for(const Verdict& verdict) {
        const bool reached = verdict.reached && verdict.work < rounds;
        rounds -= verdict.work < rounds ? verdict.work : rounds;
        return reached;
    }
};

// What a first try may work on.
MEGATRON_EXT_HOST_DEVICE inline int32_t work_at_start(Method method, int ranks, int mains) {
    const bool is_first =
        (method == Method::kBestFit) | (method == Method::kRefill) | (method == Method::kFill);
    return is_first ? work_budget(ranks, mains) : work_to_compete(ranks);
}

// How often it may start over: more often found nothing more.
MEGATRON_EXT_HOST_DEVICE inline int restarts_at_start(Method method) {
    return method == Method::kBestFit || method == Method::kRefill ? 8 : 0;
}

// The same of a try of a later threshold.
MEGATRON_EXT_HOST_DEVICE inline int restarts_of_probe(Method method) {
    return method == Method::kBestFit ? 3 : 0;
}

// Choose between plans for one threshold: least work for the busiest sender, then fewest replicas.
MEGATRON_EXT_HOST_DEVICE inline bool is_better(const Verdict& a, const Verdict& b) {
    return a.sends < b.sends || (a.sends == b.sends && a.replicas < b.replicas);
}

// Step 1 of a search: whether the threshold asked for was reached.
//   verdict_of(method)  of the try at that threshold
//   keep(method)        its plan is the best so far
template <class VerdictOf, class Keep>
MEGATRON_EXT_HOST_DEVICE bool choose_at_start(bool even,
                                              WorkLeft& left,
                                              VerdictOf verdict_of,
                                              Keep keep) {
    if (even && left.pays_for(verdict_of(Method::kFill))) {
        keep(Method::kFill);
        return true;
    }
    Method first = Method::kBestFit;
    Verdict best = verdict_of(first);
    if (!left.pays_for(best)) {
        first = Method::kRefill;
        best = verdict_of(first);
        if (!left.pays_for(best)) return false;
    }
    keep(first);
    int32_t allowed = INT32_MAX;  // no more replicas than UltraEP's plan for the threshold has
    for (int i = 1; i < kCompeting; ++i) {
        const auto method = static_cast<Method>(i);
        const Verdict verdict = verdict_of(method);
        if (!left.pays_for(verdict) || verdict.replicas > allowed) continue;
        if (method == Method::kRoomiest) allowed = verdict.replicas;
        if (is_better(verdict, best) || best.replicas > allowed) {
            best = verdict;
            keep(method);
        }
    }
    return true;
}

// Step 2: the thresholds of UltraEP's Algorithm 1, a binary search from the target.
class PublishedSearch {
  public:
    PublishedSearch() = default;  // so that it may lie in a device's shared memory

    // target: the tolerance's threshold. reached: by the best plan so far.
    MEGATRON_EXT_HOST_DEVICE PublishedSearch(int64_t target, int64_t reached)
        : low_(target), reached_(reached), threshold_(target) {}

    MEGATRON_EXT_HOST_DEVICE bool done() const { return low_ >= reached_; }
    MEGATRON_EXT_HOST_DEVICE int64_t threshold() const { return threshold_; }
    MEGATRON_EXT_HOST_DEVICE int64_t reached() const { return reached_; }

    MEGATRON_EXT_ONCE_IN_CODE void narrow(bool reached) {
        if (reached) {
            reached_ = threshold_;
        } else {
            low_ = threshold_ + 1;
        }
        threshold_ = low_ + (reached_ - low_) / 2;
    }

  private:
    int64_t low_;
    int64_t reached_;
    int64_t threshold_;
};

// Step 3: rounds of rising thresholds, the first that is reached ends a round. The
// first round quadruples its distance from what is asked for, as the bound is mostly near; the
// others divide what is left.
class ThresholdSearch {
  public:
    static constexpr int kProbes = 8;  // thresholds of a round; a GPU tries them at the same time

    // start: the threshold asked for, which was not reached. reached: by the best plan so far. A
    // fifth of the tolerance is not worth a round. That may be little, and the work is bounded: so
    // it begins with steps of a fifth of a percent.
    MEGATRON_EXT_HOST_DEVICE ThresholdSearch(int64_t start, int64_t reached, int64_t tolerance_ppm)
        : below_(start),
          reached_(reached),
          finest_(1 + share_of(start, tolerance_ppm, 5 * 1'000'000)),
          resolution_(larger(finest_, start / 512 + 1)) {}

    MEGATRON_EXT_HOST_DEVICE bool done() const { return reached_ - below_ <= finest_; }

    // What the best plan so far comes down to.
    MEGATRON_EXT_HOST_DEVICE int64_t reached() const { return reached_; }

    // The threshold of probe 0 to kProbes - 1, rising; what is not below `reached` needs no try.
    MEGATRON_EXT_ONCE_IN_CODE int64_t threshold(int probe) const {
        const int64_t gap = reached_ - below_;
        if (first_round_)
            return (gap >> 2 * probe) <= resolution_ ? reached_
                                                     : below_ + (resolution_ << 2 * probe);
        const int64_t step = larger(gap / (kProbes + 1), resolution_);
        return gap / (probe + 1) < step ? reached_ : below_ + step * (probe + 1);
    }

    MEGATRON_EXT_HOST_DEVICE bool nothing_to_do(int probe) const {
        return threshold(probe) >= reached_;
    }

    // Go on with what the round told: the lowest probe that reached its threshold, or -1.
    MEGATRON_EXT_ONCE_IN_CODE void narrow(int lowest) {
        int64_t below = below_;
        MEGATRON_EXT_ROLLED
        for (int probe = 0; probe < (lowest < 0 ? kProbes : lowest); ++probe) {
            if (!nothing_to_do(probe)) below = threshold(probe);
        }
        if (lowest >= 0) reached_ = threshold(lowest);
        below_ = below;
        first_round_ = false;
        MEGATRON_EXT_ROLLED
        while (reached_ - below_ <= resolution_ && resolution_ > finest_) {
            resolution_ = larger(finest_, resolution_ / 8);
        }
    }

    // Go on with the verdicts of a round; whether a probe reached its threshold. Refilling is asked
    // before best fit, as it is less work.
    //   verdict_of(probe, method)  of the try at the probe's threshold
    //   keep(probe, method)        its plan is the best so far
    template <class VerdictOf, class Keep>
    MEGATRON_EXT_HOST_DEVICE bool try_round(WorkLeft& left, VerdictOf verdict_of, Keep keep) {
        MEGATRON_EXT_ROLLED
        for (int probe = 0; probe < kProbes; ++probe) {
            if (nothing_to_do(probe)) continue;
            MEGATRON_EXT_ROLLED
            for (const Method method : {Method::kRefill, Method::kBestFit}) {
                if (!left.pays_for(verdict_of(probe, method))) continue;
                keep(probe, method);
                narrow(probe);
                return true;
            }
        }
        narrow(-1);
        return false;
    }

  private:
    int64_t below_;    // not reached
    int64_t reached_;  // by the best plan so far
    int64_t finest_;
    int64_t resolution_;
    bool first_round_ = true;
};

}  // namespace megatron_ext
