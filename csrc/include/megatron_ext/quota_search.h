// Around the tries of stage 2: where the search for the lowest threshold starts, which thresholds
// it tries, and which of the plans it takes. Integers and a warp's collectives, as in
// domain_attempt.h.
#pragma once

#include <cstdint>

#include "megatron_ext/api.h"
#include "megatron_ext/domain_attempt.h"

namespace megatron_ext {

MEGATRON_EXT_HOST_DEVICE inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Busiest rank's load that is within the tolerance where `ranks` ranks share `total`. Rounded down,
// so that reaching it means being within the tolerance; nothing is below the mean rounded up.
MEGATRON_EXT_HOST_DEVICE inline int64_t target_load(int64_t total,
                                                    int64_t ranks,
                                                    int64_t tolerance_ppm) {
    constexpr int64_t kMillion = 1'000'000;
    const int64_t mean_rounded_up = total / ranks + (total % ranks != 0);
    // 128 bits, because the product leaves int64 first.
    const __int128 parts = static_cast<__int128>(kMillion) + tolerance_ppm;
    const __int128 allowed = total * parts / (static_cast<__int128>(ranks) * kMillion);
    // Above the total nothing needs to move, so the cut keeps the result in int64 and its meaning.
    const int64_t cut = allowed < total ? static_cast<int64_t>(allowed) : total;
    return larger(cut, mean_rounded_up);
}

// Fill `busiest_first` [D] from `home_load` [D].
template <class Warp>
MEGATRON_EXT_HOST_DEVICE void sort_ranks(Warp warp,
                                         int ranks,
                                         const int64_t* home_load,
                                         int32_t* busiest_first) {
    warp.for_each(ranks, [&](int r) {
        int place = 0;
        for (int q = 0; q < ranks; ++q) {
            place += home_load[q] > home_load[r] || (home_load[q] == home_load[r] && q < r);
        }
        busiest_first[place] = r;
    });
}

// What the busiest rank of the domain has at least, whatever the plan: the mean, and more where the
// slots of cold ranks cannot hold enough. A rank computes at most its own load and what the hottest
// S experts of the domain bring.
template <class Warp>
MEGATRON_EXT_HOST_DEVICE int64_t domain_bound(Warp warp, const Domain& domain) {
    const int ranks = domain.ranks;
    const int64_t total = warp.sum(ranks, [&](int r) { return domain.home_load[r]; });
    const int64_t mean_rounded_up = target_load(total, ranks, 0);

    int64_t brought = 0;
    Best last{-1, {INT64_MAX, 0}};
    for (int s = 0; s < domain.slots && s < domain.experts(); ++s) {
        last = warp.best(domain.experts(), [&](int e) {
            const Score score{domain.expert_load[e], -e};
            return last.score.above(score) ? score : Score{};
        });
        if (last.index < 0) break;
        brought += last.score.first;
    }
    const auto can_compute = [&](int64_t threshold) {
        return warp.sum(ranks, [&](int r) {
            const int64_t most = domain.home_load[r] + brought;
            return most < threshold ? most : threshold;
        });
    };
    int64_t low = mean_rounded_up;
    int64_t high = domain.home_load[domain.busiest_first[0]];
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (can_compute(middle) >= total) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// Where the search starts: within the tolerance of the mean, or at the bound of the worst domain.
// The same for all domains: what the worst of them cannot get below, the others need not. (Where
// the worst ends above its bound, the others are planned once more, for what it reached.)
//   domain_at(d)  the Domain d of `num_domains`
template <class Warp, class DomainAt>
MEGATRON_EXT_HOST_DEVICE int64_t
start_threshold(Warp warp, int num_domains, int64_t tolerance_ppm, DomainAt domain_at) {
    int64_t total = 0;
    int64_t ranks = 0;
    int64_t bound = 0;
    for (int d = 0; d < num_domains; ++d) {
        const Domain domain = domain_at(d);
        total += warp.sum(domain.ranks, [&](int r) { return domain.home_load[r]; });
        ranks += domain.ranks;
        bound = larger(bound, domain_bound(warp, domain));
    }
    return larger(bound, target_load(total, ranks, tolerance_ppm));
}

// The thresholds still worth a try, round by round. The first round starts at what is asked for,
// which mostly is all there is to it.
class ThresholdSearch {
  public:
    static constexpr int kProbes = 4;  // thresholds of a round; a GPU tries them at the same time

    // start: the threshold asked for. before: the busiest rank's load without balancing.
    MEGATRON_EXT_HOST_DEVICE ThresholdSearch(int64_t start, int64_t before)
        : below_(start - 1),
          reached_(before),
          // Another fortieth of a percent is not worth a round.
          resolution_(before / 4096 + 1) {}

    MEGATRON_EXT_HOST_DEVICE bool done() const {
        return reached_ - below_ <= (first_round_ ? 1 : resolution_);
    }

    // What the best plan so far comes down to.
    MEGATRON_EXT_HOST_DEVICE int64_t reached() const { return reached_; }

    // The threshold of probe 0 to kProbes - 1, rising; probes that need none get `nothing_to_do`.
    MEGATRON_EXT_HOST_DEVICE int64_t threshold(int probe) const {
        if (first_round_) {
            if (probe == 0) return below_ + 1;
            const int64_t step = (reached_ - below_) / kProbes;
            return step > 1 ? below_ + step * probe : reached_;
        }
        const int64_t step = (reached_ - below_) / (kProbes + 1);
        const int64_t threshold = below_ + (step > 1 ? step : 1) * (probe + 1);
        return threshold < reached_ ? threshold : reached_;
    }

    MEGATRON_EXT_HOST_DEVICE bool nothing_to_do(int probe) const {
        return threshold(probe) >= reached_;
    }

    // Go on with what the round told: the lowest probe that reached its threshold, or -1.
    MEGATRON_EXT_HOST_DEVICE void narrow(int lowest) {
        const int64_t reached = lowest < 0 ? reached_ : threshold(lowest);
        int64_t below = below_;
        for (int probe = 0; probe < (lowest < 0 ? kProbes : lowest); ++probe) {
            if (!nothing_to_do(probe)) below = threshold(probe);
        }
        below_ = below;
        reached_ = reached;
        first_round_ = false;
    }

  private:
    int64_t below_;    // not reached, or one less than asked for
    int64_t reached_;  // by the best plan so far
    int64_t resolution_;
    bool first_round_ = true;
};

// Which of the methods' plans for one threshold is taken: least work for the busiest sender, then
// fewest replicas, among those that need no more replicas than the published planner for such plans
// does. -1 if none reached it.
MEGATRON_EXT_HOST_DEVICE inline int choose_plan(const Verdict* verdicts, bool even) {
    const Verdict& published = verdicts[static_cast<int>(even ? Method::kFill : Method::kRoomiest)];
    const int32_t allowed = published.reached ? published.replicas : INT32_MAX;
    int chosen = -1;
    for (int m = 0; m < kMethods; ++m) {
        const Verdict& verdict = verdicts[m];
        if (!verdict.reached || verdict.replicas > allowed) continue;
        if (chosen < 0 || verdict.sends < verdicts[chosen].sends ||
            (verdict.sends == verdicts[chosen].sends &&
             verdict.replicas < verdicts[chosen].replicas)) {
            chosen = m;
        }
    }
    return chosen;
}

}  // namespace megatron_ext
