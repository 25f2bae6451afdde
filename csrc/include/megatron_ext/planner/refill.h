// Refilling: fills hosts instead of emptying senders. Room on a rank whose slots are all in use is
// lost. Shedding, which looks for hosts for an excess, wastes such room. Refilling looks for load
// that fills a host: the busiest rank that can fills the roomiest host, from its coolest main that
// has enough. Failing that, the host takes all of the hottest main there is, as long as another
// slot is left to fill the rest. Then the host is done, and a rank that gave is a host itself if it
// now has room. Room may be lost only as far as the domain has room to spare.
#pragma once

#include "megatron_ext/planner/at_hand.h"
#include "megatron_ext/planner/moves.h"

namespace megatron_ext {

// The rank with the highest key above 0 of those that may, the lowest of equals. Lanes ask all
// ranks at the same time; one thread asks whether they may only those with a higher key than found.
template <class AtHand, class KeyOf, class May>
MEGATRON_EXT_HOST_DEVICE auto best_that_may(const AtHand& at_hand, KeyOf key_of, May may) {
    using Amount = decltype(key_of(0, 0));
    return at_hand.best_rank(
        [&](int r, Amount own) -> Amount { return may(r) ? key_of(r, own) : 0; });
}
template <class Amount, class KeyOf, class May>
auto best_that_may(const MemoryAtHand<HostPlannerWarp<Amount>>& at_hand, KeyOf key_of, May may) {
    return at_hand.best_rank(key_of, may);
}

// Try to bring every rank down; false if that fails.
//   detour  the step that takes the second best giver, or -1: a limited discrepancy search (Harvey
//           and Ginsberg, 1995) with one discrepancy
template <class Warp>
MEGATRON_EXT_HOST_DEVICE bool refill(Moves<Warp>& moves, int detour) {
    using Amount = typename Warp::Amount;
    const auto& at = moves.at();
    const auto& warp = moves.warp();
    const auto& domain = moves.domain();
    // Beyond this, which no room is in practice, the sum would leave int64.
    constexpr int64_t kMostRoom = int64_t{1} << 51;
    auto spare = static_cast<Amount>(warp.sum(domain.ranks, [&](int r) -> int64_t {
        const int64_t room = at.room[r];
        return room > kMostRoom ? kMostRoom : room < -kMostRoom ? -kMostRoom : room;
    }));
    // A rank that was filled gives nothing any more.
    warp.for_each(domain.ranks, [&](int r) { at.order[r] = 0; });
    typename Warp::template AtHand<Warp> at_hand(moves);
    const int32_t work = 8 * rounds_of(domain.ranks) + 2 * rounds_of(domain.mains);
    const auto excess = [](int, Amount room) -> Amount { return -room; };
    bool is_filled = true;
    MEGATRON_EXT_ROLLED
    for (int step = 0; is_filled && at_hand.best_rank(excess).index >= 0; ++step) {
        const Best<Amount> host = at_hand.roomiest();
        if (at_hand.is_spent() || moves.is_stopped() || host.index < 0) {
            is_filled = false;
            break;
        }
        at_hand.spend(work);
        const int t = host.index;
        const Amount room = host.key;
        const Amount enough = moves.most(room - spare, moves.least_room());
        const auto held = at_hand.held_by(t);
        const auto gives = [&](int r) {
            return (r != t) & (at.order[r] == 0) && !held.has(at.hottest[r]);
        };
        // Loads are compared by how much less room they leave than that host has.
        int passed = -1;
        const auto left = [&](int, Amount own) -> Amount { return room - own; };
        const auto fills = [&](int r) {
            const bool is_enough = at.kept[at.hottest[r]] >= enough;
            return is_enough && r != passed && gives(r);
        };
        int home = best_that_may(at_hand, left, fills).index;
        if (step == detour) {
            passed = home;
            home = best_that_may(at_hand, left, fills).index;
        }
        int main = -1;
        if (home >= 0) {
            const int first = home * domain.mains;
            const Amount hot = at.kept[at.hottest[home]];
            main =
                first + moves
                            .best_main([&](int m) -> Amount {
                                const Amount kept = at.kept[first + m];
                                return kept >= enough && !held.has(first + m) ? hot - kept + 1 : 0;
                            })
                            .index;
        } else if (held.count + 1 < domain.slots) {
            home = at_hand
                       .best_rank([&](int r, Amount) -> Amount {
                           const Amount kept = at.kept[at.hottest[r]];
                           return kept >= moves.least_room() && gives(r) ? kept : 0;
                       })
                       .index;
            if (home >= 0) main = at.hottest[home];
        }
        if (main < 0) {
            is_filled = false;
            break;
        }
        const Amount kept = at.kept[main];
        const Amount piece = moves.least(room, kept);
        at_hand.fetch(home);
        at_hand.turn_to(home);
        at_hand.give({main, kept}, host, piece);
        at_hand.leave();
        if (piece == room || held.count + 1 == domain.slots) {
            spare -= room - piece;
            warp.once([&] { at.order[t] = 1; });
            is_filled = spare >= 0;
        }
    }
    at_hand.store();
    return is_filled;
}

}  // namespace megatron_ext
