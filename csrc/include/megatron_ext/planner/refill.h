// Refilling: fills hosts instead of emptying senders. Room on a rank whose slots are all in use is
// lost. Shedding, which looks for hosts for an excess, wastes such room. Refilling looks for load
// that fills a host: the busiest rank that can fills the roomiest host, from its coolest main that
// has enough. Failing that, the host takes all of the hottest main there is, as long as another
// slot is left to fill the rest. Then the host is done, and a rank that gave is a host itself if it
// now has room. Room may be lost only as far as the domain has room to spare.
#pragma once

#include "megatron_ext/planner/moves.h"

namespace megatron_ext {

// Try to bring every rank down; false if that fails.
//   detour  the step that takes the second best giver, or -1: a limited discrepancy search (Harvey
//           and Ginsberg, 1995) with one discrepancy
template <class Warp>
MEGATRON_EXT_ONCE_IN_CODE bool refill(Moves<Warp>& moves, int detour) {
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
    const auto is_done = [&](int r) { return at.held[r] > 0 && at.order[r] != 0; };
    warp.for_each(domain.ranks, [&](int r) { at.order[r] = 0; });
    MEGATRON_EXT_ROLLED
    for (int step = 0; moves.busiest().index >= 0; ++step) {
        if (moves.is_spent() || moves.is_stopped()) return false;
        const int t = moves.roomiest_host();
        if (t < 0) return false;
        moves.spend(8 * rounds_of(domain.ranks) + 2 * rounds_of(domain.mains));
        const Amount room = at.room[t];
        const Amount enough = moves.most(room - spare, moves.least_room());
        const auto gives = [&](int r) {
            return r != t && !is_done(r) && moves.slot_of(t, at.hottest[r]) < 0;
        };
        // Loads are compared by how much less room they leave than that host has.
        const auto load = [&](int r) -> Amount { return room - at.room[r]; };
        auto giver = moves.best_rank([&](int r) -> Amount {
            return gives(r) && at.kept[at.hottest[r]] >= enough ? load(r) : 0;
        });
        if (step == detour) {
            const int passed = giver.index;
            giver = moves.best_rank([&](int r) -> Amount {
                return r != passed && gives(r) && at.kept[at.hottest[r]] >= enough ? load(r) : 0;
            });
        }
        int home = giver.index;
        int main = -1;
        if (giver.index >= 0) {
            const int first = home * domain.mains;
            const Amount hot = at.kept[at.hottest[home]];
            main = first + moves
                               .best_main([&](int m) -> Amount {
                                   const int e = first + m;
                                   if (at.kept[e] < enough || moves.slot_of(t, e) >= 0) return 0;
                                   return hot - at.kept[e] + 1;
                               })
                               .index;
        } else if (at.held[t] + 1 < domain.slots) {
            const auto hottest = moves.best_rank([&](int r) -> Amount {
                const Amount kept = at.kept[at.hottest[r]];
                return gives(r) && kept >= moves.least_room() ? kept : 0;
            });
            home = hottest.index;
            if (home >= 0) main = at.hottest[home];
        }
        if (main < 0) return false;
        moves.add(home, main, t, moves.least(room, at.kept[main]));
        if (at.room[t] == 0 || !moves.can_take(t)) {
            spare -= at.room[t];
            warp.once([&] { at.order[t] = 1; });
            if (spare < 0) return false;
        }
    }
    return true;
}

}  // namespace megatron_ext
