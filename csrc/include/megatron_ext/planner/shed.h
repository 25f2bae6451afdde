// Shedding: the excess of an overloaded rank goes to replicas on other ranks.
//   1. to the tightest host that takes all of the excess, so that roomy hosts stay for larger ones;
//   2. to the tightest pair of hosts (most orders of shedding);
//   3. in the largest piece any host takes, unless a chain carries more;
//   4. where that is less than `min_quota`, by giving more and taking some back.
#pragma once

#include "megatron_ext/planner/chain.h"
#include "megatron_ext/planner/domain.h"

namespace megatron_ext {

template <class Warp>
class Shedding {
  public:
    MEGATRON_EXT_HOST_DEVICE Shedding(Moves<Warp>& moves, bool pairs)
        : moves_(moves), chain_(moves), pairs_(pairs) {}

    // Bring `rank` down to what it may keep; false if nothing relieves it, or the work is spent.
    MEGATRON_EXT_ONCE_IN_CODE bool relieve(int rank) {
        const auto& at = moves_.at();
        MEGATRON_EXT_ROLLED
        while (at.room[rank] < 0) {
            if (moves_.is_spent()) return false;
            moves_.spend(8 * rounds_of(moves_.domain().ranks));
            const int64_t whole = -at.room[rank];
            const int hot = at.hottest[rank];
            const int64_t kept = at.kept[hot];
            // A replica that must carry more than the excess may: nobody is hurt by room.
            const int64_t needed = moves_.most(whole, moves_.domain().min_quota);
            if (kept >= needed) {
                const int smaller = moves_.hosts_below(needed);
                const int tightest = moves_.host_for(hot, smaller, 1);
                if (tightest >= 0) {
                    moves_.add(rank, hot, tightest, needed);
                    continue;
                }
                const int larger = pairs_ ? larger_of_tightest_pair(hot, whole, smaller) : -1;
                if (larger >= 0) {
                    moves_.add(rank, hot, larger, at.room[larger]);
                    continue;
                }
            }
            if (!piecewise(rank, hot, whole)) return false;
        }
        return true;
    }

  private:
    // No host takes `whole`: the largest piece, or more by a chain.
    MEGATRON_EXT_HOST_DEVICE bool piecewise(int rank, int hot, int64_t whole) {
        const auto& at = moves_.at();
        const int host = host_of_largest_piece(hot, whole);
        const int64_t piece =
            host < 0 ? 0 : moves_.least(moves_.least(at.kept[hot], at.room[host]), whole);
        if (piece < whole && moves_.roomiest().key > piece && chain_.move(rank, whole, piece)) {
            return true;
        }
        if (host < 0) return swap(rank, whole);
        moves_.add(rank, hot, host, piece);
        return true;
    }

    // The roomiest host, or the tightest that takes all of `expert`; -1 if none takes min_quota.
    MEGATRON_EXT_HOST_DEVICE int host_of_largest_piece(int expert, int64_t whole) const {
        const int64_t most = moves_.least(moves_.at().kept[expert], whole);
        if (most < moves_.least_room()) return -1;
        const int place = moves_.hosts_below(most);
        const int tightest = moves_.host_for(expert, place, 1);
        return tightest >= 0 ? tightest : moves_.host_for(expert, place - 1, -1);
    }

    // Two of the first `hosts` hosts that take `whole` of `expert` together, with the least room
    // left over: the roomier one. -1 if there are none. The hosts behind them hold `expert`.
    MEGATRON_EXT_ONCE_IN_CODE int larger_of_tightest_pair(int expert, int64_t whole, int hosts) {
        const auto& at = moves_.at();
        moves_.spend(6 * rounds_of(hosts));
        // The tightest partner of each comes from the hosts that are no roomier than it.
        const auto closest = moves_.warp().best(hosts, [&](int larger) -> int64_t {
            const int64_t room = at.host_room[larger];
            int partner =
                search_first(larger, [&](int i) { return at.host_room[i] < whole - room; });
            MEGATRON_EXT_ROLLED
            while (partner < larger && moves_.slot_of(at.host[partner], expert) >= 0) ++partner;
            if (partner >= larger || moves_.slot_of(at.host[larger], expert) >= 0) return 0;
            const int64_t left_over = room - (whole - at.host_room[partner]);
            return whole - left_over;
        });
        return closest.index < 0 ? -1 : at.host[closest.index];
    }

    // Move less than `min_quota`: a replica on a rank with room takes that much more than one of
    // that rank's experts, on `rank`, gives back.
    MEGATRON_EXT_ONCE_IN_CODE bool swap(int rank, int64_t whole) {
        const auto& at = moves_.at();
        const int64_t min_quota = moves_.domain().min_quota;
        if (min_quota == 1) return false;
        const auto host = moves_.warp().best(moves_.domain().ranks, [&](int t) -> int64_t {
            if (at.room[t] <= 0 || t == rank || !moves_.can_take(t) || !moves_.can_take(rank)) {
                return 0;
            }
            const int64_t piece = moves_.least(at.room[t], whole);
            const int there = moves_.main_for(rank, t);
            const int back = moves_.main_for(t, rank);
            if (there < 0 || at.kept[there] - piece < min_quota) return 0;
            return back < 0 || at.kept[back] < min_quota ? 0 : piece;
        });
        if (host.index < 0) return false;
        const int there = moves_.main_for(rank, host.index);
        const int back = moves_.main_for(host.index, rank);
        moves_.add(rank, there, host.index, min_quota + host.key);
        moves_.add(host.index, back, rank, min_quota);
        return true;
    }

    Moves<Warp>& moves_;
    Chain<Warp> chain_;
    const bool pairs_;
};

}  // namespace megatron_ext
