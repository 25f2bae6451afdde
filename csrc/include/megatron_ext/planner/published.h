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

// MoonEP's exact fill: the busiest rank gives the roomiest one without replicas all that it lacks.
template <class Warp>
MEGATRON_EXT_HOST_DEVICE bool fill_exactly(Moves<Warp>& moves) {
    using Amount = typename Warp::Amount;
    typename Warp::template AtHand<Warp> at_hand(moves);
    const auto& sizes = at_hand.sizes();
    const int32_t work = 5 * rounds_of(sizes.ranks);
    bool is_reached = false;
    MEGATRON_EXT_ROLLED
    while (true) {
        const int rank = at_hand.best_rank([](int, Amount room) -> Amount { return -room; }).index;
        is_reached = rank < 0;
        Best<Amount> host = at_hand.roomiest_empty();
        if (is_reached || host.index < 0) break;
        at_hand.fetch(rank);
        at_hand.turn_to(rank);
        MEGATRON_EXT_ROLLED
        for (int held = 0; host.key > 0; ++held) {
            at_hand.spend(work);
            // Of what the host has, nothing is left on the rank: the hottest main is none of it.
            const Best<Amount> hot = at_hand.hottest();
            const Amount piece = moves.least(host.key, hot.key);
            if (held == sizes.slots || piece < sizes.min_quota) break;
            at_hand.give(hot, host, piece);
            host.key -= piece;
        }
        at_hand.leave();
        if (host.key > 0) break;
    }
    at_hand.store();
    return is_reached;
}

}  // namespace megatron_ext
