// Two published planners, as tries of their own, so that a plan is never worse than theirs.
#pragma once

#include "megatron_ext/planner/at_hand.h"
#include "megatron_ext/planner/moves.h"

namespace megatron_ext {

// UltraEP, Algorithm 1 (SolveReplication): the busiest rank first, from its hottest expert on,
// always to the roomiest host. Its release keeps assignments with every main (kStays), and in some
// tries gives none of the hosts less than an equal part of what the rank has to shed (kByNeed).
template <int kStays = 0, bool kByNeed = false, class Warp>
MEGATRON_EXT_HOST_DEVICE bool shed_to_roomiest(Moves<Warp>& moves) {
    using Amount = typename Warp::Amount;
    const int32_t* const order = moves.domain().busiest_first;
    typename Warp::template AtHand<Warp> at_hand(moves);
    const auto& sizes = at_hand.sizes();
    const int32_t pass = rounds_of(sizes.ranks);
    bool is_relieved = true;
    int next = order[0];
    at_hand.fetch(next);
    MEGATRON_EXT_ROLLED
    for (int i = 1; i <= sizes.ranks && is_relieved; ++i) {
        at_hand.turn_to(next);
        if (at_hand.excess() <= 0) break;
        next = order[i < sizes.ranks ? i : 0];
        at_hand.fetch(next);
        MEGATRON_EXT_ROLLED
        for (int m = 0; m < sizes.mains && at_hand.excess() > 0; ++m) {
            Best<Amount> main = at_hand.next_main();
            if (main.index < 0) break;
            MEGATRON_EXT_ROLLED
            while (at_hand.excess() > 0 && main.key > kStays) {
                const Best<Amount> host = at_hand.roomiest();
                if (host.index < 0) break;
                at_hand.spend(4 * pass);
                const Amount whole = at_hand.excess();
                const Amount piece = moves.least(moves.least(whole, host.key), main.key - kStays);
                if (piece < sizes.min_quota) break;
                if constexpr (kByNeed) {
                    if (piece < 1 + (whole - 1) / moves.hosts()) break;
                }
                at_hand.give(main, host, piece);
                main.key -= piece;
            }
        }
        is_relieved = at_hand.excess() <= 0 && !moves.is_stopped();
        at_hand.leave();
    }
    at_hand.store();
    return is_relieved;
}

// MoonEP's exact fill: the busiest rank gives the roomiest one all that it lacks.
template <class Warp>
MEGATRON_EXT_HOST_DEVICE bool fill_exactly(Moves<Warp>& moves) {
    using Amount = typename Warp::Amount;
    const auto& at = moves.at();
    const auto& domain = moves.domain();
    MEGATRON_EXT_ROLLED
    while (true) {
        const int rank = moves.busiest().index;
        if (rank < 0) return true;
        const int t = moves
                          .best_rank([&](int t) -> Amount {
                              const bool is_free = at.held[t] == 0 && domain.slots > 0;
                              return is_free ? at.room[t] : Amount{0};
                          })
                          .index;
        if (t < 0) return false;
        MEGATRON_EXT_ROLLED
        while (at.room[t] > 0) {
            moves.spend(5 * rounds_of(domain.ranks));
            if (!moves.can_take(t)) return false;
            const int hot = moves.main_for(rank, t);
            const Amount piece = hot < 0 ? 0 : moves.least(at.room[t], at.kept[hot]);
            if (piece < domain.min_quota) return false;
            moves.add(rank, hot, t, piece);
        }
    }
}

}  // namespace megatron_ext
